"""A job that asks for a range of nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.resources import NodeRange
from hpcddp.jobfile.write import dump_job, parse_resolved
from hpcddp.slurm.directives import directives_for
from tests.facts import assert_facts

Refuse = Callable[..., list[str]]
Load = Callable[..., ResolvedJob]

TRAIN = "train: {model: resnet18, dataset: digits}\n"


def ranged(resources: str, *, batch: str = "global_batch_size: 64", work: str = TRAIN) -> str:
    return f"name: a\nresources: {{{resources}}}\nbatch: {{{batch}}}\n{work}"


def test_a_range_reads_back_equal(load: Load) -> None:
    spec = load(good=ranged("nodes: 2-8, tasks_per_node: 2")).spec
    assert spec.resources.nodes == NodeRange(2, 8)
    assert parse_resolved(dump_job(spec, environment_values=True)) == spec


def test_a_range_of_one_number_is_that_number(load: Load) -> None:
    assert load(good=ranged("nodes: 3-3")).spec.resources.nodes == 3


def test_before_the_job_starts_a_range_counts_as_its_largest_number(load: Load) -> None:
    spec = load(good=ranged("nodes: 2-8, tasks_per_node: 2")).spec
    assert (spec.nodes, spec.world_size, spec.tasks, list(spec.node_counts)) == (8, 16, 16, list(range(2, 9)))


def test_the_job_of_an_attempt_has_the_number_that_it_got(load: Load) -> None:
    sized = load(good=ranged("nodes: 2-8, tasks_per_node: 2")).spec.sized(3)
    assert (sized.resources.nodes, sized.world_size, list(sized.node_counts)) == (3, 6, [3])
    assert sized.sized(5) == sized


def test_slurm_gets_the_range_and_the_cpus_of_a_node(load: Load) -> None:
    """With --ntasks-per-node it would give the smallest number of nodes only."""
    spec = load(good=ranged("nodes: 2-8, tasks_per_node: 2, cpus_per_task: 3")).spec
    lines = [str(directive) for directive in directives_for(spec, run_id="r1")]
    assert lines[1:4] == ["--nodes=2-8", "--mincpus=6", "--cpus-per-task=3"]
    assert not any("ntasks" in line for line in lines)


@pytest.mark.parametrize(
    ("resources", "batch", "facts"),
    [
        ("nodes: 2-8", "global_batch_size: 6", ("batch.global_batch_size: is 6", "7 ranks", "(7 x 1)")),
        (
            "nodes: 2-4",
            "global_batch_size: 64, per_device_batch_size: 8",
            ("batch.per_device_batch_size: is 8", "3 ranks", "(3 x 1)"),
        ),
        (
            "nodes: 2-4, sbatch: {mincpus: 4}",
            "global_batch_size: 64",
            ("resources.sbatch.mincpus: is given", "2-4", "remove it"),
        ),
    ],
)
def test_a_number_that_does_not_fit_is_refused_with_its_sentence(
    refuse: Refuse, resources: str, batch: str, facts: tuple[str, ...]
) -> None:
    (sentence,) = refuse(good=ranged(resources, batch=batch))
    assert_facts(sentence, *facts)


@pytest.mark.parametrize(
    ("launcher", "option", "facts"),
    [
        ("torchrun", "--nnodes=2", ("command: ", "--nnodes 2", "resources.nodes is 3")),
        ("accelerate, launch", "--num-processes=12", ("resources.nodes: ", "2-3", "another number of ranks")),
    ],
)
def test_a_launcher_that_states_another_world_is_refused(
    refuse: Refuse, launcher: str, option: str, facts: tuple[str, ...]
) -> None:
    command = f"command: [{launcher}, {option}, train.py]\nlauncher: {launcher.partition(',')[0]}\n"
    sentences = refuse(good=ranged("nodes: 2-3", work=command))
    assert any(all(fact in sentence for fact in facts) for sentence in sentences), sentences


def test_a_launcher_that_states_the_ranks_of_a_node_is_started_on_each_node(load: Load) -> None:
    spec = load(good=ranged("nodes: 2-3", work="command: [torchrun, --nproc-per-node=4, train.py]\n")).spec
    assert [spec.sized(nodes).world_size for nodes in spec.node_counts] == [8, 12]
    assert (spec.tasks_per_node, spec.cpus_per_task) == (1, 4)
