"""Whether a command can run as the tasks of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.overrides import sweep_overrides
from hpcddp.jobfile.read import load_job
from hpcddp.submission.checks import check_submittable, cpus_for_gpus, unexpanded_values, unfilled_placeholders
from hpcddp.submission.request import SubmissionError
from hpcddp.submission.submit import prepare
from tests.messages import GoldenMessages
from tests.submission.requests import request_of


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    for name in ("python", "python3.11", "torchrun", "accelerate"):
        (tmp_path / name).touch(mode=0o700)
    monkeypatch.chdir(tmp_path)


def notes(*command: str, **environment: object) -> tuple[str, ...]:
    spec = JobSpec.model_validate({"name": "a", "command": list(command), "environment": environment})
    return check_submittable(request_of(spec, cluster="local", environment={"PATH": str(Path.cwd())}))


@pytest.mark.parametrize("before", [(), ("-u",), ("-W", "ignore"), ("-X", "dev", "-u")])
def test_a_script_that_is_not_here_is_told_with_the_one_that_was_meant(
    golden: GoldenMessages, before: tuple[str, ...]
) -> None:
    words = ("python", *before, "trian.py", "--lr", "0.1")
    with pytest.raises(SubmissionError) as caught:
        notes(*words)
    message = golden.message(caught.value)
    assert message.startswith(f"command is {' '.join(words)}, ")
    assert message.endswith("'trian.py' here; did you mean train.py?")


@pytest.mark.parametrize(
    ("words", "missing", "meant"),
    [
        (("python", "-m", "trian"), "module trian", "train"),
        (("python", "-u", "-mtrian"), "module trian", "train"),
        (("torchrun", "--nproc_per_node=2", "trian.py"), "file 'trian.py'", "train.py"),
        (("torchrun", "--nproc_per_node", "2", "-m", "trian"), "module trian", "train"),
        (("accelerate", "launch", "--num_processes", "2", "trian.py"), "file 'trian.py'", "train.py"),
    ],
)
def test_a_module_and_a_script_of_a_launcher_are_checked_as_well(
    golden: GoldenMessages, words: tuple[str, ...], missing: str, meant: str
) -> None:
    with pytest.raises(SubmissionError) as caught:
        notes(*words)
    message = golden.message(caught.value)
    assert message.startswith(f"command is {' '.join(words)}, ")
    assert message.endswith(f"no {missing} here; did you mean {meant}?")


@pytest.mark.parametrize("name", ["srun", "salloc"])
def test_srun_in_a_task_is_refused_because_it_would_wait_for_its_own_task(golden: GoldenMessages, name: str) -> None:
    Path(name).touch(mode=0o700)
    with pytest.raises(SubmissionError, match=f"; leave {name} and its options") as caught:
        notes(name, "-n2", "torchrun")
    golden.message(caught.value)
    assert notes(name, "--overlap", "torchrun") == ()


def test_a_script_like_no_other_is_told_with_what_its_path_means(golden: GoldenMessages) -> None:
    with pytest.raises(SubmissionError, match=r"'sub/other\.py' here; check its path, ") as caught:
        notes("./python3.11", "sub/other.py")
    golden.message(caught.value)


def test_shell_lines_may_lead_to_the_script() -> None:
    (note,) = notes("python", "other.py", setup=["cd sub"])
    assert "there is no file 'other.py' here; " in note


@pytest.mark.parametrize(
    "words",
    [
        ("python", "train.py", "no-such-file"),
        ("python", "-m", "http.server"),
        ("python", "-m", "train"),
        ("python", "-m", "no_such_package"),
        ("python", "-mtrain"),
        ("torchrun", "--nproc_per_node=2", "-m", "train"),
        ("torchrun", "--nproc-per-node", "2", "train.py"),
        ("python", "-c", "print(1)"),
        ("python", "-"),
        ("python",),
    ],
)
def test_what_is_no_missing_script_is_not_told(words: tuple[str, ...]) -> None:
    assert notes(*words) == ()


def placeholder_notes(*command: str, axis: str | None = None) -> list[str]:
    sweep = sweep_overrides([axis], None, None) if axis else []
    return list(unfilled_placeholders(request_of(load_job({"name": "a", "command": list(command)}, options=sweep))))


@pytest.mark.parametrize("axis", [None, "environment.env.LR=1,2"])
def test_placeholders_that_no_sweep_fills_are_told(golden: GoldenMessages, axis: str | None) -> None:
    (note,) = placeholder_notes("python", "train.py", "--lr={lr}", "--seed", "{seed}", "--again={lr}", axis=axis)
    message = golden.message(note)
    assert message.startswith("command holds {lr} and {seed}, ")
    assert message.endswith(" add --sweep lr=VALUE,VALUE --sweep seed=VALUE,VALUE")


@pytest.mark.parametrize(
    "words",
    [
        ("python", "train.py", '{"lr": 0.1}', "{}", "{print $1}", "{a,b}", "${lr}"),
        ("python", "-c", "print(f'{lr}')"),
    ],
)
def test_other_braces_are_not_told(words: tuple[str, ...]) -> None:
    assert placeholder_notes(*words) == []


def test_placeholders_that_a_sweep_fills_are_not_told() -> None:
    assert placeholder_notes("python", "train.py", "--lr={lr}{{lr}}", axis="lr=1,2") == []
    spec = JobSpec.model_validate({"name": "a", "command": ["python", "train.py", "{lr}"]})
    assert prepare(request_of(spec, cluster="local", environment={"PATH": str(Path.cwd())})).notes
    (Path.cwd() / "runs" / "a" / "r1").mkdir(parents=True)
    # The command of an element that is resumed.
    assert not list(unfilled_placeholders(request_of(spec)))


def unexpanded_notes(*command: str, **variables: str) -> list[str]:
    spec = JobSpec.model_validate({"name": "a", "command": list(command), "environment": {"env": variables}})
    return list(unexpanded_values(request_of(spec)))


@pytest.mark.parametrize("word", ["$SCRATCH/data", "--data=${SCRATCH}/data", "~/data", "a:~/b"])
def test_a_word_that_a_shell_would_expand_is_told(golden: GoldenMessages, word: str) -> None:
    (note,) = unexpanded_notes("python", "train.py", word)
    assert golden.message(note).startswith(f"the word {word!r} of command")


def test_a_variable_whose_value_a_shell_would_expand_is_told_without_the_value(golden: GoldenMessages) -> None:
    (note,) = unexpanded_notes("true", HF_HOME="$SCRATCH/hf", DATA="~/data", PLAIN="a$b ~")
    assert golden.message(note).startswith("environment.env.HF_HOME, environment.env.DATA: ")
    assert "SCRATCH" not in note


def test_a_flag_of_srun_whose_value_a_shell_would_expand_is_told() -> None:
    srun = {"cpu-bind": "v,mask_cpu:$MASKS", "environment": "~/a.toml", "exact": True, "comment": "5$"}
    spec = JobSpec.model_validate({"name": "a", "command": ["true"], "resources": {"srun": srun}})
    (note,) = unexpanded_values(request_of(spec))
    assert note.startswith("resources.srun.cpu-bind, resources.srun.environment: $NAME ")


@pytest.mark.parametrize("words", [("bash", "-c", "$HOME/x"), ("bash", "-lc", "~/x"), ("true", "a~/b", "5$", "$1")])
def test_what_a_shell_or_nobody_expands_is_not_told(words: tuple[str, ...]) -> None:
    assert unexpanded_notes(*words) == []


def cpu_notes(**resources: object) -> list[str]:
    job = load_job({"name": "a", "command": ["true"], "resources": {"gpus_per_node": 4, **resources}})
    return list(cpus_for_gpus(request_of(job)))


def test_gpus_whose_ranks_have_one_cpu_by_default_are_told_with_a_number(golden: GoldenMessages) -> None:
    (note,) = cpu_notes()
    assert "add --cpus-per-task 8, or" in golden.message(note)


def test_who_says_how_many_cpus_or_has_no_gpu_is_told_nothing() -> None:
    assert cpu_notes(cpus_per_task=1) == []
    assert cpu_notes(gpus_per_node=0) == []


@pytest.mark.parametrize(("name", "way"), [("run.sh", "bash ./run.sh"), ("train.py", "python ./train.py")])
def test_a_script_that_may_not_be_executed_is_told_with_the_program_that_runs_it(name: str, way: str) -> None:
    Path(name).write_text("")
    spec = JobSpec.model_validate({"name": "a", "command": [f"./{name}", "x"]})
    with pytest.raises(SubmissionError) as caught:
        check_submittable(request_of(spec))
    assert caught.value.message.endswith(f"; write {way} x")
