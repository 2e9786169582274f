"""``hpcddp doctor install`` on one machine, and the verdict about what nodes answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp import __version__, vendors
from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.doctor import install
from hpcddp.doctor.install import (
    Finding,
    ask_torch,
    examine_machine,
    existing_part,
    file_system,
    judge,
    torch_finding,
)
from tests.messages import GoldenMessages

TORCH: dict[str, object] = {
    "torch": "2.15.0", "cuda": "13.2", "hip": None, "gpus": 0, "nccl": "2.30.7", "vendor": None
}  # fmt: skip
# What the version.py of torch's wheels has.
ROCM_WHEEL = {"__version__": "2.15.0+rocm7.2", "cuda": None, "hip": "7.2.26015-fc0010cf6a"}
CUDA_WHEEL = {"__version__": "2.15.0+cu132", "cuda": "13.2", "hip": None}
CPU_WHEEL = {"__version__": "2.15.0+cpu", "cuda": None, "hip": None}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that puts a command of Slurm on PATH, which has none before."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name: str, body: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o700)

    return add


@pytest.fixture(autouse=True)
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory in place of /dev, which has the file of no GPU."""
    directory = tmp_path / "dev"
    directory.mkdir()
    monkeypatch.setattr(vendors, "ROOT", tmp_path)
    return directory


@pytest.fixture
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "is_installed", lambda _: False)


def found(name: str, run_root: Path) -> list[tuple[str, str, str | None]]:
    findings = [one for one in examine_machine(run_root, os.environ) if one.name == name]
    return [(one.verdict, one.found, one.remedy) for one in findings]


@pytest.mark.usefixtures("slurm")
def test_torch_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    answer = ask_torch(sys.executable)
    assert answer.keys() == TORCH.keys()
    ((verdict, version, _),) = found("torch", tmp_path)
    assert verdict in {"ok", "warning"}
    assert version.startswith(f"torch {answer['torch']}, ")


