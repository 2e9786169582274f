from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.jobfile.cluster import ClusterFacts, NodeKind
from hpcddp.site.facts import NODE_FORMAT, Answers, ask_site, read_gpus, read_nodes, read_site
from hpcddp.slurm import commands
from hpcddp.slurm.controller import read_config
from tests.messages import GoldenMessages
from tests.slurm.answers import NEW, NEWER, OLD, recorded


def facts(answers: Answers, *, user: str = "ada", groups: tuple[str, ...] = ("users", "daemon")) -> ClusterFacts:
    return read_site(answers, user=user, groups=groups, today="2026-11-21")


def test_a_recorded_cluster_without_accounting_is_read() -> None:
    found = facts(recorded())
    assert (found.name, found.slurm, found.max_array_size) == ("sandbox", "22.05.8", 1001)
    assert (found.looked_at, found.user, found.groups) == ("2026-11-21", "ada", ("daemon",))
    assert (found.memory_is_shared_out, found.enforce_part_limits) == (False, "NO")
    assert (found.disable_root_jobs, found.submit_plugins) == (False, ())
    assert (found.accounts.required, found.accounts.names, found.accounts.default) == (False, (), None)
    policy = found.preemption
    assert (policy.type, policy.mode, policy.kill_wait_s) == ("partition_prio", "REQUEUE", 15)
    assert (policy.sends_user_signal, policy.requeue, policy.requeue_delay_s) == (False, True, 121)
    assert found.default_partition == "low"


def test_the_partitions_of_a_recorded_cluster_are_read() -> None:
    partitions = facts(recorded()).partitions
    assert list(partitions) == ["low", "low0", "lowc", "high"]
    kinds = (NodeKind(nodes=2, available=1, cpus=8, mem_mb=1000000, gpus=2),)
    assert all(partition.kinds == kinds for partition in partitions.values())
    assert (partitions["low"].max_time, partitions["low"].default_time, partitions["low"].grace_time_s) == (
        "UNLIMITED", None, 10,
    )  # fmt: skip
    assert partitions["low0"].state == "DOWN"
    limited = partitions["lowc"]
    assert (limited.max_time, limited.default_time, limited.max_nodes) == ("02:00:00", "00:30:00", 1)
    assert (limited.allow_accounts, limited.preempt_mode, limited.grace_time_s) == (("lab", "grant"), "CANCEL", 20)
    hidden = partitions["high"]
    assert (hidden.hidden, hidden.allow_groups, hidden.priority_tier) == (True, ("nogroup", "daemon"), 10)


@pytest.mark.parametrize(
    ("shared", "whole_nodes"),
    [
        ("OverSubscribe=NO", False),
        ("OverSubscribe=EXCLUSIVE", True),
        ("ExclusiveUser=YES OverSubscribe=NO", False),
        # Slurm 26.05.
        ("Exclusive=NODE OverSubscribe=NO", True),
        ("Exclusive=TOPO OverSubscribe=NO", True),
        ("Exclusive=USER OverSubscribe=NO", False),
    ],
)
def test_a_partition_of_whole_nodes_is_known(shared: str, whole_nodes: bool) -> None:  # noqa: FBT001
    answers = recorded()
    partitions = answers.partitions.replace("OverSubscribe=NO", shared)
    assert facts(replace(answers, partitions=partitions)).partitions["low"].whole_nodes == whole_nodes


def test_select_linear_gives_whole_nodes() -> None:
    answers = recorded()
    config = answers.config.replace("select/cons_tres", "select/linear")
    assert facts(replace(answers, config=config)).partitions["low"].whole_nodes


def test_who_may_use_a_partition_follows_from_groups() -> None:
    assert facts(recorded()).barred("high") is None
    assert facts(recorded(), groups=("users",)).barred("high") == "only for the groups nogroup, daemon"
    assert facts(recorded(), user="root", groups=("root",)).barred("high") is None
    # Without accounting nobody asks for an account, whatever the partition says.
    assert facts(recorded()).barred("lowc") is None


