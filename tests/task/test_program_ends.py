"""The end of a program that Slurm signals together with the task that started it."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcddp.task.program import passes_signals_on
from tests.facts import assert_facts, line_from
from tests.forked_python import ForkedPython, run_python
from tests.messages import GoldenMessages
from tests.slurm.programs import program
from tests.waiting import wait_until, wait_until_gone

ROOT = Path(__file__).parents[2]


# The program kills itself by SIGTERM, like a signal to the whole tree; the task gets SIGTERM a moment later, or never.
TASK = """
import os, signal, threading, sys, time
from contextlib import suppress
from hpcddp.stop.deadline import EndTime, KnownEnd
from hpcddp.stop.listener import LISTENER
from hpcddp.task import program

LISTENER.install()
end = EndTime(KnownEnd(end_time=None, time=0.0))
running = program.Program(["sh", "-c", sys.argv[2]], dict(os.environ), end=end, notice_s=0.0)
def hear():
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, running._process.pid, os.WEXITED | os.WNOWAIT)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[1] == "heard":
    threading.Thread(target=hear, daemon=True).start()
code = running.wait()
print(code, running.notice)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("heard", "body", "told"),
    [
        ("heard", "kill -TERM $$", f"{-signal.SIGTERM} terminated"),
        ("heard", "exit 143", "143 terminated"),
        ("heard", "trap 'exit 0' TERM; sleep 1; kill -TERM $$", "0 terminated"),
        # The handler is there for less than half a second.
        ("heard", "sleep 0.55; trap 'exit 0' TERM; sleep 0.4; kill -TERM $$", "0 terminated"),
        ("never", "trap 'exit 0' TERM; sleep 1; kill -TERM $$", "0 None"),
        ("never", "kill -TERM $$", f"{-signal.SIGTERM} None"),
        ("heard", "exit 3", "3 None"),
    ],
)
def test_a_program_that_a_shared_signal_ended_was_told_to_end(heard: str, body: str, told: str) -> None:
    done = run_python(TASK, heard, body)
    assert done.stdout.strip() == told, done.stderr


# The end times are checked twice; the program does not listen to SIGUSR2, and SIGKILL does not end it at once.
CHECKS = """
import os, signal, time, sys
from hpcddp.stop.deadline import EndTime, KnownEnd
from hpcddp.stop.listener import LISTENER
from hpcddp.task import program

LISTENER.install()
if sys.argv[1] == "warned":
    os.kill(os.getpid(), signal.SIGUSR2)
    while LISTENER.first(signal.SIGUSR2) is None:
        time.sleep(0.01)
end = EndTime(KnownEnd(end_time=time.time() + float(sys.argv[2]), time=0.0))
# A program that handles SIGUSR1 a moment after the warning.
body = "import signal, time; signal.signal(10, print); print('ready', flush=True); time.sleep(60)"
handles = [sys.executable, "-c", body] if sys.argv[3] else ["sleep", "60"]
read_end, write_end = os.pipe()
stdout = os.dup(1)
os.dup2(write_end, 1)
running = program.Program(handles, dict(os.environ), end=end, notice_s=1000.0)
os.dup2(stdout, 1)
if sys.argv[3]:
    running._handled = frozenset({signal.SIGUSR1})
    os.read(read_end, 100)
running._process.send_signal = lambda signum: print(signum.name)
for _ in range(2):
    running._check_end_time()
print(running.notice)
sys.stdout.flush()
os.kill(running._process.pid, signal.SIGKILL)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("signalled", "left_s", "handles", "facts", "sent"),
    [
        ("no", "100", "", ("is near: SIGTERM",), "SIGTERM"),
        ("warned", "100", "", ("is near", "does not handle SIGUSR2: SIGTERM"), "SIGUSR2\nSIGTERM"),
        ("warned", "100", "USR1", ("is near: SIGTERM",), "SIGUSR1\nSIGTERM"),
        ("no", "15", "", ("is near: SIGTERM",), "SIGTERM"),
        ("no", "7.9", "", ("is reached", "the program still runs: SIGKILL"), "SIGKILL"),
        ("no", "-1", "", ("is reached", "the program still runs: SIGKILL"), "SIGKILL"),
    ],
    ids=[
        "near",
        "near, after a warning",
        "near, handled after a warning",
        "more than 8 s before",
        "less than 8 s before",
        "reached",
    ],
)
def test_a_program_gets_each_signal_of_the_end_of_the_job_once_and_its_log_says_why(
    signalled: str, left_s: str, handles: str, facts: tuple[str, ...], sent: str, golden: GoldenMessages
) -> None:
    done = run_python(CHECKS, signalled, left_s, handles)
    assert_facts(golden.message(line_from(done.stderr, "the time limit")), *facts)
    *signals, notice = done.stdout.split()
    assert [name for name in signals if name != "SIGUSR2"] == [name for name in sent.split() if name != "SIGUSR2"]
    # What hpcddp itself ends is no failure of the program.
    assert notice == "deadline"


# The program says which signals it got, in their order; the task gets those of argv[1], one after the other.
LISTENS = """
import os, signal, sys, time
from hpcddp.stop.deadline import EndTime, KnownEnd
from hpcddp.task import program
from hpcddp.stop.listener import LISTENER

