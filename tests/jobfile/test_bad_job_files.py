"""Acceptance of the job file's errors: each bad file gives one sentence, exit code 2 and no traceback."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.jobfile.datasets import DATASETS
from tests.facts import assert_facts
from tests.messages import GoldenMessages

NAME = "name: a-job\n"
BATCH = "batch: {global_batch_size: 8}\n"
TRAIN = "train: {model: resnet18, dataset: digits}\n"
GOOD = NAME + BATCH + TRAIN

# What the file holds, and what the line that is printed about it must tell.
BAD = {
    "typo in a section": (
        f"{GOOD}resorces: {{nodes: 2}}\n",
        ("job.yaml:4: resorces", "did you mean resources?"),
    ),
    "typo in a key": (
        f"{GOOD}resources: {{cpus_per_taks: 2}}\n",
        ("job.yaml:4: resources.cpus_per_taks", "did you mean resources.cpus_per_task?"),
    ),
    "the beginning of a key": (
        f"{GOOD}resources: {{gpus: 4}}\n",
        ("job.yaml:4: resources.gpus", "did you mean resources.gpus_per_node?"),
    ),
    "a key in the wrong section": (
        f"{GOOD}epochs: 3\n",
        ("job.yaml:4: epochs", "did you mean train.epochs?"),
    ),
    "another tool's word for a key": (
        f"{NAME}{BATCH}train: {{model: resnet18, dataset: digits, lr: 0.1}}\n",
        ("job.yaml:3: train.lr", "did you mean learning_rate.base?"),
    ),
    "an sbatch flag among the resources": (
        # One that no field of resources will ever be for.
        f"{GOOD}resources: {{power: END}}\n",
        ("job.yaml:4: resources.power", "goes under resources.sbatch", "{power: ...}"),
    ),
    "a section that is a number": (
        f"{GOOD}learning_rate: 0.1\n",
        ("job.yaml:4: learning_rate: is 0.1", "write learning_rate.base"),
    ),
    "an unknown tracker": (
        f"{GOOD}trackers: {{use: [tensorbord]}}\n",
        ("job.yaml:4: trackers.use.0: is 'tensorbord'", "tensorboard, wandb, mlflow", "did you mean tensorboard?"),
    ),
    "a tracker named twice": (
        f"{GOOD}trackers: {{use: [wandb, wandb]}}\n",
        ("job.yaml:4: trackers.use: is a list", "name each once"),
    ),
    "trackers without their section": (
        f"{GOOD}trackers: [wandb]\n",
        ("job.yaml:4: trackers: is a list", "write trackers.use"),
    ),
    "wrong type": (
        f"{GOOD}resources: {{nodes: two}}\n",
        ("job.yaml:4: resources.nodes: is 'two'", "write one without quotes, point or unit"),
    ),
    "a range that runs backwards": (
        f"{GOOD}resources: {{nodes: 8-2}}\n",
        ("job.yaml:4: resources.nodes: is '8-2'", "begins with 1 or more", "write for example 2-8"),
    ),
    "a range of no nodes": (
        f"{GOOD}resources: {{nodes: 0-2}}\n",
        ("job.yaml:4: resources.nodes: is '0-2'", "write for example 2-8"),
    ),
    "a range of too many numbers": (
        f"{GOOD}resources: {{nodes: 2-66}}\n",
        ("job.yaml:4: resources.nodes: is '2-66'", "at most 64 numbers", "write for example 2-65"),
    ),
    "a number in quotes": (
        f"{GOOD}resources: {{nodes: '2'}}\n",
        ("job.yaml:4: resources.nodes: is '2'", "write one without quotes"),
    ),
    "a number with a point": (
        f"{GOOD}resources: {{nodes: 2.0}}\n",
        ("job.yaml:4: resources.nodes: is 2.0", "expected an integer", "without quotes, point or unit"),
    ),
    "a number where a text belongs": (
        f"{GOOD}resources: {{partition: 0123}}\n",
        ("job.yaml:4: resources.partition: is 0123", "put double quotes around it"),
    ),
    "yes in YAML 1.2": (
        f"{GOOD}resources: {{exclusive: yes}}\n",
        ("job.yaml:4: resources.exclusive: is 'yes'", "a string in YAML 1.2", "write true"),
    ),
    "a text where a list belongs": (
        f"{GOOD}environment: {{modules: gcc}}\n",
        ("job.yaml:4: environment.modules: is 'gcc'", "expected a list", "write [VALUE, VALUE]"),
    ),
    "a command line where its words belong": (
        f"name: a\n{BATCH}command: python 'my train.py' --lr 0.1 true\n",
        (
            "job.yaml:3: command: is \"python 'my train.py' --lr 0.1 true\"",
            "the list of its words",
            "write for example [python, train.py]",
        ),
    ),
    "a name with a space": (
        f"name: my job\n{BATCH}{TRAIN}",
        ("job.yaml:1: name: is 'my job'", "1 to 64 ASCII letters", "write for example resnet50-imagenet"),
    ),
    "no name": (BATCH + TRAIN, ("job.yaml: name: is missing", "write for example name: my-job")),
    "no global batch": (
        f"{NAME}batch: {{tail: keep}}\n{TRAIN}",
        ("job.yaml:2: batch.global_batch_size: is missing", "write for example global_batch_size: 256"),
    ),
    "nothing to run": (
        NAME + BATCH,
        ("job.yaml: train: is missing", "train: {model: resnet18, dataset: digits}"),
    ),
    "fewer samples than ranks": (
        f"{NAME}batch: {{global_batch_size: 3}}\n{TRAIN}resources: {{nodes: 2, tasks_per_node: 2}}\n",
        (
            "job.yaml:2: batch.global_batch_size: is 3",
            "the 4 ranks (2 x 2)",
            "write 4 or more",
            "ask for at most 3 ranks",
        ),
    ),
    "a model in other letters": (
        f"{NAME}{BATCH}train: {{model: ResNet50, dataset: digits}}\n",
        ("job.yaml:3: train.model: is 'ResNet50'", "did you mean resnet50?", "pkg.module:function"),
    ),
    "an unknown model": (
        f"{NAME}{BATCH}train: {{model: zzz, dataset: digits}}\n",
        ("job.yaml:3: train.model: is 'zzz'", "write pkg.module:function for your own"),
    ),
    "a function with a dot in place of the colon": (
        f"{NAME}{BATCH}train: {{model: tiny.build, dataset: digits}}\n",
        ("job.yaml:3: train.model: is 'tiny.build'", "did you mean tiny:build?"),
    ),
    "an entrypoint with a dot in place of the colon": (
        f"{NAME}entrypoint: tiny.deep.main\n",
        ("job.yaml:2: entrypoint: is 'tiny.deep.main'", "pkg.module:function", "did you mean tiny.deep:main?"),
    ),
    "a function without a module": (
        f"{NAME}{BATCH}train: {{model: ':build', dataset: digits}}\n",
        ("job.yaml:3: train.model: is ':build'", "pkg.module:function", "write for example my_package.models:build"),
    ),
    "an unknown dataset": (
        f"{NAME}{BATCH}train: {{model: resnet18, dataset: mnist}}\n",
        (
            "job.yaml:3: train.dataset: is 'mnist'",
            ", ".join(DATASETS),
            "write pkg.module:function",
        ),
    ),
    "missing data_dir": (
        f"{NAME}{BATCH}train: {{model: resnet18, dataset: cifar10}}\n",
        ("job.yaml:3: train.data_dir: is missing", "cifar10", "write their directory"),
    ),
    "an enumerated value": (
        f"{NAME}batch: {{global_batch_size: 8, tail: dropp}}\n{TRAIN}",
        ("job.yaml:2: batch.tail: is 'dropp'", "keep, drop, wrap", "did you mean drop?"),
    ),
    "an enumerated value left empty": (
        f"{GOOD}resources: {{gpu_request: }}\n",
        ("job.yaml:4: resources.gpu_request: is empty", "gres, gpus-per-node, none; write one of them"),
    ),
    "time 0": (
        f"{GOOD}resources: {{time_limit: 0}}\n",
        ("job.yaml:4: resources.time_limit: is 0", "as unlimited", "write minutes (90), 90min, 2h"),
    ),
    "seconds above 59": (
        f"{GOOD}resources: {{time_limit: 1:75}}\n",
        (
            "job.yaml:4: resources.time_limit: is '1:75'",
            "75 as minutes or seconds",
            "below 60",
            "write minutes (90), 90min, 2h",
        ),
    ),
    "a duration without unit": (
        f"{GOOD}launch: {{hang_timeout: 300}}\n",
        ("job.yaml:4: launch.hang_timeout: is 300", "write a number with its unit: 90s", "10min or 2h"),
    ),
    "an interval of nothing": (
        f"{GOOD}checkpoint: {{every: {{steps: 0}}}}\n",
        (
            "job.yaml:4: checkpoint.every: is a mapping",
            "steps",
            "write a duration (10min)",
            "{steps: 500}",
            "{epochs: 1}",
        ),
    ),
    "memory without unit": (
        f"{GOOD}resources: {{mem: 64}}\n",
        ("job.yaml:4: resources.mem: is 64", "write 64G for gigabytes or 64M"),
    ),
    "negative nodes": (
        f"{GOOD}resources: {{nodes: -1}}\n",
        ("job.yaml:4: resources.nodes: is -1", "at least 1", "write 1 or more"),
    ),
    "more CPUs than Slurm counts": (
        f"{GOOD}resources: {{cpus_per_task: 70000}}\n",
        ("job.yaml:4: resources.cpus_per_task: is 70000", "at most 65533", "write 65533 or less"),
    ),
    "a rate of zero": (
        f"{GOOD}learning_rate: {{base: 0}}\n",
        ("job.yaml:4: learning_rate.base: is 0", "more than 0", "write a number above 0"),
    ),
    "a momentum of one": (
        f"{NAME}{BATCH}train: {{model: resnet18, dataset: digits, optimizer: {{momentum: 1}}}}\n",
        ("job.yaml:3: train.optimizer.momentum: is 1", "less than 1", "write a number below 1"),
    ),
    "best of a number": (
        f"{GOOD}checkpoint: {{best: 3}}\n",
        (
            "job.yaml:4: checkpoint.best: is 3",
            "write the name of a metric (val_accuracy)",
            "{metric: val_f1, mode: max}",
        ),
    ),
    "best of a mode that is none": (
        f"{GOOD}checkpoint: {{best: {{metric: val_loss, mode: lowest}}}}\n",
        (
            "job.yaml:4: checkpoint.best: is a mapping",
            "write the name of a metric (val_accuracy)",
            "{metric: val_f1, mode: max}",
        ),
    ),
    "best of a name that is none": (
        f"{GOOD}checkpoint: {{best: 'val accuracy'}}\n",
        (
            "job.yaml:4: checkpoint.best: is 'val accuracy'",
            "write the name of a metric (val_accuracy)",
            "{metric: val_f1, mode: max}",
        ),
    ),
    "one checkpoint": (
        f"{GOOD}checkpoint: {{keep: 1}}\n",
        ("job.yaml:4: checkpoint.keep: is 1", "at least 2", "write 2 or more"),
    ),
    "a flag with its own field": (
        f"{GOOD}resources: {{sbatch: {{time: '1:00:00'}}}}\n",
        ("job.yaml:4: resources.sbatch.time: is not a valid key", "--time", "write resources.time_limit"),
    ),
    "a line break in a directive": (
        GOOD + 'resources: {partition: "a\\n#SBATCH --wrap=x"}\n',
        ("job.yaml:4: resources.partition: is 'a\\n#SBATCH --wrap=x'", "a line break", "remove it"),
    ),
    "the name of a variable": (
        f"{GOOD}environment: {{env: {{MY-VAR: x}}}}\n",
        ("job.yaml:4: environment.env.MY-VAR: is not a valid key", "rename it, for example MY_VARIABLE"),
    ),
    "two environments": (
        f"{GOOD}environment: {{conda: a, venv: b}}\n",
        ("job.yaml:4: environment.venv: is given", "environment.conda", "keep one of them"),
    ),
    "duplicate key": (
        f"{GOOD}name: other\n",
        ("job.yaml:4: name: is a duplicate of line 1", "remove one of the two"),
    ),
    "YAML tag": (
        f"{GOOD}resources: {{nodes: !!int '2'}}\n",
        ("job.yaml:4: resources.nodes: has a tag (!)", "remove it, or quote a string"),
    ),
    "YAML alias": (
        f"{GOOD}resources: &r {{nodes: 2}}\nlaunch: *r\n",
        ("job.yaml:5: launch: is an alias (*)", "write the value out", "quote a string"),
    ),
    "a tab": (
        f"{GOOD}resources:\n\tnodes: 2\n",
        ("job.yaml:5: contains a tab", "replace the tab"),
    ),
    "an open bracket": (
        f"{GOOD}environment: {{modules: [gcc\n",
        ("job.yaml:4: is not valid YAML", "check indentation, quotes and brackets"),
    ),
    "empty file": ("", ("job.yaml: is empty", "write at least name, batch.global_batch_size and train")),
    "a list": (
        "- name: a-job\n",
        ("job.yaml:1: is not a mapping at its top level", "write keys with values", "as in name: my-job"),
    ),
    "two documents": (f"{GOOD}---\n{GOOD}", ("job.yaml:4: begins a second document", "write one job in one file")),
    "binary file": (b"\x7fELF\x00\x01", ("job.yaml: contains NUL bytes", "check the path")),
    "control character": (
        f"{GOOD}run_root: a\x1bb\n",
        ("job.yaml:4: contains the control character U+001B", "remove it"),
    ),
    "not UTF-8": (b"name: a-job\nrun_root: caf\xe9\n", ("job.yaml:2: is not UTF-8 (byte 0xe9)", "save it as UTF-8")),
    "larger than 1 MB": (
        GOOD + "#" * 1_000_000,
        ("job.yaml: is larger than 1 MB", "is a short text", "check the path"),
    ),
}


@pytest.fixture
def job_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    content: str | bytes = request.param
    file = tmp_path / "job.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize(("job_file", "facts"), BAD.values(), ids=BAD.keys(), indirect=["job_file"])
def test_a_bad_job_file_gives_one_sentence_and_exit_code_2(
    job_file: Path, facts: tuple[str, ...], capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    assert boundary.run(app, ["plan", str(job_file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = golden.message(err.replace(f"{job_file.parent}/", "")).splitlines()
    assert_facts(line, f"hpcddp: {facts[0]}", *facts[1:])


def test_a_missing_file_is_named_with_its_neighbour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    (tmp_path / "quickstart.yaml").write_text(GOOD, encoding="utf-8")
    for name in ("quikstart.yaml", "quickstart.yml"):
        assert boundary.run(app, ["plan", str(tmp_path / name)]) == 2
        message = golden.message(capsys.readouterr().err)
        assert_facts(message, f"hpcddp: {tmp_path}/{name}: does not exist", f"{tmp_path}/quickstart.yaml")


def test_a_directory_is_no_job_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: GoldenMessages) -> None:
    assert boundary.run(app, ["plan", str(tmp_path)]) == 2
    message = golden.message(capsys.readouterr().err)
    assert_facts(message, f"hpcddp: {tmp_path}: is a directory", "name a file in it")


def test_a_named_pipe_is_not_waited_for_and_a_pipe_of_the_shell_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "job.yaml"
    os.mkfifo(pipe)
    link.symlink_to("pipe")
    for named, words in ((link, ["render", str(link)]), (pipe, ["render", "--sweep-file", str(pipe), "--", "true"])):
        assert boundary.run(app, words) == 2
        message = golden.message(capsys.readouterr().err)
        assert_facts(message, f"hpcddp: {named}: cannot be read", "a named pipe", "check the path")
    one, two = "echo '{name: one, command: [x]}'", "echo '{name: two, command: [x]}'"
    hpcddp = shlex.join([sys.executable, "-m", "hpcddp"])
    script = f"{hpcddp} render <({one}); {two} | {hpcddp} render /dev/stdin"
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=120, check=True)
    assert re.findall("--job-name=(.*)", done.stdout) == ["one", "two"]


def test_json_lists_every_problem_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"{GOOD}resources: {{nodes: -1, gpus: 4}}\n", encoding="utf-8")
    assert boundary.run(app, ["plan", str(file), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "job_file"
    assert [(problem["key"], problem["line"]) for problem in error["problems"]] == [
        ("resources.nodes", 4),
        ("resources.gpus", 4),
    ]
