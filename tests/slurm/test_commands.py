from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp.slurm import commands
from hpcddp.slurm.commands import parse_job
from hpcddp.slurm.controller import ask_controller
from hpcddp.slurm.job_environment import submission_environment
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.slurm.programs import program

# As printed by Slurm 22.05.8; the free texts hold what a user may write.
SHOWN = """\
JobId=7 ArrayJobId=6 ArrayTaskId=1 JobName=a Reason=forged
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=0 Nice=0 Account=(null) QOS=(null)
   JobState=PENDING Reason=JobHeldUser Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   SubmitTime=2026-11-21T09:43:51 EligibleTime=Unknown
   NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Command=(null)
   WorkDir=/tmp/a b
   Comment=x JobState=COMPLETED\x20
   StdOut=/tmp/Key=value

JobId=8 JobName=other
   JobState=RUNNING Reason=None Dependency=(null)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def test_fields_of_a_job_are_read_whatever_its_user_wrote_into_it() -> None:
    job = parse_job(SHOWN)
    assert job["JobId"] == "7"
    assert job["JobName"] == "a Reason=forged"
    assert job["JobState"] == "PENDING"
    assert job["Reason"] == "JobHeldUser"
    assert job["SubmitTime"] == "2026-11-21T09:43:51"
    assert job["CPUs/Task"] == "1"
    assert job["ReqB:S:C:T"] == "0:0:*:*"
    assert job["WorkDir"] == "/tmp/a b"
    assert job["Comment"] == "x JobState=COMPLETED"
    assert job["StdOut"] == "/tmp/Key=value"


@pytest.mark.parametrize(
    "output", ["123\n", "123;cluster\n", "a site's greeting\n123\n", "123;c\nsbatch: 120 of 5000 core hours are left\n"]
)
def test_the_job_id_is_found_in_what_sbatch_printed(output: str) -> None:
    assert commands.parse_job_id(output) == "123"


@pytest.mark.parametrize(
    ("output", "last"), [("", ""), ("Submitted batch job 123\n", "Submitted batch job 123"), ("123\n124\n", "123; 124")]
)
def test_an_answer_without_a_job_id_is_an_error(output: str, last: str, golden: GoldenMessages) -> None:
    with pytest.raises(commands.SlurmCommandError) as caught:
        commands.parse_job_id(output)
    assert_facts(golden.message(caught.value), f"sbatch --parsable printed {last!r}", "not one job id", "squeue --me")


def test_variables_that_override_the_script_or_describe_other_ranks_are_dropped() -> None:
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "MY_SLURM_THING": "1", "HOME": "/root"}
    dropped = {
        "SBATCH_PARTITION": "debug",
        "SLURM_JOB_ID": "1",
        "SLURM_CLUSTERS": "other",
        "SUBMITIT_LOCAL_GLOBALID": "0",
        "TORCHELASTIC_RUN_ID": "x",
        "HPCDDP_ATTEMPT_DIR": "/runs/a",
    }
    clean, names = submission_environment({**kept, **dropped})
    assert clean == kept
    assert names == tuple(sorted(dropped))


def test_sbatch_gets_the_script_and_only_the_given_environment(programs: Path, tmp_path: Path) -> None:
    env = program(programs, "sbatch", f'env > {tmp_path}/env; printf "%s\\n" "$@" > {tmp_path}/argv; echo "42;toy"')
    script = tmp_path / "a script"
    assert commands.sbatch(script, environment={**env, "ONE": "1"}) == "42"
    assert (tmp_path / "argv").read_text().splitlines() == ["--parsable", str(script)]
    assert "ONE=1" in (tmp_path / "env").read_text().splitlines()
    assert "HOME=" not in (tmp_path / "env").read_text()


def test_a_refused_job_carries_sbatchs_reason(programs: Path, tmp_path: Path, golden: GoldenMessages) -> None:
    env = program(programs, "sbatch", 'echo "sbatch: error: too many jobs" >&2; echo "  more" >&2; exit 1')
    with pytest.raises(commands.SlurmCommandError) as caught:
        commands.sbatch(tmp_path / "s", environment=env)
    assert_facts(golden.message(caught.value), "sbatch refused the job", "error: too many jobs; more")
    assert caught.value.exit_code == 1


def test_a_value_that_sbatch_refuses_is_one_to_correct(programs: Path, tmp_path: Path, golden: GoldenMessages) -> None:
    env = program(programs, "sbatch", 'echo "sbatch: error: Batch job submission failed: Invalid qos" >&2; exit 1')
    with pytest.raises(commands.SlurmRequestError) as caught:
        commands.sbatch(tmp_path / "s", environment=env)
    assert_facts(golden.message(caught.value), "sbatch refused the job", "Invalid qos")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("reason", ["Invalid user id", "Invalid authentication credential"])
def test_what_no_value_of_the_job_mends_is_not_one_to_correct(programs: Path, tmp_path: Path, reason: str) -> None:
    env = program(programs, "sbatch", f'echo "sbatch: error: Batch job submission failed: {reason}" >&2; exit 1')
    with pytest.raises(commands.SlurmCommandError, match=reason) as caught:
        commands.sbatch(tmp_path / "s", environment=env)
    assert caught.value.exit_code == 1


def test_a_controller_that_answers_too_late_may_have_the_job(
    programs: Path, tmp_path: Path, golden: GoldenMessages
) -> None:
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    env = program(programs, "sbatch", f'echo "{said}" >&2; exit 1')
    with pytest.raises(commands.SlurmUnavailableError) as caught:
        commands.sbatch(tmp_path / "s", environment=env)
    assert_facts(golden.message(caught.value), "sbatch failed", "Socket timed out", "squeue --me", "scancel")


@pytest.mark.parametrize(
    ("requested", "known", "facts"),
    [
        ("hihg", "echo low; echo high", ("no partition 'hihg'", "did you mean high?")),
        ("low,hihg", "echo low; echo high", ("no partition 'hihg'", "did you mean high?")),
        ("zzz", "echo low; echo high", ("no partition 'zzz'", "sinfo --summarize")),
        ("hihg", "exit 1", ("no partition 'hihg'", "sinfo --summarize")),
        ("low,hihg", "exit 1", ("no partition 'low,hihg'", "sinfo --summarize")),
    ],
)
def test_a_partition_that_is_misspelt_is_answered_with_the_one_that_was_meant(
    programs: Path, tmp_path: Path, golden: GoldenMessages, requested: str, known: str, facts: tuple[str, ...]
) -> None:
    program(programs, "sinfo", known)
    refusal = f"sbatch: error: invalid partition specified: {requested}"
    env = program(programs, "sbatch", f'echo "{refusal}" >&2; echo "sbatch: error: Invalid partition name" >&2; exit 1')
    with pytest.raises(commands.SlurmRequestError) as caught:
        commands.sbatch(tmp_path / "s", environment=env)
    assert_facts(golden.message(caught.value), *facts)


def test_a_command_that_fails_without_output_is_reported_with_its_code(
    programs: Path, tmp_path: Path, golden: GoldenMessages
) -> None:
    env = program(programs, "sbatch", "exit 3")
    with pytest.raises(commands.SlurmCommandError) as caught:
        commands.sbatch(tmp_path / "s", environment=env)
    assert_facts(golden.message(caught.value), "sbatch refused the job", "exited with 3")


def test_a_command_that_is_not_there_is_named(programs: Path, tmp_path: Path, golden: GoldenMessages) -> None:
    with pytest.raises(commands.SlurmUnavailableError) as caught:
        commands.sbatch(tmp_path / "s", environment={"PATH": str(programs)})
    assert_facts(golden.message(caught.value), "sbatch was not found", "on PATH here")


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "signal 40")])
def test_sbatch_that_a_signal_ends_may_have_queued_the_job(
    programs: Path, tmp_path: Path, number: int, name: str, golden: GoldenMessages
) -> None:
    env = program(programs, "sbatch", f"kill -{number} $$")
    with pytest.raises(commands.SlurmCommandError) as caught:
        commands.sbatch(tmp_path / "s", environment=env)
    assert_facts(golden.message(caught.value), f"{name} ended sbatch", "scancel")


def test_a_command_that_does_not_answer_times_out(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    monkeypatch.setattr("hpcddp.slurm.commands.TIMEOUT_S", 0.2)
    env = program(programs, "sbatch", "exec sleep 30")
    with pytest.raises(commands.SlurmUnavailableError) as caught:
        commands.sbatch(tmp_path / "s", environment=env)
    assert_facts(golden.message(caught.value), "sbatch did not answer within 0.2 s", "try again later", "scancel")


def test_a_query_for_states_waits_less_than_a_submission(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcddp.slurm.commands._QUERY_TIMEOUT_S", 0.2)
    with pytest.raises(commands.SlurmUnavailableError, match=r"squeue did not answer within 0\.2 s"):
        commands.queue(program(programs, "squeue", "exec sleep 30"))


def test_a_job_that_the_controller_does_not_know_is_none(programs: Path) -> None:
    env = program(programs, "scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert commands.show_job("7", environment=env) is None


def test_an_element_that_has_left_its_array_is_unknown(programs: Path) -> None:
    env = program(programs, "scontrol", 'echo "Job 26_3 not found"; exit 1')
    assert commands.show_job("26_3", environment=env) is None


def test_a_controller_that_is_away_is_no_answer(programs: Path) -> None:
    said = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    env = program(programs, "scontrol", f'echo "{said}" >&2; exit 1')
    with pytest.raises(commands.SlurmUnavailableError) as caught:
        commands.show_job("7", environment=env)
    assert str(caught.value) == f"scontrol show job 7 failed: {said}"
    assert not commands.controller_answers(env)


def ended_by_a_signal(times: int, calls: Path) -> str:
    """Return a program that TERM ends in its first calls; each call adds a line to a file."""
    return f'echo >> {calls}; [[ $(wc -l < {calls}) -le {times} ]] && kill -TERM $$; echo "JobId=7"'


def test_a_question_that_a_signal_ended_is_asked_again(programs: Path, tmp_path: Path) -> None:
    env = program(programs, "scontrol", ended_by_a_signal(4, tmp_path / "calls"))
    assert commands.show_job("7", environment=env) == {"JobId": "7"}


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("scontrol", lambda env: commands.show_array("7", environment=env)),
        ("scontrol", lambda env: commands.ask("scontrol", "show", "config", environment=env)),
        ("scontrol", commands.controller_answers),
        ("squeue", commands.queue),
        ("sinfo", commands.node_states),
        ("sprio", lambda env: commands.priority("7", env)),
        ("srun", lambda env: commands.srun_knows("--container-image", env)),
    ],
)
def test_no_question_is_asked_more_than_five_times(
    programs: Path, tmp_path: Path, name: str, question: Callable[[dict[str, str]], object]
) -> None:
    env = program(programs, name, ended_by_a_signal(99, tmp_path / "calls"))
    with contextlib.suppress(commands.SlurmCommandError):
        assert not question(env)
    assert (tmp_path / "calls").read_text() == "\n" * 5


def test_a_change_that_a_signal_ended_is_not_repeated(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = program(programs, "scontrol", ended_by_a_signal(99, tmp_path / "calls"))
    monkeypatch.setenv("PATH", env["PATH"])
    with pytest.raises(commands.SlurmCommandError, match="it exited with -15"):
        commands.requeue("7")
    assert (tmp_path / "calls").read_text() == "\n"


def test_times_do_not_have_the_format_that_the_user_set(programs: Path) -> None:
    env = program(programs, "scontrol", 'echo "JobId=$3 SubmitTime=$SLURM_TIME_FORMAT"')
    assert commands.show_job("7", environment={**env, "SLURM_TIME_FORMAT": "relative"}) == {
        "JobId": "7",
        "SubmitTime": "standard",
    }


def test_no_scontrol_is_no_controller(programs: Path) -> None:
    assert not commands.controller_answers({"PATH": str(programs)})


def test_a_requeue_always_has_incomplete(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = program(programs, "scontrol", f'printf "%s\\n" "$@" >> {tmp_path}/argv')
    monkeypatch.setenv("PATH", env["PATH"])
    commands.requeue("7_1")
    commands.update_job("7_1", StartTime="now+2seconds", Requeue="1")
    assert (tmp_path / "argv").read_text().split("\n") == [
        *("requeue", "Incomplete", "7_1"),
        *("update", "JobId=7_1", "StartTime=now+2seconds", "Requeue=1", ""),
    ]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("Requested operation is presently disabled for job 7", commands.SlurmCommandError),
        ("slurm_suspend error: Unable to contact slurm controller", commands.SlurmUnavailableError),
        ("slurm_suspend error: Socket timed out on send/recv operation", commands.SlurmUnavailableError),
        # The answer to a controller that woke up after the command had given up (measured).
        ("Unexpected message received for job 7", commands.SlurmUnavailableError),
    ],
)
def test_a_requeue_that_fails_carries_scontrols_reason(
    programs: Path, monkeypatch: pytest.MonkeyPatch, said: str, error: type[commands.SlurmCommandError]
) -> None:
    env = program(programs, "scontrol", f'echo "{said}" >&2; exit 1')
    monkeypatch.setenv("PATH", env["PATH"])
    with pytest.raises(commands.SlurmCommandError) as caught:
        commands.requeue("7")
    assert (type(caught.value), str(caught.value)) == (error, f"scontrol requeue Incomplete 7 failed: {said}")


def test_a_missing_scontrol_is_told_from_one_that_does_not_answer(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(commands.SlurmMissingError, match="scontrol was not found"):
        commands.requeue("7")


@pytest.mark.parametrize(("shown", "port"), [("Port=7001 ", 7001), ("", 6818)])
def test_a_slurmds_port_is_its_own_or_that_of_the_cluster(
    programs: Path, monkeypatch: pytest.MonkeyPatch, shown: str, port: int
) -> None:
    node = f"NodeName=n1 Arch=x86_64\n   NodeAddr=10.0.0.1 NodeHostName=n1 {shown}Version=22.05.8"
    env = program(
        programs, "scontrol", f'[[ $2 == node ]] && echo "{node}" || printf "SlurmctldPort = 1\nSlurmdPort    = 6818\n"'
    )
    monkeypatch.setenv("PATH", env["PATH"])
    assert commands.slurmd_address("n1") == ("10.0.0.1", port)


@pytest.mark.parametrize(
    ("shown", "seconds"), [("KillWait                = 15 sec", 15.0), ("InactiveLimit           = 0 sec", 30.0)]
)
def test_the_wait_before_processes_are_killed_is_that_of_the_cluster(
    programs: Path, shown: str, seconds: float
) -> None:
    env = program(programs, "scontrol", f'[[ "$*" == "show config" ]] && echo "{shown}"')
    assert ask_controller(env).kill_wait_s == seconds


def test_boot_times_are_those_of_the_nodes_whatever_was_written_into_them(programs: Path) -> None:
    env = program(
        programs,
        "scontrol",
        """[[ "$*" == "show node n1,n2" && $SLURM_TIME_FORMAT == standard ]] && cat <<'END'
