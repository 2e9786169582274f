"""A job on the command line: options for resources, and the words after ``--``."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.field_options import field_options
from hpcddp.cli.main import app
from hpcddp.jobfile.job import find_key
from hpcddp.jobfile.read import name_of_command
from hpcddp.jobfile.resources import Resources
from tests.messages import GoldenMessages


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert boundary.run(app, ["render", "--json", *words]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_every_field_of_resources_but_mappings_and_what_a_site_decides_has_an_option() -> None:
    options = {option.path for option in field_options()}
    without = {name for name in Resources.model_fields if f"resources.{name}" not in options}
    assert without == {"sbatch", "srun", "gres", "gpu_request"}
    assert all(find_key(tuple(path.split("."))) for path in options)


def test_a_job_without_a_file_says_where_each_value_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    document = rendered(
        capsys, "--nodes", "2", "--gpus-per-node", "4", "--time", "2h", "--", "python", "train.py", "-x"
    )
    fields = document["fields"]
    assert fields["command"] == {"value": ["python", "train.py", "-x"], "origin": "command line"}
    assert fields["name"] == {"value": "train", "origin": "command line"}
    assert fields["resources.nodes"] == {"value": 2, "origin": "--nodes"}
    assert fields["resources.gpus_per_node"]["origin"] == "--gpus-per-node"
    assert fields["resources.time_limit"]["origin"] == "--time"
    assert {"flag": "gres", "value": "gpu:4"} in document["directives"]
    assert document["plan"] is None


def test_the_command_line_lies_over_the_job_file_and_set_over_both(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    job = here / "job.yaml"
    job.write_text("name: mine\nresources: {nodes: 3, partition: a}\ncommand: [old]\n")
    words = (str(job), "--nodes", "2", "--set", "resources.nodes=4", "--partition", "010", "--", "new", "--set", "x=1")
    fields = rendered(capsys, *words)["fields"]
    assert fields["resources.nodes"] == {"value": 4, "origin": "--set"}
    assert fields["resources.partition"] == {"value": "010", "origin": "--partition"}
    assert fields["command"]["value"] == ["new", "--set", "x=1"]
    assert fields["name"] == {"value": "mine", "origin": "job file"}


def test_words_after_a_second_pair_of_dashes_are_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    fields = rendered(capsys, "--", "a", "--", "b", "")["fields"]
    assert fields["command"]["value"] == ["a", "--", "b", ""]


@pytest.mark.parametrize(("values", "runs"), [("7", "1 run"), ("7,8", "2 runs")])
def test_a_dry_run_counts_the_runs_of_a_sweep(
    capsys: pytest.CaptureFixture[str], here: Path, values: str, runs: str
) -> None:
    words = ["--cluster", "local", "--dry-run", "--sweep", f"lr={values}", "--", sys.executable, "-c", "pass", "{lr}"]
    assert boundary.run(app, ["submit", *words]) == 0
    assert f"dry run: would go to local, {runs}, sweep directory {here}/runs/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--nodes", "2", "--"), ("no JOB is given;", "write a job file, or", "-- python train.py\n")),
        (("--nodes", "2", "minutes"), ("minutes: does not exist; check the path\n",)),
        (("minutes", "-t", "2"), ("minutes: does not exist; check the path\n",)),
        (("--nodes", "0", "--", "a"), ("--nodes: resources.nodes: is 0,", "at least 1; write 1 or more\n")),
        (
            ("--nodes=two", "--", "a"),
            ("--nodes: resources.nodes: is 'two',", "an integer;", "write one without quotes, point or unit"),
        ),
        ((), ("no JOB is given;", "write a job file, or", "-- python train.py\n")),
        (("--run-root", "", "--", "a"), ("--run-root is empty;", "write a value, or leave the option out\n")),
        (("--nodes=", "--", "a"), ("--nodes is empty;", "write a value, or leave the option out\n")),
    ],
)
def test_what_makes_no_job_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], facts: tuple[str, ...], golden: GoldenMessages
) -> None:
    assert boundary.run(app, ["render", *words]) == 2
    message = golden.message(capsys.readouterr().err)
    assert [fact for fact in facts if fact not in message] == []


def test_one_job_runs_one_thing(capsys: pytest.CaptureFixture[str], here: Path, golden: GoldenMessages) -> None:
    job = here / "job.yaml"
    job.write_text("name: a\nbatch: {global_batch_size: 8}\ntrain: {model: resnet18, dataset: digits}\n")
    assert boundary.run(app, ["render", str(job), "--", "python", "x.py"]) == 2
    message = golden.message(capsys.readouterr().err)
    assert "command: is given, and train" in message
    assert "keep one of them" in message


def test_a_program_whose_name_has_blanks_is_a_command(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    program = here / "sh my program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    assert rendered(capsys, "--", str(program))["fields"]["command"]["value"] == [str(program)]
    assert rendered(capsys, "--", "no-such-program a")["fields"]["command"]["value"] == ["no-such-program a"]


@pytest.mark.parametrize("words", ["r1 -- top -b -n 1", "r1 top -b -n 1", "--rank 1 r1 top -b -n 1"])
def test_the_command_in_a_shell_begins_behind_the_run(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    commands = []

    def keep(*arguments: object, **_: object) -> int:
        commands.append(arguments[2])
        return 0

    def first(*arguments: object) -> object:
        return arguments[0]

    monkeypatch.setattr("hpcddp.submission.sweep_element.chosen_to_act_on", first)
    for name in ("manage.overview.one_run", "manage.overview.status_now", "manage.live.live_run"):
        monkeypatch.setattr(f"hpcddp.{name}", first)
    monkeypatch.setattr("hpcddp.manage.live.run_inside", keep)
    assert boundary.run(app, ["shell", *shlex.split(words)]) == 0
    assert commands == [("top", "-b", "-n", "1")]


def test_an_option_of_shell_that_does_not_exist_is_named(
    capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    assert boundary.run(app, ["shell", "r1", "--rnak", "1"]) == 2
    assert "no option --rnak; did you mean --rank?" in golden.message(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "train.py", "--lr", "0.1"], "train"),
        (["python", "-u", "my dir/my train.py"], "my-train"),
        (["python", "-m", "pkg.training"], "pkg.training"),
        (["bash", "-lc", "cd src && exec torchrun --nnodes=2 train.py --lr 1"], "train"),
        (["bash", "-c", "python -m pkg.mod"], "pkg.mod"),
        (["bash", "-ce", "python train.py --lr 1"], "train"),
        (["bash", "-o", "pipefail", "-c", "python train.py | tee log"], "train"),
        (["bash", "-o", "pipefail", "fit.sh"], "fit"),
        (["bash", "-c", "nvidia-smi -L"], "command"),
        (["bash", "train.slurm"], "train"),
        (["/bin/bash", "-e", "jobs/fit.v2"], "fit"),
        (["zsh"], "command"),
        (["bash", "bash.sh"], "command"),
        (["python", "interactive.py"], "command"),
        (["./run.sh"], "run"),
        (["/usr/bin/true"], "true"),
        (["é"], "command"),
        (["x" * 100], "x" * 64),
    ],
)
def test_a_job_without_a_name_is_called_after_its_program(command: list[str], name: str) -> None:
    assert name_of_command(command) == name


def test_the_short_options_of_sbatch_mean_the_same_here(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split("-N 2 -p gpu -A lab -t 2h -J mine -c 3 -q high -C a100 -w n[1-2] -x n3 -L m:1")
    found = {item["flag"]: item["value"] for item in rendered(capsys, *words, "--", "python", "t.py")["directives"]}
    expected = {
        "nodes": "2",
        "partition": "gpu",
        "account": "lab",
        "time": "02:00:00",
        "job-name": "mine",
        "cpus-per-task": "3",
        "qos": "high",
        "constraint": "a100",
        "nodelist": "n[1-2]",
        "exclude": "n3",
        "licenses": "m:1",
    }
    assert {flag: found.get(flag) for flag in expected} == expected


def test_mail_has_fields_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--mail-type", "end,Fail", "--mail-user", "me@example.org", "--", "true")
    assert {"flag": "mail-type", "value": "END,FAIL"} in rendered(capsys, *words)["directives"]
    assert {"flag": "mail-user", "value": "me@example.org"} in rendered(capsys, *words)["directives"]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--mail-type", "END,FAL"), ("--mail-type: resources.mail_type: is 'END,FAL',", "'FAL'; did you mean FAIL?")),
        (
            ("--mail-type", "END,"),
            ("--mail-type: resources.mail_type: is 'END,',", "missing", "write one or more of NONE,"),
        ),
        (
            ("--set", "resources.sbatch.mail-user=me"),
            ("--set resources.sbatch.mail-user: is not a valid key:", "its own field; write resources.mail_user"),
        ),
    ],
)
def test_a_mail_that_slurm_would_not_send_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], facts: tuple[str, ...], golden: GoldenMessages
) -> None:
    assert boundary.run(app, ["render", *words, "--", "true"]) == 2
    message = golden.message(capsys.readouterr().err)
    assert [fact for fact in facts if fact not in message] == []


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("train.py --lr 1", "python train.py --lr 1"),
        ("absent.py", "python absent.py"),
        ("run.sh x", "bash run.sh x"),
        ("./program --lr 1", "./program --lr 1"),
        ("python train.py --lr 1", "python train.py --lr 1"),
        ("--time 20 --exclusive python train.py", "python train.py"),
        ("--ntasks-per-node 2 train.py", "python train.py"),
        ("train.py --lr=1 -N 2", "python train.py --lr=1 -N 2"),
    ],
)
def test_the_first_word_that_is_a_program_begins_the_command(
    capsys: pytest.CaptureFixture[str], here: Path, words: str, command: str
) -> None:
    (here / "train.py").write_text("import torch\n")
    (here / "program").write_text("#!/bin/sh\n")
    (here / "program").chmod(0o700)
    assert rendered(capsys, *shlex.split(words))["fields"]["command"]["value"] == command.split()


@pytest.mark.parametrize("option", ["--dry-run", "--cluster=local", "--follow", "--time", "--nodes"])
def test_an_option_behind_the_program_is_refused(
    capsys: pytest.CaptureFixture[str], golden: GoldenMessages, option: str
) -> None:
    assert boundary.run(app, ["submit", "train.py", "--lr", "1", option]) == 2
    message = golden.message(capsys.readouterr().err)
    assert f"{option.partition('=')[0]} stands behind the program train.py" in message
    assert "or -- before train.py" in message


def test_a_job_file_is_no_program_whatever_its_mode_and_name(
    capsys: pytest.CaptureFixture[str], here: Path, golden: GoldenMessages
) -> None:
    job = here / "python"
    job.write_text("name: mine\ncommand: [x]\n")
    job.chmod(0o700)
    assert rendered(capsys, "python", "--name", "train.py")["fields"]["name"]["value"] == "train.py"
    for words in (("job.yaml", "--lr", "1"), ("--name", "train.py", "job.yaml", "--lr", "1"), ("--lr", "1")):
        assert boundary.run(app, ["render", *words]) == 2
        message = golden.message(capsys.readouterr().err)
        assert "no option --lr; write --set learning_rate.base=VALUE," in message


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("--gres gpu:a100:4", {"resources.gpus_per_node": 4, "resources.gpu_type": "a100"}),
        ("--gres=gpu:4,nvme:100", {"resources.gpus_per_node": 4, "resources.gres.nvme": "100"}),
        ("--ntasks-per-node=3", {"resources.tasks_per_node": 3}),
        ("--job-name=mine", {"name": "mine"}),
        ("-H --nice=5", {"resources.sbatch.hold": True, "resources.sbatch.nice": "5"}),
        ("--comment 'two words' --overcommit", {"resources.sbatch.comment": "two words"}),
        ("-d afterok:7", {"resources.sbatch.dependency": "afterok:7"}),
        ("--gpu-bind=closest", {"resources.srun.gpu-bind": "closest"}),
    ],
)
def test_a_flag_of_sbatch_sets_its_field(
    capsys: pytest.CaptureFixture[str], words: str, fields: dict[str, object]
) -> None:
    resolved = rendered(capsys, *shlex.split(words), "--", "true")["fields"]
    assert {key: resolved[key]["value"] for key in fields} == fields


@pytest.mark.parametrize("words", ["render --cluster slurm", "render -f", "rehearse --resume=last"])
def test_an_option_of_submit_that_a_command_has_not_is_no_flag_of_sbatch(
    capsys: pytest.CaptureFixture[str], words: str, golden: GoldenMessages
) -> None:
    command, *options = words.split()
    assert boundary.run(app, [command, "--nodes", "2", *options, "--", "true"]) == 2
    assert "an option of hpcddp submit;" in golden.message(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--gpus 8", "its own field; write resources.gpus_per_node"),
        ("-n 4", "write resources.nodes and resources.tasks_per_node"),
        ("-a 0-3", "write a sweep for several: hpcddp submit --sweep KEY=VALUES"),
        ("--signal=USR1@120", "write requeue.signal_lead"),
        ("--export=NONE", "write environment.env or environment.pass_env"),
    ],
)
def test_a_flag_of_sbatch_that_no_field_can_have_says_why(
    capsys: pytest.CaptureFixture[str], words: str, why: str, golden: GoldenMessages
) -> None:
    assert boundary.run(app, ["submit", *words.split(), "--", "true"]) == 2
    assert why in golden.message(capsys.readouterr().err)
