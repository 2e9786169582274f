"""The training of a task: its ranks train together, in one generation after the other.

A *generation* is the ranks that train together. Where the membership service runs, the ranks that are left after a
death form the next one, and a new process joins a later one (docs/design/members.md).
"""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Timer
from typing import TYPE_CHECKING, Any, Final

from hpcddp.errors import printable
from hpcddp.jobfile.job import JobSpec
from hpcddp.polling import wait_until
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.job_records import PublishedAddress, read_members_address, read_start
from hpcddp.run.metrics_log import METRICS_FILE
from hpcddp.run.record import RecordError
from hpcddp.slurm.job import ask_end, slurm_job_id
from hpcddp.slurm.rank_env import TASK_VARIABLES, RankEnv
from hpcddp.stop import faults
from hpcddp.stop.deadline import KnownEnd
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.stop.listener import LISTENER, ReceivedSignal, write_to_stderr
from hpcddp.stop.reasons import ExitCode, StopReason
from hpcddp.task.attribution import failure_record, failure_text, is_peer_loss, save_failure
from hpcddp.task.channel import ChannelClosedError, connect
from hpcddp.task.code import record_loaded_code, why_code_differs
from hpcddp.task.cut_off import end_cut_off
from hpcddp.task.local_peers import exit_after_failure
from hpcddp.task.meeting import choose_interfaces, deadline_of, meet_ranks
from hpcddp.task.member import Formation, Member, Position
from hpcddp.task.process_state import PROCESS_STATE, TaskInputs, exit_process
from hpcddp.task.rendezvous import Identity, PeerFailedError, RendezvousError, bind_port, interface_of
from hpcddp.task.sentinel import start_sentinel
from hpcddp.task.watchdog import start_watchdog, trace_variables
from hpcddp.version import __version__

if TYPE_CHECKING:
    import torch

    from hpcddp.train.checkpoint.memory import MemoryCheckpoint
    from hpcddp.train.context import Recovery, Survivor
    from hpcddp.train.data.parts import Data


MEMBERS: Final = "HPCDDP_MEMBERS"
"""Set by the batch script where the membership service runs."""
# The service starts beside the tasks, and they import torch meanwhile.
_SERVICE_S: Final = 10.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generation:
    """Ranks that train together, as one of them sees them.

    Args:
        number: 0 for those with which the attempt began.
        address: rank 0's host.
        port: the port that rank 0 listens on.
        listener: rank 0's listening socket; None on the other ranks.
        connect_timeout_s: the timeout of the process group while it opens, in seconds; None for generation 0, which
            ends with a death while it opens.
        recovery: how they have taken the place of other ones; None for those with which the attempt began.
    """

    number: int
    env: RankEnv
    address: str
    port: int
    listener: socket.socket | None
    connect_timeout_s: float | None = None
    recovery: Recovery | None = None


def run_rank(inputs: TaskInputs) -> None:
    """Run one rank of the job's training or entrypoint, from the rendezvous to the last barrier."""
    if PROCESS_STATE.is_newcomer:
        # The others may wait for it: its sentinel lets them hear of the loss of its node during the imports too.
        _start_sentinel(inputs, *_find_service(inputs))
    # Garbage collections take a tenth of the time of these imports, and free nothing: then or later.
    gc.disable()
    # Before torch, because it says what is missing.
    from hpcddp.train import distributed  # isort: split

    import torch

    # The first step needs them all.
    import hpcddp.train.entry
    import hpcddp.train.loop.job  # noqa: F401  see above

    gc.freeze()
    gc.enable()
    env = inputs.env
    attempt = inputs.attempt
    spec = inputs.spec
    device = distributed.choose_device(env, spec.device)
    PROCESS_STATE.device = str(device)
    torch.set_num_threads(int(inputs.environment["OMP_NUM_THREADS"]))
    identity = Identity(
        host=PROCESS_STATE.host,
        gpu=distributed.gpu_uuid(device),
        must_agree={
            "hpcddp": __version__,
            "Python": platform.python_version(),
            "torch": str(torch.__version__),
            "the job file (sha256)": hashlib.sha256(inputs.job_text.encode()).hexdigest(),
            "attempt": str(attempt.number),
        },
    )
    member: Member | None
    if PROCESS_STATE.is_newcomer:
        member, generation = _join(inputs, identity)
    else:
        meeting = meet_ranks(inputs, identity)
        member = _become_member(inputs, identity)
        generation = _Generation(
            number=0, env=env, address=meeting.address, port=meeting.port, listener=meeting.listener
        )
    inputs.environment.update(env.exports(generation.address, generation.port))
    PROCESS_STATE.collective_trace = distributed.collective_trace
    inputs.environment.update(trace_variables(attempt, inputs.environment))
    _TrainingRank(inputs, device, member).run_generations(generation)


