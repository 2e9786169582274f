from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from tests.messages import GoldenMessages

JOB = """\
name: example
resources:
  nodes: 3
batch:
  global_batch_size: 256
  max_per_device_batch_size: 32
train:
  model: resnet18
  dataset: digits
  epochs: 10
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def document(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    assert boundary.run(app, ["plan", *map(str, arguments), "--json"]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert boundary.run(app, ["plan", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("batch", "world", "cap", "shares", "steps"),
    [
        (256, 3, 32, [86, 85, 85], 3),
        (256, 6, 32, [43] * 4 + [42] * 2, 2),
        (1000, 7, 64, [143] * 6 + [142], 3),
    ],
)
def test_numbers_without_a_job_file_are_planned(
    capsys: pytest.CaptureFixture[str], batch: int, world: int, cap: int, shares: list[int], steps: int
) -> None:
    found = document(capsys, "--global-batch", batch, "--world-size", world, "--max-per-device", cap)
    assert (found["per_rank_samples"], found["grad_accum_steps"]) == (shares, steps)
    assert [sum(micro) for micro in found["micro_batches"]] == shares
    assert (found["steps_per_epoch"], found["learning_rate"], found["total_steps"]) == (None, None, None)


def test_every_number_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = "--global-batch 64 --world-size 2 --samples 1000 --grad-accum 4 --tail drop --epochs 3 --base-lr 0.2"
    assert document(capsys, *numbers.split()) == {
        "global_batch_size": 64,
        "world_size": 2,
        "grad_accum_steps": 4,
        "per_rank_samples": [32, 32],
        "micro_batches": [[8, 8, 8, 8], [8, 8, 8, 8]],
        "steps_per_epoch": 15,
        "tail_samples": 64,
        "samples_per_epoch": 960,
        "duplicated": 0,
        "dropped": 40,
        "imbalance": 0.0,
        "learning_rate": 0.2,
        "base_learning_rate": 0.2,
        "kappa": 1.0,
        "rule": "none",
        "scaled": {"learning_rate": 0.2, "min": 0.0, "betas": None, "eps": None, "ema_decay": None},
        "fitting": {
            "optimizer": "sgd",
            "rule": "linear",
            "learning_rate": 0.2,
            "min": 0.0,
            "betas": None,
            "eps": None,
            "ema_decay": None,
        },
        "total_steps": 45,
        "unit": "sample",
        "notes": [],
    }


def test_a_rule_scales_the_rate_and_is_compared_with_the_fitting_one(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = "--global-batch 2048 --world-size 8 --base-lr 0.001 --base-batch 512 --optimizer adamw"
    stated = document(capsys, *numbers.split())
    assert (stated["kappa"], stated["rule"], stated["learning_rate"]) == (4.0, "none", 0.001)
    assert (stated["fitting"]["rule"], stated["fitting"]["learning_rate"]) == ("sqrt", 0.002)
    scaled = document(capsys, *numbers.split(), "--rule", "sqrt")
    assert (scaled["learning_rate"], scaled["scaled"]["betas"]) == (0.002, [0.6, 0.996])
    assert scaled["scaled"] == {key: value for key, value in scaled["fitting"].items() if key in scaled["scaled"]}


def test_the_text_tells_kappa_both_rules_and_that_none_is_universal(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set=learning_rate.base_global_batch_size=64", "--set=learning_rate.rule=sqrt"]
    assert boundary.run(app, ["plan", str(job), *sets, "--set=train.optimizer.momentum=0.9"]) == 0
    text = capsys.readouterr().out
    for line in (
        "  kappa            4 = 256 / 64, ",
        "  rule sqrt        learning rate 0.2\n",
        "  fitting rule     linear, for sgd: learning rate 0.4\n",
        "  learning rate    0.2, constant\n",
        "The world size does not matter",
        "no rule is universal",
        "(Shallue et al. 2019)",
    ):
        assert line in text


def test_a_rule_without_a_rate_is_refused(capsys: pytest.CaptureFixture[str], golden: GoldenMessages) -> None:
    words = ("--global-batch", 8, "--world-size", 2, "--rule", "linear", "--base-batch", 4)
    message = golden.message(refusal(capsys, *words))
    assert message.startswith("hpcddp: --base-batch, --rule ")
    assert message.endswith("add --base-lr, or drop it\n")


def test_a_micro_batch_held_fixed_decides_the_accumulation(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--global-batch", 1024, "--world-size", 8, "--per-device", 32)
    assert (found["grad_accum_steps"], found["micro_batches"]) == (4, [[32] * 4] * 8)


@pytest.mark.parametrize(("batch", "world", "steps"), [(256, 3, 5005), (255, 3, 5025), (512, 6, 2503), (510, 6, 2513)])
def test_steps_tell_a_batch_that_was_divided_with_int(
    capsys: pytest.CaptureFixture[str], batch: int, world: int, steps: int
) -> None:
    found = document(capsys, "--global-batch", batch, "--samples", 1_281_167, "--world-size", world)
    assert found["steps_per_epoch"] == steps


def test_groups_are_not_counted(job: Path, capsys: pytest.CaptureFixture[str], golden: GoldenMessages) -> None:
    groups = ("--set", "batch.unit=group", "--set", "batch.group=mine:group")
    found = document(capsys, job, *groups)
    assert (found["unit"], found["steps_per_epoch"]) == ("group", None)
    assert golden.message(found["notes"][0]).startswith("The number of groups is unknown, ")
    assert document(capsys, job, *groups, "--samples", 512)["steps_per_epoch"] == 2


def test_a_job_file_is_planned_with_its_own_data(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, job)
    assert found["per_rank_samples"] == [86, 85, 85]
    assert (found["samples_per_epoch"], found["steps_per_epoch"], found["total_steps"]) == (1437, 6, 60)
    assert found["learning_rate"] == 0.1


def test_samples_override_what_the_data_say(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, job, "--samples", 1_281_167)["steps_per_epoch"] == 5005


def test_overrides_reach_the_plan(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, job, "--set", "batch.global_batch_size=30", "--set", "resources.nodes=4")
    assert found["per_rank_samples"] == [8, 8, 7, 7]


def test_a_missing_image_folder_is_null_with_a_note(
    job: Path, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    found = document(capsys, job, "--set", "train.dataset=imagefolder", "--set", "train.data_dir=nowhere")
    assert (found["steps_per_epoch"], found["total_steps"]) == (None, None)
    note = golden.message(found["notes"][0])
    assert note.startswith(f"The number of samples is unknown: {job.parent}/nowhere/train ")
    assert note.endswith("give it with --samples.")


def test_an_own_dataset_is_imported_from_the_current_directory(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job.parent / "mine.py").write_text("def make(split): return range(512)\n")
    assert document(capsys, job, "--set", "train.dataset=mine:make")["steps_per_epoch"] == 2


def test_the_human_text_goes_to_stdout(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert boundary.run(app, ["plan", str(job)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "    ranks 1-2      85 samples = 1 x 29 + 2 x 28\n" in captured.out
    assert captured.out.count("\n\n\n") == 0


def test_fewer_samples_than_ranks_is_refused_with_numbers_that_work(
    capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    message = golden.message(refusal(capsys, "--global-batch", 2, "--world-size", 3))
    assert message.startswith("hpcddp: global_batch_size is 2, fewer")
    assert "the 3 ranks" in message
    assert "write 3 or more," in message
    assert message.endswith("ask for at most 2 ranks\n")


def test_a_job_file_with_fewer_samples_than_ranks_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, job, "--set", "batch.global_batch_size=2")
    assert "batch.global_batch_size" in message
    assert "3" in message


def test_a_refusal_as_json_is_one_document(capsys: pytest.CaptureFixture[str], golden: GoldenMessages) -> None:
    found = document(capsys, "--global-batch", 7, "--world-size", 3, "--split", "error", code=2)
    message = golden.message(found["error"]["message"])
    assert message.startswith("global_batch_size is 7, which 3 ranks ")
    assert "write 6 or 9, or split 'exact'" in message
    assert found == {"error": {"kind": "plan", "message": message, "hint": message.partition("; ")[2]}}


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ("", "--global-batch and --world-size"),
        ("--world-size 3", "--global-batch"),
        ("--global-batch 8", "--world-size"),
    ],
)
def test_without_a_job_file_batch_and_world_size_are_needed(
    capsys: pytest.CaptureFixture[str], arguments: str, missing: str, golden: GoldenMessages
) -> None:
    message = golden.message(refusal(capsys, *arguments.split()))
    assert message.startswith(f"hpcddp: {missing} must be given")
    assert " hpcddp plan --global-batch 256 --world-size 4, " in message
    assert message.endswith("or hpcddp plan JOB\n")


def test_numbers_beside_a_job_file_are_refused_by_name(
    job: Path, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    message = golden.message(refusal(capsys, job, "--world-size", 3, "--tail", "drop"))
    assert message.startswith("hpcddp: --world-size, --tail cannot be given")
    assert f"the job file {job}," in message
    assert "; leave the job file out, or " in message
    assert message.endswith("change it with --set\n")


def test_an_override_without_a_job_file_is_refused(capsys: pytest.CaptureFixture[str], golden: GoldenMessages) -> None:
    words = ("--global-batch", 8, "--world-size", 2, "--set", "train.epochs=3")
    message = golden.message(refusal(capsys, *words))
    assert message.startswith("hpcddp: --set train.epochs=3 ")
    assert message.endswith("; write hpcddp plan JOB --set ...\n")


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_a_base_rate_that_is_no_rate_is_refused(
    capsys: pytest.CaptureFixture[str], rate: str, golden: GoldenMessages
) -> None:
    message = golden.message(refusal(capsys, "--global-batch", 8, "--world-size", 2, f"--base-lr={rate}"))
    assert message.startswith(f"hpcddp: --base-lr is {rate}, ")
    assert "above 0; write for example 0.1\n" in message


@pytest.mark.parametrize(
    ("option", "name"),
    [("--samples", "samples"), ("--epochs", "epochs"), ("--max-per-device", "max_per_device_batch_size")],
)
def test_numbers_below_one_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], option: str, name: str, golden: GoldenMessages
) -> None:
    message = golden.message(refusal(capsys, "--global-batch", 8, "--world-size", 2, option, 0))
    assert message.startswith(f"hpcddp: {name} is 0, ")
    assert message.endswith("; write 1 or more\n")


@pytest.mark.parametrize("arguments", ["job.yaml", "--global-batch 256 --world-size 3 --samples 1281167"])
def test_plan_loads_nothing_heavy(job: Path, arguments: str) -> None:
    program = (
        "import sys\n"
        "from hpcddp.cli import boundary\n"
        "from hpcddp.cli.main import app\n"
        "code = boundary.run(app, ['plan', *sys.argv[1:], '--json'])\n"
        "heavy = {'torch', 'torchvision', 'submitit', 'asyncio', 'numpy', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)\n"
    )
    command = [sys.executable, "-c", program, *arguments.split()]
    found = subprocess.run(command, cwd=job.parent, capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_a_range_of_nodes_shows_the_plan_of_each_number(
    job: Path, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    job.write_text(JOB.replace("nodes: 3", "nodes: 2-4"))
    found = document(capsys, job)
    assert found["world_size"] == 4
    assert {nodes: plan["world_size"] for nodes, plan in found["by_nodes"].items()} == {"2": 2, "3": 3, "4": 4}
    assert {plan["learning_rate"] for plan in found["by_nodes"].values()} == {found["learning_rate"]}
    assert boundary.run(app, ["plan", str(job)]) == 0
    text = golden.message(capsys.readouterr().out)
    assert "3 nodes          1 rank x 86 samples" in text


def test_a_number_of_a_range_that_cannot_split_the_batch_is_refused(
    job: Path, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    job.write_text(JOB.replace("nodes: 3", "nodes: 2-4"))
    message = golden.message(refusal(capsys, job, "--set", "batch.split=error"))
    assert "with 3 nodes of resources.nodes 2-4" in message
