from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.jobfile.read import load_job
from hpcddp.submission.request import first_plan
from tests.messages import GoldenMessages

JOB = """\
name: example
resources: {cpus_per_task: 2, sbatch: {switches: 1}}
environment:
  env: {PLAIN: plain-value}
  pass_env: [TOKEN]
batch: {global_batch_size: 256}
learning_rate: {base: 0.5}
train: {model: resnet18, dataset: digits, epochs: 10}
"""

# Makes a machine that is another one in every way that must not matter.
ELSEWHERE = """
import getpass, os, platform, socket, sys, time
from importlib.abc import MetaPathFinder

class Gone(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "torchvision", "submitit", "numpy", "sklearn"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Gone())
time.time = lambda: 0.0
time.time_ns = lambda: 0
socket.gethostname = platform.node = lambda: "elsewhere"
getpass.getuser = lambda: "somebody"
"""


@pytest.fixture
def job(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a job file in the working directory of a machine with Slurm."""
    sbatch = tmp_path_factory.mktemp("slurm") / "sbatch"
    sbatch.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def render(capsysbinary: pytest.CaptureFixture[bytes], *arguments: object, code: int = 0) -> tuple[str, str]:
    assert boundary.run(app, ["render", *map(str, arguments)]) == code
    captured = capsysbinary.readouterr()
    return captured.out.decode(), captured.err.decode()


def refusal(capsysbinary: pytest.CaptureFixture[bytes], *arguments: object) -> str:
    output, errors = render(capsysbinary, *arguments, code=2)
    assert output == ""
    return errors


def test_the_script_alone_goes_to_stdout(job: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    output, errors = render(capsysbinary, job)
    assert errors == ""
    assert output.startswith("#!/bin/bash\n#SBATCH --job-name=example\n")
    assert f"\nhpcddp_python={sys.executable}\n" in output


def test_on_a_machine_without_slurm_the_interpreter_gets_a_warning(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], golden: GoldenMessages
) -> None:
    expected, _ = render(capsysbinary, job)
    monkeypatch.setenv("PATH", str(job.parent))
    output, errors = render(capsysbinary, job)
    assert output == expected
    warning = golden.message(errors, {sys.executable: "PYTHON"})
    assert f"the script calls {sys.executable}, " in warning
    assert "--set environment.python=PATH" in warning
    assert render(capsysbinary, job, "-o", "job.sh") == ("", errors)


@pytest.mark.parametrize("field", ["python=/opt/py", "conda=base", "venv=/opt/env", "uv=/opt/project"])
def test_an_interpreter_that_the_job_names_gets_no_warning(
    field: str, job: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("PATH", str(job.parent))
    assert render(capsysbinary, job, "--set", f"environment.{field}")[1] == ""


def test_overrides_and_the_interpreter_of_the_job_file_count(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    output, _ = render(capsysbinary, job, "--set", "environment.python=/opt/py", "--set", "resources.nodes=2")
    assert "\n#SBATCH --nodes=2\n" in output
    assert "\nhpcddp_python=/opt/py\n" in output


def test_a_file_is_written_whole_and_nothing_printed(job: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    expected, _ = render(capsysbinary, job, "--run-id", "r1")
    Path("job.sh").write_text("an older script")
    assert render(capsysbinary, job, "--run-id", "r1", "-o", "job.sh") == ("", "")
    assert Path("job.sh").read_text() == expected
    assert sorted(path.name for path in Path().iterdir()) == ["job.sh", "job.yaml"]


def test_a_script_cannot_be_written_over_a_directory(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes], golden: GoldenMessages
) -> None:
    Path("there").mkdir()
    message = golden.message(refusal(capsysbinary, job, "-o", "there"))
    assert message.startswith("hpcddp: -o is 'there', ")
    assert "directory; write the name of a file" in message


@pytest.mark.parametrize("source", ["job file", "template"])
def test_a_script_cannot_be_written_over_what_it_is_made_from(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes], golden: GoldenMessages, source: str
) -> None:
    template = Path("own.sh.j2")
    template.write_text('{% extends "hpcddp/sbatch.sh.j2" %}\n')
    file = job if source == "job file" else template
    before = file.read_text()
    link = Path("out")
    link.symlink_to(file)
    message = golden.message(refusal(capsysbinary, job, "--template", f"./{template}", "-o", "out"))
    assert message == f"hpcddp: -o is 'out', which is the {source}; write another name\n"
    assert file.read_text() == before


def test_a_script_is_written_through_a_link(job: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    Path("elsewhere").mkdir()
    link = Path("job.sh")
    link.symlink_to("elsewhere/job.sh")
    script, _ = render(capsysbinary, job)
    render(capsysbinary, job, "-o", "job.sh")
    assert link.is_symlink()
    assert Path("elsewhere/job.sh").read_text() == script


def test_a_script_cannot_have_a_name_that_is_too_long(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes], golden: GoldenMessages
) -> None:
    message = golden.message(refusal(capsysbinary, job, "-o", "x" * 300))
    assert message.endswith("which cannot be written (File name too long); write another name\n")


def test_a_script_cannot_be_written_over_a_device(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes], golden: GoldenMessages
) -> None:
    message = golden.message(refusal(capsysbinary, job, "-o", "/dev/null"))
    assert message.startswith("hpcddp: -o is '/dev/null', ")
    assert "; leave -o out " in message
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_missing_directory_is_named(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes], golden: GoldenMessages
) -> None:
    message = golden.message(refusal(capsysbinary, job, "-o", "no/such/job.sh"))
    assert message.startswith("hpcddp: -o is 'no/such/job.sh', ")
    assert "the directory 'no/such'" in message
    assert message.endswith("; make it first\n")


def test_a_file_that_cannot_be_written_is_named(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes], golden: GoldenMessages
) -> None:
    name = "x" * 250
    message = golden.message(refusal(capsysbinary, job, "-o", name), {name: "LONG"})
    assert message.startswith(f"hpcddp: -o is '{name}', ")
    assert message.endswith("(File name too long); write another name\n")


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("--", "srun", "python", "train.py"), "hpcddp starts the tasks with srun itself"),
        (("--", "bash", "-ce", "srun python train.py"), "hpcddp starts the tasks with srun itself"),
        (("--sweep", "n=1,2", "--", "sbatch", "{n}.sh"), "element 0 of the sweep, with n=1: command is sbatch 1.sh"),
        (("--nodelist", "n[1-3]", "--nodes", "2", "--", "true"), "the job must get all 3 of these nodes"),
        (("--global-batch-size", "9", "--tasks-per-node", "2", "--", "true"), "2 ranks cannot share evenly"),
        (("job.yaml", "--set", "batch.split=error", "--tasks-per-node", "3"), "which 3 ranks do not divide"),
    ],
)
def test_what_submit_refuses_on_every_machine_is_refused(
    capsysbinary: pytest.CaptureFixture[bytes], words: tuple[str, ...], fact: str, golden: GoldenMessages
) -> None:
    assert fact in golden.message(refusal(capsysbinary, *words))


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("--", "bash", "-c", "echo 'a"), "the text of bash -c is not valid bash"),
        (("--set", "environment.setup=[fi]", "--", "true"), "environment.setup is not valid bash"),
    ],
)
def test_shell_text_with_a_syntax_error_is_refused(
    capsysbinary: pytest.CaptureFixture[bytes], words: tuple[str, ...], fact: str
) -> None:
    assert fact in refusal(capsysbinary, *words)


@pytest.mark.usefixtures("job")
def test_what_only_this_machine_lacks_is_not_refused(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    script, _ = render(capsysbinary, "--", "no-such-program", "gone.py")
    assert "no-such-program" in script


def test_a_bad_run_id_is_refused(job: Path, capsysbinary: pytest.CaptureFixture[bytes], golden: GoldenMessages) -> None:
    message = golden.message(refusal(capsysbinary, job, "--run-id", "../x"))
    assert message.startswith("hpcddp: the run id is '../x', ")
    assert "write 1 to 64 letters, digits," in message


def test_an_unknown_template_lists_the_known_ones(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes], golden: GoldenMessages
) -> None:
    message = golden.message(refusal(capsysbinary, job, "--template", "nope"))
    assert message.startswith("hpcddp: --template is 'nope', ")
    assert message.endswith("one of sbatch, or a file's path\n")


def test_a_template_of_ones_own_gets_the_documented_variables(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "templates.md").read_text()
    table = page.partition("## Variables")[2]
    names = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    own = Path("own.sh.j2")
    own.write_text("#!/bin/bash\n" + "".join(f"{{{{ {name} | string | sh }}}}\n" for name in names))
    output, _ = render(capsysbinary, job, "--template", "./own.sh.j2")
    assert len(names) == 29
    assert output.splitlines()[1] == "example"


def test_a_template_that_lacks_directives_of_the_job_gives_a_warning(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    Path("own.sh.j2").write_text("#!/bin/bash\n")
    output, errors = render(capsysbinary, job, "--template", "own.sh.j2")
    assert output == "#!/bin/bash\n"
    assert errors.startswith("warning: the template own.sh.j2 makes a script without --job-name, ")


def test_the_template_of_the_page_is_the_example_and_extends_the_script(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    root = Path(__file__).parents[2]
    example = root / "examples" / "gpu_monitor.sh.j2"
    page = (root / "docs" / "templates.md").read_text()
    assert f"```jinja\n{example.read_text()}```" in page
    default, _ = render(capsysbinary, job)
    output, errors = render(capsysbinary, job, "--template", str(example))
    added = [line for line in example.read_text().splitlines() if not line.startswith("{%")]
    assert [line for line in output.splitlines() if line not in default.splitlines()] == added
    assert errors == ""


def test_the_document_tells_script_directives_plan_and_where_values_came_from(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    profiles = Path("config/hpcddp/profiles")
    profiles.mkdir(parents=True)
    (profiles / "default.yaml").write_text("resources: {partition: gpu}\n")
    text, _ = render(capsysbinary, job, "--run-id", "r1")
    output, errors = render(capsysbinary, job, "--run-id", "r1", "--json", "--set", "resources.nodes=1")
    document: dict[str, Any] = json.loads(output)
    assert errors == ""
    assert document["script"] == text
    assert document["directives"][0] == {"flag": "job-name", "value": "example"}
    assert {"flag": "requeue", "value": None} in document["directives"]
    assert document["plan"]["global_batch_size"] == 256
    fields = document["fields"]
    assert fields["resources.nodes"] == {"value": 1, "origin": "--set"}
    assert fields["resources.partition"] == {"value": "gpu", "origin": "profile default"}
    assert fields["resources.cpus_per_task"] == {"value": 2, "origin": "job file"}
    assert fields["resources.sbatch.switches"] == {"value": "1", "origin": "job file"}
    assert fields["learning_rate.base"] == {"value": 0.5, "origin": "job file"}
    assert fields["batch.tail"] == {"value": "keep", "origin": "default"}


def test_the_plan_of_the_document_is_the_one_that_a_submission_writes(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    output, _ = render(capsysbinary, job, "--json")
    plan = first_plan(load_job(job).spec)
    assert plan is not None
    assert plan.total_steps is not None
    assert json.loads(output)["plan"] == plan.as_json()


def test_the_fields_show_no_value_of_an_environment_variable(
    job: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    output, _ = render(capsysbinary, job, "--json")
    fields = json.loads(output)["fields"]
    assert fields["environment.env.PLAIN"] == {"value": "<set>", "origin": "job file"}
    assert fields["environment.env"]["value"] == {"PLAIN": "<set>"}
    assert fields["environment.pass_env"]["value"] == ["TOKEN"]
    assert "plain-value" not in json.dumps(fields)
    assert "s3cret" not in output


def test_the_bytes_depend_on_nothing_but_the_job(job: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "sitecustomize.py").write_text(ELSEWHERE)
    project = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "hpcddp", "render", str(job), "--run-id", "r1"]
    here = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": project}
    there = {
        "PATH": "/nonexistent",
        "HOME": "/nonexistent",
        "PYTHONPATH": f"{tmp_path / 'elsewhere'}:{project}",
        "LC_ALL": "C",
        "PYTHONIOENCODING": "latin-1",
        "TZ": "Asia/Kathmandu",
        "USER": "somebody",
        "TERM": "xterm-256color",
        "SLURM_CONF": "/nonexistent/slurm.conf",
        "SLURM_JOB_ID": "1",
        "SBATCH_PARTITION": "debug",
    }
    first = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, check=True)
    second = subprocess.run(command, cwd="/", env=there, capture_output=True, check=True)
    assert first.stdout == second.stdout
    assert second.stderr.startswith(f"warning: the script calls {sys.executable}, ".encode())
