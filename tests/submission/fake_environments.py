"""Small programs for a ``ScriptRunner`` in place of conda, virtual environments, apptainer and srun with pyxis."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from tests.submission.script_runner import PYTHON, ScriptRunner

# The hook of the real conda defines a function of this name; its activate fails for an environment that is not there.
CONDA = r"""#!/bin/bash
[[ $* == "shell.bash hook" ]] || exit 9
cat <<'HOOK'
conda() {
  [[ $1 == activate ]] || return 9
  [[ -d $2 ]] || { echo "EnvironmentLocationNotFound: $2" >&2; return 1; }
  export CONDA_PREFIX=$2 PATH=$2/bin:$PATH
}
HOOK
"""
ACTIVATE = 'export VIRTUAL_ENV={}\nexport PATH="$VIRTUAL_ENV/bin:$PATH"\n'
# Takes apptainer's options off, and finds the image's interpreter on a PATH of its own.
# Its shell evaluates the variables for the container, unless it is told not to.
APPTAINER = r"""#!/bin/bash
for variable in "${!APPTAINERENV_@}"; do
  name=${variable#APPTAINERENV_}
  if [[ " $* " == *" --no-eval "* ]]; then export "$name=${!variable}"; else eval "export $name=\"${!variable}\""; fi
done
printf '%s\0' "$@" > "$RECORD/${0##*/}"
grep SigIgn /proc/self/status > "$RECORD/outside"
while [[ $1 != *.sif ]]; do shift; done
shift
PATH=$RECORD/../image:$PATH exec env --default-signal=USR2 "$@"
"""
PYXIS = r"""#!/bin/bash
if [[ $1 == --help ]]; then echo "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"; exit 0; fi
printf '%s\0' "$@" > "$RECORD/srun"
while [[ $1 == --* ]]; do shift; done
PATH=$RECORD/../image:$PATH SLURM_PROCID=0 exec "$@"
"""
# submitit's controller splits with shlex, and starts the words without a shell.
CONTROLLER = r"""exec /usr/bin/env python3 -c 'import os, shlex
words = shlex.split(os.environ["SUBMITIT_LOCAL_COMMAND"])
os.environ["SUBMITIT_LOCAL_GLOBALID"] = "0"
os.execvp(words[0], words)' """


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o700)
    return path


def fake_virtual_environment(runner: ScriptRunner, name: str) -> Path:
    """Make what a virtual environment consists of, with the runner's interpreter in it."""
    venv = runner.directory / name
    write_program(venv / "bin" / "python", PYTHON)
    write_program(venv / "bin" / "activate", ACTIVATE.format(shlex.quote(str(venv))))
    return venv


def variables(runner: ScriptRunner) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in runner.words("environment"))


def apptainer_job(**container: Any) -> dict[str, Any]:
    return {"container": {"image": "i.sif", "runtime": "apptainer", **container}}


def install_programs(runner: ScriptRunner, **programs: str) -> None:
    for name, text in programs.items():
        write_program(runner.directory / "bin" / name, text)
    write_program(runner.directory / "image" / "python3", PYTHON)
    (runner.directory / "i.sif").touch()


def install_controller(runner: ScriptRunner) -> None:
    """Let the runner's interpreter do what submitit's controller does with its variable."""
    case = f'  *" submitit.local._local "*) {CONTROLLER};;\n'
    write_program(runner.python, PYTHON.replace("  *) printf", f"{case}  *) printf"))


def install_mounts(runner: ScriptRunner, *directories: str) -> None:
    """Let the runner's interpreter print the directories that a copy of the code needs in a container."""
    lines = " ".join(map(shlex.quote, directories))
    record = r"printf '%s\0' " + '"$@" > "$RECORD/mounts"'
    case = f'  *" hpcddp.supervise mounts "*) {record}; printf "%s\\n" {lines} ;;\n'
    write_program(runner.python, PYTHON.replace("  *) printf", f"{case}  *) printf"))
