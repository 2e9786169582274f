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
    for name, value in _state_of(loss):
        try:
            state[name] = copy.deepcopy(value)
        except Exception:  # noqa: BLE001, S112  it may be a lock, a file, or anything else
            continue
    return state


def changed_names(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names of what differs between two results of ``kept_state``."""
    names = dict.fromkeys([*before, *after])
    return [name for name in names if not _is_same(before.get(name), after.get(name))]


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
        changed = _state_that_counts(probe, outputs, labels)
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


def _state_that_counts(probe: Callable[[Any, Any], Tensor], outputs: object, labels: Tensor) -> list[str]:
    """Return the names of what a call changes in the loss; none if its value does not depend on the calls before."""
    all_outputs = _first_rows(outputs, len(labels))
    half = len(labels) // 2

    state = kept_state(probe)
    first_value = _evaluate(probe, all_outputs, labels)
    changed = changed_names(state, kept_state(probe))
    if not changed:
        return []
    _evaluate(probe, _first_rows(outputs, half), labels[:half])
    value_again = _evaluate(probe, all_outputs, labels)
    if torch.allclose(first_value, value_again, rtol=_TOLERANCE, atol=0, equal_nan=True):
        return []
    return changed


def _evaluate(loss: Callable[[Any, Any], Tensor], outputs: object, labels: Tensor) -> Tensor:
    """Return the loss, or the sum of the losses of the samples, with the same random numbers in every call."""
    devices = [labels.device] if labels.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(0)
        return torch.as_tensor(loss(outputs, labels)).detach().double().sum()


def _first_rows(outputs: object, count: int) -> Any:  # noqa: ANN401  of the type that the model returns
    """Return the first rows of the outputs, without their graph."""
    if isinstance(outputs, Tensor):
        return outputs.detach()[:count]
    if isinstance(outputs, tuple | list):
        parts = [_first_rows(output, count) for output in outputs]
        # A named tuple takes its values one by one.
        return type(outputs)(*parts) if hasattr(outputs, "_fields") else type(outputs)(parts)
    return outputs


def _state_of(loss: object) -> Iterator[tuple[str, object]]:
    """Yield the name and the value of each thing that a loss keeps."""
    # A partial function keeps what its function does, and a bound method what its object does.
    holder = getattr(loss, "func", loss)
    owner = getattr(holder, "__self__", None)
    if hasattr(owner, "__dict__"):
        holder = owner
    if isinstance(holder, nn.Module):
        for path, module in holder.named_modules():
            prefix = f"{path}." if path else ""
            for name, value in _state_of_module(module):
                yield f"{prefix}{name}", value
    elif not isinstance(holder, type) and hasattr(holder, "__dict__"):
        yield from sorted(vars(holder).items())


def _state_of_module(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the buffers of a module without those of its submodules, and the attributes that its class adds."""
    yield from module.named_buffers(recurse=False)
    for name in sorted(vars(module).keys() - vars(nn.Module()).keys()):
        yield name, vars(module)[name]


def _is_same(before: object, after: object, depth: int = _DEEPEST) -> bool:
    """Return whether two values are equal; what is nested deeper, or cannot be compared, counts as equal."""
    if type(before) is not type(after):
        return False
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return _is_same_tensor(before, after)
    if isinstance(before, np.ndarray) and isinstance(after, np.ndarray):
        return before.tobytes() == after.tobytes()
    if isinstance(before, _PLAIN):
        are_nan = before != before and after != after  # noqa: PLR0124
        return before == after or are_nan
    return depth == 0 or _has_same_parts(before, after, depth - 1)


def _has_same_parts(before: object, after: object, depth: int) -> bool:
    """Return whether two values of one type have equal entries, or equal attributes."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return before.keys() == after.keys() and all(_is_same(before[key], after[key], depth) for key in before)
    if isinstance(before, _SEQUENCES) and isinstance(after, _SEQUENCES):
        pairs = zip(before, after, strict=False)
        return len(before) == len(after) and all(_is_same(*pair, depth) for pair in pairs)
    attributes = getattr(before, "__dict__", None)
    return attributes is None or _is_same(attributes, getattr(after, "__dict__", None), depth)


def _is_same_tensor(before: Tensor, after: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN equal to NaN."""
    if before.shape != after.shape:
        return False
    are_nan = before.isnan() & after.isnan()
    return bool(((before == after) | are_nan).all())
