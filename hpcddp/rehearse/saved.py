"""What a run has saved: which files hold tensors, and the values in them."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import open_regular

if TYPE_CHECKING:
    import torch

    Values = Mapping[str, "torch.Tensor | float"]
    """The tensors and numbers of a file, by their path in it: ``optimizer.state.0.exp_avg``."""

_SAFETENSORS: Final = ".safetensors"
_FIRST_BYTES: Final = (b"PK\x03\x04", b"\x80")
"""How the files of torch.save begin: an archive, or a pickle of older versions."""
GENERATORS: Final = re.compile(r"rng|random|generator|seed", re.IGNORECASE)
"""Names of the states of random generators: they may differ although nothing is drawn from them."""
MEASURED: Final = re.compile(
    r"(^|[_/.-])(time|times|duration|elapsed|eta|speed|throughput|memory|mem|fps|seconds|hours|utili[sz]ation)"
    r"($|[_/.-])|_m?s$|per_s(ec|econd)?\b",
    re.IGNORECASE,
)
"""Names of what is measured of the machine, which differs from run to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file with tensors, as far as its first bytes show.

    Args:
        name: its path below the run directory or the project's copy, which two runs have in common.
        time: when it was written, in nanoseconds since the epoch.
    """

    path: Path
    name: str
    time: int


def saved_files(run: RunDirectory, copy: Path, *, since: int) -> list[SavedFile]:
    """Return the files with tensors that a run has written, the oldest first.

    Args:
        copy: the copy of the project in which its program runs.
        since: nanoseconds since the epoch; older files are those of the project.
    """
    files = [*_files_below(run.path, skipped=_records_of(run)), *_files_below(copy, skipped=frozenset())]
    return sorted((file for file in files if file.time >= since), key=lambda file: (file.time, file.name))


def _records_of(run: RunDirectory) -> frozenset[Path]:
    """Return the directories of a run that hold no file of the user's program."""
    folders = (run.submitit, run.attempts, run.tensorboard, run.wandb, run.trackers, run.path / "reserve")
    return frozenset(folders)


def _files_below(folder: Path, *, skipped: frozenset[Path]) -> Iterator[SavedFile]:
    for parent, folders, names in os.walk(folder):
        # A name that begins with a dot is that of a file or directory that is being written.
        folders[:] = [name for name in folders if Path(parent, name) not in skipped and not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            with suppress(OSError):
                if not name.startswith(".") and _may_hold_tensors(path):
                    yield SavedFile(path=path, name=str(path.relative_to(folder)), time=path.stat().st_mtime_ns)


def _may_hold_tensors(path: Path) -> bool:
    """Return whether a file may hold tensors.

    Raises:
        OSError: it is no regular file, or cannot be read.
    """
    with open_regular(path) as (stream, _):
        return path.suffix == _SAFETENSORS or stream.read(4).startswith(_FIRST_BYTES)


def newest_to_damage(files: list[SavedFile]) -> SavedFile | None:
    """Return the newest saved file, but not one with states of generators alone; None without any."""
    candidates = [file for file in files if not GENERATORS.search(Path(file.name).name)]
    return candidates[-1] if candidates else None


def read_values(file: SavedFile) -> Values:
    """Return the tensors and numbers of a file, on the CPU.

    Raises:
        ValueError: the file is damaged, or cannot be loaded without running code of its own.
    """
    try:
        # torch warns of pickles that it does not read.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = _content_of(file.path)
    except Exception as error:  # a damaged file, or one of another library, raises anything
        raise ValueError(f"{file.name} cannot be loaded ({type(error).__name__})") from error
    return dict(_flat(content, ""))


def _content_of(path: Path) -> object:
    import torch

    if path.suffix == _SAFETENSORS:
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _flat(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor | float]]:  # noqa: ANN401  what a file holds
    import torch

    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from _flat(entry, f"{name}.{number}" if name else str(number))
    elif isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, int | float):
        yield name, float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A saved value that two runs do not share.

    Args:
        file: the name of the file.
        name: the name of the value in it.
        largest: the largest absolute difference, computed in float64; infinite if the shapes differ or one is not
            finite.
        relative: the same over the largest absolute value of the undisturbed run.
    """

    file: str
    name: str
    largest: float
    relative: float

    def __str__(self) -> str:
        """Return it in words."""
        by = f"by at most {self.largest:.3g}" if math.isfinite(self.largest) else "in its shape, or is not finite"
        return f"{self.name} in {self.file} differs {by}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedComparison:
    """The files that two runs share.

    Args:
        files: how many files were compared.
        differences: the values that differ, those of the oldest file first.
        unreadable: the names of the files that cannot be loaded.
    """

    files: int
    differences: tuple[TensorDifference, ...]
    unreadable: tuple[str, ...]


def compare_saved(reference: list[SavedFile], disturbed: list[SavedFile]) -> SavedComparison:
    """Compare the files of the same names, value by value. States of generators and measured times are left out."""
    by_name = {file.name: file for file in disturbed}
    compared = 0
    differences: list[TensorDifference] = []
    unreadable: list[str] = []
    for file in reference:
        if file.name not in by_name:
            continue
        try:
            differences += _differences(file.name, read_values(file), read_values(by_name[file.name]))
            compared += 1
        except ValueError:
            unreadable.append(file.name)
    return SavedComparison(files=compared, differences=tuple(differences), unreadable=tuple(unreadable))


def _differences(file: str, reference: Values, disturbed: Values) -> Iterator[TensorDifference]:
    for name, value in reference.items():
        if GENERATORS.search(f"{file}.{name}") or MEASURED.search(name):
            continue
        largest = _largest_difference(value, disturbed[name]) if name in disturbed else math.inf
        if largest > 0:
            yield TensorDifference(file=file, name=name, largest=largest, relative=largest / _size_of(value))


def _size_of(value: torch.Tensor | float) -> float:
    """Return the largest absolute value; 1 where that is 0, or there is none."""
    import torch

    tensor = torch.as_tensor(value)
    size = float(tensor.abs().max()) if tensor.numel() else 0.0
    return size or 1.0


def _largest_difference(one: torch.Tensor | float, other: torch.Tensor | float) -> float:
    import torch

    tensors = [torch.as_tensor(value) for value in (one, other)]
    if tensors[0].shape != tensors[1].shape:
        return math.inf
    if torch.equal(*tensors):
        return 0.0
    kind = torch.complex128 if any(tensor.is_complex() for tensor in tensors) else torch.float64
    first, second = (tensor.to(kind) for tensor in tensors)
    # Equal infinities have no difference that is a number.
    apart = (first - second).abs()[first != second]
    largest = 0.0 if apart.numel() == 0 else float(apart.max())
    return largest if math.isfinite(largest) else math.inf
