"""A loss that depends on the calls before it is refused, in ``doctor loss`` and in a training."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcddp.doctor.errors import DoctorError
from hpcddp.doctor.loss.examination import examine
from hpcddp.train.errors import UserCodeError
from hpcddp.train.losses.state import refuse_state
from tests.distributed.training import job_document, run_ranks
from tests.messages import GoldenMessages
from tests.train.losses import stateful

KEEPS: dict[str, Callable[[], Any]] = {
    "Centred": stateful.Centred,
    "Queued": stateful.Queued,
    "Counting": stateful.Counting,
    "FirstSeen": stateful.FirstSeen,
    "behind_a_function": lambda: stateful.behind_a_function,
    "in_a_global": lambda: stateful.in_a_global,
}


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 10, generator=generator), torch.randint(10, (samples,), generator=generator)


@pytest.mark.parametrize("name", KEEPS)
def test_the_doctor_refuses_a_loss_that_depends_on_the_calls_before(name: str) -> None:
    with pytest.raises(DoctorError, match="its value depends on what it keeps from call to call"):
        examine(f"tests.train.losses.stateful:{name}", world_size=3, samples=None, data=None, directory=Path.cwd())


@pytest.mark.parametrize("name", ["Logging", "Fixed"])
def test_the_doctor_judges_a_loss_whose_state_has_no_influence(name: str) -> None:
    examine(f"tests.train.losses.stateful:{name}", world_size=3, samples=None, data=None, directory=Path.cwd())


@pytest.mark.parametrize("name", KEEPS)
def test_the_first_call_of_a_training_shows_it(name: str) -> None:
    with pytest.raises(UserCodeError, match="its value depends on what it keeps from call to call"):
        refuse_state("a:b", KEEPS[name](), *batch())


def test_one_sample_shows_it_as_well() -> None:
    with pytest.raises(UserCodeError):
        refuse_state("a:b", stateful.Centred(), *batch(1))


def draws_from_every_generator(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    noise = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002  a loss may draw from it
    return torch.nn.functional.cross_entropy(outputs, labels) * noise


def changes_its_outputs(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.mul_(2), labels)


def needs_the_graph(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(outputs, labels)
    (gradient,) = torch.autograd.grad(loss, outputs, create_graph=True)
    return loss + gradient.square().sum()


@pytest.mark.parametrize(
    "loss",
    [
        stateful.Logging(),
        stateful.Fixed(),
        torch.nn.functional.cross_entropy,
        torch.nn.CrossEntropyLoss(reduction="none"),
        draws_from_every_generator,
        changes_its_outputs,
        needs_the_graph,
    ],
)
def test_other_losses_are_tried_without_a_trace(loss: Callable[..., Any]) -> None:
    outputs, labels = batch()
    outputs.requires_grad_()
    before = (random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state())  # noqa: NPY002  as above
    assert refuse_state("a:b", loss, outputs, labels) is None
    assert random.getstate() == before[0]
    assert str(np.random.get_state(legacy=False)) == before[1]  # noqa: NPY002  as above
    assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.equal(outputs, batch()[0])
    assert torch.get_deterministic_debug_mode() == 0


def test_what_cannot_be_judged_is_a_note(golden: GoldenMessages) -> None:
    centred = stateful.Centred()

    def takes_whole_batches(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.view(8, 10), labels)

    def varies(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # As torch says it of an operation on a GPU.
        warnings.warn("it has no such algorithm, and torch.use_deterministic_algorithms(True) is set", stacklevel=1)
        loss: torch.Tensor = centred(outputs, labels)
        return loss

    for loss in (takes_whole_batches, varies):
        note = refuse_state("a:b", loss, *batch())
        assert note is not None
        golden.message(note)


@pytest.mark.parametrize("name", ["Centred", "behind_a_function"])
def test_a_training_with_such_a_loss_ends_at_its_first_step(tmp_path: Path, name: str, golden: GoldenMessages) -> None:
    spec = job_document(train__loss=f"tests.train.losses.stateful:{name}")
    outcome = run_ranks(tmp_path / "ranks", 2, [{"run": tmp_path / "run", "spec": spec}])
    assert outcome.codes == [70, 70]
    golden.message(outcome.errors[0]["message"])
