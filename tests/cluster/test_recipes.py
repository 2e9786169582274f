"""The recipes of docs/own-loop.md on a real Slurm: each program starts, is preempted, and resumes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hpcddp.run.directory import RunDirectory
from tests.cluster.jobs import HPCDDP
from tests.cluster.sandbox import Sandbox
from tests.cluster.tracked_run import TrackedRun
from tests.waiting import wait_for_text

PAGE = (Path(__file__).parents[2] / "docs" / "own-loop.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
# The directory with checkouts of pytorch/examples, nanoGPT and pytorch-image-models.
CHECKOUTS = os.environ.get("HPCDDP_TEST_CHECKOUTS")
# Long enough to be preempted in.
SLOW_STEP = ("optimizer.step()\n", "optimizer.step(); import time; time.sleep(0.2)\n")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A section of the page, and what makes its run small and slow enough for a test.

    Attributes:
        section: the heading.
        resumes_at: finds the step or epoch at which an attempt begins in the log of rank 0.
        checkpoint: the program's first checkpoint, below the run directory; None if it saves when it must stop.
        trains: without such a checkpoint, what rank 0 prints when the program can be preempted.
        checkout: the directory of the program below the checkouts; None if the page shows the program.
        replaced: pairs of texts: the first, in a file or in the command, becomes the second.
        arguments: what follows the command.
    """

    section: str
    resumes_at: str = r"begins at (\d+)"
    checkpoint: str | None = None
    trains: str = "begins at 0"
    checkout: str | None = None
    replaced: tuple[tuple[str, str], ...] = ()
    arguments: str = ""


ACCELERATE = Recipe(section="accelerate", replaced=(SLOW_STEP,))
# A preemption before the first step is saved as step 0.
SLOW_LIGHTNING_STEP = """        import time
        time.sleep(0.1)
        print("second step" if index else "first step", flush=True)
        return self.layer"""
LIGHTNING = Recipe(
    section="Lightning",
    trains="second step",
    replaced=(("        return self.layer", SLOW_LIGHTNING_STEP),),
)
HYDRA = Recipe(section="Hydra", replaced=(SLOW_STEP, ("steps: 200", "steps: 120")))
IMAGENET = Recipe(
    section="imagenet/main.py",
    resumes_at=r"loaded checkpoint .* \(epoch (\d+)\)",
    checkpoint="rank-0/checkpoint.pth.tar",
    checkout="examples/imagenet",
    replaced=(("resnet50", "squeezenet1_1"),),
    arguments="--dist-backend gloo --no-accel --workers 0 --epochs 6 --lr 0.001",
)
NANOGPT = Recipe(
    section="nanoGPT",
    resumes_at=r"^step (\d+):",
    checkpoint="out/ckpt.pt",
    checkout="nanoGPT",
    replaced=(
        # As it is, each of several ranks needs a GPU.
        ("f'cuda:{ddp_local_rank}'", "'cpu'"),
        ("torch.cuda.set_device(device)", "pass"),
        (", device_ids=[ddp_local_rank]", ""),
        ("config/train_gpt2.py --eval_interval=500", "config/train_shakespeare_char.py"),
        ("480", "24"),
    ),
    arguments="--backend=gloo --device=cpu --dtype=float32 --compile=False --n_layer=1 --n_head=1 --n_embd=16"
    " --block_size=16 --eval_interval=50 --eval_iters=1 --always_save_checkpoint=True --max_iters=500",
)
TIMM = Recipe(
    section="timm",
    resumes_at=r"Train: (\d+) \[",
    checkpoint="timm/last.pth.tar",
    checkout="pytorch-image-models",
    # As it is, each of several ranks needs a GPU.
    replaced=(("device_ids=[device], ", ""), ("1024", "16"), ("resnet50", "resnet10t")),
    arguments="--num-classes 10 --img-size 32 --device cpu --workers 1 --epochs 10",
)


def blocks(recipe: Recipe, language: str) -> list[str]:
    """Return the code blocks of a recipe in one language, for hosts without GPUs."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", SECTIONS[recipe.section], re.MULTILINE | re.DOTALL)
    return [edited(text, recipe).replace("gpus_per_node: 4", "tasks_per_node: 1") for text in found]


def edited(text: str, recipe: Recipe) -> str:
    for old, new in recipe.replaced:
        text = text.replace(old, new)
    return text


def write_files(recipe: Recipe, directory: Path) -> None:
    """Write the files that the page shows; the first comment of each is its name."""
    for language in ("bash", "python", "yaml"):
        for text in blocks(recipe, language):
            named = re.search(r"^# (\S+\.\w+)", text, re.MULTILINE)
            assert named is not None, text
            path = directory / named[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.replace("/data/imagenet", str(directory / "images")))


def write_images(directory: Path) -> None:
    """Write handwritten digits as files: for each class four to train on and two to validate on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    written = dict.fromkeys(range(10), 0)
    for pixels, label in zip(digits.images, digits.target, strict=True):
        if (number := written[label]) < 6:
            path = directory / ("train" if number < 4 else "val") / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 15).astype("uint8")).resize((32, 32)).convert("RGB").save(path)
            written[label] += 1


