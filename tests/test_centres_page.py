"""docs/centres.md asks Slurm for what the centres publish, and so does a job file that is made from their scripts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.jobfile.slurm_flags import SRUN
from hpcddp.script.convert import convert
from hpcddp.script.directives import read_flags
from hpcddp.script.launch import launch_of
from hpcddp.script.parse import parse_script
from hpcddp.submission.render import render_script
from tests.submission.requests import request_of

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "script" / "scripts"
PAGE = (ROOT / "docs" / "centres.md").read_text(encoding="utf-8")
INTRODUCTION, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
Flags = Mapping[str, str | None]
Render = Callable[[str, str], str]
ANY = "any value: it is the reader's own"
MASKS = (
    "0x00fe000000000000,0xfe00000000000000,0x0000000000fe0000,0x00000000fe000000,"
    "0x00000000000000fe,0x000000000000fe00,0x000000fe00000000,0x0000fe0000000000"
)
# What hpcddp adds to every script, and to every srun.
ADDED: Flags = {
    "job-name": ANY,
    "output": "%x-%j.out",
    "error": "%x-%j.out",
    "open-mode": "append",
    "requeue": None,
    "signal": "USR2@120",
}
ADDED_TO_SRUN: Flags = {
    "nodes": ANY,
    "ntasks": ANY,
    "ntasks-per-node": ANY,
    "cpus-per-task": ANY,
    "distribution": "block",
    "kill-on-bad-exit": "1",
    "wait": "0",
    "unbuffered": None,
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a centre publishes, read in the documents that its section names.

    Args:
        directives: the flags of sbatch, by their long names.
        srun: those of srun.
        program: how the command that the tasks run begins.
        differs: the directives that hpcddp writes in place of published ones or in addition, which the text names.
        left_out: the published directives that have no place in the script of the page.
    """

    directives: Flags
    srun: Flags
    program: str
    differs: Flags
    left_out: frozenset[str] = frozenset()


PUBLISHED = {
    "TACC: Vista": Published(
        directives={"partition": "gh-dev", "nodes": "2", "ntasks": "2", "time": "01:00:00"},
        srun={"ntasks": "2"},
        program="python train.py",
        differs={"ntasks-per-node": "1", "cpus-per-task": "72"},
        left_out=frozenset({"ntasks"}),
    ),
    "LUMI": Published(
        directives={
            "account": ANY,
            "partition": "standard-g",
            "nodes": "4",
            "gpus-per-node": "8",
            "ntasks-per-node": "8",
            "cpus-per-task": "7",
            "mem-per-gpu": "60G",
            "time": "01:00:00",
        },
        srun={"cpu-bind": f"v,mask_cpu={MASKS}"},
        program="singularity run /appl/local/laifs/containers/lumi-multitorch-",
        differs={},
    ),
    "CSCS: Alps": Published(
        directives={"account": ANY, "nodes": "2", "ntasks-per-node": "4", "time": "01:00:00"},
        srun={"mpi": "pmix", "network": "disable_rdzv_get", "environment": "./torch.toml"},
        program="python train.py",
        differs={"cpus-per-task": "72"},
    ),
    "NERSC: Perlmutter": Published(
        directives={
            "account": ANY,
            "constraint": "gpu",
            "qos": "regular",
            "nodes": "2",
            "ntasks-per-node": "4",
            "gpus-per-node": "4",
            "cpus-per-task": "32",
            "image": "nersc/pytorch:25.02.01",
            "module": "gpu,nccl-plugin",
            "time": ANY,
        },
        srun={},
        program="shifter python train.py",
        differs={},
    ),
    "OLCF: Frontier": Published(
        directives={"account": ANY, "partition": "batch", "nodes": "2", "time": ANY, "network": "disable_rdzv_get"},
        srun={"nodes": "2", "ntasks": "16", "cpus-per-task": "7", "gpus-per-task": "1", "gpu-bind": "closest"},
        program="python train.py",
        differs={"ntasks-per-node": "8", "cpus-per-task": "7"},
    ),
    "A university's cluster": Published(
        directives={
            "nodes": "2",
            "ntasks-per-node": "2",
            "cpus-per-task": "8",
            "mem": "32G",
            "gres": "gpu:2",
            "time": "00:05:00",
            # sbatch takes both cases.
            "mail-type": "BEGIN,END",
        },
        srun={},
        program="python mnist_classify_ddp.py --epochs=2",
        differs={},
    ),
}


def section(centre: str) -> str:
    """Return the section of a centre, without its heading."""
    (text,) = (text.partition("\n")[2] for text in SECTIONS if text.startswith(f"{centre}\n"))
    return text


def blocks(centre: str) -> tuple[str, str]:
    """Return the profile and the command of a centre's section."""
    (profile,), (command,) = (
        re.findall(rf"```{name}\n(.*?)```", section(centre), re.DOTALL) for name in ("yaml", "sh")
    )
    return profile, command.replace("\\\n", "")