class _NotFormedError(PeerFailedError):
    """The process group of a generation after the first could not be opened."""


class _TrainingRank:
    """This process as a rank of a training, in one generation after the other.

    Args:
        inputs: what the task read when it started.
        device: the device of the rank.
        member: the connection to the membership service; None without one, and there is one generation.
    """

    def __init__(self, inputs: TaskInputs, device: torch.device, member: Member | None) -> None:
        from hpcddp.train.tracking.opening import TrackingKeeper

        self._inputs = inputs
        self._device = device
        self._member = member
        self._heartbeat = _heartbeat(inputs.spec, inputs.attempt, world_size=inputs.env.world_size)
        self._trackers = None if member is None else TrackingKeeper()
        self._survivor: Survivor | None = None

    def run_generations(self, generation: _Generation) -> None:
        """Train to the end, with the ranks of this generation and of those that follow it."""
        while True:
            try:
                self._run_generation(generation)
            except Exception as error:  # noqa: BLE001  raised again where there is no next generation
                try:
                    generation = self._next_generation(generation, error)
                except Exception:
                    if self._trackers is not None:
                        self._trackers.fail()
                    raise
            else:
                return

    def _run_generation(self, generation: _Generation) -> None:
        """Train with the other ranks of a generation to the end."""
        from hpcddp.train.context import TrainContext, never_pause
        from hpcddp.train.entry import run_entrypoint
        from hpcddp.train.errors import StoppedError
        from hpcddp.train.loop.job import run_training

        inputs = self._inputs
        member = self._member
        spec = inputs.spec
        attempt = inputs.attempt
        with ExitStack() as stack:
            self._open_group(generation, stack)
            context = TrainContext(
                spec=spec,
                rank_env=generation.env,
                device=self._device,
                run=attempt.run,
                attempt=attempt.number,
                threads=int(inputs.environment["OMP_NUM_THREADS"]),
                stop_reason=_begin_and_get_stop_reason,
                cause=PROCESS_STATE.cause,
                deadline=deadline_of(attempt),
                ask_end=_ask_end(inputs.environment),
                heartbeat=self._heartbeat,
                offer_survivor=partial(self._take_survivor, generation),
                recovery=generation.recovery,
                trackers=self._trackers,
                metrics=None if self._survivor is None else self._survivor.metrics,
                is_paused=never_pause if member is None else member.is_paused,
            )
            if spec.entrypoint is not None:
                variables = {METRICS_FILE: str(attempt.run.metrics), "HPCDDP_ATTEMPT": str(attempt.number)}
                inputs.environment.update(variables)
                # Before the function is called: nobody sees the steps that it makes until it asks whether to stop.
                PROCESS_STATE.start_training()
                run_entrypoint(context)
                return
            try:
                run_training(context)
            except StoppedError:
                self._say_done()
                # A stop is neither a result nor a failure: submitit, which may have called this function, must record
                # none.
                exit_process(ExitCode.STOPPED)
            self._say_done()

    def _open_group(self, generation: _Generation, stack: ExitStack) -> None:
        """Open the process group of a generation, until the end of the stack.

        Raises:
            RendezvousError: it could not be opened.
        """
        from hpcddp.train.distributed import Forming, process_group
        from hpcddp.train.waits import WAITS

        member = self._member
        spec = self._inputs.spec
        forming = None
        if member is not None:
            WAITS.begin()
            member.open_group(WAITS.end)
            if generation.connect_timeout_s is not None:
                forming = Forming(
                    connect_timeout=timedelta(seconds=generation.connect_timeout_s),
                    raise_if_broken=member.raise_if_broken,
                )
        group = process_group(
            generation.env,
            address=generation.address,
            port=generation.port,
            listener=generation.listener,
            device=self._device,
            rendezvous_timeout=spec.launch.rendezvous_timeout,
            hang_timeout=spec.launch.hang_timeout,
            forming=forming,
        )
        if generation.recovery is not None:
            state = generation.recovery.state
            faults.inject("form", step=state.manifest.step if state is not None else None)
        try:
            with opening(self._inputs.attempt, spec.launch.rendezvous_timeout):
                stack.enter_context(group)
        except Exception as error:
            if forming is None:
                raise
            raise _NotFormedError(f"the ranks that are left could not form a generation: {error}") from error
        if member is not None:
            member.begin()
        if generation.recovery is not None:
            self._heartbeat.expect_beginning()
            if generation.recovery.shares_state:
                # A process that is new may need longer until its loop begins than this one.
                self._heartbeat.expect_long()

    def _take_survivor(self, generation: _Generation, survivor: Survivor) -> None:
        self._survivor = survivor
        PROCESS_STATE.save_last_step = survivor.save
        if self._member is not None and generation.recovery is None:
            # It is the same in all generations, and planning the batch of each world takes time.
            self._member.allow(survivor.smallest_world)
            if self._inputs.env.rank == 0:
                record_loaded_code(self._inputs.attempt)

    def _say_done(self) -> None:
        if self._member is not None:
            self._member.done()

    def _next_generation(self, generation: _Generation, error: Exception) -> _Generation:
        """Leave a generation after an error, and return the next one.

        Raises:
            Exception: there is none for this process, which must end with this error: the given one if it is not
                survived.
        """
        from hpcddp.train.distributed import abandon_process_group
        from hpcddp.train.errors import DifferentStatesError, PausedError

        member = self._member
        survivor = self._survivor
        if member is None:
            raise error
        is_asked = isinstance(error, PausedError | _NotFormedError)
        can_go_on = is_asked or (is_peer_loss(error) and member.is_broken())
        # A process that is new has nothing to keep before it has the state of the others.
        is_new = survivor is None and generation.recovery is not None
        state = survivor.state() if can_go_on and survivor is not None else None
        if not can_go_on or (state is None and not is_new):
            member.failed()
            raise error
        self._heartbeat.expect_long()
        abandon_process_group()
        listener = bind_port(single_host=self._inputs.env.nodes == 1)
        formation = member.leave(_position(state, survivor), listener)
        if formation is None and member.states_differ:
            # Nobody knows which state is right.
            PROCESS_STATE.save_last_step = None
            raise DifferentStatesError(f"{member.why_ended}, and none of them is saved") from error
        if formation is None:
            raise PeerFailedError(member.why_ended) from error
        data = survivor.data if survivor is not None else None
        return _generation_of(self._inputs, formation, listener, state, data)


