from __future__ import annotations

import getpass
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.jobfile.document import read_document
from tests.messages import GoldenMessages

RECORDED = Path(__file__).parents[1] / "slurm" / "site"

Run = Callable[..., tuple[str, str]]


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the commands of a recorded cluster on PATH, and make an empty home."""
    folder = tmp_path / "bin"
    folder.mkdir()
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    command(
        folder,
        "scontrol",
        f"case $* in *config) cat {RECORDED}/22.05-config.txt;; *) cat {RECORDED}/22.05-partitions.txt;; esac",
    )
    command(folder, "sinfo", f"cat {RECORDED}/22.05-nodes.txt")
    return folder


def command(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o700)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str, code: int = 0) -> tuple[str, str]:
        assert boundary.run(app, list(words)) == code, capsys.readouterr()
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


PROFILE = Path("config/hpcddp/profiles/default.yaml")


def test_it_says_what_it_found_what_it_wrote_and_what_is_next(run: Run) -> None:
    output, errors = run("init")
    assert errors == ""
    # Whether the hidden partition is open depends on who runs the test.
    lines = [line for line in output.splitlines() if "high: " not in line]
    assert lines == [
        "cluster        sandbox, Slurm 22.05.8",
        "partitions     low (default): 2 nodes of 8 CPUs, 976G, 2 GPUs, no time limit",
        "               low0: 2 nodes of 8 CPUs, 976G, 2 GPUs, no time limit; DOWN",
        "               lowc: 2 nodes of 8 CPUs, 976G, 2 GPUs, 02:00:00 at most",
        "accounts       none needed",
        f"profile        {Path.cwd() / PROFILE}",
        "job file       job.yaml",
        "next           hpcddp submit job.yaml --follow",
    ]
    assert PROFILE.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in PROFILE.parent.iterdir()] == ["default.yaml"]
    assert read_document(PROFILE.read_text()).value["cluster"]["name"] == "sandbox"
    assert run("render", "job.yaml")[0].startswith("#!/bin/bash\n#SBATCH --job-name=first-job\n")


def test_a_site_that_requeues_nothing_by_default_is_named(programs: Path, run: Run, golden: GoldenMessages) -> None:
    command(
        programs,
        "scontrol",
        f"case $* in *config) sed 's/^JobRequeue .*/JobRequeue = 0/' {RECORDED}/22.05-config.txt;; "
        f"*) cat {RECORDED}/22.05-partitions.txt;; esac",
    )
    (line,) = [line for line in run("init")[0].splitlines() if line.startswith("requeue")]
    assert golden.message(line).endswith("hpcddp submit --chain N")


def test_a_profile_that_is_there_is_replaced_only_by_force(programs: Path, run: Run, golden: GoldenMessages) -> None:
    run("init")
    PROFILE.write_text("# mine\n")
    (programs / "scontrol").unlink()
    _, errors = run("init", code=2)
    assert golden.message(errors).startswith(
        f"hpcddp: the profile {Path.cwd() / PROFILE} is there already; add --force "
    )
    assert errors.endswith("or give another NAME\n")
    assert PROFILE.read_text() == "# mine\n"


def test_force_writes_the_profile_anew_and_keeps_the_job_file(run: Run) -> None:
    run("init")
    PROFILE.write_text("# mine\n")
    Path("job.yaml").write_text("# mine\n")
    output, _ = run("init", "--force", "--partition", "lowc")
    assert read_document(PROFILE.read_text()).value["resources"] == {"partition": "lowc"}
    assert Path("job.yaml").read_text() == "# mine\n"
    assert "job file       job.yaml, which was there" in output


def test_another_name_makes_another_profile_which_the_job_file_names(run: Run) -> None:
    output, _ = run("init", "big", "--job", "big.yaml")
    assert "next           hpcddp submit big.yaml --follow\n" in output
    assert PROFILE.with_name("big.yaml").is_file()
    document = json.loads(run("render", "big.yaml", "--json")[0])
    assert document["fields"]["profile"] == {"value": "big", "origin": "job file"}
    output, _ = run("init", "other", "--job", "big.yaml")
    assert "next           hpcddp submit big.yaml --set profile=other --follow\n" in output


def test_a_dry_run_prints_the_profile_and_writes_nothing(run: Run) -> None:
    output, errors = run("init", "--dry-run")
    assert read_document(output).value["cluster"]["partitions"]["lowc"]["max_time"] == "02:00:00"
    assert errors == ""
    assert list(Path().iterdir()) == []


def test_the_document_holds_the_facts(run: Run) -> None:
    document: dict[str, Any] = json.loads(run("init", "--json", "--partition", "lowc")[0])
    assert (document["profile"], document["written"], document["job_file_written"]) == ("default", True, True)
    assert document["given"] == {"partition": "lowc"}
    assert document["runs_in"] == "lowc"
    assert document["cluster"]["partitions"]["low"]["kinds"][0]["gpus"] == 2
    assert document["text"] == PROFILE.read_text()
    assert document["next"] == "hpcddp submit job.yaml --follow"


def test_an_unknown_partition_is_refused_and_nothing_written(run: Run, golden: GoldenMessages) -> None:
    _, errors = run("init", "--partition", "lwo", code=2)
    assert golden.message(errors).startswith("hpcddp: --partition is 'lwo', and cluster sandbox ")
    assert errors.endswith("; did you mean low?\n")
    assert list(Path().iterdir()) == []


def test_the_name_of_a_profile_is_no_path(run: Run, golden: GoldenMessages) -> None:
    _, errors = run("init", "../x", code=2)
    assert golden.message(errors).startswith("hpcddp: NAME is '../x', ")
    assert "ASCII letters, digits, '.', '_' and '-'" in errors
    assert errors.endswith("; write for example default\n")


def test_without_slurm_it_writes_a_first_job_for_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    output, errors = run("init", "--job", "my job.yaml")
    assert errors == ""
    assert output == (
        "cluster        none: scontrol was not found\n"
        "job file       my job.yaml\n"
        "next           hpcddp submit 'my job.yaml' --cluster local --follow\n"
    )
    assert [entry.name for entry in Path().iterdir()] == ["my job.yaml"]
    assert "#   hpcddp plan 'my job.yaml' " in Path("my job.yaml").read_text()
    assert "64 samples" in run("plan", "my job.yaml")[0]
    Path("my job.yaml").write_text("# mine\n")
    output, _ = run("init", "--job", "my job.yaml")
    assert "job file       my job.yaml, which was there" in output
    assert Path("my job.yaml").read_text() == "# mine\n"


def test_without_slurm_a_dry_run_writes_nothing_and_json_is_one_document(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    job, _ = run("init", "--dry-run")
    document = json.loads(run("init", "--dry-run", "--json")[0])
    assert list(Path().iterdir()) == []
    assert document == {
        "profile": None,
        "written": False,
        "no_cluster": "scontrol was not found",
        "job_file": "job.yaml",
        "job_file_written": False,
        "text": job,
        "next": "hpcddp submit job.yaml --cluster local --follow",
    }


@pytest.mark.parametrize("words", [["hpc1"], ["--partition", "gpu"], ["--account", "lab"], ["--qos", "long"]])
def test_without_slurm_there_is_nothing_to_choose(
    words: list[str], run: Run, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    output, errors = run("init", *words, code=2)
    assert output == ""
    assert "no Slurm here (scontrol was not found)" in golden.message(errors)
    assert "without a name, --partition, --account and --qos:" in errors
    assert list(Path().iterdir()) == []


def test_commands_without_a_configuration_are_no_slurm(programs: Path, run: Run) -> None:
    command(programs, "scontrol", 'echo "scontrol: fatal: Could not establish a configuration source" >&2; exit 1')
    assert run("init")[0].startswith("cluster        none: Slurm's commands find no slurm.conf\n")


def test_a_controller_that_is_away_is_one_sentence(programs: Path, run: Run, golden: GoldenMessages) -> None:
    command(programs, "scontrol", 'echo "error: Unable to contact slurm controller (connect failure)" >&2; exit 1')
    document = json.loads(run("init", "--json", code=2)[0])
    message = golden.message(document["error"]["message"])
    assert message.startswith("Slurm's controller does not answer,")
    assert message.endswith("; try again later")


REFUSED = "echo 'sbatch: error: not here' >&2; exit 1"
FAILURE = "echo 'allocation failure:"


@pytest.mark.parametrize(
    ("refusals", "shared", "gpu_request", "reason"),
    [
        ("", "EXCLUSIVE", None, ""),
        (f"*--gres=*) {REFUSED};;", "NO", "gpus-per-node", "sbatch refuses --gres=gpu:1"),
        (f"*--gpus-per-node=*) {REFUSED};;", "EXCLUSIVE", None, ""),
        (f"*--g*) {REFUSED};;", "EXCLUSIVE", "none", "sbatch refuses --gres=gpu:1 and --gpus-per-node=1"),
        (
            f"*--g*) echo 'sbatch: error: no GPUs, please'; {FAILURE} Unspecified error' >&2; exit 1;;",
            "EXCLUSIVE",
            "none",
            "sbatch refuses --gres=gpu:1 and --gpus-per-node=1",
        ),
        # Without a request a job would get no GPU.
        (f"*--g*) {REFUSED};;", "NO", None, ""),
        # What follows says nothing of the form of the request.
        (f"*) {REFUSED};;", "EXCLUSIVE", None, ""),
        (
            f"*--g*) {FAILURE} Job violates accounting/QOS policy (job submit limit, ...)' >&2; exit 1;;",
            "EXCLUSIVE",
            None,
            "",
        ),
        (f"*--gres*) {FAILURE} Required node not available (down, drained or reserved)' >&2; exit 1;;", "NO", None, ""),
        ("*--g*) echo 'Unable to contact slurm controller' >&2; exit 1;;", "EXCLUSIVE", None, ""),
    ],
)
def test_gpus_are_requested_in_the_first_form_that_sbatch_accepts(
    programs: Path, run: Run, refusals: str, shared: str, gpu_request: str | None, reason: str
) -> None:
    scontrol = programs / "scontrol"
    scontrol.write_text(f"{scontrol.read_text().rstrip()} | sed s/OverSubscribe=NO/OverSubscribe={shared}/\n")
    asked = programs / "asked"
    command(programs, "sbatch", f'echo "$*" >> {asked}; case $* in {refusals} esac')
    output, _ = run("init", "--partition", "lowc")
    settings = read_document(PROFILE.read_text()).value["resources"]
    assert settings.pop("gpu_request", None) == gpu_request
    assert settings == {"partition": "lowc"}
    assert (f"GPU requests   {gpu_request}: {reason}\n" in output) == (gpu_request is not None)
    # A site may want all of them, and nothing is ever submitted.
    for line in asked.read_text().splitlines():
        assert line.startswith("--test-only --partition=lowc --time=01:00:00 --nodes=1 --ntasks-per-node=1")


def test_accounts_are_named_and_a_silent_accounting_is_told(programs: Path, run: Run, golden: GoldenMessages) -> None:
    enforced = "AccountingStorageEnforce = associations\\nAccountingStorageType = accounting_storage/slurmdbd\\n"
    command(
        programs,
        "scontrol",
        f"case $* in *config) printf '{enforced}';; *) cat {RECORDED}/22.05-partitions.txt;; esac",
    )
    command(programs, "sacctmgr", "[[ $5 == assoc ]] && printf 'lab|normal\\ngrant|\\n' || echo grant")
    output, errors = run("init")
    assert "accounts       needed: grant (default), lab\n" in output
    assert errors == ""
    command(programs, "sacctmgr", "echo 'Connection refused' >&2; exit 1")
    output, errors = run("init", "--force")
    assert "accounts       needed, and none of yours" in output
    golden.message(errors, {f"user={getpass.getuser()}": "user=USER"})
    assert errors.startswith("hpcddp: your accounts are not known: sacctmgr ")
    assert "Connection refused" in errors


def test_a_cluster_whose_partitions_are_all_closed_has_no_next_step(
    programs: Path, run: Run, golden: GoldenMessages
) -> None:
    closed = "PartitionName=a Default=NO State=DOWN PreemptMode=OFF MaxTime=UNLIMITED"
    command(programs, "scontrol", f'case $* in *config) echo "ClusterName = c";; *) echo "{closed}";; esac')
    command(programs, "sinfo", "true")
    output, _ = run("init")
    assert "partitions     a: no nodes; DOWN\n" in output
    next_line = golden.message(output.splitlines()[-1])
    assert next_line.startswith("next           no partition is open to you:")
    assert next_line.endswith("with --partition")


def test_a_job_for_slurm_is_held_to_what_was_found(
    programs: Path, run: Run, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    run("init")
    command(programs, "sbatch", "echo 'nothing is to be submitted' >&2; exit 1")
    command(programs, "srun", "exit 1")
    Path("slurm.conf").touch()
    monkeypatch.setenv("SLURM_CONF", "slurm.conf")
    asked = ("--set", "resources.nodes=3", "--set", "resources.partition=lowc", "--set", "resources.time_limit=3h")
    for more in ((), ("--dry-run",), ("--sweep", "train.seed=0..3")):
        _, errors = run("submit", "job.yaml", *asked, *more, code=2)
        time_limit, nodes, *_ = errors.splitlines()
        # Whether partition high is open depends on who runs the test.
        golden.message(time_limit, {"partition low or high": "partition low"})
        assert time_limit.startswith("hpcddp: resources.time_limit (--set) is 03:00:00, ")
        assert "partition lowc takes 02:00:00 at most" in time_limit
        assert "use partition low" in time_limit
        assert golden.message(nodes).startswith("resources.nodes (--set) is 3, ")
        assert "partition lowc gives one job 1;" in nodes
        assert nodes.endswith("; write 1 or less")
    # Here nothing is known of a partition's limits, and render is for a look at any time.
    run("submit", "job.yaml", "--set", "resources.partition=x", "--cluster", "local", "--dry-run")
    run("render", "job.yaml", *asked)


def test_the_origin_of_each_value_is_shown_from_profile_to_set(run: Run) -> None:
    run("init", "--partition", "lowc")
    Path("hpcddp.yaml").write_text("resources: {cpus_per_task: 2}\n")
    fields = json.loads(run("render", "job.yaml", "--json", "--set", "train.epochs=3")[0])["fields"]
    asked = ("resources.partition", "resources.cpus_per_task", "resources.time_limit", "train.epochs", "train.seed")
    # The job file gives the CPUs, and so has the last word on them.
    assert [fields[key]["origin"] for key in asked] == ["profile default", "job file", "job file", "--set", "default"]
    Path("hpcddp.yaml").write_text("checkpoint: {keep: 5}\n")
    fields = json.loads(run("render", "job.yaml", "--json")[0])["fields"]
    assert fields["checkpoint.keep"] == {"value": 5, "origin": "project hpcddp.yaml"}


def test_what_cannot_be_written_is_one_sentence(run: Run, golden: GoldenMessages) -> None:
    Path("config").write_text("in the way")
    _, errors = run("init", code=2)
    assert golden.message(errors).startswith(f"hpcddp: {Path.cwd() / PROFILE} cannot be written (Not a directory);")
    assert "XDG_CONFIG_HOME names another directory" in errors
    assert "--dry-run prints it" in errors
    _, errors = run("init", "--job", "config/job.yaml", code=2)
    assert golden.message(errors).startswith("hpcddp: config/job.yaml cannot be written (Not")
    assert errors.endswith("--job names another file\n")


def test_a_profile_that_its_user_keeps_elsewhere_stays_there(run: Run) -> None:
    Path("dotfiles").mkdir()
    PROFILE.parent.mkdir(parents=True)
    PROFILE.symlink_to(Path.cwd() / "dotfiles" / "hpc.yaml")
    run("init", "--force")
    assert PROFILE.is_symlink()
    assert Path("dotfiles/hpc.yaml").read_text().startswith("# Profile default of hpcddp")


def test_of_many_partitions_the_first_are_listed_and_the_profile_has_all(programs: Path, run: Run) -> None:
    lines = "\n".join(f"PartitionName=p{number} State=UP Default=NO" for number in range(25))
    nodes = "\n".join(f"p{number}|1|idle|8|1000|(null)|(null)" for number in range(25))
    command(programs, "scontrol", f"case $* in *config) echo 'ClusterName = c';; *) echo '{lines}';; esac")
    command(programs, "sinfo", f"echo '{nodes}'")
    output, _ = run("init")
    assert output.count(" nodes of ") + output.count(" node of ") == 20
    assert "               and 5 more: the profile" in output
    assert len(read_document(PROFILE.read_text()).value["cluster"]["partitions"]) == 25
