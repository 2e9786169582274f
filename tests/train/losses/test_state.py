"""A loss that depends on the calls before it is refused, in ``doctor loss`` and in a training."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcddp.doctor.errors import DoctorError
from hpcddp.doctor.loss.examination import examine
from hpcddp.doctor.loss.verdict import Verdict
from hpcddp.train.errors import UserCodeError
from hpcddp.train.losses.state import changed_names, refuse_state
from tests.distributed.training import job_document, run_ranks
from tests.messages import GoldenMessages
from tests.train.losses import stateful

KEEPS = {"Centred": "centre", "Queued": "queue", "Counting": "counts"}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 10, generator=generator), torch.randint(10, (8,), generator=generator)


@pytest.mark.parametrize(("name", "kept"), KEEPS.items())
def test_the_doctor_refuses_a_loss_that_depends_on_the_calls_before(
    name: str, kept: str, golden: GoldenMessages
) -> None:
    with pytest.raises(DoctorError) as refused:
        examine(f"tests.train.losses.stateful:{name}", world_size=3, samples=None, data=None, directory=Path.cwd())
    assert f"keeps {kept} from call to call" in golden.message(refused.value)


@pytest.mark.parametrize("name", ["Logging", "Fixed"])
def test_what_has_no_influence_is_at_most_a_note(name: str) -> None:
    found = examine(f"tests.train.losses.stateful:{name}", world_size=3, samples=None, data=None, directory=Path.cwd())
    assert any("keeps last" in note for note in found.notes) == (name == "Logging")
    assert found.verdict is (Verdict.MEAN if name == "Logging" else found.verdict)


@pytest.mark.parametrize("name", KEEPS)
def test_the_first_call_of_a_training_shows_it_and_changes_nothing(name: str) -> None:
    loss: Callable[..., Any] = getattr(stateful, name)()
    before = torch.get_rng_state()
    with pytest.raises(UserCodeError, match=f"keeps {KEEPS[name]} from call to call"):
        refuse_state("a:b", loss, *batch())
    assert torch.equal(torch.get_rng_state(), before)
    first = float(loss(*batch()).detach())
    assert first == float(getattr(stateful, name)()(*batch()).detach())


def test_losses_without_an_influence_are_called_as_they_are() -> None:
    for loss in (stateful.Logging(), stateful.Fixed(), torch.nn.CrossEntropyLoss(), torch.nn.functional.cross_entropy):
        refuse_state("a:b", loss, *batch())


def test_a_training_with_such_a_loss_ends_at_its_first_step(tmp_path: Path) -> None:
    spec = job_document(train__loss="tests.train.losses.stateful:Centred")
    outcome = run_ranks(tmp_path / "ranks", 2, [{"run": tmp_path / "run", "spec": spec}])
    assert outcome.codes == [70, 70]
    assert all("keeps centre from call to call" in error["message"] for error in outcome.errors.values())


class Locked(torch.nn.Module):
    """Cannot be copied, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.calls = 0

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.nn.functional.cross_entropy(outputs, labels)


class NeedsGraph(torch.nn.Module):
    """Differentiates its outputs, so that it cannot be called without a graph."""

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(outputs, labels)
        (gradient,) = torch.autograd.grad(loss, outputs, create_graph=True)
        return loss + gradient.square().sum()


def test_a_loss_that_cannot_be_tried_is_called_as_it_is() -> None:
    calls = []

    def counted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(len(labels))
        return torch.nn.functional.cross_entropy(outputs, labels)

    locked = Locked()
    for loss in (locked, NeedsGraph(), counted):
        refuse_state("a:b", loss, *batch())
    assert (locked.calls, calls) == (0, [])


@pytest.mark.parametrize("value", [itertools.count(), object(), threading.Lock(), {"deep": [[[[[[[[1]]]]]]]]}])
def test_what_has_no_end_or_cannot_be_compared_counts_as_equal(value: object) -> None:
    assert changed_names({"a": value}, {"a": value}) == []
