"""What a loss keeps from call to call: buffers and attributes of a module, attributes of an object or a function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpcddp.train.errors import UserCodeError

_TOLERANCE = 1e-6


def kept_state(loss: object) -> dict[str, object]:
    """Return copies of all that a loss keeps, by name; what cannot be copied is left out."""
    found: dict[str, object] = {}
    for name, value in _kept(loss):
        try:
            found[name] = copy.deepcopy(value)
        except Exception:  # noqa: BLE001, S112  it may be a lock, a file, or anything else
            continue
    return found


def changed_names(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names of what two results of ``kept_state`` do not have in common."""
    names = dict.fromkeys([*before, *after])
    return [name for name in names if not _same(before.get(name), after.get(name))]


def refuse_state(name: str, loss: Callable[[Any, Any], Tensor], outputs: object, labels: Tensor) -> None:
    """Refuse a loss whose value depends on the calls before it.

    Every rank would keep a state of its own, and no checkpoint holds it. The loss is called on copies: twice on the
    batch, and on a part of it in between.

    Args:
        name: what the job file calls it.
        loss: the loss, not yet called.
        outputs: of the model, one row or more for each label.
        labels: at least two.

    Raises:
        UserCodeError: it depends on what it keeps.
    """
    probe = copy.deepcopy(loss)
    before, half = kept_state(probe), len(labels) // 2
    whole, part = _rows(outputs, len(labels)), _rows(outputs, half)
    first = _value(probe, whole, labels)
    changed = changed_names(before, kept_state(probe))
    if not changed:
        return
    _value(probe, part, labels[:half])
    again = _value(probe, whole, labels)
    if torch.allclose(first, again, rtol=_TOLERANCE, atol=0, equal_nan=True):
        return
    raise UserCodeError(
        f"train.loss is {name}, which keeps {', '.join(changed)} from call to call, and its value depends on that: "
        "each rank would keep its own, and no checkpoint holds it; write a loss that keeps nothing, or a training of "
        "your own (entrypoint) that saves it and makes it equal on all ranks"
    )


def _value(loss: Callable[[Any, Any], Tensor], outputs: object, labels: Tensor) -> Tensor:
    devices = [labels.device] if labels.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(0)
        return torch.as_tensor(loss(outputs, labels)).detach().double().sum()


def _rows(outputs: object, count: int) -> Any:  # noqa: ANN401  of the type that the model returns
    """Return the first rows of the outputs, without their graph."""
    if isinstance(outputs, Tensor):
        return outputs.detach()[:count]
    if isinstance(outputs, tuple | list):
        rows = [_rows(output, count) for output in outputs]
        return type(outputs)(*rows) if hasattr(outputs, "_fields") else type(outputs)(rows)
    return outputs


def _kept(loss: object) -> Iterator[tuple[str, object]]:
    loss = getattr(loss, "func", loss)
    owner = getattr(loss, "__self__", None)
    if isinstance(owner, nn.Module) or (owner is not None and hasattr(owner, "__dict__")):
        loss = owner
    if isinstance(loss, nn.Module):
        for path, module in loss.named_modules():
            prefix = f"{path}." if path else ""
            yield from ((f"{prefix}{name}", buffer) for name, buffer in module.named_buffers(recurse=False))
            own = vars(module).keys() - vars(nn.Module()).keys()
            yield from ((f"{prefix}{name}", vars(module)[name]) for name in sorted(own))
    elif not isinstance(loss, type) and hasattr(loss, "__dict__"):
        yield from sorted(vars(loss).items())


def _same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # NaN is what it was.
        return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, str | bytes | int | float | complex | set | frozenset | None):
        return one == other or (one != one and other != other)  # noqa: PLR0124
    try:
        ones, others = list(one), list(other)  # type: ignore[call-overload]
    except TypeError:
        kept = getattr(one, "__dict__", None)
        return kept is None or _same(kept, getattr(other, "__dict__", None))
    return len(ones) == len(others) and all(map(_same, ones, others))
