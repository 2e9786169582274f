from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.jobfile.cluster import Accounts, ClusterFacts, NodeKind, Partition
from hpcddp.jobfile.profiles import Profile, read_profile
from hpcddp.jobfile.read import DefaultSettings, ResolvedJob, load_job
from hpcddp.site.profile_writer import Choice, UnknownChoiceError, choose, first_job, profile_text
from hpcddp.site.rules import check_site
from tests.messages import GoldenMessages
from tests.site.sites import CPU_NODES, laptop, university


def choice(
    facts: ClusterFacts, *, partition: str | None = None, account: str | None = None, qos: str | None = None
) -> Choice:
    return choose(facts, partition=partition, account=account, qos=qos)


def text(facts: ClusterFacts, name: str = "default", **wanted: str) -> str:
    return profile_text(name, facts, choice(facts, **wanted))


def read_back(directory: Path, written: str) -> Profile:
    (directory / "default.yaml").write_text(written, encoding="utf-8")
    profile = read_profile(None, directory)
    assert profile is not None
    return profile


@pytest.mark.parametrize("facts", [university(), laptop(), ClusterFacts(name="x")])
def test_a_profile_reads_back_what_was_found(facts: ClusterFacts, tmp_path: Path) -> None:
    assert read_back(tmp_path, text(facts)).cluster == facts


names = st.text(st.characters(exclude_categories=()), min_size=1, max_size=8)


@given(name=names, account=names, feature=names)
def test_whatever_a_site_calls_its_things_the_profile_can_be_read(name: str, account: str, feature: str) -> None:
    kind = NodeKind(nodes=1, cpus=1, mem_mb=1, gpus=1, gpu_types={name: 1}, features=(feature,))
    facts = university(
        name=name,
        accounts=Accounts(required=True, names=(account,), qos=(name,)),
        partitions={name: Partition(kinds=(kind,)), account: Partition(allow_groups=(name,))},
    )
    written = text(facts)
    profile = read_profile_from(written)
    # Lone surrogates stand for bytes that are no UTF-8, which a YAML file cannot hold.
    plain = [one.encode("utf-8", "replace").decode() for one in (name, account, feature)]
    assert profile.cluster is not None
    assert profile.cluster.name == plain[0]
    assert profile.cluster.accounts.names == (plain[1],)
    assert set(profile.cluster.partitions) == set(plain[:2])
    if plain[0] != plain[1]:
        assert profile.cluster.partitions[plain[0]].kinds[0].features == (plain[2],)


def read_profile_from(written: str) -> Profile:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        return read_back(Path(directory), written)


def test_nothing_is_said_that_the_site_does_not_need(tmp_path: Path, golden: GoldenMessages) -> None:
    profile = read_back(tmp_path, text(university()))
    assert profile.settings.value == {"resources": None}
    said = golden.message(text(university()).partition("cluster:\n")[0])
    assert "# partition: batch " in said
    assert ": 100 nodes of 64 CPUs, 250G, 3-00:00:00 " in said
    assert "secret" not in said
    assert "# account: grant " in said
    assert " 01:00:00, at most 3-00:00:00\n" in said
    assert " 2000M per CPU\n" in said


