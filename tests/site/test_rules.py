from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.cluster import Accounts, ClusterFacts, NodeKind, Partition
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.site.rules import SiteError, broken_site_rules, check_site
from tests.messages import GoldenMessages
from tests.site.sites import laptop, university


def spec(**resources: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "a-job",
            "resources": resources,
            "batch": {"global_batch_size": 1000},
            "train": {"model": "resnet18", "dataset": "digits"},
        }
    )


def findings(facts: ClusterFacts | None = None, **resources: Any) -> list[str]:
    return [f"{key} {sentence}" for key, sentence in broken_site_rules(spec(**resources), facts or university())]


@pytest.mark.parametrize(
    "resources",
    [
        {},
        {"nodes": 100, "tasks_per_node": 64, "mem": "250G", "time_limit": "3-00:00:00"},
        {"partition": "gpu.v100", "gpus_per_node": 4, "gpu_type": "v100", "cpus_per_task": 10, "account": "grant"},
        {"partition": "batch,gpu.v100", "gpus_per_node": 4, "time_limit": "1-00:00:00", "qos": "long"},
        {"partition": "gpu", "account": "grant", "nodes": 2, "gpus_per_node": 8, "time_limit": "unlimited"},
        {"partition": "old"},
        {"mem": 0},
        # Slurm need not know GPUs for which it is not asked.
        {"gpus_per_node": 4, "gpu_request": "none"},
        # The job goes to another cluster, about which nothing is known.
        {"partition": "elsewhere", "sbatch": {"clusters": "hpc2"}},
    ],
)
def test_what_the_cluster_can_give_is_not_refused(resources: dict[str, Any]) -> None:
    assert findings(**resources) == []


@pytest.mark.parametrize(
    ("resources", "facts"),
    [
        ({"partition": "bacth"}, ("resources.partition is 'bacth', ", "no partition 'bacth'; did you mean batch?")),
        (
            {"partition": "batch,zzz"},
            ("resources.partition is 'batch,zzz', ", "no partition 'zzz'; write one of batch, gpu.v100, gpu"),
        ),
        (
            {"partition": "secret"},
            ("resources.partition is 'secret', ", "(only for the groups chemistry); write one of batch, gpu.v100, gpu"),
        ),
        (
            {"time_limit": "4-00:00:00"},
            ("resources.time_limit is 4-00:00:00, ", " batch takes 3-00:00:00 at most; ", "use partition gpu"),
        ),
        (
            {"time_limit": "unlimited", "partition": "batch,gpu.v100"},
            ("resources.time_limit is UNLIMITED, ", " batch takes 3-00:00:00 at most; ", "use partition gpu"),
        ),
        ({"nodes": 101}, ("resources.nodes is 101, ", " batch has 100; ", "write 100 or less")),
        (
            {"nodes": 4, "partition": "gpu.v100"},
            ("resources.nodes is 4, ", " gpu.v100 gives one job 3; ", "write 3 or less"),
        ),
        (
            {"gpus_per_node": 1},
            ("resources.gpus_per_node is 1, ", " batch have none; ", "use partition gpu.v100 or gpu"),
        ),
        (
            {"gpus_per_node": 16, "partition": "gpu.v100"},
            ("resources.gpus_per_node is 16, ", " gpu.v100 has 4 GPUs at most; ", "write 4 or less, and more nodes"),
        ),
        (
            {"gpus_per_node": 2, "gpu_type": "h100", "partition": "gpu.v100"},
            ("resources.gpu_type is 'h100', ", " gpu.v100 are v100; ", "did you mean v100?"),
        ),
        (
            {"gpus_per_node": 2, "gpu_type": "a100", "partition": "gpu.v100"},
            ("resources.gpu_type is 'a100', ", " gpu.v100 does not have; ", "use partition gpu"),
        ),
        (
            {"cpus_per_task": 9, "tasks_per_node": 8},
            ("resources.cpus_per_task is 9, ", " 72 CPUs for the 8 tasks ", " batch has 64 CPUs ", "use partition gpu"),
        ),
        (
            {"cpus_per_task": 200},
            ("resources.cpus_per_task is 200, ", " batch has 64 CPUs at most; ", "write 64 or less"),
        ),
        (
            {"tasks_per_node": 200},
            ("resources.cpus_per_task is 1, ", " 200 CPUs for the 200 tasks ", " batch has 64 CPUs ", "use 64 tasks "),
        ),
        ({"mem": "2T"}, ("resources.mem is 2T, ", " batch has 250G at most; ", "ask for 250G or less")),
        (
            {"mem_per_cpu": "100G", "cpus_per_task": 4},
            ("resources.mem_per_cpu is 100G, ", " 400G on a node, ", " 250G ", "use partition gpu.v100 or gpu"),
        ),
        (
            {"nodes": 5, "gpus_per_node": 8, "partition": "gpu", "account": "grant", "cpus_per_task": 16},
            ("resources.nodes is 5, ", " 2 nodes of gpu have 8 GPUs, 128 CPUs; ", "write 2 or less"),
        ),
        ({"account": "labs"}, ("resources.account is 'labs', ", "; did you mean lab?")),
        ({"account": "x"}, ("resources.account is 'x', ", "; write one of grant, lab")),
        ({"qos": "lon"}, ("resources.qos is 'lon', ", "; did you mean long?")),
        (
            {"partition": "gpu"},
            ("resources.account is not given, ", " 'lab', which may not use partition gpu; ", "write grant"),
        ),
        (
            {"partition": "gpu", "account": "lab"},
            ("resources.account is 'lab', ", " may not use partition gpu; ", "write grant"),
        ),
        (
            {"nodes": 98, "spare_nodes": 3},
            ("resources.spare_nodes is 3, ", " makes 101, ", " batch has 100; ", "write 2 or less"),
        ),
        ({"nodes": 101, "spare_nodes": 3}, ("resources.nodes is 101, ", "write 100 or less")),
        (
            {"nodes": 2, "spare_nodes": 9, "gpus_per_node": 8, "partition": "gpu", "account": "grant"},
            ("resources.spare_nodes is 9, ", " makes 11, ", " gpu has 6; ", "write 4 or less"),
        ),
        (
            {"gpus_per_node": 9},
            ("resources.gpus_per_node is 9, ", " batch have none; ", "CPU job, or write resources.gpu_request none "),
        ),
    ],
)
def test_what_the_cluster_cannot_give_is_refused_with_a_way_out(
    golden: GoldenMessages, resources: dict[str, Any], facts: tuple[str, ...]
) -> None:
    (message,) = findings(**resources)
    assert golden.message(message).startswith(facts[0])
    assert [fact for fact in facts if fact not in message] == []


