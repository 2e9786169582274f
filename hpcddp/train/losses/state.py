"""What a loss keeps from call to call: buffers and attributes of a module, attributes of an object or a function."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from hpcddp.train.errors import UserCodeError

_TOLERANCE: Final = 1e-6
_PLAIN: Final = (str, bytes, int, float, complex, set, frozenset, type(None))
_SEQUENCES: Final = (list, tuple, deque)
# Objects may hold each other.
_DEEPEST: Final = 6


def kept_state(loss: object) -> dict[str, object]:
    """Return copies of all that a loss keeps, by name; what cannot be copied is left out."""
    state: dict[str, object] = {}
    for name, value in _kept(loss):
        try:
            state[name] = copy.deepcopy(value)
        except Exception:  # noqa: BLE001, S112  it may be a lock, a file, or anything else
            continue
    return state


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
    probe = copy_of(loss)
    if probe is loss:
        # A function, or what cannot be copied: a call could change what it keeps elsewhere.
        return
    try:
        changed = _influential(probe, outputs, labels)
    except Exception:  # noqa: BLE001  a loss may need the graph of its outputs; its first real call shows other errors
        return
    if changed:
        raise UserCodeError(
            f"train.loss is {name}, which keeps {', '.join(changed)} from call to call, and its value depends on that: "
            "each rank would keep its own, and no checkpoint holds it; write a loss that keeps nothing, or a training "
            "of your own (entrypoint) that saves it and makes it equal on all ranks"
        )


def copy_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a loss; the loss itself if it is a function or holds what cannot be copied."""
    try:
        return copy.deepcopy(loss)
    except Exception:  # noqa: BLE001  it may hold a lock or a file
        return loss


def _influential(probe: Callable[[Any, Any], Tensor], outputs: object, labels: Tensor) -> list[str]:
    """Return what the calls of a loss change in it, if its value depends on that."""
    half = len(labels) // 2
    state = kept_state(probe)
    whole = _rows(outputs, len(labels))
    first = _value(probe, whole, labels)
    changed = changed_names(state, kept_state(probe))
    if not changed:
        return []
    _value(probe, _rows(outputs, half), labels[:half])
    again = _value(probe, whole, labels)
    return [] if torch.allclose(first, again, rtol=_TOLERANCE, atol=0, equal_nan=True) else changed


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
            names = vars(module).keys() - vars(nn.Module()).keys()
            yield from ((f"{prefix}{name}", vars(module)[name]) for name in sorted(names))
    elif not isinstance(loss, type) and hasattr(loss, "__dict__"):
        yield from sorted(vars(loss).items())


def _same(first: object, other: object, depth: int = _DEEPEST) -> bool:
    """Return whether two values are equal; what is nested deeper, or cannot be compared, counts as equal."""
    if type(first) is not type(other):
        return False
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        # NaN is what it was.
        return first.shape == other.shape and bool(((first == other) | (first.isnan() & other.isnan())).all())
    if isinstance(first, np.ndarray) and isinstance(other, np.ndarray):
        return first.tobytes() == other.tobytes()
    if isinstance(first, _PLAIN):
        return first == other or (first != first and other != other)  # noqa: PLR0124
    return depth == 0 or _same_parts(first, other, depth - 1)


def _same_parts(first: object, other: object, depth: int) -> bool:
    """Return whether two values of one type have equal parts."""
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        return first.keys() == other.keys() and all(_same(first[key], other[key], depth) for key in first)
    if isinstance(first, _SEQUENCES) and isinstance(other, _SEQUENCES):
        return len(first) == len(other) and all(_same(*pair, depth) for pair in zip(first, other, strict=True))
    kept = getattr(first, "__dict__", None)
    return kept is None or _same(kept, getattr(other, "__dict__", None), depth)
