"""What one rank does between its start and its end."""

import pytest

from hpcddp.launch.attribution import is_peer_loss
from hpcddp.launch.rendezvous import PeerFailedError
from hpcddp.train.errors import DataError, UserCodeError


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Connection closed by peer [10.0.0.2]:4242"), True),
        (caused(RuntimeError("backward failed"), RuntimeError("Connection reset by peer")), True),
        (RuntimeError("NCCL error: remote error, a remote process exiting prematurely: remote process exited"), True),
        # One of Python's own sockets is the user's.
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (PeerFailedError("rank 3 on n2 failed before all ranks had met"), True),
        # The user's own server is no rank.
        (caused(UserCodeError("loading failed"), ConnectionRefusedError(111, "Connection refused")), False),
        (DataError("the store said: broken pipe"), False),
        (ValueError("my own mistake"), False),
    ],
)
def test_only_a_rank_that_has_gone_is_a_peer_loss(error: Exception, *, expected: bool) -> None:
    assert is_peer_loss(error) is expected
