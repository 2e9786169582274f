"""Scripts that a rule must find, and scripts that look like them and are right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcddp.check.check import check_file

TORCHRUN = "torchrun --nproc_per_node=4 train.py"


def codes_of(directory: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> set[str]:
    file = directory / "job.sh"
    file.write_text("\n".join(("#!/bin/bash", *lines, "")))
    monkeypatch.chdir(directory)
    return {finding.rule.code for finding in check_file(file, None, {"PATH": os.environ["PATH"]}).findings}


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("refused-text", ("#SBATCH --ntask-per-node=2", "srun python a.py")),
        ("refused-text", ("#SBATCH --nodes=2 two nodes", "srun python a.py")),
        ("refused-text", ("#SBATCH --comment='open", "srun python a.py")),
        ("directive-not-read", ("#SBATCh --nodes=1", "srun python a.py")),
        ("directive-not-read", (" #SBATCH --nodes=1", "srun python a.py")),
        ("directive-value", ("#SBATCH --job-name=run#3", "srun python a.py")),
        ("directive-value", ("#SBATCH --output=~/%j.out", "srun python a.py")),
        ("time-unit", ("#SBATCH -t 90", "srun python a.py")),
        ("time-unit", ("#SBATCH --time=48:00", "srun python a.py")),
        ("output-shared", ("#SBATCH -a 1,2", "#SBATCH -o a-%A.out", "srun python a.py")),
        ("output-pattern", ("#SBATCH -o log.%a", "srun python a.py")),
        ("srun-cpus", ("#SBATCH -c 4", "time srun python a.py")),
        ("launcher-in-each-task", ("#SBATCH --ntasks-per-node=4", f"srun {TORCHRUN}")),
        ("launcher-in-each-task", ("#SBATCH --nodes=2", "#SBATCH -n 8", f"srun {TORCHRUN}")),
        ("launcher-in-each-task", ("#SBATCH --nodes=2", f"srun --ntasks-per-node=2 {TORCHRUN}")),
        ("launcher-on-one-node", ("#SBATCH -N 2", f"exec {TORCHRUN}")),
        ("local-master", ("#SBATCH -N 2", "srun torchrun --nnodes 2 --rdzv_endpoint=localhost:$PORT a.py")),
        ("fixed-port", ("srun torchrun --nproc_per_node 1 --master_port 29501 a.py",)),
        ("fixed-port", ('srun torchrun --nproc_per_node 1 --rdzv_endpoint "$HEAD:29501" a.py',)),
        ("unheard-signal", ("#SBATCH --signal=B:10@60", "trap 'touch stop' USR1", "srun python a.py")),
        ("unheard-signal", ("#SBATCH --signal=USR1@60", "python a.py")),
        (
            "unheard-signal",
            ("#SBATCH --signal=USR1@60", "trap 'scontrol requeue $SLURM_JOB_ID' USR1", "srun python a.py &", "wait $!"),
        ),
        (
            "exit-in-grace",
            ("end() {", "  touch stop", "  exit 0", "}", "trap end SIGTERM", "srun python a.py & wait $!"),
        ),
        ("secret-in-script", ("HF_TOKEN=hf_0123456789 srun python a.py",)),
        ("traced-secret", ("set -euxo pipefail", "export HF_TOKEN=$(cat ~/.hf)", "srun python a.py")),
        ("no-wait", ("for i in 1 2; do", "  srun python a.py $i &", "done")),
        ("lost-exit-code", ("srun python a.py | tee log",)),
        ("lost-exit-code", ("srun python a.py &", "wait")),
        ("bash-syntax", ("cat >settings <<EOF", "lr: 1", "srun python a.py")),
    ],
)
def test_a_script_breaks_a_rule(
    code: str, lines: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code in codes_of(tmp_path, monkeypatch, *lines)


@pytest.mark.parametrize(
    "lines",
    [
        ("#SBATCH --container-image=a", "srun python a.py"),
        ("#SBATCH --image=docker:a", "srun python a.py"),
        ("##SBATCH --nodes=2", "# SBATCH --nodes=4", "#SBATCH --nodes=1", "srun python a.py"),
        ("#SBATCH --time=1-0", "srun python a.py"),
        ("#SBATCH --output=%x-%3j-%N-100%%.out", "srun python a.py"),
        ("#SBATCH --array=3", "#SBATCH --output=a.out", "srun python a.py"),
        ("#SBATCH --array=1-3", "#SBATCH --output=%x-%4j.out", "srun python a.py"),
        ("#SBATCH --output=/no-such-file-system/logs/%j.out", "srun python a.py"),
        ("#SBATCH -c 4", "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK", "srun python a.py"),
        ("#SBATCH -c 4", "head=$(srun -N 1 -n 1 hostname)", "srun mkdir -p data", "srun -c 4 python a.py"),
        ("#SBATCH -c 4", 'ARGS="--wait=60 --cpus-per-task=4"', "srun $ARGS python a.py"),
        ("#SBATCH --ntasks-per-node=4", f"srun --ntasks-per-node=1 {TORCHRUN}"),
        ("#SBATCH --ntasks-per-node=4", TORCHRUN),
        ("#SBATCH -N 2", "#SBATCH --ntasks-per-node=1", f"srun bash -c '{TORCHRUN}'"),
        ("#SBATCH -N 2", f'for h in $(scontrol show hostnames); do ssh $h "{TORCHRUN}" & done; wait $!'),
        ("export MASTER_ADDR=localhost", "srun python a.py"),
        ("#SBATCH --exclusive", "export MASTER_PORT=29500", "srun python a.py"),
        ("export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))", "srun python a.py"),
        ("# export MASTER_PORT=29500", "srun python a.py"),
        ("#SBATCH --signal=B:USR1@60", "trap 'kill -USR1 $pid' USR1", "srun python a.py & pid=$!", "wait $pid"),
        ("#SBATCH --signal=B:USR1@60", "exec python a.py"),
        ("export HF_TOKEN=your_token_here", "export TOKENIZERS_PARALLELISM=false", "srun python a.py"),
        ("set -x", "export TOKENIZERS_PARALLELISM=$A", "srun python a.py"),
        ("set -x", "set +x", "export HF_TOKEN=$(cat f)", "srun python a.py"),
        ("srun python a.py", "code=$?", "echo done", "exit $code"),
        ("set -euo pipefail", "srun python a.py | tee log", "echo done"),
        ("srun python a.py || exit 1", "echo done"),
        ("echo begin", "srun python a.py"),
        ("cat >settings <<EOF", "lr: 1", "EOF", "srun python a.py"),
        ("x=$(cat <<EOF", "lr: 1", "EOF)", "srun python a.py"),
        ("python -c 'import torch'", "srun python a.py"),
    ],
)
def test_a_script_is_right(lines: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert codes_of(tmp_path, monkeypatch, *lines) == set()
