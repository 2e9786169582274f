"""The sandbox is a Slurm of several hosts."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cluster.sandbox import Sandbox


def script(directory: Path, *lines: str) -> Path:
    path = directory / "job.sh"
    path.write_text("\n".join(("#!/bin/bash", *lines, "")))
    return path


def test_each_node_has_its_own_host_name_and_address(sandbox: Sandbox, tmp_path: Path) -> None:
    job = script(tmp_path, "srun sh -c 'echo $(hostname) $(getent ahostsv4 $(hostname) | cut -d\" \" -f1 | head -1)'")
    job_id = sandbox.submit("--nodes=4", "--output", tmp_path / "log", job)
    sandbox.wait(job_id)
    names, addresses = zip(*(line.split() for line in (tmp_path / "log").read_text().splitlines()), strict=True)
    assert sorted(names) == list(sandbox.nodes) == ["n1", "n2", "n3", "n4"]
    assert len(set(addresses)) == 4


def test_one_node_reaches_the_server_of_another_by_its_name(sandbox: Sandbox, tmp_path: Path) -> None:
    talk = tmp_path / "talk.py"
    talk.write_text(
        "import os, socket, time\n"
        "if os.environ['SLURM_PROCID'] == '0':\n"
        "    socket.create_server(('n1', 23456)).accept()[0].sendall(b'hello')\n"
        "else:\n"
        "    time.sleep(1)\n"
        "    print(socket.gethostname(), socket.create_connection(('n1', 23456)).recv(5))\n"
    )
    done = sandbox.run("srun", "--nodelist=n1,n2", "--nodes=2", sys.executable, talk)
    assert done.stdout == "n2 b'hello'\n"


def test_gpus_are_counted_and_shown_to_the_tasks(sandbox: Sandbox) -> None:
    done = sandbox.run("srun", "--nodes=2", "--gres=gpu:2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert done.stdout.split() == ["0,1", "0,1"]


def test_the_partitions_differ_in_what_preemption_does(sandbox: Sandbox) -> None:
    found = {}
    for block in sandbox.run("scontrol", "--oneliner", "show", "partition").stdout.splitlines():
        fields = dict(field.split("=", 1) for field in block.split())
        found[fields["PartitionName"]] = (fields["PreemptMode"], fields["GraceTime"], fields["Default"])
    assert found == {
        "low": ("REQUEUE", "10", "YES"),
        "low0": ("REQUEUE", "0", "NO"),
        "lowc": ("CANCEL", "20", "NO"),
        "high": ("OFF", "0", "NO"),
    }


def test_a_job_on_high_preempts_one_on_low_which_is_requeued(sandbox: Sandbox, tmp_path: Path) -> None:
    low = sandbox.submit("--nodes=4", "--exclusive", "--partition=low0", "--output=/dev/null", "--wrap=sleep 600")
    sandbox.wait(low, states={"RUNNING"})
    job = script(tmp_path, "true")
    high = sandbox.submit("--nodes=4", "--exclusive", "--partition=high", "--output=/dev/null", job)
    sandbox.wait(high)
    assert sandbox.job(low)["Restarts"] == "1"


def test_a_command_on_a_node_sees_its_host_name(sandbox: Sandbox) -> None:
    assert sandbox.on("n3", "hostname").stdout == "n3\n"