def _position(state: MemoryCheckpoint | None, survivor: Survivor | None) -> Position:
    """Return what a rank says of the state with which it leaves a generation; a new process has none."""
    if state is None or survivor is None:
        return Position()
    return Position(
        step=state.manifest.step,
        evaluated_step=state.manifest.progress["evaluated_step"] or 0,
        checksum=state.checksum(),
        samples=survivor.samples_of_begun_step(),
    )


def _become_member(inputs: TaskInputs, identity: Identity) -> Member | None:
    """Connect to the membership service; return None where there is none."""
    if MEMBERS not in inputs.environment:
        return None
    try:
        address, token = _find_service(inputs)
        _start_sentinel(inputs, address, token)
        return _connect(inputs, identity, address, token, left=None)
    except (ChannelClosedError, RecordError) as error:
        reason = f" ({error})" if str(error) else ""
        write_to_stderr(f"hpcddp: the membership service cannot be reached{reason}; the training goes on without it\n")
        return None


def _find_service(inputs: TaskInputs) -> tuple[PublishedAddress, str]:
    """Return the address of the membership service, and the attempt's token.

    Raises:
        ChannelClosedError: it has published none.
    """
    attempt = inputs.attempt
    published = wait_until(lambda: read_members_address(attempt), timeout_s=_SERVICE_S, poll_s=_POLL_S)
    start = read_start(attempt)
    if published is None or start is None:
        raise ChannelClosedError
    return published, start.token


def _own_name() -> str:
    """Return what names this process among those of the job, of all times."""
    return f"{PROCESS_STATE.host} {os.getpid()}"


def _start_sentinel(inputs: TaskInputs, address: PublishedAddress, token: str) -> None:
    node = inputs.environment.get("SLURMD_NODENAME", "")
    try:
        start_sentinel(address.addresses, address.port, token, process=_own_name(), node=node)
    except OSError as error:
        write_to_stderr(f"hpcddp: no process can watch this one ({error}); its death is noticed later\n")


def _connect(
    inputs: TaskInputs, identity: Identity, address: PublishedAddress, token: str, *, left: Mapping[str, Any] | None
) -> Member:
    attempt = inputs.attempt
    hello = {
        "number": inputs.env.rank,
        "process": _own_name(),
        "task": {name: value for name, value in inputs.environment.items() if name in TASK_VARIABLES},
        "identity": dict(identity.must_agree),
        "left": left,
    }
    deadline = time.monotonic() + _SERVICE_S
    channel = connect(address.addresses, address.port, token.encode(), hello, deadline=deadline)
    job_id = slurm_job_id(inputs.environment)
    end_lone_rank = None
    if inputs.spec.may_lose_nodes and job_id is not None:
        end_lone_rank = partial(end_cut_off, attempt, job_id, inputs.spec)
    member = Member(
        channel,
        lambda: PROCESS_STATE.heartbeat,
        end=lambda why: _end_lost_rank(attempt, why),
        end_cut_off=end_lone_rank,
    )
    LISTENER.add_callback(partial(_tell_of_the_end, member))
    return member


