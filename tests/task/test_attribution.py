"""Failure records of a rank, and their text in its log."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.failure import read_failures
from hpcddp.slurm.rank_env import own_host, own_rank
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.task.attribution import failure_record, failure_text, is_peer_loss, peer_failure_record, save_failure
from hpcddp.task.process_state import ProcessState
from hpcddp.task.rendezvous import PeerFailedError
from hpcddp.train.errors import DataError, UserCodeError
from tests.facts import assert_facts
from tests.messages import GoldenMessages

PEER_LOSS = RuntimeError("Connection closed by peer [10.0.0.2]:4242")


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def process_state(now: list[float]) -> ProcessState:
    known = ProcessState()
    known.rank, known.host, known.device = 3, "n2", "cuda:1"
    known.heartbeat = Heartbeat(300.0, monotonic=lambda: now[0])
    known.heartbeat.at_step(120)
    return known


def test_a_record_says_who_where_and_how_far(process_state: ProcessState) -> None:
    record = failure_record(ValueError("boom"), process_state=process_state)
    assert (record.rank, record.host, record.device, record.step) == (3, "n2", "cuda:1", 120)
    assert (record.kind, record.message, record.exit_code, record.secondary) == ("ValueError", "boom", 70, False)
    assert "ValueError: boom" in record.traceback


def test_an_error_of_ours_keeps_its_kind_and_code(process_state: ProcessState) -> None:
    record = failure_record(DataError("no data"), process_state=process_state)
    assert (record.kind, record.exit_code) == ("data", 70)


def test_a_full_disk_is_no_error_of_the_users_code(process_state: ProcessState) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    assert failure_record(error, process_state=process_state).exit_code == 71


def test_an_error_that_names_broken_hardware_is_no_error_of_the_users_code(process_state: ProcessState) -> None:
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    assert failure_record(error, process_state=process_state).exit_code == 71


def test_the_error_of_a_callback_of_torch_is_told_without_its_frames(process_state: ProcessState) -> None:
    from torch.futures import Future

    numbers: Future[None] = Future()
    ended = numbers.then(_fail)
    numbers.set_result(None)
    with pytest.raises(RuntimeError) as failed:
        ended.wait()
    record = failure_record(failed.value, process_state=process_state)
    assert record.message == "the communicator was aborted: another rank has gone"
    assert record.secondary


def _fail(_: object) -> None:
    raise RuntimeError("the communicator was aborted: another rank has gone")


def test_a_rank_whose_peer_has_gone_is_secondary(process_state: ProcessState) -> None:
    record = failure_record(PEER_LOSS, process_state=process_state)
    assert (record.secondary, record.exit_code) == (True, 71)


def test_a_rank_that_stood_still_is_the_first_cause_although_it_fails_last(
    process_state: ProcessState, now: list[float], golden: GoldenMessages
) -> None:
    now[0] += 262.0
    process_state.heartbeat.look()
    for record in (
        failure_record(PEER_LOSS, process_state=process_state),
        peer_failure_record(failure_record(PEER_LOSS), process_state),
    ):
        assert (record.kind, record.secondary, record.exit_code) == ("stood_still", False, 124)
        assert_facts(golden.message(record.message), "the process did not run for 262 s", "it was stopped, or its host")


def test_the_record_of_a_rank_that_ends_because_of_another_names_the_other(
    process_state: ProcessState, golden: GoldenMessages
) -> None:
    record = peer_failure_record(failure_record(ValueError("boom"), process_state=process_state), process_state)
    assert (record.kind, record.secondary, record.exit_code) == ("peer_failed", True, 71)
    message = golden.message(record.message)
    assert_facts(message, "rank 3 on n2 (cuda:1) failed", "this rank was told to end", "ValueError: boom")


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (ValueError("boom"), ("ValueError: boom", "the job is not requeued")),
        (PEER_LOSS, (f"RuntimeError: {PEER_LOSS}", "failed as a consequence", "the batch log names the one")),
    ],
    ids=["an error of its own", "the loss of a peer"],
)
def test_the_failure_text_names_the_error_and_what_follows_from_it(
    process_state: ProcessState, error: Exception, facts: tuple[str, ...], golden: GoldenMessages
) -> None:
    lines = failure_text(failure_record(error, process_state=process_state)).splitlines()[-2:]
    assert_facts(golden.message("\n".join(lines)), "rank 3 on n2 (cuda:1) failed after step 120", *facts)


def test_the_failure_text_of_an_infrastructure_failure_names_max_failures(
    process_state: ProcessState, golden: GoldenMessages
) -> None:
    record = failure_record(OSError("gone"), exit_code=71, process_state=process_state)
    last_line = failure_text(record).splitlines()[-1]
    assert_facts(golden.message(last_line), "requeue.max_failures", "how often a run goes on")


@pytest.mark.parametrize(
    ("environment", "rank", "host"),
    [
        ({"SLURM_PROCID": "5", "SLURMD_NODENAME": "n7"}, 5, "n7"),
        ({"SUBMITIT_LOCAL_GLOBALID": "1", "SLURM_PROCID": "9", "SLURMD_NODENAME": "n1"}, 1, "n1"),
        ({"RANK": "not a number", "SLURMD_NODENAME": "n1"}, 0, "n1"),
    ],
)
def test_rank_and_host_are_known_even_if_the_rank_environment_is_wrong(
    environment: dict[str, str], rank: int, host: str
) -> None:
    assert (own_rank(environment), own_host(environment)) == (rank, host)


def test_a_record_that_cannot_be_written_is_reported(
    process_state: ProcessState, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    attempt = RunDirectory(tmp_path / "gone").attempt(0)
    save_failure(attempt, failure_record(ValueError("boom"), process_state=process_state))
    assert f"hpcddp: {attempt.rank_error(3)} cannot be written (" in capfd.readouterr().err


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Connection closed by peer [10.0.0.2]:4242"), True),
        (caused(RuntimeError("backward failed"), RuntimeError("Connection reset by peer")), True),
        (RuntimeError("NCCL error: remote error, a remote process exiting prematurely: remote process exited"), True),
        (RuntimeError("failed to recv, got 0 bytes. Connection was likely closed."), True),
        # A socket of the user's own code.
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (PeerFailedError("rank 3 on n2 failed before all ranks had met"), True),
        # A server of the user.
        (caused(UserCodeError("loading failed"), ConnectionRefusedError(111, "Connection refused")), False),
        (DataError("the store said: broken pipe"), False),
        (ValueError("my own mistake"), False),
    ],
)
def test_only_a_lost_connection_to_a_rank_is_a_peer_loss(error: Exception, *, expected: bool) -> None:
    assert is_peer_loss(error) is expected


def raised(error: Exception) -> Exception:
    """Return an error that Python code has raised, unlike those of torch's collectives."""
    try:
        raise error  # noqa: TRY301
    except Exception as caught:  # noqa: BLE001
        return caught


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("label server: connection refused"),
        # torch/_utils.py raises this in the main process.
        RuntimeError("Caught ApiError in DataLoader worker process 0.\nApiError: Connection reset by peer"),
    ],
)
def test_an_error_that_code_has_raised_itself_is_no_peer_loss(error: Exception) -> None:
    assert not is_peer_loss(raised(error))
    wrapped = raised(caused(RuntimeError("the step failed"), PEER_LOSS))
    assert is_peer_loss(wrapped)


def test_a_text_that_is_not_utf_8_does_not_lose_the_record(tmp_path: Path, process_state: ProcessState) -> None:
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    record = failure_record(FileNotFoundError("no file 'caf\udce9.jpg'"), process_state=process_state)
    save_failure(attempt, record)
    (found,) = read_failures(attempt)
    assert (found.exit_code, found.message) == (70, "no file 'caf\\udce9.jpg'")
    assert "FileNotFoundError: no file 'caf\\udce9.jpg'" in found.traceback
