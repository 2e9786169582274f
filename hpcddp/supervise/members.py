"""The membership service of an attempt: which ranks train together, and who goes on when one of them dies.

It runs beside srun, on the host of the batch script. Each rank keeps a connection to it (``hpcddp.task.member``). The
ranks that train together are a *generation*. When the process of a rank dies, the service tells the others that their
generation is broken, waits until each has left it, and lets those that are left form the next one. A new process of the
same rank joins a later generation. docs/design/members.md has the protocol and its failure cases.

Whoever cannot go on here is told to end: each rank then saves its last step, and the batch script decides.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, Protocol

from hpcddp.supervise.generations import Change, LastGeneration, Member, NewGeneration, formations
from hpcddp.supervise.job_nodes import JobNodes
from hpcddp.supervise.rank_states import samples_text, why_states_differ
from hpcddp.task.channel import Channel, ChannelClosedError

# How long a rank may take to leave a broken generation beyond two of its longest steps, and to form the next one. The
# first is longer than it takes to notice that a host does not answer (hpcddp.task.channel).
_LEAVE_S: Final = 5.0
_FORM_S: Final = 20.0
# How long gloo waits for the connection of a peer is five times the timeout of its group (tcp/pair.cc). The timeout of
# the first try to form a generation is short, in case that a rank dies meanwhile; each further try doubles it.
_CONNECT_S: Final = 0.2
_CONNECT_FACTOR: Final = 5
_MOST_TRIES: Final = 5
# How long new processes may take that the others wait for.
_NEWCOMER_S: Final = 120.0
# How long srun may take to say how a task has ended.
_CAUSE_S: Final = 5.0
_POLL_S: Final = 0.02
_SLOW_POLL_S: Final = 0.5
# Connections that have not proven yet that they know the key.
_MOST_GREETING: Final = 256
# So often may processes die before a step is made.
_MOST_AT_A_STEP: Final = 3
# So many processes are started for one number while the others wait for it.
_MOST_STARTS: Final = 2
NODE_LOST: Final = "its node was lost"
"""How a rank was ended whose host does not answer."""
# How srun says that a task was ended by a signal, which is not what a program does by itself: signal(7), strsignal(3).
_ENDED_BY_SIGNAL: Final = ("Killed", "Segmentation fault", "Bus error", "Aborted", "Out Of Memory")
_SURVIVED: Final = (*_ENDED_BY_SIGNAL, NODE_LOST)


class NewProcesses(Protocol):
    """Starts processes in the places of ranks, and knows how tasks have ended."""

    def start(self, number: int, task: Mapping[str, str]) -> None:
        """Start a process for a number, with the variables of srun of its task."""

    def refuse(self, number: int, why: str) -> None:
        """Note why the newest process of a number is not taken in; it ends by itself."""

    def exit_of(self, number: int) -> str | None:
        """Return how the newest task of a number has ended, in srun's words; None while srun has not said it.

        The sentinel of the task mostly says it earlier.
        """


Phase = Literal["gathering", "training", "leaving", "waiting", "forming", "ended"]


class MemberService:
    """Keeps the members of an attempt.

    Args:
        world_size: ranks of the job.
        most_failures: how many generations may break because a process has died.
        newcomers: the new processes that take the places of ranks.
        on_new_generation: called when a generation has taken the place of another one.
        on_last_generation: called when no generation follows because of what the ranks have said.
        monotonic: seconds on a clock that never goes back.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        *,
        world_size: int,
        most_failures: int,
        nodes: JobNodes,
        newcomers: NewProcesses,
        on_new_generation: Callable[[NewGeneration], None],
        on_last_generation: Callable[[LastGeneration], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._key = key
        self._world_size = world_size
        self._failures_left = most_failures
        self._nodes = nodes
        self._has_lost_node = False
        self._new_processes = newcomers
        self._on_new_generation = on_new_generation
        self._on_last_generation = on_last_generation
        self._monotonic = monotonic
        self._greeting = threading.Semaphore(_MOST_GREETING)
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._phase: Phase = "gathering"
        self._generation = 0
        self._members: dict[int, Member] = {}
        self._newcomers: dict[int, Member] = {}
        self._tasks: dict[int, Mapping[str, str]] = {}
        # The newest process of each number, and how processes have ended, as their sentinels have seen it.
        self._processes: dict[int, str] = {}
        self._exits: dict[str, str] = {}
        self._smallest_world = world_size
        self._change = Change(0.0)
        # Whether its ranks have not been told that the generation is broken.
        self._is_whole = True
        # How often the ranks have tried to form a generation since they last trained.
        self._tries = 0
        self._formed: set[int] = set()
        self._must_end = False
        # The number of the member that is rank 0, and of the one that has written all records of the training.
        self._rank_0 = self._recorder = 0
        self._joined: list[int] = []
        # That of the state with which the generation began.
        self._position = (-1, -1)
        # The step after which processes have died, how often, and how often in a generation that had trained.
        self._step_of_deaths = -1
        self._deaths_at_step = 0
        self._broken_at_step = 0

    @property
    def members(self) -> Collection[int]:
        """The numbers of the ranks that train, or are about to."""
        return self._members.keys()

    @property
    def is_gathering(self) -> bool:
        """Whether not all ranks have connected yet."""
        return self._phase == "gathering"

    @property
    def is_training(self) -> bool:
        """Whether a generation trains, and nobody leaves or joins it."""
        return self._phase == "training"

    @property
    def has_ended(self) -> bool:
        """Whether the ranks were told to end."""
        return self._phase == "ended"

    @property
    def must_end(self) -> bool:
        """Whether the ranks were told to end because of a failure; else the run ends by itself."""
        return self._must_end

    @property
    def only_stuck_ranks_are_left(self) -> bool:
        """Whether the ranks were told to end, and none that is left has answered: stopped, or stuck in native code."""
        if not self._must_end or not self._members:
            return False
        left = (*self._members.values(), *self._newcomers.values())
        return not any(member.is_done for member in left)

    @property
    def srun_waits_in_vain(self) -> bool:
        """Whether all ranks have ended, and srun waits for those of a lost node."""
        return self.has_ended and self._has_lost_node and not self._members

    def start(self) -> None:
        """Begin to accept connections, in a thread."""
        threading.Thread(target=self._accept, daemon=True).start()

    def handle(self, *, most_s: float = _SLOW_POLL_S) -> None:
        """Handle what has happened, and what is due; wait for ``most_s`` at most if nothing has."""
        # What srun says of new processes is read from files; that they are there is an event.
        timeout_s = min(_POLL_S, most_s) if self._phase in {"leaving", "forming"} else most_s
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            pass
        else:
            event()
        if self._phase == "leaving":
            self._go_on_if_all_have_left()
        elif self._phase == "waiting":
            self._go_on_if_newcomers_are_there()
        elif self._phase == "forming":
            self._train_if_all_have_formed()

    def end(self, why: str, *, states_differ: bool = False) -> None:
        """Tell all ranks to end, and to save before if their states do not differ."""
        if self._phase == "ended":
            return
        self._phase = "ended"
        self._must_end = True
        for member in (*self._members.values(), *self._newcomers.values()):
            member.channel.send({"end": why, "states_differ": states_differ})

    def _accept(self) -> None:
        while True:
            self._greeting.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Read what one connection sends, in a thread of its own, and hand it to the thread of the service."""
        try:
            channel = Channel(connection, self._key, is_service=True)
            hello = channel.receive()
            member = None if "watches" in hello else _member_of(channel, hello)
        except (ChannelClosedError, KeyError, TypeError, ValueError):
            connection.close()
            return
        finally:
            self._greeting.release()
        channel.greeted()
        if member is None:
            self._serve_sentinel(channel, str(hello["watches"]), str(hello.get("node")))
        else:
            self._serve_member(member, hello)

    def _serve_member(self, member: Member, hello: Mapping[str, Any]) -> None:
        """Read what a rank sends, until its connection ends."""
        self._events.put(partial(self._join, member, hello))
        try:
            while True:
                document = member.channel.receive()
                self._events.put(partial(self._hear, member, document))
        except ChannelClosedError as error:
            member.channel.close()
            self._events.put(partial(self._lose, member, is_cut_off=error.is_cut_off))

    def _serve_sentinel(self, channel: Channel, process: str, node: str) -> None:
        """Read what the sentinel of a rank sends."""
        channel.send({"welcome": self._generation})
        try:
            how = _exit_text(int(channel.receive()["exit"]))
            self._events.put(lambda: self._hear_exit(process, how))
        except ChannelClosedError as error:
            if error.is_cut_off:
                self._events.put(lambda: self._lose_node(node))
        except (KeyError, TypeError, ValueError):
            pass
        channel.close()

    def _join(self, member: Member, hello: Mapping[str, Any]) -> None:
        is_newcomer = hello.get("left") is not None
        if self._phase == "ended" or (self._phase != "gathering" and not is_newcomer):
            member.channel.close()
            return
        member.channel.send({"welcome": self._generation})
        if is_newcomer:
            self._join_as_newcomer(member, hello["left"])
            return
        self._members[member.number] = member
        self._processes[member.number] = member.process
        self._tasks[member.number] = member.task
        self._nodes.use(member.node)
        if len(self._members) == self._world_size:
            self._phase = "training"

    def _join_as_newcomer(self, member: Member, left: Mapping[str, Any]) -> None:
        if not self._members or member.number in self._members:
            member.channel.send({"end": f"rank {member.number} is not missing"})
            return
        why_refused = self._why_refused(member, left)
        if why_refused is not None:
            self._new_processes.refuse(member.number, why_refused)
            member.channel.send({"end": why_refused})
            return
        member.left = left
        self._processes[member.number] = member.process
        self._newcomers[member.number] = member
        if self._phase == "training":
            self._pause()

    def _why_refused(self, newcomer: Member, left: Mapping[str, Any]) -> str | None:
        """Return why a new process is not like the others; None if it is."""
        other = next(iter(self._members.values()))
        for name, value in other.identity.items():
            if newcomer.identity.get(name) != value:
                return f"{name} is {newcomer.identity.get(name)} there, and {value} for the other ranks"
        return left.get("why_code_differs")

    def _pause(self) -> None:
        """Ask the ranks to leave their generation after a step, so that newcomers can join."""
        self._phase = "leaving"
        self._change = Change(self._monotonic())
        self._tell({"pause": self._generation})

    def _hear(self, member: Member, document: Mapping[str, Any]) -> None:
        if "done" in document:
            member.is_done = True
            # The run has finished, or stops: nobody goes on after it.
            self._phase = "ended"
        elif "failed" in document:
            member.is_done = True
            self.end(f"rank {member.number} has failed")
        elif "ending" in document:
            member.is_done = True
        elif "must_leave" in document:
            member.must_leave = True
            if self._phase == "waiting":
                self._end_before_the_job()
        elif "smallest_world" in document:
            self._smallest_world = int(document["smallest_world"])
        elif "told" in document and self._phase == "leaving":
            deadline = self._monotonic() + _LEAVE_S + 2 * float(document["step_s"])
            self._change.deadline = max(self._change.deadline, deadline)
        elif document.get("left") == self._generation:
            self._hear_left(member, document)
        elif document.get("formed") == self._generation:
            self._formed.add(member.number)

    def _hear_left(self, member: Member, document: Mapping[str, Any]) -> None:
        """Handle what a rank says that has left the generation."""
        member.left = document
        if self._phase == "forming":
            # It could not open the process group: another rank was late, or has died.
            self._break({})

    def _hear_exit(self, process: str, how: str) -> None:
        """Handle what the sentinel of a process says: how it ends."""
        self._exits[process] = how
        if not how.startswith(_ENDED_BY_SIGNAL):
            # What it has said before it ends by itself may still be on its way.
            return
        for member in (*self._members.values(), *self._newcomers.values()):
            if member.process == process:
                self._lose(member, is_cut_off=False)

    def _how_ended(self, number: int) -> str | None:
        """Return how the newest process of a number has ended; None while it is not known."""
        # srun alone knows that a node was lost.
        return self._new_processes.exit_of(number) or self._exits.get(self._processes.get(number, ""))

    def _lose(self, member: Member, *, is_cut_off: bool) -> None:
        """Handle the end of a connection."""
        if is_cut_off:
            self._lose_node(member.node)
        elif self._newcomers.get(member.number) is member:
            del self._newcomers[member.number]
            if self._phase == "waiting":
                self._break({member.number: None})
        elif self._members.get(member.number) is member:
            del self._members[member.number]
            if member.is_done or self._phase == "ended":
                return
            if self._phase == "gathering":
                self.end(f"rank {member.number} was lost while the ranks met")
            else:
                self._break({member.number: None})

    def _lose_node(self, node: str) -> None:
        """Handle the loss of a node: the connections of its other ranks end some seconds later, or never began."""
        lost = {number for number in self._change.awaited if self._tasks[number].get("SLURMD_NODENAME") == node}
        for members in (self._members, self._newcomers):
            for member in [member for member in members.values() if member.node == node]:
                del members[member.number]
                member.channel.close()
                if members is self._members and not member.is_done:
                    lost.add(member.number)
        if not lost or self._phase == "ended":
            return
        if self._phase == "gathering":
            self.end(f"rank {min(lost)} was lost while the ranks met")
        else:
            self._break(dict.fromkeys(lost, NODE_LOST))

    def _break(self, dead: Mapping[int, str | None]) -> None:
        """Let the ranks leave their generation.

        Args:
            dead: those that have died, and how they were ended; empty if some rank could not open the process group.
        """
        now = self._monotonic()
        is_first_death = not self._change.dead and not self._change.failures
        if self._phase == "training" or (is_first_death and dead):
            # Ranks that have been told already that the generation is broken have no more time than before.
            self._change = Change(now, deadline=self._change.deadline)
        change = self._change
        change.dead.update(dead)
        change.awaited -= dead.keys()
        change.explain_until = now + _CAUSE_S
        leave_s = _LEAVE_S
        if self._phase == "forming":
            leave_s += _CONNECT_FACTOR * self._connect_s
            self._tries += 1
        self._phase = "leaving"
        if self._is_whole:
            self._is_whole = False
            change.deadline = now + leave_s
            self._tell({"broken": self._generation})

    @property
    def _connect_s(self) -> float:
        """The timeout of the process group while it opens."""
        return _CONNECT_S * 2.0**self._tries

    def _tell(self, document: Mapping[str, Any]) -> None:
        for member in self._members.values():
            member.channel.send(document)

    def _go_on_if_all_have_left(self) -> None:
        """Go on if all that are left have left their generation; tell them to end if that takes too long."""
        now = self._monotonic()
        dead = self._change.dead
        for number in [number for number, how in dead.items() if how is None]:
            dead[number] = self._how_ended(number)
        unexplained = [number for number, how in dead.items() if how is None]
        exited = [number for number, how in dead.items() if how is not None and not how.startswith(_SURVIVED)]
        if exited:
            self.end(f"rank {exited[0]} has ended by itself ({dead[exited[0]]})")
        elif unexplained and now > self._change.explain_until:
            self.end(f"rank {unexplained[0]} has ended, and srun does not say why")
        elif not unexplained and all(member.left is not None for member in self._members.values()):
            self._go_on()
        elif now > self._change.deadline:
            self.end("a rank did not leave the broken generation in time")

    def _go_on(self) -> None:
        """Form the next generation, or wait for new processes, if one of both is possible."""
        change = self._change
        step = max((member.position[0] for member in self._members.values()), default=-1)
        if step < 0:
            self.end("no rank is left that has the state")
            return
        if self._ends_because_states_differ():
            return
        if change.dead:
            if not self._may_break_again(step) or not self._has_enough_nodes():
                return
            change.count_failure()
        if self._tries == _MOST_TRIES:
            self.end(f"the ranks that are left could not meet in {_MOST_TRIES} tries")
        elif len(self._members.keys() | self._newcomers.keys()) >= self._smallest_world:
            self._form()
        else:
            self._wait_for_newcomers()

    def _ends_because_states_differ(self) -> bool:
        """Tell the ranks to end, without a save, if their states after a step differ; return whether they do."""
        checksums: dict[int, dict[int, int]] = {}
        for number, member in self._members.items():
            if member.checksum is not None:
                step, _ = member.position
                checksums.setdefault(step, {})[number] = member.checksum
        why = why_states_differ(checksums)
        if why is None:
            return False
        self.end(why, states_differ=True)
        reason = f"{why}; the ranks end, and save none of them"
        self._on_last_generation(LastGeneration(reason=reason, step=max(checksums)))
        return True

    def _wait_for_newcomers(self) -> None:
        """Start new processes where fewer ranks would not have the same result; the others wait for them."""
        if any(member.must_leave for member in self._members.values()):
            self._end_before_the_job()
            return
        change = self._change
        absent = change.counted_deaths.keys() - self._members.keys() - self._newcomers.keys()
        change.awaited |= self._start_newcomers(absent - change.awaited)
        expected = len(self._members.keys() | self._newcomers.keys() | change.awaited)
        if expected < self._smallest_world:
            self.end(f"{expected} ranks are too few for the same result")
            return
        self._phase = "waiting"
        change.deadline = self._monotonic() + _NEWCOMER_S

    def _end_before_the_job(self) -> None:
        """Tell the ranks to end: Slurm kills them KillWait after SIGTERM, and the imports may take longer."""
        self.end("the job must leave its nodes, and the new processes are not there yet")

    def _go_on_if_newcomers_are_there(self) -> None:
        awaited = self._change.awaited - self._newcomers.keys()
        exits = {number: self._new_processes.exit_of(number) for number in awaited}
        ended = {number: how for number, how in exits.items() if how is not None}
        exited = [number for number, how in ended.items() if not how.startswith(_SURVIVED)]
        if len(self._members.keys() | self._newcomers.keys()) >= self._smallest_world:
            self._go_on()
        elif exited:
            self.end(f"the new process of rank {exited[0]} has ended ({ended[exited[0]]})")
        elif ended:
            self._break(ended)
        elif self._monotonic() > self._change.deadline:
            self.end("the new processes were not there in time")

    def _start_newcomers(self, numbers: Collection[int]) -> set[int]:
        """Start new processes for ranks that have died; return the numbers for which that is possible."""
        started = set()
        for number in sorted(numbers):
            task = self._task_of_newcomer(number)
            if task is not None and self._change.started[number] < _MOST_STARTS:
                self._tasks[number] = task
                self._change.started[number] += 1
                self._new_processes.start(number, task)
                started.add(number)
        return started

    def _task_of_newcomer(self, number: int) -> Mapping[str, str] | None:
        """Return the task of a new process; None if its node is lost, and no spare one is left."""
        task = self._tasks[number]
        if self._change.counted_deaths[number] != NODE_LOST:
            return task
        return self._nodes.task_elsewhere(task)

    def _train_if_all_have_formed(self) -> None:
        if self._formed >= self._members.keys():
            self._train_again()
        elif self._monotonic() > self._change.deadline:
            self.end("the ranks that are left did not meet in time")

    def _form(self) -> None:
        """Let the ranks that are there form the next generation."""
        position = max(member.position for member in self._members.values())
        if position > self._position:
            # The generation before has made a step or an evaluation, so its rank 0 has written all records.
            self._recorder = self._rank_0
        self._position = position
        everyone = self._newcomers | self._members
        self._generation += 1
        for number, formation in formations(everyone, position, self._recorder).items():
            document = {**formation, "generation": self._generation, "connect_timeout_s": self._connect_s}
            everyone[number].channel.send({"form": document})
        # New processes of a generation that broke before it trained are members already.
        self._joined = [number for number, member in everyone.items() if member.is_new and not member.has_joined]
        for member in everyone.values():
            member.left = None
        self._rank_0 = min(everyone)
        self._members = everyone
        self._newcomers = {}
        self._formed = set()
        self._is_whole = True
        self._phase = "forming"
        self._change.deadline = self._monotonic() + _FORM_S + _CONNECT_FACTOR * self._connect_s

    def _may_break_again(self, step: int) -> bool:
        """Count the newest deaths as one; tell the ranks to end, and return False, if that were one too many."""
        if all(how == NODE_LOST for how in self._change.dead.values()):
            # It says nothing about the step, and there are fewer nodes each time.
            return True
        self._count_deaths(step)
        broken = f"{self._broken_at_step} generations have broken in the step after step {step}"
        if self._broken_at_step >= _MOST_AT_A_STEP:
            self._end_at_step(broken, step, is_cascade=True)
            return False
        if self._deaths_at_step >= _MOST_AT_A_STEP:
            self.end(
                f"processes have died {self._deaths_at_step} times after step {step}, before the ranks could make the "
                "next one"
            )
            return False
        if self._failures_left > 0:
            self._failures_left -= 1
            return True
        why = "requeue.max_failures is used up"
        if self._broken_at_step > 1:
            self._end_at_step(f"{why}, and {broken}", step, is_cascade=False)
        else:
            self.end(why)
        return False

    def _count_deaths(self, step: int) -> None:
        """Count the newest deaths, after a step, as one."""
        if step != self._step_of_deaths:
            self._step_of_deaths = step
            self._deaths_at_step = 0
            self._broken_at_step = 0
        self._deaths_at_step += 1
        has_trained = not self._change.failures and self._tries == 0
        if has_trained:
            # A sample of the step may be the cause.
            self._broken_at_step += 1

    def _end_at_step(self, why: str, step: int, *, is_cascade: bool) -> None:
        """Tell the ranks to end after several deaths at a step; name its samples, one of which may be the cause."""
        samples: Sequence[int] = []
        for member in self._members.values():
            if member.left is not None and member.position[0] == step:
                samples = member.left["samples"]
                why = f"{why}{samples_text(samples, int(member.left['sample_count']))}"
                break
        self.end(why)
        self._on_last_generation(LastGeneration(reason=why, step=step, samples=samples, is_cascade=is_cascade))

    def _has_enough_nodes(self) -> bool:
        """Return whether no node was lost, or enough are left; tell the ranks to end where they are not."""
        lost = {self._tasks[number]["SLURMD_NODENAME"] for number, how in self._change.dead.items() if how == NODE_LOST}
        if not lost:
            return True
        self._has_lost_node = True
        self._nodes.lose(lost)
        why_not = self._nodes.why_too_few({member.node for member in self._members.values()})
        if why_not is not None:
            self.end(why_not)
        return why_not is None

    def _train_again(self) -> None:
        change = self._change
        seconds = self._monotonic() - change.began
        self._phase = "training"
        self._tries = 0
        self._on_new_generation(
            NewGeneration(
                failures=tuple(change.failures),
                joined={number: self._members[number].node for number in self._joined},
                world_size=len(self._members),
                step=self._position[0],
                seconds=seconds,
            )
        )
        for number in self._joined:
            self._members[number].has_joined = True
        self._start_newcomers(change.counted_deaths.keys() - self._members.keys() - change.awaited)
        if self._newcomers:
            self._pause()


def _member_of(channel: Channel, hello: Mapping[str, Any]) -> Member:
    """Return the rank that says hello; raises ``KeyError``, ``TypeError`` or ``ValueError`` for another document."""
    return Member(
        number=int(hello["number"]),
        channel=channel,
        task=dict(hello["task"]),
        process=str(hello["process"]),
        identity=dict(hello["identity"]),
    )


def _exit_text(status: int) -> str:
    """Return how a process has ended, in srun's words, from its status as waitpid(2) has it."""
    number = os.waitstatus_to_exitcode(status)
    if number >= 0:
        return f"Exited with exit code {number}"
    return signal.strsignal(-number) or f"signal {-number}"