def test_a_site_without_default_partition_and_without_default_account_asks_for_both(golden: GoldenMessages) -> None:
    facts = university(
        accounts=Accounts(required=True, names=("grant", "lab")),
        partitions={"a": Partition(kinds=()), "b": Partition()},
    )
    account, partition = findings(facts)
    assert golden.message(account).startswith("resources.account is missing, ")
    assert account.endswith("; write one of grant, lab")
    assert golden.message(partition).startswith("resources.partition is missing, ")
    assert partition.endswith("; write one of a, b")
    # A rule of the site's may fill in what is missing.
    assert findings(facts.model_copy(update={"submit_plugins": ("lua",)}), account="lab") == []
    assert findings(facts, account="lab", reservation="course") == []


def test_no_node_may_have_all_that_is_asked_for_together(golden: GoldenMessages) -> None:
    both = university().partitions["gpu"].model_copy(update={"allow_accounts": None})
    few_cpus = both.kinds[0].model_copy(update={"cpus": 16})
    facts = university(partitions={"gpu": both.model_copy(update={"kinds": (few_cpus, both.kinds[1])})})
    (message,) = findings(facts, partition="gpu", gpus_per_node=8, cpus_per_task=5)
    assert golden.message(message).startswith("resources.nodes is 1, ")
    assert " of 8 GPUs, 40 CPUs; " in message


def test_gpus_without_a_type_are_asked_for_without_one(golden: GoldenMessages) -> None:
    kinds = (laptop().partitions["all"].kinds[0].model_copy(update={"gpus": 2, "cpus": 8}),)
    facts = university(partitions={"all": Partition(default=True, kinds=kinds)})
    (message,) = findings(facts, gpus_per_node=2, gpu_type="a100")
    assert golden.message(message).startswith("resources.gpu_type is 'a100', ")
    assert message.endswith("no type; leave it out")
    assert findings(facts, gpus_per_node=2) == []


