"""The signal listener, in separate processes."""

from __future__ import annotations

import ast
import dis
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcddp.stop.listener import REASONS, ReceivedSignal, do_nothing
from hpcddp.stop.reasons import StopReason
from tests.messages import GoldenMessages

ROOT = Path(__file__).parents[2]
BEGIN = """
import ctypes, json, os, signal, threading, time
from hpcddp.stop.listener import LISTENER, do_nothing
LISTENER.install()
def kill_oneself(*signals):
    for number in signals:
        os.kill(os.getpid(), number)
def wait_for(met):
    end = time.monotonic() + 30
    while not met() and time.monotonic() < end:
        time.sleep(0.01)
"""


def run(program: str) -> tuple[Any, str]:
    """Run a program that begins as a task does; return what it printed as JSON, and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(("signum", "reason"), list(REASONS.items()))
def test_each_signal_has_its_reason_and_ends_no_process(
    signum: signal.Signals, reason: StopReason, golden: GoldenMessages
) -> None:
    answer, said = run(f"""
kill_oneself({int(signum)})
wait_for(LISTENER.reason)
print(json.dumps([LISTENER.reason().word, LISTENER.first(signal.Signals({int(signum)})).signum.name]))
""")
    assert answer == [reason.word, signum.name]
    time_of_day = said.split()[1]
    assert f"{signum.name}: the training will be saved" in golden.message(said, {time_of_day: "TIME"})


def test_the_most_important_reason_is_returned() -> None:
    answer, _ = run("""
kill_oneself(signal.SIGTERM, signal.SIGUSR2)
wait_for(lambda: LISTENER.first(signal.SIGUSR2) and LISTENER.first(signal.SIGTERM))
print(json.dumps(LISTENER.reason().word))
""")
    assert answer == "terminated"


def test_many_signals_are_reported_once_of_each_kind() -> None:
    answer, said = run("""
for _ in range(200):
    kill_oneself(signal.SIGTERM, signal.SIGUSR2)
wait_for(lambda: LISTENER.first(signal.SIGUSR2) and LISTENER.first(signal.SIGTERM))
calls = []
LISTENER.add_callback(lambda received: calls.append(received.signum.name))
for _ in range(200):
    kill_oneself(signal.SIGTERM)
wait_for(lambda: len(calls) >= 2)
time.sleep(0.2)
print(json.dumps(sorted(calls)))
""")
    assert answer == ["SIGTERM", "SIGUSR2"]
    assert (said.count("SIGTERM"), said.count("SIGUSR2")) == (1, 1)


def test_a_signal_is_received_while_the_main_thread_waits_below_python() -> None:
    answer, _ = run("""
heard, handled, freed = [], [], []
signal.signal(signal.SIGTERM, lambda *_: handled.append(time.monotonic()))
LISTENER.add_callback(lambda received: heard.append(time.monotonic()))
# A mutex goes on waiting after a signal, as a collective does.
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
threading.Timer(0.3, kill_oneself, [signal.SIGTERM]).start()
def free():
    freed.append(time.monotonic())
    libc.pthread_mutex_unlock(mutex)
threading.Timer(1.5, free).start()
libc.pthread_mutex_lock(mutex)
wait_for(lambda: heard and handled)
print(json.dumps([heard[0] < freed[0], handled[0] < freed[0]]))
""")
    assert answer == [True, False]


def test_handlers_of_others_are_replaced_and_nothing_is_lost_meanwhile() -> None:
    answer, _ = run("""
def theirs(*_):
    pass
for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGCONT):
    signal.signal(number, theirs)
kill_oneself(signal.SIGTERM)
wait_for(LISTENER.reason)
LISTENER.reinstall()
ours = [signal.getsignal(number) is do_nothing for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)]
print(json.dumps([LISTENER.reason().word, ours, signal.getsignal(signal.SIGCONT) == signal.SIG_DFL]))
""")
    assert answer == ["terminated", [True, True, True], True]


def test_a_forked_child_can_be_ended_and_its_parent_receives_nothing() -> None:
    answer, _ = run("""
pid = os.fork()
if pid == 0:
    time.sleep(60)
    os._exit(0)