@pytest.mark.usefixtures("_no_torch", "slurm")
def test_without_torch_a_training_needs_the_extra(golden: GoldenMessages, tmp_path: Path) -> None:
    ((verdict, message, remedy),) = found("torch", tmp_path)
    assert (verdict, remedy) == ("warning", "a plain command needs no torch here")
    golden.message(message, {sys.executable: "PYTHON"})
    assert "a training needs torch" in message
    assert f"run: {sys.executable} -m pip install 'hpcddp[train]'" in message


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'ImportError: libcudart.so.13' >&2; exit 1", "import torch failed: ImportError: libcudart.so.13"),
        ("exit 1", "import torch failed: it said nothing"),
        ("echo no document", "import torch failed: it said nothing"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_an_error_with_its_last_line(
    golden: GoldenMessages, body: str, reason: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o700)
    answer = ask_torch(str(python))
    assert answer == {"error": reason}
    message = golden.message(torch_finding(answer))
    assert message.startswith(f"error    torch        {reason}; ")
    assert "install torch again" in message


def test_an_interpreter_that_is_not_there_is_an_error(golden: GoldenMessages) -> None:
    answer = ask_torch("/nonexistent/python")
    assert answer.keys() == {"error"}
    assert "/nonexistent/python cannot be started" in golden.message(answer["error"])


@pytest.mark.parametrize(("version", "verdict"), [("2.8.1", "error"), ("2.9.0a0+nv25", "ok"), ("2.10.0", "ok")])
def test_a_torch_older_than_the_bound_is_an_error(version: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["typer>=0.16", "torch>=2.9; extra == 'train'"])
    finding = torch_finding(TORCH | {"torch": version}, where="n1: ")
    assert finding.verdict == verdict
    assert finding.found.startswith(f"n1: torch {version}, CUDA 13.2, ")
    assert finding.remedy == (None if verdict == "ok" else "hpcddp needs 2.9 or later")


def test_a_torch_without_gpus_or_collectives_is_told() -> None:
    cpus = torch_finding(TORCH | {"cuda": None, "nccl": None})
    assert (cpus.verdict, cpus.found) == ("warning", "torch 2.15.0, built for CPUs only")
    nccl = torch_finding(TORCH | {"nccl": None})
    assert (nccl.verdict, nccl.found) == ("error", "torch 2.15.0, built without NCCL")
    rccl = torch_finding(TORCH | {"cuda": None, "hip": "7.2", "nccl": None})
    assert (rccl.verdict, rccl.found) == ("error", "torch 2.15.0, built without RCCL")
    assert torch_finding(TORCH | {"gpus": 4}).found == "torch 2.15.0, CUDA 13.2, NCCL 2.30.7, 4 NVIDIA GPUs here"


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("wheel", "device", "variables", "found_of_torch", "remedy"),
    [
        (ROCM_WHEEL, None, "", "HIP 7.2.26015-fc0010cf6a, RCCL 2.27.7, 0 AMD GPUs here", None),
        (ROCM_WHEEL, "kfd", "", "RCCL 2.27.7, 0 AMD GPUs here", "rocm-smi (or amd-smi) shows"),
        (ROCM_WHEEL, "kfd", "CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES", "0 AMD GPUs here", "Flags=amd_gpu_env"),
        (ROCM_WHEEL, "nvidia0", "", "0 AMD GPUs here", "build for CUDA (NVIDIA)"),
        # The job of this node has asked for no GPU.
        (ROCM_WHEEL, "kfd", "SLURM_JOB_ID", "0 AMD GPUs here", None),
        (CUDA_WHEEL, "kfd", "", "CUDA 13.2, NCCL 2.27.7, 0 NVIDIA GPUs here", "build for ROCm (AMD)"),
        (CUDA_WHEEL, "nvidia0", "", "0 NVIDIA GPUs here", "nvidia-smi shows"),
        (CPU_WHEEL, "kfd", "", "built for CPUs only", "build for ROCm (AMD)"),
        (CPU_WHEEL, None, "", "built for CPUs only", "build for CUDA (NVIDIA) or ROCm (AMD)"),
    ],
    ids=[
        "rocm", "rocm-sees-none", "rocm-two-variables", "rocm-on-nvidia", "rocm-job-on-cpus", "cuda-on-amd",
        "cuda-sees-none", "cpu-on-amd", "cpu",
    ],
)  # fmt: skip
def test_the_vendor_of_torch_and_that_of_the_machine_are_told(
    wheel: dict[str, str | None],
    device: str | None,
    variables: str,
    found_of_torch: str,
    remedy: str | None,
    golden: GoldenMessages,
    tmp_path: Path,
    devices: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_wheel(tmp_path / "site", wheel)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    for name in variables.split():
        monkeypatch.setenv(name, "4,5")
    if device is not None:
        (devices / device).touch()
    boundary.run(app, ["doctor", "install", "--run-root", str(tmp_path)])
    message = golden.message(capsys.readouterr().out.splitlines()[1])
    verdict = "ok" if remedy is None else "warning"
    assert message.startswith(f"{verdict:<8} torch        torch {wheel['__version__']}, ")
    assert f", {found_of_torch}" in message
    assert ("; " in message) == (remedy is not None)
    assert (remedy or "") in message


def write_wheel(directory: Path, version: dict[str, str | None]) -> None:
    """Write a package torch that sees no GPU."""
    cuda = directory / "torch" / "cuda"
    cuda.mkdir(parents=True)
    (cuda.parent / "version.py").write_text("".join(f"{name} = {value!r}\n" for name, value in version.items()))
    (cuda.parent / "__init__.py").write_text("from torch.version import __version__\n")
    (cuda / "__init__.py").write_text("def device_count():\n    return 0\n")
    (cuda / "nccl.py").write_text("def version():\n    return (2, 27, 7)\n")


@pytest.mark.usefixtures("_no_torch")
def test_slurm_is_missing_silent_old_or_well(
    golden: GoldenMessages, tmp_path: Path, slurm: Callable[[str, str], None]
) -> None:
    ((verdict, what, remedy),) = found("slurm", tmp_path)
    assert (verdict, what) == ("warning", "no Slurm here: sinfo was not found")
    assert "hpcddp submit --cluster local" in golden.message(remedy)
    slurm("sinfo", "echo 'sinfo: fatal: Could not establish a configuration source' >&2; exit 1")
    ((verdict, what, _),) = found("slurm", tmp_path)
    assert (verdict, "find no slurm.conf" in golden.message(what)) == ("warning", True)
    slurm("sinfo", "echo slurm 23.11.10")
    slurm("scontrol", "exit 1")
    assert found("slurm", tmp_path)[0][:2] == ("error", "Slurm 23.11.10, whose controller does not answer")
    slurm("scontrol", "exit 0")
    assert found("slurm", tmp_path) == [("ok", "Slurm 23.11.10", None)]
    slurm("sinfo", "echo slurm-wlm 20.02.3")
    ((verdict, what, remedy),) = found("slurm", tmp_path)
    assert (verdict, what) == ("warning", "Slurm 20.02.3")
    assert "22.05 or later" in golden.message(remedy)


@pytest.mark.usefixtures("_no_torch", "slurm")
def test_a_run_root_that_cannot_be_written_is_an_error() -> None:
    assert found("run root", Path("/proc/runs"))[0][0] == "error"
    assert found("run root", Path("/proc/runs"))[0][1].startswith("/proc/runs cannot be written (")


@pytest.mark.usefixtures("_no_torch", "slurm")
def test_nothing_is_left_in_the_run_root_and_nothing_is_created(tmp_path: Path) -> None:
    runs = tmp_path / "project"
    runs.mkdir()
    assert existing_part(runs / "runs" / "deep") == runs
    found("run root", runs / "runs")
    assert list(runs.iterdir()) == []


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 0:1 / / rw - ext4 /dev/sda rw\n"
        "23 22 0:2 / /home rw,relatime shared:1 - nfs4 server:/home rw\n"
        "24 23 0:3 / /home/a\\040b rw - lustre mds:/x rw\n"
    )
    assert file_system(Path("/home/a b/runs"), table) == "lustre"
    assert file_system(Path("/home/ab"), table) == "nfs4"
    assert file_system(Path("/homes"), table) == "ext4"


