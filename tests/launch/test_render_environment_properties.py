"""Hostile names of environments, images and mounts: bash and the programs see them as the user wrote them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launch.environments import APPTAINER, CONDA, PYXIS, apptainer_job, install, use_controller, virtual
from tests.launch.stage import Stage
from tests.launch.test_render_properties import LINE, MARKER
from tests.launch.test_render_script import LAUNCHERS, script_of

# The name of one directory or file, whatever is in it; PATH takes no colon.
NAME = LINE.map(lambda text: f"x{text.replace('/', '_').replace(':', '_')[:30]}")
MOUNTED = LINE.map(lambda text: "/" + "".join(sign for sign in text if sign not in ",:^ \t"))


def run(stage: Stage, environment: dict[str, Any], launcher: Literal["slurm", "local"] = "slurm") -> None:
    assert stage.run(script_of(stage, launcher=launcher, environment=environment)) == (0, "")
    assert stage.words("task") == ["-P", "-u", "-m", "hpcddp.launch.task"]
    assert not list(stage.directory.rglob(MARKER))


@settings(max_examples=40, deadline=None)
@given(name=NAME, field=st.sampled_from(["venv", "uv", "conda"]))
def test_an_environment_may_have_any_name(name: str, field: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        stage = Stage(Path(directory))
        stage.set_up()
        install(stage, conda=CONDA)
        place = virtual(stage, f"{name}/.venv" if field == "uv" else name)
        run(stage, {field: str(stage.directory / name)})
        assert stage.words("program") == [str(place / "bin" / "python")]


@settings(max_examples=40, deadline=None)
@given(image=NAME, mount=MOUNTED, workdir=MOUNTED, launcher=st.sampled_from(LAUNCHERS))
def test_apptainer_is_told_what_the_user_wrote(
    image: str, mount: str, workdir: str, launcher: Literal["slurm", "local"]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        stage = Stage(Path(directory))
        stage.set_up()
        install(stage, apptainer=APPTAINER)
        use_controller(stage)
        (stage.directory / f"{image}.sif").touch()
        run(stage, apptainer_job(image=f"{image}.sif", mounts=(mount,), workdir=workdir), launcher)
        words = stage.words("apptainer")
        here = str(stage.directory)
        binds = ["--bind", here, "--bind", str(stage.record), "--bind", f"{mount}:{mount}"]
        assert words[: words.index("sh")] == ["exec", "--pwd", workdir, *binds, f"{image}.sif"]


@settings(max_examples=40, deadline=None)
@given(image=NAME, mount=MOUNTED, workdir=MOUNTED)
def test_pyxis_is_told_what_the_user_wrote(image: str, mount: str, workdir: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        stage = Stage(Path(directory))
        stage.set_up()
        install(stage, srun=PYXIS)
        run(stage, {"container": {"image": image, "mounts": (f"{mount}:/data:ro",), "workdir": workdir}})
        here, there = stage.directory, stage.record
        assert stage.words("srun")[7:10] == [
            f"--container-image={image}",
            f"--container-mounts={here}:{here},{there}:{there},{mount}:/data:ro",
            f"--container-workdir={workdir}",
        ]
