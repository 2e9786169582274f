"""``hpcddp.Checkpointer``: save and restore the objects of a training loop, the user's own or the built-in one.

The state is copied between two steps, so that it can be written while the training continues.
"""

from __future__ import annotations

import copy
import json
import operator
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final, Protocol, SupportsIndex, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hpcddp.errors import UserError
from hpcddp.jobfile.fields import Best
from hpcddp.run.checkpoints import Checkpoint, Manifest
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.evaluations import Mode
from hpcddp.run.events import append_event
from hpcddp.run.job_records import Start, write_start
from hpcddp.run.metrics_log import METRICS_FILE
from hpcddp.run.moved import is_same_directory
from hpcddp.train import distributed
from hpcddp.train.checkpoint.start import agree_on_start, load_file, loading, refuse_another_contract
from hpcddp.train.checkpoint.writer import CheckpointWriter, SaveOutcome
from hpcddp.train.errors import SaveError

_NOTHING: Mapping[str, Any] = MappingProxyType({})
# Exported by the batch script of hpcddp, which has claimed the run directory already.
_ATTEMPT = "HPCDDP_ATTEMPT_DIR"
_PROGRESS = "HPCDDP_PROGRESS_FILE"
_LEAST_KEPT = 2
# How long a running write may continue after the training has failed; the next attempt can then resume from it.
_ABANDON_TIMEOUT_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)


@runtime_checkable
class Stateful(Protocol):
    """An object that can be saved: a module, an optimizer, a scheduler, or your own."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: tensors, numbers, texts and containers of them."""

    def load_state_dict(self, state_dict: Any, /) -> object:  # noqa: ANN401  each object takes its own type
        """Load a state that ``state_dict`` returned."""


class CheckpointerError(UserError):
    """The checkpointer is used in a way in which it cannot work."""

    kind = "checkpointer"


def _print_line(text: str) -> None:
    sys.stderr.write(f"hpcddp: {text}\n")
    sys.stderr.flush()


def _no_context(_: int) -> AbstractContextManager[None]:
    return nullcontext()