def findings(**changes: Any) -> list[Finding]:
    """Return what is found about two nodes, of which the first one is sound."""
    sound = {
        "python": "3.11.7",
        "hpcddp": __version__,
        "addresses": ["10.0.0.1"],
        "login_file": True,
        "refused": None,
        "is_seen": True,
        "clock": 100.0,
        "reached": "10.0.0.1",
        "interface": "eth0",
        "torch": TORCH,
    }
    nodes = [{**sound, "host": "n1"}, {**sound, **changes, "host": "n2"}]
    return list(judge(nodes, Path("/runs"), asked_at=100.0))


def test_sound_nodes_are_ok() -> None:
    assert {finding.verdict for finding in findings()} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "name", "facts"),
    [
        ({"python": "3.12.1"}, "versions", ("Python 3.11.7, hpcddp ", "and Python 3.12.1, hpcddp ")),
        ({"hpcddp": "9.0"}, "versions", (f"Python 3.11.7, hpcddp {__version__}", "and Python 3.11.7, hpcddp 9.0")),
        ({"login_file": False}, "run root", ("n2 cannot see the file", "this machine wrote into /runs")),
        ({"refused": "Permission denied"}, "run root", ("n2 cannot write in /runs: Permission denied",)),
        ({"is_seen": False}, "run root", ("this machine cannot see the file", "n2 wrote into /runs")),
        ({"reached": None}, "network", ("n2 does not reach", "n1 (10.0.0.1)")),
        ({"clock": 160.0}, "clocks", ("the clock of n2 is 60.0 s ahead",)),
        ({"torch": {"error": "import torch failed: x"}}, "torch", ("n2: import torch failed: x",)),
    ],
)
def test_what_keeps_runs_from_working_on_nodes_is_an_error(
    golden: GoldenMessages, changes: dict[str, Any], name: str, facts: tuple[str, ...]
) -> None:
    errors = [finding for finding in findings(**changes) if finding.verdict == "error"]
    assert [finding.name for finding in errors] == [name]
    message = golden.message(errors[0].found, {__version__: "VERSION"})
    for fact in facts:
        assert fact in message
    assert errors[0].remedy


def test_clocks_that_differ_a_little_are_a_warning(golden: GoldenMessages) -> None:
    (clocks,) = (finding for finding in findings(clock=95.0) if finding.name == "clocks")
    assert clocks.verdict == "warning"
    golden.message(clocks.found)
    assert "is 5.0 s ahead" in clocks.found
    assert clocks.found.endswith(" n2")


@pytest.mark.usefixtures("_no_torch", "slurm")
def test_an_error_exits_1_and_json_is_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert boundary.run(app, ["doctor", "install"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["python", "torch", "slurm", "run"]
    assert boundary.run(app, ["doctor", "install", "--json", "--run-root", "/proc/runs"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [finding["verdict"] for finding in document["findings"]] == ["ok", "warning", "warning", "error"]


@pytest.mark.usefixtures("_no_torch", "slurm")
def test_nodes_without_srun_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert boundary.run(app, ["doctor", "install", "--on-nodes"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("error    nodes        srun was not found; Slurm's ")
    assert boundary.run(app, ["doctor", "install", "--on-nodes", "--set", "resources.nodes=no"]) == 2


def test_the_group_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert boundary.run(app, ["doctor"]) == boundary.run(app, []) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Usage: hpcddp doctor [OPTIONS] COMMAND [ARGS]...\n")
    assert "See 'hpcddp" not in shown