def test_what_is_not_known_refuses_nothing() -> None:
    nothing = ClusterFacts(name="x")
    asked: dict[str, Any] = {"partition": "a", "account": "b", "qos": "c", "nodes": 9, "time_limit": "unlimited"}
    assert findings(nothing, **asked) == []
    assert findings(university(partitions={"a": Partition()}, accounts=Accounts()), **asked, gpus_per_node=8) == []


def test_an_account_is_nobodys_business_where_the_site_asks_for_none() -> None:
    assert findings(laptop(), account="anything", qos="any") == []


def job(facts: ClusterFacts | None, **resources: Any) -> ResolvedJob:
    origins = {"resources.nodes": "--set", "resources.mem": "profile default", "resources.qos": "job file"}
    return ResolvedJob(spec=spec(**resources), origins=origins, profile="default", cluster=facts)


@pytest.mark.parametrize(
    ("mem_mb", "requests", "requested", "most"),
    [
        (1_000_000, {"mem": "977G"}, "resources.mem is 977G, ", "976G"),
        (9_500, {"mem": "1T"}, "resources.mem is 1T, ", "9500M"),
        (2_048, {"mem": "1T"}, "resources.mem is 1T, ", "2G"),
        (
            1_000_000,
            {"mem_per_cpu": "1000100M"},
            "resources.mem_per_cpu is 1000100M, which is 977G on a node, ",
            "976G",
        ),
    ],
)
def test_the_memory_that_is_proposed_fits_the_node(
    golden: GoldenMessages, mem_mb: int, requests: dict[str, Any], requested: str, most: str
) -> None:
    batch = Partition(default=True, kinds=(NodeKind(nodes=1, cpus=64, mem_mb=mem_mb),))
    facts = university().model_copy(update={"partitions": {"batch": batch}})
    (message,) = findings(facts, **requests)
    assert golden.message(message).startswith(requested)
    assert f" has {most} at most; ask for {most} " in message


def test_all_is_found_together_and_says_where_it_came_from_and_how_old_the_facts_are(golden: GoldenMessages) -> None:
    with pytest.raises(SiteError) as caught:
        check_site(job(university(), nodes=200, mem="2T", qos="x"), "slurm", {})
    qos, nodes, memory = golden.message(caught.value.message).splitlines()
    assert qos.startswith("resources.qos is 'x', ")
    assert qos.endswith("; write one of long, normal")
    assert nodes.startswith("resources.nodes (--set) is 200, ")
    assert nodes.endswith("; write 100 or less")
    assert memory.startswith("resources.mem (profile default) is 2T, ")
    assert memory.endswith("; ask for 250G or less")
    hint = golden.message(caught.value.hint)
    assert hint.startswith("Profile default knows hpc1 as of 2026-11-21; ")
    assert hint.endswith(": hpcddp init default --force")
    assert caught.value.exit_code == 2
    problems = caught.value.as_json()["error"]["problems"]
    assert [problem["key"] for problem in problems] == ["resources.qos", "resources.nodes", "resources.mem"]


def test_a_job_for_this_machine_and_one_whose_profile_knows_nothing_are_not_checked() -> None:
    check_site(job(university(), nodes=200), "local", {})
    check_site(job(None, nodes=200), "slurm", {})


def test_facts_about_another_cluster_than_the_one_that_is_spoken_to_are_left_aside(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    environment = {"SLURM_CONF": str(conf)}
    conf.write_text("# ClusterName=hpc1\nClusterName=sandbox\n")
    check_site(job(university(), nodes=200), "slurm", environment)
    for text in ("SlurmctldHost=a\nclustername = HPC1 # ours\n", "include other.conf\n"):
        conf.write_text(text)
        with pytest.raises(SiteError):
            check_site(job(university(), nodes=200), "slurm", environment)
    conf.unlink()
    with pytest.raises(SiteError):
        check_site(job(university(), nodes=200), "slurm", environment)


def test_memory_per_cpu_refuses_nothing_where_memory_is_not_shared_out() -> None:
    memory: dict[str, Any] = {"tasks_per_node": 8, "mem_per_cpu": "200G"}
    assert findings(**memory) != []
    assert findings(university().model_copy(update={"memory_is_shared_out": False}), **memory) == []


def test_a_qos_may_lift_the_limits_of_a_partition() -> None:
    longer: dict[str, Any] = {"time_limit": "300-00:00:00", "partition": "batch"}
    assert findings(**longer) != []
    assert findings(**longer, qos="long") == []