LISTENER.install()
body = '''
import os, signal, sys, time
for name in sys.argv[1:]:
    # One call: the handler of another signal may run in the middle of print().
    signal.signal(signal.Signals["SIG" + name], lambda *_, line=f"SIG{name}{chr(10)}".encode(): os.write(1, line))
print("ready", flush=True)
time.sleep(%s)
'''
signals, handled, saves, launcher, left = (words.split() for words in sys.argv[1:])
begins = "import subprocess, sys; subprocess.call([sys.executable, *sys.argv[1:]])"
# As the starter of a container: it handles every signal, and the program begins without the ignored ones.
starter = '''
import os, signal, subprocess, sys
all_signals = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM]
for number in all_signals:
    signal.signal(number, lambda number, _: child.send_signal(number))
child = subprocess.Popen([sys.executable, *sys.argv[3:]])
sys.exit(child.wait())
'''
with open("singularity", "w") as file:
    file.write(f"#!{sys.executable}\\n{starter}")
os.chmod("singularity", 0o700)
begin = [sys.executable]
if launcher:
    begin = {"launcher": [*begin, "-c", begins], "container": ["./singularity", "run", "i.sif"]}[launcher[-1]]
def ends_in(seconds):
    return EndTime(KnownEnd(end_time=time.time() + seconds, time=0.0))
environment = dict(os.environ)
read_end, write_end = os.pipe()
os.dup2(write_end, 1)
running = program.Program(
    [*begin, "-c", body % 2, *handled], environment, end=ends_in(600), notice_s=0.5, lead_s=5.5,
    save_signal=saves[0] if saves else None,
    is_launcher=launcher[-1:] == ["launcher"] or program.passes_signals_on(begin + ["x"]),
)
with open(read_end) as said:
    assert said.readline() == "ready\\n"
    running._end = ends_in(float(left[0]))
    for name in signals:
        os.kill(os.getpid(), signal.Signals["SIG" + name])
        time.sleep(0.3)
    code = running.wait()
    os.close(write_end)
    os.close(1)
    print(code, running.notice, *said.read().split(), file=sys.stderr)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("signals", "handled", "saves", "launcher", "got"),
    [
        ("USR2", "USR1 TERM", "", "", "0 warned SIGUSR1"),
        ("TERM", "USR1 TERM", "", "", "0 terminated SIGUSR1 SIGTERM"),
        ("TERM TERM", "USR1 TERM", "", "", "0 terminated SIGUSR1 SIGTERM SIGTERM"),
        ("USR2 TERM", "USR1 USR2 TERM", "", "", "0 warned SIGUSR2 SIGTERM"),
        ("USR2 TERM", "USR1 USR2 TERM", "USR1", "", "0 warned SIGUSR1 SIGUSR1 SIGTERM"),
        ("USR2", "INT", "INT", "", "0 warned SIGINT"),
        ("USR2", "TERM", "USR1", "", "0 None"),
        ("TERM", "TERM", "USR1", "", "0 terminated SIGTERM"),
        ("USR2", "USR1", "", "a launcher", "0 warned SIGUSR1"),
        ("USR2", "USR1 USR2", "", "a launcher", "0 warned SIGUSR2"),
        ("USR2", "HUP", "HUP", "a launcher", "0 warned SIGHUP"),
        ("USR2", "", "", "a launcher", "0 None"),
        ("USR2", "TERM", "", "", "0 warned SIGTERM"),
        ("USR2", "TERM", "TERM", "", "0 warned SIGTERM"),
        ("USR2", "USR1 TERM", "TERM", "", "0 warned SIGTERM"),
        ("USR2 USR2", "TERM", "", "", "0 warned SIGTERM"),
        ("TERM", "TERM", "TERM", "", "0 terminated SIGTERM"),
        ("USR2", "TERM", "", "a launcher", "0 warned SIGTERM"),
        ("USR2", "TERM", "", "a container", "0 warned SIGTERM"),
        ("USR2", "USR1 TERM", "", "a container", "0 warned SIGUSR1"),
        ("USR2 TERM", "USR2 TERM", "", "a container", "0 warned SIGUSR2 SIGTERM"),
        ("USR2", "", "", "a container", "0 None"),
    ],
)
def test_a_program_gets_the_signal_after_which_it_saves(
    tmp_path: Path, signals: str, handled: str, saves: str, launcher: str, got: str
) -> None:
    done = run_python(LISTENS, signals, handled, saves, launcher, "600", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == got, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "apptainer exec --nv i.sif python train.py",
        "/usr/bin/singularity run i.sif train",
        "env -C /work singularity exec i.sif python train.py",
        "bash -c 'cd /work && exec apptainer run i.sif'",
    ],
)
def test_the_commands_of_containers_are_known(command: str) -> None:
    assert passes_signals_on(shlex.split(command))


