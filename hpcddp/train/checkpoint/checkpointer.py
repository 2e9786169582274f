"""``hpcddp.Checkpointer``: save and restore the objects of the user's own training loop."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from hpcddp.errors import UserError
from hpcddp.run.checkpoints import Manifest
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import append_event
from hpcddp.run.job_records import Start, write_start
from hpcddp.train import distributed
from hpcddp.train.checkpoint.staging import Staging
from hpcddp.train.checkpoint.start import agree_on_start, load_file, loading, refuse_another_contract
from hpcddp.train.checkpoint.writer import CheckpointWriter
from hpcddp.train.errors import SaveError

_NOTHING: Mapping[str, Any] = MappingProxyType({})
# Exported by the batch script of hpcddp, which has claimed the run directory already.
_ATTEMPT = "HPCDDP_ATTEMPT_DIR"
_PROGRESS = "HPCDDP_PROGRESS_FILE"
_LEAST_KEPT = 2
_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)


class Stateful(Protocol):
    """An object that can be saved: a module, an optimizer, a scheduler, or your own."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: tensors, numbers, texts and containers of them."""

    def load_state_dict(self, state_dict: Any, /) -> object:  # noqa: ANN401
        """Load a state that ``state_dict`` returned."""


class CheckpointerError(UserError):
    """The checkpointer is used in a way in which it cannot work."""

    kind = "checkpointer"


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
        contract: what must be the same when the loop is resumed, such as the seed and the global batch: numbers, texts
            and containers of them.

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
        contract: Mapping[str, Any] = _NOTHING,
    ) -> None:
        distributed.refuse_without_group(os.environ)
        _check(objects, keep)
        self._run = RunDirectory(Path(directory).absolute())
        self._objects, self._keep = dict(objects), keep
        # As it will be read from the manifest, where a tuple is a list.
        self._contract: dict[str, Any] = json.loads(json.dumps(dict(contract)))
        self._staging = Staging()
        self._attempt = 0
        self._writer: CheckpointWriter | None = None
        self._restored = False
        self._published = 0

    def restore(self) -> Restored:
        """Claim the directory, and load its newest valid checkpoint into the objects.

        Called once, by all ranks. A damaged checkpoint is skipped with a warning, and the one before it is used.

        Returns:
            Where to continue; step 0 if there was no checkpoint.

        Raises:
            NoCheckpointError: checkpoints were saved before, and none is valid.
            ResumeError: the checkpoint has another contract or other objects.
        """
        if distributed.rank() == 0:
            self._attempt = self._claim()
            self._writer = CheckpointWriter(
                self._run, attempt=self._attempt, keep=self._keep, now=time.time, monotonic=time.monotonic, tell=_tell
            )
        (self._attempt,) = distributed.broadcast_numbers([self._attempt])
        self._restored = True
        found = agree_on_start(self._run, self._attempt, tell=_tell).checkpoint
        if found is None:
            return Restored()
        refuse_another_contract(found, self._contract)
        with loading(found, "the objects of the Checkpointer"):
            for name, item in self._objects.items():
                _unwrapped(item).load_state_dict(load_file(found, f"{name}.pt"))
        return Restored(found.manifest.step, found.manifest.progress)

    def save(self, step: int, facts: Mapping[str, Any] = _NOTHING) -> None:
        """Copy the state of all objects and start to write it. Called by all ranks after the same step.

        The loop waits only for the copy in memory, and before it for the last write. A failed write is a warning, and
        earlier checkpoints are kept.

        Args:
            step: optimizer steps done, >= 1.
            facts: values that ``restore`` returns again: numbers, texts and containers of them.

        Raises:
            CheckpointerError: ``restore`` has not been called.
            TypeError: the facts cannot be written as JSON.
            SaveError: three writes in a row failed, or the last one raised another error; on every rank.
            FencedError: another process owns the directory; on rank 0.
        """
        self._refuse_unrestored()
        # Before any collective: facts that are not JSON raise on all ranks alike.
        document = json.loads(json.dumps(dict(facts)))
        began = time.monotonic()
        self._agree_on_last_write()
        if self._writer is None:
            return
        states = {f"{name}.pt": _unwrapped(item).state_dict() for name, item in self._objects.items()}
        writers = {name: partial(self._dump, content) for name, content in self._staging.copy(states).items()}
        self._writer.start(self._manifest(step, document), writers, reason="save", began=began)

    def wait(self) -> bool:
        """Wait for the last write. Called by all ranks, before a stop and at the end.

        Returns:
            Whether the last write has published its checkpoint; the same on every rank.

        Raises:
            CheckpointerError: ``restore`` has not been called.
            SaveError: the last write raised an error other than a disk error; on every rank.
            FencedError: another process owns the directory; on rank 0.
        """
        self._refuse_unrestored()
        return self._agree_on_last_write(even_if_failing=True)

    def _agree_on_last_write(self, *, even_if_failing: bool = False) -> bool:
        """Wait for rank 0's last write, and raise on all ranks if it failed fatally; return whether it succeeded."""
        error: Exception | None = None
        saved = True
        if self._writer is not None:
            try:
                self._writer.wait()
                saved = self._writer.saved
                self._touch_progress_file(len(self._writer.seconds))
                if not even_if_failing:
                    self._writer.raise_if_failing()
            except Exception as caught:  # noqa: BLE001  raised below, when the other ranks know
                error = caught
        grave, all_saved = distributed.broadcast_numbers([error is not None, saved])
        if error is not None:
            raise error
        if grave:
            raise SaveError("rank 0 cannot save any more, so that this rank ends too; its own error says why")
        return bool(all_saved)

    def _touch_progress_file(self, published: int) -> None:
        """Touch the progress file, if there is one, after a new checkpoint."""
        told = os.environ.get(_PROGRESS)
        if told and published > self._published:
            Path(told).touch(mode=0o600)
        self._published = published

    def _claim(self) -> int:
        """Return the attempt of the surrounding run, or create the next attempt, which fences earlier ones."""
        ours = os.environ.get(_ATTEMPT)
        if ours and AttemptDirectory.from_text(ours).run.path == self._run.path:
            return AttemptDirectory.from_text(ours).number
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
            now, host, job_id = time.time(), socket.gethostname(), os.environ.get("SLURM_JOB_ID")
            write_start(attempt, Start(job_id=job_id, host=host, time=now, is_local=job_id is None, pid=os.getpid()))
            append_event(self._run.events, kind="start", time=now, attempt=attempt.number, job_id=job_id, host=host)
            return attempt.number

    def _manifest(self, step: int, facts: Mapping[str, Any]) -> Manifest:
        versions = {"torch": str(torch.__version__)}
        return Manifest(
            step=step,
            attempt=self._attempt,
            time=time.time(),
            contract=self._contract,
            progress=facts,
            information={"versions": versions},
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
        raise CheckpointerError(f"keep is {keep}, and a rotten newest checkpoint needs one before it; write 2 or more")
    if not objects:
        raise CheckpointerError("objects is empty, so that there is nothing to save; give the model and the optimizer")
    for name in objects:
        if not _NAME.fullmatch(name):
            raise CheckpointerError(
                f"an object is called {name!r}, which cannot name a file; write letters, digits and underscores"
            )


def _unwrapped(item: Stateful) -> Stateful:
    return item.module if isinstance(item, DistributedDataParallel) else item


def _tell(text: str) -> None:
    sys.stderr.write(f"hpcddp: {text}\n")
    sys.stderr.flush()