def _tell_of_the_end(member: Member, received: ReceivedSignal) -> None:
    if received.reason >= StopReason.TERMINATED:
        member.must_leave()


def _end_lost_rank(attempt: AttemptDirectory, why: str) -> None:
    """End this process, whose main thread waits for ranks that have gone."""
    record = failure_record(PeerFailedError(why))
    save_failure(attempt, record)
    write_to_stderr(failure_text(record))
    if PROCESS_STATE.save_last_step is not None:
        PROCESS_STATE.save_last_step()
    exit_after_failure(record.exit_code, attempt)


def _join(inputs: TaskInputs, identity: Identity) -> tuple[Member, _Generation]:
    """Wait, as a new process of a rank, until the others take this one in.

    Its code is imported before it is compared: a later edit then changes nothing in it.
    """
    from hpcddp.train.user_code import import_modules_of

    import_modules_of(inputs.spec)
    listener = bind_port(single_host=inputs.env.nodes == 1)
    left = {**Position().document(listener), "why_code_differs": why_code_differs(inputs.attempt)}
    member = _connect(inputs, identity, *_find_service(inputs), left=left)
    formation = member.wait_for_formation()
    if formation is None:
        write_to_stderr(f"hpcddp: this process does not join the other ranks: {member.why_ended}\n")
        exit_process(ExitCode.FINISHED)
    PROCESS_STATE.is_newcomer = False
    choose_interfaces(inputs, interface_of(member.own_address))
    return member, _generation_of(inputs, formation, listener, None, None)


def _generation_of(
    inputs: TaskInputs,
    formation: Formation,
    listener: socket.socket,
    state: MemoryCheckpoint | None,
    data: Data | None,
) -> _Generation:
    from hpcddp.train.context import Recovery

    is_rank_0 = formation.rank == 0
    if not is_rank_0:
        listener.close()
    env = inputs.env
    if formation.world_size < env.world_size:
        env = env.among(formation.rank, formation.world_size)
    return _Generation(
        number=formation.generation,
        env=env,
        address=formation.address,
        port=formation.port,
        listener=listener if is_rank_0 else None,
        connect_timeout_s=formation.connect_timeout_s,
        recovery=Recovery(
            state=state,
            data=data,
            source=formation.source,
            shares_state=formation.shares_state,
            completes_records=formation.completes_records,
        ),
    )


@contextmanager
def opening(attempt: AttemptDirectory, timeout: timedelta) -> Iterator[None]:
    """Limit the time in which the process group opens, and report an error of torch there as one of the network.

    Most of it is one call of torch's, which may not return, whatever its own timeouts are.

    Args:
        timeout: ends the process, with a failure record.

    Raises:
        RendezvousError: torch could not open the process group.
    """
    timer = Timer(timeout.total_seconds(), _give_up, (attempt, timeout))
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if is_peer_loss(error):
            raise
        # A changed value in torch's store can cause any error: gloo may read it as a size that it cannot allocate.
        reason = printable(next(iter(str(error).splitlines()), type(error).__name__))
        raise RendezvousError(f"the ranks have met, but torch could not open their process group: {reason}") from error
    finally:
        timer.cancel()


def _give_up(attempt: AttemptDirectory, timeout: timedelta) -> None:
    error = RendezvousError(
        f"the ranks have met, but torch did not open their process group within {timeout.total_seconds():.0f} s; look "
        "at the network between the hosts, or raise launch.rendezvous_timeout"
    )
    record = failure_record(error)
    save_failure(attempt, record)
    write_to_stderr(failure_text(record))
    exit_after_failure(record.exit_code, attempt)


def _heartbeat(spec: JobSpec, attempt: AttemptDirectory, *, world_size: int) -> Heartbeat:
    """Return the heartbeat of the training; an entrypoint has no watchdog, because it reports no steps."""
    if spec.entrypoint is not None:
        return Heartbeat()
    return start_watchdog(attempt, spec.launch.hang_timeout, world_size=world_size)


def _begin_and_get_stop_reason() -> StopReason:
    """Return why this rank is to stop, and record that the training has begun.

    It is called when this rank votes: near the end of a step, and between batches of an evaluation.

    Does not return in a process that is about to exit.
    """
    PROCESS_STATE.start_training()
    return LISTENER.reason()


def _ask_end(environment: Mapping[str, str]) -> Callable[[], KnownEnd | None] | None:
    job_id = slurm_job_id(environment)
    return None if job_id is None else lambda: ask_end(job_id)
