"""A model that cannot take the data is refused, with what would work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hpcddp.jobfile.sections import Train
from hpcddp.train.errors import ModelError
from hpcddp.train.losses.declared import zero_of
from hpcddp.train.model.objective import mean_loss
from hpcddp.train.model.replica import build_model, check_model_input
from hpcddp.train.precision import Precision
from tests.messages import GoldenMessages


def check(name: str, side: int) -> tuple[str, ...]:
    model = build_model(name, {}, 10)
    train = Train(model=name, dataset="digits")
    return check_model_input(train, model, torch.rand(2, 3, side, side), Precision("fp32", "cpu"), classes=10)


def test_model_that_cannot_take_the_images_is_refused(golden: GoldenMessages) -> None:
    with pytest.raises(ModelError) as caught:
        check("alexnet", 32)
    reason = str(caught.value.__cause__)
    message = golden.message(caught.value, {reason: "REASON OF TORCH"})
    for fact in ("train.model is alexnet", "inputs of 3 x 32 x 32", "digits", reason, "images of another size"):
        assert fact in message


def test_check_leaves_buffers_and_gradients_as_they_were() -> None:
    torch.manual_seed(0)
    model = build_model("resnet18", {}, 10)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    train = Train(model="resnet18", dataset="digits")
    assert check_model_input(train, model, torch.rand(2, 3, 32, 32), Precision("fp32", "cpu"), classes=10) == ()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_unknown_argument_of_a_torchvision_model_is_refused(golden: GoldenMessages) -> None:
    with pytest.raises(ModelError) as caught:
        build_model("resnet18", {"bogus": 1}, 10)
    message = golden.message(caught.value, {str(caught.value.__cause__): "REASON OF PYTHON"})
    assert "train.model is resnet18 with model_args {'bogus': 1}" in message
    assert "arguments that torchvision knows" in message


def test_auxiliary_outputs_count_with_their_weight() -> None:
    from torchvision.models.googlenet import GoogLeNetOutputs

    labels = torch.tensor([0, 1, 1])
    parts = [torch.randn(3, 2, dtype=torch.float64) for _ in range(3)]
    main, second, first = (nn.functional.cross_entropy(part, labels) for part in parts)
    found = mean_loss(GoogLeNetOutputs(parts[0], parts[1], parts[2]), labels)
    assert found.item() == pytest.approx((main + 0.3 * second + 0.3 * first).item(), abs=1e-15)


def test_loss_of_nothing_is_zero_and_reaches_every_output() -> None:
    from torchvision.models.googlenet import GoogLeNetOutputs

    outputs: list[Tensor] = [torch.ones(2, 2, requires_grad=True) for _ in range(3)]
    loss = zero_of(GoogLeNetOutputs(outputs[0], outputs[1], outputs[2]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert all(output.grad is not None and not output.grad.any() for output in outputs)