NodeName=n1 Arch=x86_64 CoresPerSocket=1
   NodeAddr=10.0.0.1 NodeHostName=n1 Version=22.05.8
   BootTime=2026-11-26T10:00:00 SlurmdStartTime=2026-11-26T10:00:05
   Reason=BootTime=2020-01-01T00:00:00 [root@2026-11-26T10:00:00]

NodeName=n2 CoresPerSocket=1
   BootTime=None SlurmdStartTime=None

END""",
    )
    assert commands.boot_times(["n1", "n2"], env) == {"n1": "2026-11-26T10:00:00", "n2": "None"}


def test_a_job_may_run_elsewhere_and_after_another(programs: Path, tmp_path: Path) -> None:
    env = program(programs, "sbatch", f'printf "%s\n" "$@" > {tmp_path}/argv; echo 42')
    commands.sbatch(tmp_path / "s", environment=env, directory=Path("/data"), dependency="afterany:41")
    assert (tmp_path / "argv").read_text().split() == [
        "--parsable",
        "--chdir=/data",
        "--dependency=afterany:41",
        str(tmp_path / "s"),
    ]


def test_the_command_line_of_a_submission_is_no_part_of_the_records_of_its_job(programs: Path) -> None:
    """Slurm shows it since 25.11, with the blank lines that it contains."""
    typed = "sbatch --wrap=\n\nJobId=9 JobState=COMPLETED\n   WorkDir"
    shown = SHOWN.replace("   WorkDir=", f"   SubmitLine={typed}\n   WorkDir=", 1)
    assert parse_job(shown) == parse_job(SHOWN)
    (programs.parent / "shown").write_text(shown)
    environment = program(programs.parent, "scontrol", f"cat {programs.parent}/shown")
    records = commands.show_array("7", environment=environment)
    assert [record["JobId"] for record in records] == ["7", "8"]


def test_a_script_is_tested_without_being_submitted(programs: Path, tmp_path: Path) -> None:
    env = program(programs, "sbatch", f'cat > {tmp_path}/script; printf "%s\\n" "$@" > {tmp_path}/argv')
    commands.test_script("#!/bin/bash\n", environment=env, options=["--exclude=n1"])
    assert (tmp_path / "script").read_text() == "#!/bin/bash\n"
    assert (tmp_path / "argv").read_text().splitlines() == ["--test-only", "--exclude=n1"]


def test_a_script_that_slurm_could_not_run_carries_its_reason(programs: Path, golden: GoldenMessages) -> None:
    why = "allocation failure: Requested node configuration is not available"
    env = program(programs, "sbatch", f'echo "{why}" >&2; exit 1')
    with pytest.raises(commands.SlurmCommandError) as caught:
        commands.test_script("#!/bin/bash\n", environment=env, options=[])
    assert_facts(golden.message(caught.value), "sbatch --test-only failed", why)