@pytest.mark.parametrize(
    "command",
    [
        # The shell stays between them, and handles nothing.
        "bash -c 'apptainer exec i.sif a; b'",
        "python train.py --image singularity",
        "shifter python train.py",
    ],
)
def test_other_commands_show_what_they_handle(command: str) -> None:
    assert not passes_signals_on(shlex.split(command))


@pytest.mark.parametrize(
    ("handled", "saves", "got"),
    [
        ("TERM", "", "0 deadline SIGTERM"),
        ("USR1 TERM", "TERM", "0 deadline SIGTERM"),
        ("USR1 TERM", "", "0 None"),
        ("USR2 TERM", "", "0 None"),
        ("", "", "0 None"),
    ],
)
def test_only_a_program_that_saves_at_sigterm_gets_it_a_lead_before_the_end(
    tmp_path: Path, handled: str, saves: str, got: str
) -> None:
    # The program would end by itself 4 s before the end, and 3.5 s before others get SIGTERM.
    done = run_python(LISTENS, "", handled, saves, "", "6", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == got, done.stderr


# The program ends after the step in which it got SIGTERM, as Lightning does; Slurm signals it as well as the task.
ENDS_WITH_ITS_STEP = """
import os, signal, sys, time
from hpcddp.stop.deadline import EndTime, KnownEnd
from hpcddp.task import program
from hpcddp.stop.listener import LISTENER

LISTENER.install()
body = '''
import os, signal, time
signals = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: signals.append(signal.Signals(number).name))
print(os.getpid(), flush=True)
while "SIGTERM" not in signals:
    time.sleep(2)
print(*signals)
'''
def ask_slurm():
    time.sleep(4)
    if sys.argv[1] == "fails":
        raise OSError("no answer")
end = EndTime(KnownEnd(end_time=time.time() + 600, time=0.0))
read_end, write_end = os.pipe()
os.dup2(write_end, 1)
running = program.Program(
    [sys.executable, "-c", body], dict(os.environ), end=end, notice_s=5, ask_cause=ask_slurm,
)
with open(read_end) as said:
    task, child = os.getpid(), int(said.readline())
    # It is in a step.
    time.sleep(0.2)
    for number in (signal.SIGCONT, signal.SIGTERM):
        os.kill(child, number)
    os.kill(task, signal.SIGTERM)
    time.sleep(0.3)
    # At the end of the grace time, or without one, they come again.
    os.kill(child, signal.SIGCONT)
    os.kill(task, signal.SIGTERM)
    code = running.wait()
    os.close(write_end)
    os.close(1)
    print("ended:", code, *said.read().split(), file=sys.stderr)
os._exit(0)
"""


@pytest.mark.parametrize("slurm", ["answers", "fails"])
def test_a_program_that_ends_with_its_step_after_sigterm_saves_first(slurm: str) -> None:
    done = run_python(ENDS_WITH_ITS_STEP, slurm)
    # The traceback of a thread may come later.
    (ended,) = (line for line in done.stderr.splitlines() if line.startswith("ended: "))
    assert ended.split()[1] == "0", done.stderr
    assert "SIGUSR1" in ended, done.stderr


# The program requeues its job in the handler of the signal after which it saves, as Lightning does.
REQUEUES_ITS_JOB = """
import os, signal, sys, time
from pathlib import Path
from hpcddp.stop.deadline import EndTime, KnownEnd
from hpcddp.task import program
from hpcddp.stop.listener import LISTENER

LISTENER.install()
# A busy machine, on which this process does not get on.
program._print = lambda _: time.sleep(0.5)
answer = Path(sys.argv[1])
body = '''
import os, signal, sys, time
signals = []
def requeue(*_):
    # It saves before.
    time.sleep(0.2)
    signals.append("after" if os.path.exists(sys.argv[1]) else "before")
signal.signal(signal.SIGUSR1, requeue)
signal.signal(signal.SIGTERM, lambda *_: signals.append("SIGTERM"))
print(os.getpid(), flush=True)
while "SIGTERM" not in signals:
    time.sleep(0.1)
print(*signals)
'''
def ask_slurm():
    time.sleep(0.8)
    answer.touch()
end = EndTime(KnownEnd(end_time=time.time() + 600, time=0.0))
read_end, write_end = os.pipe()
os.dup2(write_end, 1)
running = program.Program(
    [sys.executable, "-c", body, str(answer)], dict(os.environ), end=end, notice_s=5, ask_cause=ask_slurm
)
with open(read_end) as said:
    child = int(said.readline())
    os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[2] == "srun":
        # It passes on the SIGCONT that Slurm sends before SIGTERM, a moment later.
        time.sleep(0.7)
        os.kill(child, signal.SIGCONT)
    code = running.wait()
    os.close(write_end)
    os.close(1)
    print("ended:", code, *said.read().split(), file=sys.stderr)
os._exit(0)
"""


@pytest.mark.parametrize("continues", ["nobody", "srun"])
def test_a_program_cannot_requeue_its_job_before_slurm_has_said_why_it_ends(tmp_path: Path, continues: str) -> None:
    done = run_python(REQUEUES_ITS_JOB, str(tmp_path / "answer"), continues)
    assert sorted(done.stderr.splitlines()[-1].split()) == ["0", "SIGTERM", "after", "ended:"], done.stderr


# Rank 0 asks Slurm and writes its answer for the other ranks.
MOVED = """
import os, sys, time
from pathlib import Path
from hpcddp.run.directory import AttemptDirectory
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop.deadline import Deadline
from hpcddp.stop.listener import LISTENER
from hpcddp.task import program

LISTENER.install()
env = RankEnv(rank=int(sys.argv[1]), local_rank=0, world_size=2, local_world_size=1, node_rank=0, nodes=2,
              source="srun")
now = time.time()
deadline = Deadline(end_time=now + float(sys.argv[3]), start_time=now - 1000)
end = program._end_time(env, AttemptDirectory(Path(sys.argv[2])), os.environ, deadline)
running = program.Program(["sleep", "18"], dict(os.environ), end=end, notice_s=10)
print(running.wait(), running.notice)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "known_s", "moved_s", "told"), [(2, 2, 1200, "0 None"), (1, 1200, 25, f"{-signal.SIGTERM} deadline")]
)
def test_an_end_of_the_job_that_slurm_has_moved_counts(
    ranks: int, known_s: float, moved_s: float, told: str, tmp_path: Path, golden: GoldenMessages
) -> None:
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + moved_s))
    answer = f"JobState=RUNNING PreemptTime=None TimeLimit=00:20:00 EndTime={text}"
    path = program(tmp_path, "scontrol", f"echo asked >>{tmp_path}/asked; echo '{answer}'")["PATH"]
    attempt = tmp_path / "attempts" / "0"
    attempt.mkdir(parents=True)
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "5"}
    running = []
    for rank in range(ranks):
        running.append(ForkedPython(MOVED, str(rank), str(attempt), str(known_s), env=environment))
        if ranks > 1:
            wait_until((attempt / "end-time.json").exists, "the answer to rank 0")
    said = [rank.communicate(timeout=60) for rank in running]
    assert [out.strip() for out, _ in said] == [told] * ranks, said
    for _, errors in said:
        message = golden.message(line_from(errors, "Slurm has moved"), {text.replace("T", " "): "TIME"})
        assert_facts(message, "the end of the job", text.replace("T", " "))
    # Every 5 s before the end is acted on.
    assert (tmp_path / "asked").read_text().count("asked") in ({1} if ranks > 1 else {3, 4})


# A newer attempt begins while the program and what it has started run.
FENCED = """
import os, sys
from pathlib import Path
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.ownership import FencedError
from hpcddp.stop.deadline import EndTime, KnownEnd
from hpcddp.stop.listener import LISTENER
from hpcddp.task import program

LISTENER.install()
program._LOOK_FOR_NEWER_ATTEMPT_EVERY_S = 0.2
attempt = AttemptDirectory.from_text(sys.argv[1])
fence = program._Fence(attempt)
end = EndTime(KnownEnd(end_time=None, time=0.0))
body = "trap 'touch saved' TERM; sleep 600 & echo $! >child; wait; wait"
running = program.Program(
    ["sh", "-c", body], dict(os.environ), end=end, notice_s=0.0, on_poll=lambda _: fence.check()
)
print(running._process.pid, flush=True)
try:
    running.wait()
except FencedError as error:
    print(error.message, flush=True)
os._exit(0)
"""


def test_a_program_whose_run_a_newer_attempt_owns_is_killed_before_it_can_save(
    tmp_path: Path, golden: GoldenMessages
) -> None:
    attempt = tmp_path / "runs" / "demo" / "r1" / "attempts" / "0"
    attempt.mkdir(parents=True)
    task = ForkedPython(FENCED, str(attempt), cwd=tmp_path)
    child = tmp_path / "child"
    wait_until(lambda: child.exists() and child.read_text().strip(), "the child of the program")
    time.sleep(1)
    assert task.poll() is None
    attempt.with_name("1").mkdir()
    out, _ = task.communicate(timeout=60)
    pid, message = out.splitlines()
    assert "attempt 1 owns the run r1" in golden.message(message)
    for process_id in (pid, child.read_text()):
        wait_until_gone(int(process_id))
    assert not (tmp_path / "saved").exists()


# Two ranks agree in each step whether to save, and meet again in the save, as a training with collectives does.
MEETS_IN_ITS_SAVE = """
import os, signal, socket, sys, time
from hpcddp.stop.deadline import EndTime, KnownEnd
from hpcddp.task import program
from hpcddp.stop.listener import LISTENER

LISTENER.install()
body = '''
import os, signal, socket, sys, time
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
signal.signal(signal.SIGTERM, lambda *_: None)
peer = socket.socket(fileno=int(sys.argv[1]))
def exchange(flag):
    peer.sendall(bytes([flag]))
    return flag | peer.recv(1)[0]
print("ready", flush=True)
while not exchange(bool(asked)):
    time.sleep(0.01)
exchange(0)
print("saved", flush=True)
# SIGTERM may follow at any moment, and Python gives up its handlers before it ends.
os._exit(0)
'''
descriptor = int(sys.argv[1])
os.set_inheritable(descriptor, True)
start = program.subprocess.Popen
program.subprocess.Popen = lambda *words, **given: start(*words, **given, pass_fds=[descriptor])
end = EndTime(KnownEnd(end_time=time.time() + 600, time=0.0))
ask_slurm = (lambda: time.sleep(1.5)) if sys.argv[2] == "0" else None
running = program.Program(
    [sys.executable, "-c", body, str(descriptor)], dict(os.environ), end=end, notice_s=5, ask_cause=ask_slurm
)
print("ended:", running.wait(), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    "trial", [0, *(pytest.param(trial, marks=pytest.mark.long("another place of a step")) for trial in (1, 2))]
)
def test_a_rank_that_is_halted_while_slurm_is_asked_holds_up_no_save_that_has_collectives(trial: int) -> None:
    ends = socket.socketpair()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEETS_IN_ITS_SAVE, str(end.fileno()), str(rank)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            pass_fds=[end.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, end in enumerate(ends)
    ]
    for end in ends:
        end.close()
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        # At another place of their steps in each trial.
        time.sleep(0.1 + 0.004 * trial)
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["saved\nended: 0\n"] * 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
