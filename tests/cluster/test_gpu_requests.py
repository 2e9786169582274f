"""Clusters that refuse a form of a request for GPUs: ``hpcddp init`` finds one that is accepted, and a job runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.jobs import HPCDDP, finished
from tests.cluster.sandboxes import QUICK, sandbox_with

if TYPE_CHECKING:
    from tests.cluster.sandbox import Sandbox

# A filter of what users give sbatch and salloc (slurm.conf(5), CliFilterPlugins).
_FILTER = """\
function slurm_cli_setup_defaults(options, early) return slurm.SUCCESS end
function slurm_cli_post_submit(offset, job, step) return slurm.SUCCESS end
function slurm_cli_pre_submit(options, offset)
  for _, flag in ipairs({REFUSED}) do
    if options.type ~= "srun" and options[flag] ~= nil then
      slurm.log_error("--" .. flag .. " is not used on this cluster")
      return slurm.ERROR
    end
  end
  return slurm.SUCCESS
end
"""


@pytest.fixture(scope="module")
def filtered() -> Iterator[Sandbox]:
    """Start a Slurm that gives whole nodes with two GPUs each, and whose sbatch asks a filter."""
    with sandbox_with(*QUICK, "CliFilterPlugins=lua", options=("--nodes", "1", "--gpus-per-node", "2")) as started:
        started.slurm_conf.with_name("cli_filter.lua").write_text(_FILTER.replace("REFUSED", ""))
        started.run("scontrol", "update", "PartitionName=low", "OverSubscribe=EXCLUSIVE")
        yield started


@pytest.mark.parametrize(
    ("refused", "gpu_request"),
    [
        (("gres",), "gpus-per-node"),
        (("gpus-per-node",), None),
        (("gres", "gpus", "gpus-per-node", "gpus-per-task"), "none"),
    ],
    ids=["gres", "gpus-per-node", "any"],
)
def test_init_finds_the_form_and_a_job_on_two_gpus_runs(
    filtered: Sandbox, tmp_path: Path, refused: tuple[str, ...], gpu_request: str | None
) -> None:
    names = ", ".join(f'"{name}"' for name in refused)
    filtered.slurm_conf.with_name("cli_filter.lua").write_text(_FILTER.replace("REFUSED", names))
    home = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    written = json.loads(filtered.run(*HPCDDP, "init", "--json", cwd=tmp_path, env=home).stdout)
    assert written["given"].get("gpu_request") == gpu_request
    report = 'echo "$RANK/$WORLD_SIZE ${CUDA_VISIBLE_DEVICES-}" > "$RANK"'
    words = ("--gpus-per-node", "2", "--json", "--", "bash", "-c", report)
    submitted = json.loads(filtered.run(*HPCDDP, "submit", *words, cwd=tmp_path, env=home).stdout)
    finished(filtered, submitted["job_id"])
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["0/2 0,1\n", "1/2 0,1\n"]
