"""A model that cannot take the data is refused, with what would work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcddp.train.errors import ModelError
from hpcddp.train.model.models import Fit, build_model, check_model_input
from hpcddp.train.model.objective import mean_loss, zero_loss
from hpcddp.train.precision import Precision
from tests.messages import GoldenMessages


def check(name: str, side: int, **model_args: Any) -> tuple[str, ...]:
    model = build_model(name, model_args, 10)
    fit = Fit(model_name=name, model_args=model_args, dataset="digits", classes=10)
    return check_model_input(fit, model, torch.zeros(2, 3, side, side), Precision("fp32", "cpu"))


@pytest.mark.parametrize(
    ("name", "side", "advice"),
    [
        ("alexnet", 32, ("smallest", "63 x 63", "use another model, or larger images")),
        ("vit_b_16", 32, ("set train.model_args.image_size to 32",)),
        ("inception_v3", 32, ("smallest", "299 x 299", "75 x 75 with train.model_args.aux_logits false")),
        ("inception_v3", 75, ("set train.model_args.aux_logits to false",)),
    ],
)
def test_model_that_cannot_take_the_images_is_refused_with_what_would_work(
    golden: GoldenMessages, name: str, side: int, advice: tuple[str, ...]
) -> None:
    with pytest.raises(ModelError) as caught:
        check(name, side)
    reason = str(caught.value.__cause__)
    message = golden.message(caught.value, {reason: "REASON OF TORCH"})
    for fact in (f"train.model is {name}", f"3 x {side} x {side} images", "digits", reason, *advice):
        assert fact in message


def test_advice_holds() -> None:
    assert check("alexnet", 63) == ()
    assert check("vit_b_16", 32, image_size=32) == ()


def test_check_leaves_buffers_and_gradients_as_they_were() -> None:
    torch.manual_seed(0)
    model = build_model("resnet18", {}, 10)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    fit = Fit(model_name="resnet18", model_args={}, dataset="digits", classes=10)
    check_model_input(fit, model, torch.rand(2, 3, 32, 32), Precision("fp32", "cpu"))
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
    loss = zero_loss(GoogLeNetOutputs(outputs[0], outputs[1], outputs[2]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert all(output.grad is not None and not output.grad.any() for output in outputs)
