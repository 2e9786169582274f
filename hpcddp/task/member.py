"""A rank as a member of its attempt: what it hears from the membership service, and how it leaves a generation.

A thread reads what the service sends. When the generation is broken, it shuts down the connections of gloo: a
collective that waits for the dead rank, or for ranks that have left, then fails at once.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.task.channel import Channel, ChannelClosedError
from hpcddp.task.rendezvous import PeerFailedError

# How long a rank whose collective has failed waits for the service to say that the generation is broken.
_BREAK_S: Final = 3.0
# How long the main thread has to end after the service has said so, beyond two of its longest steps.
_END_S: Final = 3.0
# How long a rank that has left its generation waits for the next one, beyond four of its longest steps.
_FORMATION_S: Final = 180.0
# The numbers of so many samples fit into a message.
_MOST_SAMPLES: Final = 1000
_DESCRIPTORS: Final = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """The next generation, as one of its ranks sees it.

    Args:
        generation: its number.
        rank: this process's rank in it.
        world_size: how many ranks it has.
        address: where its rank 0 listens.
        connect_timeout_s: the timeout of the process group while it opens, in seconds.
        source: the rank whose state all take.
        shares_state: whether some rank has another state, or none.
        completes_records: whether rank 0 has not written all records: it is another process than before, or behind.
    """

    generation: int
    rank: int
    world_size: int
    address: str
    port: int
    connect_timeout_s: float
    source: int
    shares_state: bool
    completes_records: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The state with which a process leaves a generation, or joins one.

    Args:
        step: optimizer steps done; -1 without a state.
        evaluated_step: those at the last evaluation; 0 before the first, -1 without a state.
        checksum: that of the state after both; the same on all ranks that have the same state. None without a state.
        samples: the numbers of the samples of the step that was begun.
    """

    step: int = -1
    evaluated_step: int = -1
    checksum: int | None = None
    samples: Sequence[int] = ()

    def document(self, listener: socket.socket) -> dict[str, Any]:
        """Return what the service hears of it, and of the socket that listens in case that the process is rank 0."""
        return {
            "step": self.step,
            "evaluated_step": self.evaluated_step,
            "checksum": self.checksum,
            "samples": list(self.samples[:_MOST_SAMPLES]),
            "sample_count": len(self.samples),
            "port": int(listener.getsockname()[1]),
        }


