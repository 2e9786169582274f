"""How the ranks of a task meet, and the end of the job as they know it then."""

from __future__ import annotations

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import is_full
from hpcddp.run.job_records import Rank, read_start, write_ranks
from hpcddp.stop.deadline import Deadline
from hpcddp.stop.listener import write_to_stderr
from hpcddp.task.process_state import TaskInputs
from hpcddp.task.rendezvous import Identity, Rendezvous, meet


def meet_ranks(inputs: TaskInputs, identity: Identity) -> Rendezvous:
    """Meet the other ranks, and record where all of them run."""
    spec = inputs.spec
    attempt = inputs.attempt
    meeting = meet(inputs.env, attempt, identity, timeout=spec.launch.rendezvous_timeout)
    choose_interfaces(inputs, meeting.interface)
    if inputs.env.rank == 0:
        launcher = None if spec.launcher_command is None else spec.launcher_command.launcher
        ranks = [Rank(host=rank.host, gpu=rank.gpu, launcher=launcher) for rank in meeting.identities]
        try:
            write_ranks(attempt, ranks)
        except OSError as error:
            # The record of some hundred ranks is larger than a reserve file; only people read it.
            if not is_full(error):
                raise
            write_to_stderr(f"hpcddp: {attempt.ranks} cannot be written ({error.strerror})\n")
    return meeting


def choose_interfaces(inputs: TaskInputs, leads_to_others: str | None) -> None:
    """Set the network interface for gloo and NCCL, unless the user chose one.

    Otherwise gloo takes the address of this host's own name, which /etc/hosts often gives as 127.0.1.1.

    Args:
        inputs: what the task read; its environment is changed.
        leads_to_others: the interface of this host that leads to the other hosts; None if it is not known.
    """
    single_host = inputs.env.nodes == 1
    interface = "lo" if single_host else leads_to_others
    if interface is None:
        return
    inputs.environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    if not single_host:
        inputs.environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def deadline_of(attempt: AttemptDirectory) -> Deadline:
    """Return the end of the job as the batch script recorded it."""
    start = read_start(attempt)
    if start is None:
        return Deadline(end_time=None, start_time=0.0)
    return Deadline(end_time=start.end_time, start_time=start.time)
