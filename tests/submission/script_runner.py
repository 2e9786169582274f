"""Runs rendered scripts with small programs in place of python, srun and module, which record how they were called."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.submission.render import render_script
from tests.submission.requests import request_of
from tests.waiting import wait_until

LAUNCHERS: tuple[Cluster, ...] = ("slurm", "local", "here")
PYTHON = r"""#!/bin/bash
case " $* " in
  *" hpcddp.supervise begin "*)
    printf '%s\0' "$@" > "$RECORD/begin"; cat > "$RECORD/job.yaml"; cat /proc/self/status > "$RECORD/begin-status"
    pwd > "$RECORD/directory"
    while [[ -e $RECORD/hold-begin ]]; do sleep 0.02; done
    [[ -v ATTEMPT ]] || ATTEMPT=$RECORD/attempts/0
    [[ -z $ATTEMPT ]] || mkdir -p "$ATTEMPT"
    printf '%s' "$ATTEMPT"; exit "${BEGIN_CODE:-0}" ;;
  *" hpcddp.supervise end "*) printf '%s\0' "$@" > "$RECORD/end"
    cat /proc/self/status > "$RECORD/end-status"
    while [[ -e $RECORD/hold-end ]]; do sleep 0.02; done
    if [[ ${RESTARTS:-0} -gt 0 && ! -e $RECORD/attempts/1 ]]; then
      mkdir "$RECORD/attempts/1"; echo "$RECORD/attempts/1"; exit 75
    fi
    exit "${END_CODE:-0}" ;;
  *" hpcddp.supervise watch "*) printf '%s\0' "$@" > "$RECORD/watch" ;;
  *) printf '%s\0' "$@" > "$RECORD/task"; printf '%s\0' "$0" > "$RECORD/program"; env -0 > "$RECORD/environment"
    echo "this is the task"
    trap 'echo TERM >> "$RECORD/signals"' TERM
    touch "$RECORD/running"
    while [[ -e $RECORD/hold ]]; do sleep 0.02; done
    exit "${TASK_CODE:-0}" ;;
esac
"""
SRUN = r"""#!/bin/bash
printf '%s\0' "$@" > "$RECORD/srun"
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 exec "$@"
"""
MODULE = r"""module() { printf '%s\0' "$@" >> "$RECORD/module"; return "${MODULE_CODE:-0}"; }
"""


@dataclass(frozen=True)
class ScriptRunner:
    """Runs scripts in a directory and reads what the programs recorded.

    Args:
        directory: a directory of its own, which is also the working directory.
    """

    directory: Path

    @property
    def record(self) -> Path:
        return self.directory / "record"

    @property
    def errors(self) -> Path:
        return self.directory / "errors"

    @property
    def python(self) -> Path:
        return self.directory / "python"

    def set_up(self, python: Path | None = None) -> None:
        """Put the programs in their places; ``python`` may have any name."""
        programs = {python or self.python: PYTHON, self.directory / "bin" / "srun": SRUN}
        for path, text in programs.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o700)
        self.record.mkdir()
        (self.directory / "init").mkdir()
        (self.directory / "init" / "bash").write_text(MODULE)

    def environment(self, **more: str) -> dict[str, str]:
        path = f"{self.directory / 'bin'}:/usr/bin:/bin"
        home = {"PATH": path, "RECORD": str(self.record), "MODULESHOME": str(self.directory), "LC_ALL": "C.UTF-8"}
        return home | more

    def start(self, script: str, **more: str) -> subprocess.Popen[bytes]:
        return self.start_with(script, self.environment(**more))

    def start_with(self, script: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        path = self.directory / "job.sh"
        path.write_bytes(script.encode())
        with self.errors.open("wb") as errors:
            return subprocess.Popen(
                ["/bin/bash", str(path)],
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def run(self, script: str, **more: str) -> tuple[int, str]:
        """Run the script to its end and return its exit code and what it printed to stderr."""
        return self.run_with(script, self.environment(**more))

    def run_with(self, script: str, environment: dict[str, str]) -> tuple[int, str]:
        code = self.end_of(self.start_with(script, environment))
        return code, self.errors.read_text(encoding="utf-8")

    def end_of(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(timeout=60)
        finally:
            process.kill()

    def signal(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Signal the shell, and wait until it waits for its tasks again.

        bash loses the code of a process that ends at the moment of a signal, and another signal at that moment.
        """
        process.send_signal(number)

        def waits() -> bool:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines)
            return status["State"].startswith("S") and not int(status["ShdPnd"], 16) >> (number - 1) & 1

        wait_until(waits, "the trap of the script")

    def words(self, name: str) -> list[str]:
        """Return the words that a program was called with, or [] if it was not."""
        path = self.record / name
        return path.read_bytes().decode().split("\0")[:-1] if path.exists() else []

    def end_options(self) -> list[str]:
        """Return the options of the last call of ``supervise end``, but for the one that every script gives."""
        command, options = self.words("end")[:5], self.words("end")[5:]
        assert command == ["-P", "-m", "hpcddp.supervise", "end", "--may-restart"]
        return options


def script_of(
    runner: ScriptRunner,
    *,
    launcher: Cluster = "slurm",
    run_id: str | None = "r1",
    template: str | None = None,
    **fields: Any,
) -> str:
    """Render the script of a small training, changed by ``fields``, for the runner's interpreter."""
    job = {
        "name": "example",
        "batch": {"global_batch_size": 8},
        "train": {"model": "resnet18", "dataset": "digits"},
        **fields,
    }
    resolved = ResolvedJob(spec=JobSpec.model_validate(job), origins={})
    request = request_of(resolved, python=str(runner.python), run_id=run_id, cluster=launcher, template=template)
    return render_script(request).text
