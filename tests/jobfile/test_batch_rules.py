from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcddp.jobfile.read import ResolvedJob
from tests.facts import assert_facts

Refuse = Callable[..., list[str]]
Load = Callable[..., ResolvedJob]


def job(batch: str, more: str = "", optimizer: str = "{name: sgd}") -> str:
    return (
        "name: a\nresources: {nodes: 2, tasks_per_node: 4}\n"
        f"batch: {{{batch}}}\ntrain: {{model: resnet18, dataset: digits, optimizer: {optimizer}}}\n{more}"
    )


REFUSED = {
    job("global_batch_size: 1024, per_device_batch_size: 48"): (
        "3: batch.per_device_batch_size: is 48",
        "8 ranks (2 x 4) make 384",
        "batch.global_batch_size 1024",
        "write global_batch_size 768 or 1152",
    ),
    job("global_batch_size: 96, per_device_batch_size: 16"): (
        "3: batch.per_device_batch_size: is 16",
        "8 ranks (2 x 4) make 128",
        "batch.global_batch_size 96",
        "write global_batch_size 128",
    ),
    job("global_batch_size: 1024, per_device_batch_size: 32, grad_accum_steps: 4"): (
        "3: batch.per_device_batch_size: is 32",
        "batch.grad_accum_steps",
        "keep one of them",
    ),
    job("global_batch_size: 1024, per_device_batch_size: 32, max_per_device_batch_size: 64"): (
        "3: batch.per_device_batch_size: is 32",
        "batch.max_per_device_batch_size",
        "keep one of them",
    ),
    job("global_batch_size: 4"): (
        "3: batch.global_batch_size: is 4",
        "the 8 ranks (2 x 4)",
        "write 8 or more",
        "ask for at most 4 ranks",
    ),
    job("global_batch_size: 4, unit: group, group: 'a.b:c'"): (
        "3: batch.global_batch_size: is 4",
        "the 8 ranks (2 x 4)",
        "write 8 or more",
        "ask for at most 4 ranks",
    ),
    job("global_batch_size: 64, unit: group"): ("3: batch.unit: is group", "write batch.group: pkg.module:function"),
    job("global_batch_size: 64, group: 'a.b:c'"): (
        "3: batch.group: is a.b:c",
        "batch.unit is sample",
        "write batch.unit: group, or remove it",
    ),
    job("global_batch_size: 64", "learning_rate: {rule: linear}\n", "{name: adamw}"): (
        "5: learning_rate.rule: is linear",
        "adamw",
        "write sqrt, or none",
    ),
    job("global_batch_size: 640", "learning_rate: {rule: sqrt, base_global_batch_size: 64}\n", "{name: adamw}"): (
        "5: learning_rate.rule: is sqrt",
        "10 * (1 - 0.9) = 1",
        "train.optimizer.betas [0.9, 0.999]",
        "write batch.global_batch_size 639 or less",
        "betas closer to 1",
        "rule: none",
    ),
}


@pytest.mark.parametrize(("good", "facts"), REFUSED.items(), ids=REFUSED)
def test_numbers_that_do_not_fit_are_refused_with_what_would(good: str, facts: tuple[str, ...], refuse: Refuse) -> None:
    (line,) = refuse(good=good)
    assert_facts(line, f"job.yaml:{facts[0]}", *facts[1:])


@pytest.mark.parametrize(
    "good",
    [
        job("global_batch_size: 1024, per_device_batch_size: 32, split: error"),
        job("global_batch_size: 64, unit: group, group: 'a.b:c'"),
        job("global_batch_size: 639", "learning_rate: {rule: sqrt, base_global_batch_size: 64}\n", "{name: adamw}"),
        job("global_batch_size: 640", "learning_rate: {rule: linear, base_global_batch_size: 64}\n"),
        job("global_batch_size: 640", "learning_rate: {rule: sqrt}\n", "{name: adamw, betas: [0.0, 0.5]}"),
    ],
)
def test_numbers_that_fit_pass(good: str, load: Load) -> None:
    load(good=good)