time.sleep(0.3)
os.kill(pid, signal.SIGUSR2)
time.sleep(0.2)
alive = os.waitpid(pid, os.WNOHANG) == (0, 0)
os.kill(pid, signal.SIGTERM)
_, status = os.waitpid(pid, 0)
time.sleep(0.2)
print(json.dumps([alive, os.WTERMSIG(status), LISTENER.reason().word]))
""")
    assert answer == [True, signal.SIGTERM, "none"]


def test_a_failing_callback_does_not_stop_the_listener() -> None:
    answer, _ = run("""
threading.excepthook = lambda _: None
LISTENER.add_callback(lambda received: 1 / 0)
kill_oneself(signal.SIGUSR2)
wait_for(LISTENER.reason)
kill_oneself(signal.SIGTERM)
wait_for(lambda: LISTENER.first(signal.SIGTERM))
print(json.dumps(LISTENER.reason().word))
""")
    assert answer == "terminated"


def test_a_received_signal_has_its_reason() -> None:
    assert ReceivedSignal(signum=signal.SIGUSR2, monotonic=1.0, time=2.0).reason is StopReason.WARNED


def test_our_handler_does_nothing() -> None:
    names = {instruction.opname for instruction in dis.get_instructions(do_nothing)}
    assert names <= {"RESUME", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}
    assert do_nothing.__code__.co_names == ()


def handlers_in(path: Path) -> list[str]:
    """Return the source of every handler that a file installs."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [ast.unparse(call.args[1]) for call in calls if ast.unparse(call.func) == "signal.signal"]


def test_no_handler_in_a_task_does_anything_whatever_file_installs_it() -> None:
    """No collective, file or subprocess in a handler: there is no handler that does anything at all."""
    found = {
        (path.relative_to(ROOT).as_posix(), handler)
        for path in (ROOT / "hpcddp").rglob("*.py")
        for handler in handlers_in(path)
    }
    harmless = {"do_nothing", "signal.SIG_IGN", "signal.SIG_DFL", "signal.default_int_handler"}
    others = {(path, handler) for path, handler in found if handler not in harmless}
    # These give back what had been there before.
    assert others <= {
        ("hpcddp/stop/listener.py", "signal.SIG_DFL if handler is None else handler"),
        ("hpcddp/stop/listener.py", "signal.SIG_IGN if warning or handler is None else handler"),
        ("hpcddp/cli/follow.py", "previous"),
        ("hpcddp/submission/interrupts.py", "handler_before"),
        # These are in processes that have no collectives. The first is default_int_handler, or notes the signal.
        ("hpcddp/submission/interrupts.py", "handler"),
        ("hpcddp/supervise/stage.py", "_exit"),
    }
    assert ("hpcddp/stop/listener.py", "do_nothing") in found


def test_the_listener_imports_the_standard_library_only() -> None:
    program = """
import sys
before = set(sys.modules)
import hpcddp.stop.listener
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(name for name in new if name not in sys.stdlib_module_names))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "['hpcddp']"


def test_the_task_installs_the_listener_before_its_other_imports() -> None:
    tree = ast.parse((ROOT / "hpcddp/task/__main__.py").read_text(encoding="utf-8"))
    statements = [ast.unparse(statement) for statement in tree.body]
    assert statements[1:3] == ["from __future__ import annotations", "from hpcddp.stop.listener import LISTENER"]
    assert statements[3] == "if __name__ == '__main__':\n    LISTENER.install()"


def test_time_is_that_of_the_signal() -> None:
    before = time.time()
    answer, _ = run("""
kill_oneself(signal.SIGTERM)
wait_for(LISTENER.reason)
print(json.dumps(LISTENER.first(signal.SIGTERM).time))
""")
    assert before <= answer <= time.time()


def test_a_log_on_a_full_disk_keeps_no_signal_from_its_callbacks() -> None:
    answer, _ = run("""
import sys
sys.stderr.flush()
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
called = []
LISTENER.add_callback(lambda received: called.append(received.signum.name))
for number in (signal.SIGUSR2, signal.SIGTERM):
    kill_oneself(number)
    wait_for(lambda: LISTENER.first(number))
wait_for(lambda: len(called) == 2)
print(json.dumps(sorted(called)))
""")
    assert answer == ["SIGTERM", "SIGUSR2"]