def test_an_older_slurm_with_accounting_is_read() -> None:
    found = facts(OLD)
    assert (found.slurm, found.enforce_part_limits, found.disable_root_jobs) == ("20.11.9", "ALL", True)
    assert (found.submit_plugins, found.memory_is_shared_out) == (("lua",), True)
    assert (found.accounts.required, found.accounts.default) == (True, "lab")
    assert (found.accounts.names, found.accounts.qos) == (("grant", "lab"), ("long", "normal"))
    assert (found.preemption.type, found.preemption.requeue) == ("qos", False)
    batch, gpu = found.partitions["batch"], found.partitions["gpu.v100"]
    assert batch.default_mem == "2000M per CPU"
    assert batch.kinds == (NodeKind(nodes=100, available=98, cpus=64, mem_mb=257000, features=("avx2", "ib")),)
    assert (gpu.default_mem, gpu.max_nodes, gpu.deny_accounts) == ("4000M per CPU, 32000M per GPU", 4, ("guests",))
    assert (gpu.allow_accounts, gpu.allow_qos) == (None, ("normal", "long"))
    assert (gpu.gpus_per_node, gpu.gpu_types, gpu.kinds[0].available) == (4, ("v100",), 3)


def test_a_slurm_of_today_with_accounts_for_partitions_is_read() -> None:
    found = facts(NEW)
    assert (found.slurm, found.submit_plugins, found.preemption.kill_wait_s) == ("23.11.10", ("lua",), 60)
    assert (found.accounts.required, found.accounts.default, found.accounts.qos) == (True, "lab", ("normal",))
    assert found.barred("reserved") == "only for the accounts bio"
    assert found.open_partitions == ["cpu", "a100", "preemptible"]
    assert found.partitions["a100"].default_mem == "120000M per GPU"
    assert (found.partitions["preemptible"].preempt_mode, found.partitions["preemptible"].grace_time_s) == (
        "REQUEUE", 90,
    )  # fmt: skip


def test_a_newer_slurm_with_several_types_of_gpus_is_read() -> None:
    found = facts(NEWER)
    assert (found.slurm, found.accounts.required) == ("24.05.3", False)
    assert (found.preemption.sends_user_signal, found.preemption.requeue_delay_s) == (True, 21)
    (partition,) = found.partitions.values()
    assert partition.max_time == "2-00:00:00"
    assert [(kind.nodes, kind.available, kind.gpus, kind.gpu_types) for kind in partition.kinds] == [
        (4, 4, 4, {"h100": 4}),
        (2, 2, 20, {"a100": 6, "a100_1g.5gb": 14}),
    ]


def test_an_older_place_of_the_parameter_about_signals_is_read() -> None:
    config = "ClusterName = x\nSlurmctldParameters = enable_configless,preempt_send_user_signal\n"
    assert facts(Answers(config=config, partitions="", nodes="")).preemption.sends_user_signal


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("", {}),
        ("gpu:4", {"": 4}),
        ("gpu", {"": 1}),
        ("gpu:tesla", {"tesla": 1}),
        ("gpu:4(S:0,1),shard:16(S:0,1)", {"": 4}),
        ("craynetwork:4,gpu:a100:2(S:1),gpu:a100:2(S:0)", {"a100": 4}),
        ("gpu:no_consume:2", {"": 2}),
    ],
)
def test_gpus_are_counted_by_type(gres: str, gpus: Mapping[str, int]) -> None:
    assert read_gpus(gres) == gpus


@pytest.mark.parametrize(
    ("state", "available"),
    [
        ("idle", 1), ("mixed", 1), ("allocated", 1), ("completing", 1), ("reserved", 1), ("idle~", 1), ("idle#", 1),
        ("mixed-", 1), ("down", 0), ("down*", 0), ("idle*", 0), ("drained", 0), ("draining", 0), ("maint", 0),
        ("fail", 0), ("unk", 0), ("inval", 0), ("future", 0),
    ],
)  # fmt: skip
def test_nodes_in_service_are_counted(state: str, available: int) -> None:
    ((kind,),) = read_nodes(f"p|1|{state}|8|1000|(null)|(null)\n").values()
    assert (kind.nodes, kind.available) == (1, available)


