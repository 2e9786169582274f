"""A run that a resumption continues with another global batch equals a loop that is written out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcddp.batch.order import KeyedOrder
from hpcddp.train.randomness import seed_initialisation
from tests.distributed import own_code
from tests.distributed.named_batches import name_batch
from tests.distributed.training import job_document, parameters, result, run_ranks, steps

SAMPLES, EPOCHS, BASE = 100, 4, 0.1
JOB: dict[str, Any] = {
    "train__epochs": EPOCHS,
    "train__optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True},
    "learning_rate__base": BASE,
    "learning_rate__base_global_batch_size": 32,
    "learning_rate__rule": "linear",
    "learning_rate__schedule": "cosine",
    "learning_rate__warmup_epochs": 1,
}
# Batches of 32 are 4 steps per epoch: step 6 is within the second epoch. Of the 36 samples that are left of it, 24 and
# 12 are steps 7 and 8. Batches of 24 are 5 steps per epoch: step 10 is within the third. Of its other 52 samples, 40
# and 12 are steps 11 and 12; 3 more steps of 40 are the last epoch.
SEGMENTS = ((0, 6, 32), (6, 10, 24), (10, 15, 40))


def rate_of(epoch: int, taken: int, batch: int) -> float:
    """Return the rate of a step: linear in the batch, over the first epoch a warm-up, then a cosine over the rest."""
    base = BASE * batch / 32
    per_epoch = math.ceil(SAMPLES / batch)
    place = epoch * per_epoch + taken / batch
    if place < per_epoch:
        return base * min(1.0, (place + 1) / per_epoch)
    progress = (place - per_epoch) / ((EPOCHS - 1) * per_epoch)
    return base * (1 + math.cos(math.pi * progress)) / 2


def reference() -> tuple[torch.Tensor, list[float], list[float], list[int]]:
    """Return the parameters, the losses, the rates and the numbers of samples of a training in one plain loop."""
    seed_initialisation(0)
    model = own_code.linear_model(10).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE, momentum=0.9, nesterov=True)
    data = own_code.few_digits("train")
    losses, rates, sizes = [], [], []
    epoch, taken = 0, 0
    for first, last, batch in SEGMENTS:
        for _ in range(first, last):
            order = KeyedOrder(SAMPLES, 0, epoch)(np.arange(SAMPLES)).tolist()
            indices = order[taken : taken + batch]
            rates.append(rate_of(epoch, taken, batch))
            for group in optimizer.param_groups:
                group["lr"] = rates[-1]
            images = torch.stack([data[index][0] for index in indices]).double()
            labels = torch.tensor([data[index][1] for index in indices])
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            sizes.append(len(indices))
            taken += len(indices)
            if taken == SAMPLES:
                epoch, taken = epoch + 1, 0
    assert (epoch, taken) == (EPOCHS, 0)
    return torch.cat([tensor.detach().reshape(-1) for tensor in model.state_dict().values()]), losses, rates, sizes


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 3, 1)], ids=["one rank", "two, three and one"])
def test_a_run_with_two_changes_of_its_batch_equals_a_plain_loop(tmp_path: Path, ranks: tuple[int, int, int]) -> None:
    run = tmp_path / "run"
    name_batch(run, 24, 40)
    for attempt, (world_size, (first, last, batch)) in enumerate(zip(ranks, SEGMENTS, strict=True)):
        spec = job_document(**JOB, batch__global_batch_size=batch)
        # One agreement comes one step late, and another one before the first step.
        stop = {"stop_after_calls": last - first - 2, "stop_rank": 0} if last < SEGMENTS[-1][1] else {}
        job = {"run": run, "spec": spec, "attempt": attempt, **stop}
        outcome = run_ranks(tmp_path / f"ranks-{attempt}", world_size, [job])
        assert outcome.codes == [75 if stop else 0] * world_size, outcome.outputs
        assert not stop or f"all ranks stopped after step {last} " in outcome.errors[0]["message"]
    weights, losses, rates, sizes = reference()
    records = steps(run)
    assert [record["step"] for record in records] == list(range(1, 16))
    assert [record["samples_seen"] for record in records] == np.cumsum(sizes).tolist()
    assert [record["epoch"] for record in records] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 3
    assert [record["lr"] for record in records] == pytest.approx(rates, rel=0, abs=1e-15)
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=0, abs=1e-12)
    assert float((parameters(run, 15) - weights).abs().max()) <= 1e-12
    assert (result(run)["steps"], result(run)["samples_seen"]) == (15, EPOCHS * SAMPLES)
    manifest = json.loads((run / "checkpoints" / "step-000015" / "manifest.json").read_text())
    assert manifest["progress"]["batch_starts"] == [
        {"global_batch_size": 32, "step": 0, "epoch": 0, "offset_samples": 0},
        {"global_batch_size": 24, "step": 6, "epoch": 1, "offset_samples": 64},
        {"global_batch_size": 40, "step": 10, "epoch": 2, "offset_samples": 48},
    ]
    assert manifest["contract"]["global_batch_size"] == 40
