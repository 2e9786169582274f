"""Job files that ``hpcddp init --from`` makes, compared with their scripts by the real sbatch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpcddp.script.convert import convert
from hpcddp.script.parse import read_script
from tests.cluster.jobs import HPCDDP
from tests.script.published import SCRIPTS

if TYPE_CHECKING:
    from tests.cluster.sandbox import Sandbox

# What the script of each job has.
_OWN = frozenset(
    {
        "job-name",
        "nodes",
        "ntasks-per-node",
        "cpus-per-task",
        "gres",
        "output",
        "error",
        "open-mode",
        "requeue",
        "signal",
    }
)
# What the accounting, the nodes and the plugins of the sandbox do not have.
_FOREIGN = re.compile(r"^#SBATCH .*--(?:container|segment-rack|licenses|image|module).*\n", re.MULTILINE)


def options_of(sandbox: Sandbox, script: Path) -> dict[str, str]:
    """Return the options that the real sbatch reads from a script."""
    done = sandbox.run("sbatch", "-vv", "--test-only", script, check=False)
    assert "end of defined options" in done.stderr, done.stderr
    read = dict(re.findall(r"^sbatch: ([a-z-]+) +: (.*)$", done.stderr, re.MULTILINE))
    return {name: value for name, value in read.items() if name not in {"test-only", "verbose"}}


@pytest.mark.parametrize("file", SCRIPTS, ids=[file.stem for file in SCRIPTS])
def test_sbatch_reads_the_same_options_but_for_what_the_table_says(
    sandbox: Sandbox, tmp_path: Path, file: Path
) -> None:
    script = tmp_path / file.name
    script.write_text(_FOREIGN.sub("", file.read_text()))
    job_file = tmp_path / "job.yaml"
    sandbox.run(*HPCDDP, "init", "--from", script, "--job", job_file)
    rendered = tmp_path / "rendered.sh"
    sandbox.run(*HPCDDP, "render", job_file, "-o", rendered, cwd=tmp_path)
    before = options_of(sandbox, script)
    after = options_of(sandbox, rendered)
    conversion = convert(read_script(script), name=script.stem, environment={"HOME": "/root"})
    told = " ".join(row.text for row in conversion.rows)
    different = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert {name for name in different - _OWN if f"--{name}" not in told} == set()
