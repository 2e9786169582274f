"""What the rendered script does with ``environment.stage``."""

from __future__ import annotations

import signal

import pytest

from hpcddp.jobfile.cluster import Cluster
from tests.submission.script_runner import LAUNCHERS, PYTHON, ScriptRunner, script_of
from tests.waiting import wait_until

# Like srun, it hands its program the words; this interpreter records those of the copy.
STAGES = PYTHON.replace(
    '*" hpcddp.supervise end "*)',
    '*" hpcddp.supervise stage "*) printf \'%s\\0\' "$@" >> "$RECORD/stage"\n'
    '    while [[ -e $RECORD/hold-stage ]]; do sleep 0.02; done; exit "${STAGE_CODE:-0}" ;;\n'
    '  *" hpcddp.supervise end "*)',
)
STAGE = {"source": "/data/it's $(id).tar", "target": "$SLURM_TMPDIR/my data"}


@pytest.fixture
def stages(runner: ScriptRunner) -> ScriptRunner:
    runner.python.write_text(STAGES)
    return runner


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_data_is_copied_before_the_tasks_start(stages: ScriptRunner, launcher: Cluster) -> None:
    script = script_of(stages, launcher=launcher, environment={"stage": STAGE})
    assert stages.run(script) == (0, "")
    assert stages.words("stage") == [
        "-P",
        "-m",
        "hpcddp.supervise",
        "stage",
        f"--source={STAGE['source']}",
        f"--target={STAGE['target']}",
    ]
    assert stages.words("task")
    assert stages.end_options()[-2:] == ["--code", "0"]


def test_each_node_copies_once_whatever_ranks_it_has(stages: ScriptRunner) -> None:
    resources = {"nodes": 3, "tasks_per_node": 4}
    stages.run(script_of(stages, resources=resources, environment={"stage": STAGE}), STAGE_CODE="70")
    options = stages.words("srun")
    assert options[:5] == ["--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=0"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_where_the_copy_fails_no_task_starts_and_the_end_gets_its_code(stages: ScriptRunner, launcher: Cluster) -> None:
    stages.run(script_of(stages, launcher=launcher, environment={"stage": STAGE}), STAGE_CODE="71")
    assert not (stages.record / "task").exists()
    assert stages.end_options()[1:2] == ["71"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_during_the_copy_starts_no_task_and_the_end_decides(stages: ScriptRunner, launcher: Cluster) -> None:
    (stages.record / "hold-stage").touch()
    process = stages.start(script_of(stages, launcher=launcher, environment={"stage": STAGE}))
    wait_until((stages.record / "stage").exists, "the copy")
    process.send_signal(signal.SIGTERM)
    (stages.record / "hold-stage").unlink()
    process.wait(timeout=30)
    assert not (stages.record / "task").exists()
    assert stages.end_options()[1:2] == ["143"]