def test_what_a_wrapper_of_the_site_says_is_passed_over() -> None:
    text = "Welcome to the cluster!\np|1|idle|8+|1000+|gpu:2|a,b\np|0|n/a|0|0|(null)|(null)\n"
    kind = NodeKind(nodes=1, available=1, cpus=8, mem_mb=1000, gpus=2, features=("a", "b"))
    assert read_nodes(text) == {"p": (kind,)}


def test_a_setting_of_a_later_section_does_not_replace_one_of_slurm_conf() -> None:
    assert read_config("A = 1\nB = (null)\nCgroup Support Configuration:\nA = 2\nB = x=y\n") == {"A": "1", "B": "x=y"}


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o700)


def test_the_questions_do_not_depend_on_the_users_taste(tmp_path: Path) -> None:
    for name in ("scontrol", "sinfo"):
        program(tmp_path, name, f'echo "{name} $* [$SINFO_PARTITION$SLURM_CONF]" >> {tmp_path}/asked')
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SINFO_PARTITION": "gpu", "SLURM_CONF": "conf"}
    assert ask_site(environment, user="ada").associations is None
    assert (tmp_path / "asked").read_text().splitlines() == [
        "scontrol show config [conf]",
        "scontrol --all --oneliner show partition [conf]",
        f"sinfo --all --noheader --exact --format={NODE_FORMAT} [conf]",
    ]


def test_accounts_are_asked_for_where_somebody_keeps_them(tmp_path: Path) -> None:
    program(tmp_path, "scontrol", 'echo "AccountingStorageType = accounting_storage/slurmdbd"; echo "ClusterName = c"')
    program(tmp_path, "sinfo", "true")
    program(tmp_path, "sacctmgr", f'echo "$*" >> {tmp_path}/asked; [[ $5 == assoc ]] && echo "lab|normal" || echo lab')
    answers = ask_site({"PATH": f"{tmp_path}:/usr/bin:/bin"}, user="ada")
    assert (answers.associations, answers.default_account, answers.accounting_error) == ("lab|normal\n", "lab\n", None)
    assert (tmp_path / "asked").read_text().splitlines() == [
        "--noheader --parsable2 --readonly show assoc where user=ada cluster=c format=Account,QOS",
        "--noheader --parsable2 --readonly show user where name=ada format=DefaultAccount",
    ]


def test_an_accounting_that_does_not_answer_is_only_silent(tmp_path: Path, golden: GoldenMessages) -> None:
    program(tmp_path, "scontrol", 'echo "AccountingStorageType = accounting_storage/slurmdbd"')
    program(tmp_path, "sinfo", "true")
    program(tmp_path, "sacctmgr", 'echo "sacctmgr: error: Sending PersistInit msg: Connection refused" >&2; exit 1')
    answers = ask_site({"PATH": f"{tmp_path}:/usr/bin:/bin"}, user="ada")
    assert answers.associations is None
    assert answers.accounting_error is not None
    assert answers.accounting_error.endswith("Sending PersistInit msg: Connection refused")
    (tmp_path / "sacctmgr").unlink()
    answers = ask_site({"PATH": str(tmp_path)}, user="ada")
    message = golden.message(answers.accounting_error)
    assert message.startswith("sacctmgr was not found; ")
    assert message.endswith(" on PATH here")


def test_a_controller_that_is_away_is_told_from_one_that_refuses(tmp_path: Path) -> None:
    program(tmp_path, "scontrol", 'echo "slurm_load_ctl_conf error: Unable to contact slurm controller" >&2; exit 1')
    with pytest.raises(commands.SlurmUnavailableError):
        ask_site({"PATH": f"{tmp_path}:/usr/bin:/bin"}, user="ada")
    program(tmp_path, "scontrol", 'echo "Access denied" >&2; exit 1')
    with pytest.raises(commands.SlurmCommandError, match="scontrol show config failed: Access denied") as caught:
        ask_site({"PATH": f"{tmp_path}:/usr/bin:/bin"}, user="ada")
    assert not isinstance(caught.value, commands.SlurmUnavailableError)
