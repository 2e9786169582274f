"""``hpcddp doctor install --on-nodes`` on a real Slurm: a sound installation, and one with a fault."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cluster.jobs import HPCDDP
from tests.cluster.sandbox import Sandbox
from tests.cluster.slurm_faults import daemon_pid

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
    assert [found.partition(":")[0] for _, found in of("file system", findings)][1:] == ["n1"]
    assert of("slurm", findings)[0][0] == "ok"
    assert [found.partition(": torch ")[0] for _, found in of("torch", findings)][1:] == ["n1", "n2"]
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def covered(sandbox: Sandbox, node: str, directory: Path) -> Iterator[None]:
    """Give a node an empty file system of its own in place of a directory."""
    inside = daemon_pid(sandbox, "slurmd", on=node)
    enter = (*sandbox.enter_controller(), "nsenter", f"--target={inside}", "--mount", "--")
    sandbox.run(*enter, "mount", "-t", "tmpfs", "tmpfs", str(directory))
    try:
        yield
    finally:
        sandbox.run(*enter, "umount", str(directory))


def test_a_node_with_a_file_system_of_its_own_in_place_of_the_run_root_is_named(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with covered(sandbox, "n2", runs):
        findings = examine(sandbox, tmp_path, code=1)
    assert of("run root", findings) == [("error", f"n2 does not see in {runs} what this machine wrote there")]
    (remedy,) = (finding["remedy"] for finding in findings if finding["name"] == "run root")
    assert remedy == "set run_root in hpcddp.toml or the profile to a directory that all nodes and the login node share"
    assert list(runs.iterdir()) == []


def test_what_slurm_refuses_is_an_error_with_its_reason(sandbox: Sandbox, tmp_path: Path) -> None:
    findings = examine(sandbox, tmp_path, "--set", "resources.partition=nope", code=1)
    ((verdict, found),) = of("nodes", findings)
    assert verdict == "error"
    assert "invalid partition specified: nope" in found


def test_nodes_that_do_not_come_are_not_waited_for_and_leave_no_job(sandbox: Sandbox, tmp_path: Path) -> None:
    holder = sandbox.submit("--nodelist=n2", "--exclusive", "--wrap", "sleep 300", cwd=tmp_path)
    sandbox.wait(holder, {"RUNNING"})
    findings = examine(sandbox, tmp_path, "--wait", "3", code=1)
    ((verdict, found),) = of("nodes", findings)
    assert verdict == "error"
    assert found.startswith("0 of 2 nodes have answered within 3 s: ")
    queued = sandbox.run("squeue", "--noheader", "--format=%j").stdout
    assert "hpcddp-doctor" not in queued