def _versions() -> Mapping[str, Any]:
    return {"versions": {"torch": str(torch.__version__)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """Settings that differ between the checkpointer of a user's own loop (the defaults) and of the built-in training.

    Args:
        information: facts for the manifest, which may differ in later attempts.
        described_as: the objects, in the message about a checkpoint of other objects.
        optional: names of the objects that have no file while their state is empty.
        save_context: returns a context that all ranks enter while rank 0 reads the states, for the collectives that the
            states need; takes the optimizer steps done.
        broadcast_save_errors: whether rank 0 broadcasts the result of the last write, so that every rank raises its
            error. False in the built-in training: its steps must not wait for the disk, and srun ends the other ranks
            after rank 0.
        now: seconds since the epoch.
        monotonic: seconds on a clock that never goes back.
        print_line: writes a line to the log; called on rank 0.
        reads_environment: whether ``HPCDDP_METRICS_FILE`` names the metrics file; else it is that of the run.
    """

    information: Mapping[str, Any] = field(default_factory=_versions)
    described_as: str = "the objects of the Checkpointer"
    optional: Container[str] = ()
    save_context: Callable[[int], AbstractContextManager[None]] = _no_context
    broadcast_save_errors: bool = True
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    print_line: Callable[[str], None] = _print_line
    reads_environment: bool = True


_OWN_LOOP: Final = SaveSettings()


@dataclass(frozen=True, slots=True)
class Restored:
    """The position at which a loop continues.

    Args:
        step: optimizer steps done; 0 if there was no checkpoint.
        facts: the ``facts`` that were passed to ``save``.
    """

    step: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)


class Checkpointer:
    """Saves the objects of a loop atomically and in the background, and restores them.

    Every rank creates one and calls its methods at the same places; rank 0 writes. Without a process group there is one
    process. The state of rank 0 is saved; state that differs between ranks is not part of a checkpoint.

    ::

        checkpointer = hpcddp.Checkpointer("runs/mine", {"model": model, "optimizer": optimizer})
        for step in range(checkpointer.restore().step, 1000):
            train_one_step(step)
            if (step + 1) % 100 == 0:
                checkpointer.save(step + 1)
        checkpointer.wait()

    Args:
        directory: the run directory, on a file system that every rank sees; created if missing. Checkpoints are in
            ``checkpoints/`` there. The process that calls ``restore`` last owns it: an earlier process that is still
            running can no longer write.
        objects: what to save, by name: anything with ``state_dict`` and ``load_state_dict``. A model in DDP is saved
            without its wrapper, and can be loaded with and without one.
        keep: number of checkpoints to keep on disk, >= 2.
        best: a metric that ``hpcddp.log`` or ``Context.log`` reports: ``checkpoints/best`` then names the checkpoint
            of the step with its best value, which stays on disk. None keeps none.
        best_mode: whether the largest (``max``) or the smallest value is the best; None = the smallest one of a loss,
            an error or a perplexity, by its name, and the largest one of any other metric.
        contract: what must be the same when the loop is resumed, such as the seed and the global batch: numbers, texts
            and containers of them.
        settings: for the built-in training; the defaults are those of a user's own loop.

    Raises:
        CheckpointerError: a name or ``keep`` cannot be used.
        NoGroupError: several processes have been started, and no process group is open.
    """

    def __init__(
        self,
        directory: str | Path,
        objects: Mapping[str, Stateful],
        *,
        keep: int = 3,
        best: str | Best | None = None,
        best_mode: Mode | None = None,
        contract: Mapping[str, Any] = _NOTHING,
        settings: SaveSettings = _OWN_LOOP,
    ) -> None:
        distributed.refuse_without_group(os.environ)
        _check(objects, keep)
        self._run = RunDirectory(Path(directory).absolute())
        self._objects = dict(objects)
        self._keep = keep
        self._settings = settings
        self._best = Best(metric=best, mode=best_mode) if isinstance(best, str) else best
        # As it will be read from the manifest, where a tuple is a list.
        self._contract: dict[str, Any] = json.loads(json.dumps(dict(contract)))
        self._staging = Staging()
        self._attempt = 0
        self._writer: CheckpointWriter | None = None
        self._restored = False
        self._published = 0
        self.outcome: SaveOutcome | None = None
        """Result of the last save that has been waited for; None before the first, and on other ranks than 0."""

    @property
    def busy(self) -> bool:
        """Whether this rank is writing a checkpoint; never on another rank than 0."""
        return self._writer is not None and self._writer.busy

    @property
    def seconds(self) -> Sequence[float]:
        """How long each save of this process took until it was published; on rank 0 only."""
        return () if self._writer is None else self._writer.seconds

    def restore(self) -> Restored:
        """Claim the directory, and load its newest valid checkpoint into the objects.

        Called once, by all ranks. A damaged checkpoint is skipped with a warning, and the one before it is used.

        Returns:
            Where to continue; step 0 if there was no checkpoint.

        Raises:
            NoCheckpointError: checkpoints were saved before, and none is valid.
            ResumeError: the checkpoint has another contract or other objects.
        """
        (attempt,) = distributed.broadcast_numbers([self._claim() if distributed.rank() == 0 else 0])
        checkpoint = agree_on_start(self._run, attempt, print_line=self._settings.print_line).checkpoint
        if checkpoint is not None:
            refuse_another_contract(checkpoint, self._contract)
        return self.restore_from(checkpoint, attempt)

    def restore_from(self, checkpoint: Checkpoint | None, attempt: int) -> Restored:
        """Load a checkpoint on which all ranks have agreed, in an attempt that owns the directory.

        The caller has compared its contract.

        Args:
            checkpoint: the verified checkpoint; None = there was none.
            attempt: the attempt of this process.

        Raises:
            ResumeError: the checkpoint has other objects.
        """
        settings = self._settings
        self._attempt = attempt
        self._restored = True
        if distributed.rank() == 0:
            metrics = os.environ.get(METRICS_FILE) if settings.reads_environment else None
            self._writer = CheckpointWriter(
                self._run,
                attempt=attempt,
                keep=self._keep,
                best=self._best,
                metrics=Path(metrics) if metrics else None,
                now=settings.now,
                monotonic=settings.monotonic,
                print_line=settings.print_line,
            )
            # An attempt that was killed may have published a checkpoint and not yet looked at its metric.
            self._writer.keep_best()
        if checkpoint is None:
            return Restored()
        with loading(checkpoint, settings.described_as):
            for name, item in self._objects.items():
                file = f"{name}.pt"
                if file in checkpoint.manifest.files or name not in settings.optional:
                    _unwrapped(item).load_state_dict(load_file(checkpoint, file))
        return Restored(checkpoint.manifest.step, checkpoint.manifest.progress)

    def save(self, step: int, facts: Mapping[str, Any] = _NOTHING, *, reason: str = "save") -> None:
        """Copy the state of all objects and start to write it. Called by all ranks after the same step.

        The loop waits only for the copy in memory, and before it for the last write. A failed write is a warning, and
        earlier checkpoints are kept. A valid checkpoint of the same step stays as it is, and nothing is written.

        Args:
            step: optimizer steps done, >= 1.
            facts: values that ``restore`` returns again: numbers, texts and containers of them.
            reason: why a save is made, in a few words, for the event log.

        Raises:
            CheckpointerError: ``restore`` has not been called, the step is no integer of 0 or more, or the facts cannot
                be written as JSON.
            SaveError: three writes in a row failed, over five minutes or longer, or the last one raised another error;
                on every rank, or on rank 0 only without ``broadcast_save_errors``.
            FencedError: another process owns the directory; on rank 0.
        """
        self._refuse_unrestored()
        # Before any collective: facts that are not JSON raise on all ranks alike.
        step = _checked_step(step)
        try:
            document = json.loads(json.dumps(dict(facts), ensure_ascii=False).encode())
        except (TypeError, ValueError) as error:
            raise CheckpointerError(
                f"the facts cannot be saved ({error}); give numbers, texts and containers of them, such as loss.item()"
            ) from error
        began = self._settings.monotonic()
        with self._settings.save_context(step):
            # The staging buffers belong to the last write until it has ended.
            self._await_last_write()
            if self._writer is not None:
                writers = {
                    name: partial(self._dump, content) for name, content in self._staging.copy(self._files()).items()
                }
                self._writer.start(self._manifest(step, document), writers, reason=reason, began=began)

    def settle(self) -> None:
        """Report the result of the last write if it has ended, without waiting and without a collective.

        Raises:
            SaveError: three writes in a row failed over five minutes or longer; on rank 0.
            FencedError: another process owns the directory; on rank 0.
        """
        if self._writer is not None:
            self.outcome = self._writer.settle() or self.outcome

    def wait(self) -> bool:
        """Wait for the last write. Called by all ranks, before a stop and at the end.

        Returns:
            Whether the last write has published its checkpoint: the same on every rank, or always true on other ranks
            than 0 without ``broadcast_save_errors``.

        Raises:
            CheckpointerError: ``restore`` has not been called.
            SaveError: the last write raised an error other than a disk error; on every rank, or on rank 0 only without
                ``broadcast_save_errors``.
            FencedError: another process owns the directory; on rank 0.
        """
        self._refuse_unrestored()
        saved = self._await_last_write(even_if_failing=True)
        if self._writer is not None:
            # A loop may evaluate after its last save.
            self._writer.keep_best()
        return saved

    def abandon(self) -> None:
        """Give a running write a few seconds to end, before a process ends with an error; not a collective."""
        if self._writer is not None:
            self._writer.join(_ABANDON_TIMEOUT_S)

    def _await_last_write(self, *, even_if_failing: bool = False) -> bool:
        """Wait for rank 0's last write; return whether it succeeded. Errors are raised on all ranks if so set."""
        if not self._settings.broadcast_save_errors:
            return self._await_own_write(even_if_failing=even_if_failing)
        error: Exception | None = None
        saved = True
        try:
            saved = self._await_own_write(even_if_failing=even_if_failing)
        except Exception as caught:  # noqa: BLE001  raised below, after the broadcast
            error = caught
        failed, all_saved = distributed.broadcast_numbers([error is not None, saved])
        if error is not None:
            raise error
        if failed:
            raise SaveError("rank 0 can no longer save, so this rank ends too; the error of rank 0 has the reason")
        return bool(all_saved)

    def _await_own_write(self, *, even_if_failing: bool) -> bool:
        if self._writer is None:
            return True
        self.outcome = self._writer.wait() or self.outcome
        published = len(self._writer.seconds)
        progress_file = os.environ.get(_PROGRESS)
        if progress_file and published > self._published:
            Path(progress_file).touch(mode=0o600)
        self._published = published
        if not even_if_failing:
            self._writer.raise_if_failing()
        return self._writer.saved

    def _claim(self) -> int:
        """Return the attempt of the surrounding run, or create the next attempt, which fences earlier ones."""
        if attempt_directory := os.environ.get(_ATTEMPT):
            surrounding = AttemptDirectory.from_text(attempt_directory)
            if is_same_directory(surrounding.run.path, self._run.path):
                return surrounding.number
        for folder in (self._run.path, self._run.attempts):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            newest = self._run.newest_attempt()
            attempt = self._run.attempt(0 if newest is None else newest + 1)
            try:
                attempt.path.mkdir(mode=0o700)
            except FileExistsError:
                # Another process was faster; the last attempt owns the run.
                continue
            now = time.time()
            host = socket.gethostname()
            job_id = os.environ.get("SLURM_JOB_ID")
            write_start(attempt, Start(job_id=job_id, host=host, time=now, is_local=job_id is None, pid=os.getpid()))
            append_event(self._run.events, kind="start", time=now, attempt=attempt.number, job_id=job_id, host=host)
            return attempt.number

    def _files(self) -> dict[str, Mapping[str, Any]]:
        states = {name: _unwrapped(item).state_dict() for name, item in self._objects.items()}
        return {f"{name}.pt": state for name, state in states.items() if state or name not in self._settings.optional}

    def _manifest(self, step: int, facts: Mapping[str, Any]) -> Manifest:
        return Manifest(
            step=step,
            attempt=self._attempt,
            time=self._settings.now(),
            contract=self._contract,
            progress=facts,
            information=self._settings.information,
            files={},
        )

    def _dump(self, content: Mapping[str, Any], stream: IO[bytes]) -> None:
        self._staging.wait_until_copied()
        torch.save(content, stream)

    def _refuse_unrestored(self) -> None:
        if not self._restored:
            raise CheckpointerError(
                f"the Checkpointer of {self._run.path} is used before restore(), so that it would overwrite what an "
                "earlier process has saved there; call restore() first"
            )


def _check(objects: Mapping[str, Stateful], keep: int) -> None:
    if keep < _LEAST_KEPT:
        raise CheckpointerError(f"keep is {keep}, and a damaged newest checkpoint needs one before it; write 2 or more")
    if not isinstance(objects, Mapping):
        raise CheckpointerError(
            f"objects is a {type(objects).__name__}, and objects are saved by name; write for example "
            '{"model": model, "optimizer": optimizer}'
        )
    if not objects:
        raise CheckpointerError("objects is empty, so that there is nothing to save; give the model and the optimizer")
    for name, item in objects.items():
        if not _NAME.fullmatch(name):
            raise CheckpointerError(
                f"an object is called {name!r}, which cannot name a file; write letters, digits and underscores"
            )
        if not isinstance(item, Stateful):
            raise CheckpointerError(
                f"{name} is a {type(item).__name__}, which has no state_dict and load_state_dict; give numbers and "
                "texts to save() as facts"
            )


def _unwrapped(item: Stateful) -> Stateful:
    return item.module if isinstance(item, DistributedDataParallel) else item


def _checked_step(step: SupportsIndex) -> int:
    """Return the step as an int; numpy's and torch's integers are taken too.

    Raises:
        CheckpointerError: it is none, or negative.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointerError(f"the step is {step!r}; give the optimizer steps done, an integer of 0 or more")
    return number


_TreePath: TypeAlias = tuple[Any, ...]


class Staging:
    """Buffers in host memory for the content of a checkpoint; those of the last copy are used again where they fit.

    Copies from a GPU go to pinned memory, asynchronously on the stream of the training, and so before the next change
    of the originals. The host waits for them only in ``wait_until_copied``.
    """

    def __init__(self) -> None:
        self._buffers: dict[_TreePath, Tensor] = {}
        self._new_buffers: dict[_TreePath, Tensor] = {}
        # Of one file: what has been copied, by the memory that it was in.
        self._aliases: dict[_TreePath, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def copy(self, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return a copy of the contents of files, which is valid until the next call.

        Args:
            files: the objects for ``torch.save``, by file name. Tensors are copied into the buffers. A tensor that
                occurs twice in a file is copied once and shared. Numbers of numpy become Python's.
        """
        copies = {}
        for name, content in files.items():
            self._aliases.clear()
            copies[name] = self._copy(content, (name,))
        self._buffers = self._new_buffers
        self._new_buffers = {}
        self._copied = None
        if any(buffer.is_pinned() for buffer in self._buffers.values()):
            # torch leaves the class without types.
            new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
            self._copied = new_event(blocking=True)
            self._copied.record()
        return copies

    def wait_until_copied(self) -> None:
        """Wait until the copies from a GPU are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, value: object, path: _TreePath) -> object:
        if isinstance(value, Tensor):
            return self._copy_tensor(value, path)
        if isinstance(value, dict):
            # copy.copy keeps attributes, such as the metadata of a state_dict.
            duplicate = copy.copy(value)
            for key, item in value.items():
                duplicate[key] = self._copy(item, (*path, key))
            return duplicate
        if type(value) is list:
            return [self._copy(item, (*path, i)) for i, item in enumerate(value)]
        if type(value) is tuple:
            return tuple(self._copy(item, (*path, i)) for i, item in enumerate(value))
        if isinstance(value, np.generic):
            # A learning rate from numpy; torch would not load it again.
            return value.item()
        return copy.deepcopy(value)

    def _copy_tensor(self, value: Tensor, path: _TreePath) -> Tensor:
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return value.detach().cpu().clone()
        key = (
            value.data_ptr(), value.dtype, value.shape, value.stride(), value.device, value.is_conj(), value.is_neg(),
        )  # fmt: skip
        if value.numel() and key in self._aliases:
            return self._aliases[key]
        buffer = self._buffers.get(path)
        if buffer is None or not _fits(buffer, value):
            buffer = _new_buffer(value)
        with torch.no_grad():
            # Copies to unpinned memory must be complete before the training continues.
            buffer.copy_(value, non_blocking=buffer.is_pinned())
        self._new_buffers[path] = self._aliases[key] = buffer
        return buffer


def _fits(buffer: Tensor, value: Tensor) -> bool:
    return (buffer.dtype, buffer.shape) == (value.dtype, value.shape) and (
        buffer.stride() == torch.empty_like(value, device="meta").stride()
    )


def _new_buffer(value: Tensor) -> Tensor:
    try:
        return torch.empty_like(value, device="cpu", requires_grad=False, pin_memory=value.is_cuda)
    except RuntimeError:
        if not value.is_cuda:
            raise
        # The host may limit pinned memory; without it the copy is synchronous and slower.
        return torch.empty_like(value, device="cpu", requires_grad=False)
