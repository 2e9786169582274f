"""``hpcddp doctor install --on-nodes`` on a real Slurm: a sound installation, and one with a fault."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import HPCDDP
from tests.cluster.sandbox import Sandbox
from tests.waiting import wait_until

ONE_PACKAGE = pytest.mark.depends_on(
    "hpcddp/doctor/install.py", "hpcddp/slurm", "hpcddp/task/rendezvous.py", "tests/cluster/test_doctor_install.py"
)
COMMAND = (*HPCDDP, "doctor", "install", "--on-nodes", "--set", "resources.nodelist=n[1-2]", "--json")


def examine(sandbox: Sandbox, directory: Path, *options: str, code: int) -> list[dict[str, Any]]:
    done = sandbox.run(*COMMAND, *options, cwd=directory, check=False, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] == (code == 0)
    findings: list[dict[str, Any]] = document["findings"]
    return findings


def of(name: str, findings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(finding["verdict"], finding["found"]) for finding in findings if finding["name"] == name]


def test_sound_nodes_share_the_run_root_reach_each_other_and_agree_on_the_time(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    findings = examine(sandbox, tmp_path, code=0)
    assert of("nodes", findings) == [("ok", "a job ran on n1, n2")]
    assert of("run root", findings) == [("ok", f"n1, n2 and this machine share {tmp_path / 'runs'}")]
    (there, back) = of("network", findings)
    assert there[1].startswith("n1 reaches a free port of n2 at ")
    assert back[1].startswith("n2 reaches a free port of n1 at ")
    assert there[1].endswith(" through eth0")
    ((verdict, found),) = of("clocks", findings)
    assert (verdict, found.startswith("at most ")) == ("ok", True)
    assert of("slurm", findings)[0][0] == "ok"
    assert [found.partition(": torch ")[0] for _, found in of("torch", findings)][1:] == ["n1", "n2"]
    assert list(tmp_path.iterdir()) == []


def on_n2(directory: Path, command: str) -> tuple[str, str]:
    """Return the option for an interpreter that on n2 is started by a command of a shell, with ``"$@"`` in it."""
    wrapper = directory / "python"
    wrapper.write_text(
        "#!/bin/sh\n"
        f"set -- '{sys.executable}' \"$@\"\n"
        f'[ "$SLURMD_NODENAME" = n2 ] && {{ {command}; exit; }}\n'
        'exec "$@"\n'
    )
    wrapper.chmod(0o700)
    return "--set", f"environment.python={wrapper}"


@ONE_PACKAGE
def test_a_node_with_a_file_system_and_a_clock_of_its_own_is_named_for_both(sandbox: Sandbox, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    (tmp_path / "late.py").write_text(
        "import runpy, time\n"
        "real = time.time\n"
        "time.time = lambda: real() - 60\n"
        "runpy.run_module('hpcddp.doctor.install', run_name='__main__')\n"
    )
    late = f'exec "$1" -P -u {tmp_path}/late.py "$6"'
    cover = f"""exec unshare --mount sh -c 'mount -t tmpfs tmpfs {runs} && {late}' sh "$@\""""
    findings = examine(sandbox, tmp_path, *on_n2(tmp_path, cover), code=1)
    assert of("run root", findings) == [("error", f"n2 cannot see the file that this machine wrote into {runs}")]
    (remedy,) = (finding["remedy"] for finding in findings if finding["name"] == "run root")
    assert remedy == "set run_root in hpcddp.yaml or the profile to a directory that all nodes and the login node share"
    assert list(runs.iterdir()) == []
    ((verdict, found),) = of("clocks", findings)
    assert verdict == "error"
    assert re.fullmatch(r"the clock of (n1|this machine) is (59|60|61)\.\d s ahead of that of n2", found)


@ONE_PACKAGE
def test_a_node_without_a_network_is_named(sandbox: Sandbox, tmp_path: Path) -> None:
    findings = examine(sandbox, tmp_path, *on_n2(tmp_path, 'exec unshare --net "$@"'), code=1)
    (there, back) = of("network", findings)
    assert (there[0], back[0]) == ("error", "error")
    assert there[1].startswith("n1 does not reach a free port of n2 (")
    assert back[1].startswith("n2 does not reach a free port of n1 (")
    assert of("run root", findings)[0][0] == "ok"


@ONE_PACKAGE
def test_what_slurm_refuses_is_an_error_with_its_reason(sandbox: Sandbox, tmp_path: Path) -> None:
    findings = examine(sandbox, tmp_path, "--set", "resources.partition=nope", code=1)
    ((verdict, found),) = of("nodes", findings)
    assert verdict == "error"
    assert "invalid partition specified: nope" in found


@ONE_PACKAGE
def test_nodes_that_do_not_come_are_not_waited_for_and_leave_no_job(sandbox: Sandbox, tmp_path: Path) -> None:
    holder = sandbox.submit("--nodelist=n2", "--exclusive", "--wrap", "sleep 300", cwd=tmp_path)
    sandbox.wait(holder, {"RUNNING"})
    findings = examine(sandbox, tmp_path, "--wait", "3", code=1)
    ((verdict, found),) = of("nodes", findings)
    assert verdict == "error"
    assert found.startswith("0 of 2 nodes have answered within 3 s: ")

    def queued() -> str:
        return sandbox.run("squeue", "--noheader", "--format=%j").stdout

    wait_until(lambda: "hpcddp-doctor" not in queued(), queued)
