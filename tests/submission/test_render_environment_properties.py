"""Hostile names of environments, images and mounts: bash and the programs see them as the user wrote them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.submission.fake_environments import (
    APPTAINER,
    CONDA,
    PYXIS,
    apptainer_job,
    fake_virtual_environment,
    install_controller,
    install_programs,
)
from tests.submission.hostile_text import LINE, MARKER
from tests.submission.script_runner import LAUNCHERS, ScriptRunner, script_of

# The name of one directory or file, whatever is in it; PATH takes no colon.
NAME = LINE.map(lambda text: f"x{text.replace('/', '_').replace(':', '_')[:30]}")
MOUNTED = LINE.map(lambda text: "/" + "".join(sign for sign in text if sign not in ",:^ \t"))


def run(runner: ScriptRunner, environment: dict[str, Any], launcher: Literal["slurm", "local"] = "slurm") -> None:
    assert runner.run(script_of(runner, launcher=launcher, environment=environment)) == (0, "")
    assert runner.words("task") == ["-P", "-u", "-m", "hpcddp.task"]
    assert not list(runner.directory.rglob(MARKER))


@examples(0.2)
@given(name=NAME, field=st.sampled_from(["venv", "uv", "conda"]))
def test_an_environment_may_have_any_name(name: str, field: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        runner = ScriptRunner(Path(directory))
        runner.set_up()
        install_programs(runner, conda=CONDA)
        place = fake_virtual_environment(runner, f"{name}/.venv" if field == "uv" else name)
        run(runner, {field: str(runner.directory / name)})
        assert runner.words("program") == [str(place / "bin" / "python")]


@examples(0.2)
@given(image=NAME, mount=MOUNTED, workdir=MOUNTED, launcher=st.sampled_from(LAUNCHERS))
def test_apptainer_is_told_what_the_user_wrote(
    image: str, mount: str, workdir: str, launcher: Literal["slurm", "local"]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        runner = ScriptRunner(Path(directory))
        runner.set_up()
        install_programs(runner, apptainer=APPTAINER)
        install_controller(runner)
        (runner.directory / f"{image}.sif").touch()
        run(runner, apptainer_job(image=f"{image}.sif", mounts=(mount,), workdir=workdir), launcher)
        words = runner.words("apptainer")
        here = str(runner.directory)
        binds = ["--bind", here, "--bind", str(runner.record), "--bind", f"{mount}:{mount}"]
        assert words[: words.index("sh")] == ["exec", "--no-eval", "--pwd", workdir, *binds, f"{image}.sif"]


@examples(0.2)
@given(image=NAME, mount=MOUNTED, workdir=MOUNTED)
def test_pyxis_is_told_what_the_user_wrote(image: str, mount: str, workdir: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        runner = ScriptRunner(Path(directory))
        runner.set_up()
        install_programs(runner, srun=PYXIS)
        run(runner, {"container": {"image": image, "mounts": (f"{mount}:/data:ro",), "workdir": workdir}})
        here, there = runner.directory, runner.record
        words = runner.words("srun")
        first = words.index(f"--container-image={image}")
        assert words[first : first + 3] == [
            f"--container-image={image}",
            f"--container-mounts={here}:{here},{there}:{there},{mount}:/data:ro",
            f"--container-workdir={workdir}",
        ]