def submit(recipe: Recipe, sandbox: Sandbox, directory: Path, *, number: int = 0) -> TrackedRun:
    """Submit the run as a command of the page says, for hosts without GPUs that can be preempted."""
    command = blocks(recipe, "console")[number].replace("/data/imagenet", str(directory / "images"))
    program, verb, *words = shlex.split(command.replace("--gpus-per-node 4", "--tasks-per-node 1").removeprefix("$ "))
    assert (program, verb) == ("hpcddp", "submit")
    hosts = ("--json", "--partition", "low", "--nodelist", "n1,n2")
    more = shlex.split(recipe.arguments) if "--" in words else ()
    done = sandbox.run(*HPCDDP, verb, *hosts, *words, *more, cwd=directory, env={"OMP_NUM_THREADS": "1"})
    document: dict[str, Any] = json.loads(done.stdout)
    run = RunDirectory(Path(document["run_dir"]))
    return TrackedRun(sandbox=sandbox, job=run.job_file, run=run, job_id=document["job_id"])


def check_that_it_resumes(recipe: Recipe, sandbox: Sandbox, directory: Path) -> TrackedRun:
    """Submit a run, preempt it after its first checkpoint, and check that the second attempt goes on from there."""
    tracked = submit(recipe, sandbox, directory)
    logs = [tracked.run.attempt(attempt).rank_log(0) for attempt in range(2)]
    if recipe.checkpoint is None:
        wait_for_text(logs[0], recipe.trains, timeout_s=300)
    else:
        pattern = recipe.checkpoint
        tracked.wait_until(lambda: [*tracked.run.path.glob(pattern)], "the first checkpoint")
    high = ("--partition=high", "--exclusive", "--nodelist=n1,n2", "--nodes=2", "--output=/dev/null")
    sandbox.submit(*high, "--wrap=sleep 2")
    sandbox.wait(tracked.job_id, states={"COMPLETED"}, timeout=400)
    tracked.wait_until(lambda: not tracked.processes(), "the end of all processes", timeout_s=90)
    assert (tracked.result["status"], tracked.attempts) == ("finished", 2)
    begun = re.search(recipe.resumes_at, logs[1].read_text(), re.MULTILINE)
    assert begun is not None, logs[1].read_text()
    assert int(begun[1]) > 0
    return tracked


@pytest.mark.long
def test_accelerate_resumes_after_a_preemption(sandbox: Sandbox, tmp_path: Path) -> None:
    write_files(ACCELERATE, tmp_path)
    check_that_it_resumes(ACCELERATE, sandbox, tmp_path)


@pytest.mark.long
@pytest.mark.xfail(
    reason="Lightning 2.6 calls collectives in its signal handlers: ranks that get the signals in different steps can "
    "wait for each other until Slurm kills them",
    strict=False,
)
def test_lightning_resumes_on_two_hosts_after_a_preemption(sandbox: Sandbox, tmp_path: Path) -> None:
    write_files(LIGHTNING, tmp_path)
    check_that_it_resumes(LIGHTNING, sandbox, tmp_path)


@pytest.mark.depends_on("docs/own-loop.md", "pyproject.toml", "tests/cluster/test_recipes.py")
@pytest.mark.xfail(
    sys.version_info >= (3, 14),
    reason="Hydra 1.3 does not start on Python 3.14, whose argparse takes no object for the text of a help",
)
def test_hydra_resumes_after_a_preemption_and_writes_into_the_run_directory(sandbox: Sandbox, tmp_path: Path) -> None:
    write_files(HYDRA, tmp_path)
    tracked = check_that_it_resumes(HYDRA, sandbox, tmp_path)
    for rank in range(2):
        output = tracked.run.path / "hydra" / "attempt-1" / f"rank-{rank}"
        assert "lr=0.2" in (output / ".hydra" / "overrides.yaml").read_text()
        assert "finished 120 steps with lr 0.2" in (output / "hydra_train.log").read_text()
    assert not (tmp_path / "outputs").exists()


@pytest.mark.long
def test_the_built_in_training_trains_a_model_of_timm(sandbox: Sandbox, tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    recipe = Recipe(section="timm", replaced=(*TIMM.replaced, ("epochs: 90", "epochs: 1"), ("12h", "10min")))
    write_files(recipe, tmp_path)
    tracked = submit(recipe, sandbox, tmp_path, number=1)
    tracked.wait_until_finished()
    assert tracked.result["status"] == "finished"


@pytest.mark.skipif(CHECKOUTS is None, reason="HPCDDP_TEST_CHECKOUTS names no directory with the checkouts")
@pytest.mark.parametrize("recipe", [IMAGENET, NANOGPT, TIMM], ids=lambda recipe: recipe.section)
def test_a_program_of_a_checkout_resumes_after_a_preemption(recipe: Recipe, sandbox: Sandbox, tmp_path: Path) -> None:
    directory = tmp_path / "checkout"
    shutil.copytree(Path(str(CHECKOUTS), str(recipe.checkout)), directory)
    write_files(Recipe(section="A save that a kill cannot break"), directory)
    write_files(recipe, directory)
    write_images(directory / "images")
    program = directory / ("main.py" if recipe is IMAGENET else "train.py")
    program.write_text(edited(program.read_text(), recipe))
    if recipe is NANOGPT:
        data = directory / "data" / "shakespeare_char"
        (data / "input.txt").write_text(PAGE)
        sandbox.run(sys.executable, data / "prepare.py")
    check_that_it_resumes(recipe, sandbox, directory)