def test_what_is_asked_for_stands_there(tmp_path: Path) -> None:
    said = text(university(), partition="gpu.v100", account="grant", qos="long")
    given = read_back(tmp_path, said).settings.value["resources"]
    assert given == {"partition": "gpu.v100", "account": "grant", "qos": "long"}
    assert "  partition: gpu.v100                 # as requested" in said


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        ("partition", "gpux", "did you mean gpu?"),
        ("partition", "zzz", "write one of batch, gpu.v100, gpu, secret, old"),
        ("account", "labb", "did you mean lab?"),
        ("qos", "zz", "write one of long, normal"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(
    golden: GoldenMessages, option: str, value: str, advice: str
) -> None:
    with pytest.raises(UnknownChoiceError) as caught:
        choice(university(), **{option: value})
    message = golden.message(caught.value.message)
    assert message.startswith(f"--{option} is {value!r}, ")
    assert message.endswith(f"; {advice}")
    assert caught.value.exit_code == 2


def test_what_is_not_known_is_taken_as_it_is_asked_for() -> None:
    chosen = choice(laptop(), account="any", qos="any")
    assert (chosen.account, chosen.qos) == (("any", "as requested"), ("any", "as requested"))


def partition_of(site: ClusterFacts, golden: GoldenMessages) -> tuple[str, str]:
    """Return the partition that is chosen, and why."""
    chosen = choice(site).partition
    assert chosen is not None
    name, reason = chosen
    return name, golden.message(reason)


def test_a_site_without_a_usable_default_partition_needs_one(golden: GoldenMessages) -> None:
    up, down = Partition(kinds=(CPU_NODES,)), Partition(kinds=(CPU_NODES,), state="DOWN", default=True)
    empty = CPU_NODES.model_copy(update={"available": 0})
    site = university(partitions={"down": down, "idle": Partition(kinds=(empty,)), "up": up, "none": Partition()})
    name, reason = partition_of(site, golden)
    assert name == "up"
    assert "default, down, is down" in reason
    site = university(partitions={"up": up})
    name, reason = partition_of(site, golden)
    assert name == "up"
    assert "no default partition" in reason
    closed = Partition(kinds=(CPU_NODES,), default=True, allow_groups=("others",))
    site = university(partitions={"closed": closed, "up": up})
    name, reason = partition_of(site, golden)
    assert name == "up"
    assert "closed, is only for the groups others" in reason
    site = university(partitions={"down": down})
    assert (choice(site).partition, choice(site).runs_in) == (None, "down")
    assert choice(ClusterFacts(name="x")).runs_in is None


def account_of(chosen: Choice, golden: GoldenMessages) -> tuple[str, str]:
    """Return the account that is chosen, and why."""
    assert chosen.account is not None
    name, reason = chosen.account
    return name, golden.message(reason)


def test_an_account_is_given_where_slurm_would_not_find_one(golden: GoldenMessages) -> None:
    accounts = Accounts(required=True, names=("grant", "lab"))
    name, reason = account_of(choice(university(accounts=accounts)), golden)
    assert name == "grant"
    assert "you have no default one" in reason
    name, reason = account_of(choice(university(), partition="gpu"), golden)
    assert name == "grant"
    assert "partition gpu does not take lab" in reason
    assert choice(laptop()).account is None
    unknown = university(accounts=Accounts(required=True))
    assert choice(unknown).account is None
    (line,) = [line for line in text(unknown).splitlines() if line.startswith('  # account: "..." ')]
    assert golden.message(line).endswith(" names none of yours")


def test_a_time_limit_is_given_where_the_site_refuses_jobs_without() -> None:
    site = university(submit_plugins=("require_timelimit",))
    assert choice(site).time_limit == ("01:00:00", "the site refuses jobs without one")
    quick = site.model_copy(
        update={"partitions": {"q": Partition(default=True, max_time="00:30:00", kinds=(CPU_NODES,))}}
    )
    assert choice(quick).time_limit == ("00:30:00", "the site refuses jobs without one")
    assert choice(university()).time_limit is None


@pytest.mark.parametrize("facts", [university(), laptop(), ClusterFacts(name="x")])
@pytest.mark.parametrize("name", ["default", "other"])
def test_the_first_job_file_is_a_job_that_its_profile_lets_pass(facts: ClusterFacts, name: str, tmp_path: Path) -> None:
    job = load_first_job(facts, name, tmp_path)
    assert (job.profile, job.cluster) == (name, facts)
    check_site(job, "slurm", {})


def load_first_job(facts: ClusterFacts, name: str, directory: Path, **wanted: str) -> ResolvedJob:
    chosen = choice(facts, **wanted)
    (directory / f"{name}.yaml").write_text(profile_text(name, facts, chosen))
    file = directory / "job.yaml"
    file.write_text(first_job("job.yaml", name, facts, runs_in=chosen.runs_in))
    return load_job(file, defaults=DefaultSettings(profiles=directory))


def test_the_first_job_fits_small_nodes_and_short_limits(tmp_path: Path) -> None:
    assert load_first_job(laptop(), "default", tmp_path).spec.world_size == 1
    short = Partition(default=True, max_time="00:05:00", kinds=(CPU_NODES.model_copy(update={"mem_mb": 2000}),))
    resources = load_first_job(university(partitions={"s": short}), "default", tmp_path).spec.resources
    assert (str(resources.time_limit), resources.mem, resources.tasks_per_node) == ("00:05:00", "2000M", 2)