class Member:
    """This process as a member.

    Args:
        channel: the connection to the service.
        heartbeat: the progress of this rank, which says how long its steps take.
        end: ends the process, after saving what can be saved; called in another thread if the main thread does not end
            by itself.
        end_cut_off: ends the process where the host of the service does not answer; called in another thread. None if
            the training then goes on without the service.
    """

    def __init__(
        self,
        channel: Channel,
        heartbeat: Callable[[], Heartbeat],
        end: Callable[[str], None],
        end_cut_off: Callable[[], None] | None = None,
    ) -> None:
        self._channel = channel
        self._heartbeat = heartbeat
        self._end = end
        self._end_cut_off = end_cut_off
        self._is_cut_off = threading.Event()
        self._generation = 0
        # The sockets that this process had open before the process group, and those of the group; None while it opens.
        self._sockets_before: dict[str, int] = {}
        self._sockets: dict[str, int] | None = {}
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._broken = threading.Event()
        self._paused = threading.Event()
        self.why_ended = "the membership service does not answer"
        """Why this process must end, where ``leave`` returns None."""
        self.states_differ = False
        """Whether it must end because ranks have different states after the same step."""
        self._group_lock = threading.Lock()
        self._end_waits: Callable[[], None] | None = None
        threading.Thread(target=self._listen, name="hpcddp-member", daemon=True).start()

    @property
    def own_address(self) -> str:
        """This host's address on the route to the service."""
        return self._channel.own_address

    def is_paused(self) -> bool:
        """Return whether the service asks the ranks to leave their generation after a step."""
        return self._paused.is_set()

    def open_group(self, end_waits: Callable[[], None]) -> None:
        """Say, before this process opens the process group of its generation, that it does so.

        Args:
            end_waits: ends what the main thread waits for in that group; called in another thread when the generation
                is broken, after the connections are shut down.
        """
        with self._group_lock:
            self._end_waits = end_waits
            self._sockets_before = open_sockets()
            self._sockets = None

    def raise_if_broken(self) -> None:
        """Raise an error if the generation is broken: what this process waits for while it opens may never come.

        Raises:
            PeerFailedError: it is broken.
        """
        if self._broken.is_set():
            raise PeerFailedError("another rank has gone while the ranks that are left opened their process group")

    def begin(self) -> None:
        """Begin the generation, whose process group is open."""
        with self._group_lock:
            self._sockets = self._sockets_since()
        self._channel.send({"formed": self._generation})

    def is_broken(self) -> bool:
        """Return whether the generation is broken, after a collective has failed; wait some seconds for the answer.

        It does not return where the host of the service does not answer: another thread then ends the process.
        """
        is_broken = self._broken.wait(_BREAK_S)
        while self._is_cut_off.is_set():
            time.sleep(1)
        return is_broken

    def leave(self, position: Position, listener: socket.socket) -> Formation | None:
        """Leave the generation, and wait for the next one.

        Args:
            position: the state that this process keeps.
            listener: listens in case that this process becomes rank 0.

        Returns:
            The next generation; None if this process must end.
        """
        self._channel.send({"left": self._generation, **position.document(listener)})
        # The service gives up earlier; it may have been stopped.
        return self.wait_for_formation(_FORMATION_S + 4 * self._heartbeat().slowest_s)

    def wait_for_formation(self, timeout_s: float | None = None) -> Formation | None:
        """Wait for the generation that this process is to be a part of; None if it must end, or at the timeout."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            answer = None
        return None if answer is None else Formation(**answer)

    def allow(self, smallest_world: int) -> None:
        """Say how many ranks must be left for the same result."""
        self._channel.send({"smallest_world": smallest_world})

    def must_leave(self) -> None:
        """Say that the job must leave its nodes within seconds."""
        self._channel.send({"must_leave": True})

    def done(self) -> None:
        """Say that this process ends by itself, and the run with it."""
        self._channel.send({"done": True})

    def failed(self) -> None:
        """Say that this process ends because it has failed."""
        self._channel.send({"failed": True})

    def _listen(self) -> None:
        try:
            while True:
                self._hear(self._channel.receive())
        except ChannelClosedError as error:
            if error.is_cut_off and self._end_cut_off is not None:
                self._is_cut_off.set()
                self._broken.set()
                self._shut_down_group()
                self._end_cut_off()
            # The training goes on without the service; the next death ends the attempt.
            self._answers.put(None)

    def _hear(self, document: Mapping[str, Any]) -> None:
        if document.get("broken") == self._generation:
            self._channel.send({"told": self._generation, "step_s": self._heartbeat().slowest_s})
            self._broken.set()
            self._shut_down_group()
        elif document.get("pause") == self._generation:
            self._paused.set()
        elif "form" in document:
            # Here and not in the main thread: the new generation may be broken before that thread runs.
            self._generation = int(document["form"]["generation"])
            self._broken.clear()
            self._paused.clear()
            self._answers.put(dict(document["form"]))
        elif "end" in document:
            self._channel.send({"ending": True})
            self.why_ended = str(document["end"])
            self.states_differ = document.get("states_differ") is True
            self._answers.put(None)
            self._broken.set()
            self._shut_down_group()
            threading.Thread(target=self._end_later, args=(document["end"],), daemon=True).start()

    def _end_later(self, why: str) -> None:
        time.sleep(_END_S + 2 * self._heartbeat().slowest_s)
        self._end(why)

    def _shut_down_group(self) -> None:
        """Shut down the connections of the process group."""
        with self._group_lock:
            now = open_sockets()
            sockets = self._sockets_since() if self._sockets is None else self._sockets
            for name, descriptor in sockets.items():
                # The descriptor may be that of another socket by now.
                if now.get(name) == descriptor:
                    _shut_down(descriptor)
            end_waits = self._end_waits
        if end_waits is not None:
            end_waits()

    def _sockets_since(self) -> dict[str, int]:
        """Return the sockets that this process has opened since it began to open the process group."""
        return {name: number for name, number in open_sockets().items() if name not in self._sockets_before}


def open_sockets() -> dict[str, int]:
    """Return the descriptors of the open sockets of this process, by the names of the sockets."""
    sockets = {}
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                sockets[name] = int(entry.name)
    return sockets


def _shut_down(descriptor: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in {socket.AF_INET, socket.AF_INET6}:
            # Raises for a socket that listens: gloo aborts the process if that is shut down.
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