@pytest.fixture
def render(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Render:
    """Return what renders a command of the page, as a reader with that profile does."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.chdir(tmp_path)

    def render_command(profile: str, command: str) -> str:
        file = Path(profile.partition("\n")[0].removeprefix("# ")).expanduser()
        file.parent.mkdir(parents=True)
        file.write_text(profile, encoding="utf-8")
        code = boundary.run(app, shlex.split(command.replace("hpcddp submit", "render", 1)))
        output = capsys.readouterr()
        assert code == 0, output.err
        return output.out

    return render_command


def flags_of_srun(script: str) -> Flags:
    """Return the flags of the srun that starts the tasks of a rendered script."""
    (line,) = re.findall(r"^ +srun (.*?) \\\n +sh -c ", script, re.MULTILINE | re.DOTALL)
    # If Slurm manages the GPUs of nodes that are given as a whole.
    line = re.sub(r"\$\{SLURM_JOB_GPUS:\+--gpus-per-node=\d+\}", "", line)
    words = shlex.split(line.replace("\\\n", ""))
    flags, count = read_flags([(0, word) for word in words], SRUN, stops_at_word=True)
    assert count == len(words)
    return {flag.name: flag.value for flag in flags}


def differences(wanted: Flags, found: Flags) -> list[str]:
    """Return what is different, a flag each."""
    return [
        f"--{name}={found.get(name, 'missing')}, and not {wanted.get(name, 'missing')}"
        for name in sorted(wanted.keys() | found.keys())
        if name not in wanted or name not in found or wanted[name] not in {ANY, found[name]}
    ]


def differences_from_the_centre(centre: str, script: str) -> list[str]:
    published = PUBLISHED[centre]
    directives = {flag.name: flag.value for flag in parse_script(script).flags}
    kept = {name: value for name, value in published.directives.items() if name not in published.left_out}
    return [
        *differences({**ADDED, **kept, **published.differs}, directives),
        *differences({**ADDED_TO_SRUN, **published.srun}, flags_of_srun(script)),
    ]


def test_each_section_is_of_a_centre_and_short() -> None:
    assert [text.partition("\n")[0] for text in SECTIONS] == [*PUBLISHED]
    assert max(len(text.rstrip().splitlines()) for text in SECTIONS) <= 25


@pytest.mark.parametrize("centre", PUBLISHED)
def test_the_command_asks_for_what_the_centre_publishes(render: Render, centre: str) -> None:
    profile, command = blocks(centre)
    assert differences_from_the_centre(centre, render(profile, command)) == []
    program = shlex.split(command.partition(" -- ")[2])
    assert " ".join(program).startswith(PUBLISHED[centre].program)


@pytest.mark.parametrize("centre", PUBLISHED)
def test_what_is_different_and_the_dates_of_the_sources_are_told(centre: str) -> None:
    published = PUBLISHED[centre]
    text = section(centre)
    assert all(f"`--{name}={value}`" in text or f"`--{name}`" in text for name, value in published.differs.items())
    assert re.search(r"^Sources?: .*(20\d\d-\d\d-\d\d|undated; read in 20\d\d)\)", text, re.MULTILINE)


def test_what_is_added_to_every_script_is_told() -> None:
    told = set(re.findall(r"`--([a-z-]+)(?:=[^`]*)?`", INTRODUCTION))
    assert {*ADDED, *ADDED_TO_SRUN, "gpus-per-node"} <= told


@pytest.mark.parametrize(
    ("centre", "old", "new"),
    [
        ("TACC: Vista", "gpu_request: none, ", ""),
        ("LUMI", "mask_cpu=0x00fe", "mask_cpu=0x00ff"),
        ("CSCS: Alps", "mpi: pmix, ", ""),
        ("NERSC: Perlmutter", "gpu,nccl-plugin", "gpu"),
        ("OLCF: Frontier", "gpu-bind: closest", "gpu-bind: none"),
        ("A university's cluster", "mem: 32G, ", ""),
    ],
)
def test_another_flag_is_noticed(render: Render, centre: str, old: str, new: str) -> None:
    profile, command = blocks(centre)
    assert profile.count(old) == 1
    script = render(profile.replace(old, new), command)
    assert len(differences_from_the_centre(centre, script)) == 1


@pytest.mark.parametrize("centre", ["alps", "frontier", "lumi", "perlmutter", "university", "vista"])
def test_the_job_file_of_a_centres_script_asks_for_the_same(centre: str) -> None:
    text = (SCRIPTS / f"{centre}.sbatch").read_text(encoding="utf-8")
    published = parse_script(text)
    rendered = render_script(request_of(convert(published, name=centre, environment={}).job, run_id=None)).text

    asked = {flag.name: flag.value for flag in published.flags}
    found = {flag.name: flag.value for flag in parse_script(rendered).flags}
    # Each rank has a log of its own; sbatch adds mail types up; a time has one form.
    changed = {"output": "%x-%j.out", "mail-type": "BEGIN,END", "time": found["time"]}
    if "ntasks" in asked:
        changed["ntasks-per-node"] = str(int(asked.pop("ntasks") or 0) // int(asked["nodes"] or 1))
    wanted = asked | {name: value for name, value in changed.items() if name in asked or name == "ntasks-per-node"}
    numbers = {"ntasks-per-node": ANY, "cpus-per-task": ANY}
    assert differences({**ADDED, **numbers, **wanted}, found) == []

    (launch,) = (launch for launch in map(launch_of, published.commands) if launch.started_by != "shell")
    flags = {flag.name: flag.value for flag in launch.srun if flag.name != "label"}
    if centre == "lumi":
        flags["cpu-bind"] = f"v,mask_cpu={MASKS}"
    assert differences({**ADDED_TO_SRUN, **flags}, flags_of_srun(rendered)) == []
