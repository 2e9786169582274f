from __future__ import annotations

from pathlib import Path

import pytest

from tests.messages import GoldenMessages
from tests.submission.submitting import errors_of, program, warnings_of

SRUN = "#!/bin/sh\necho '      --container-image=PATH  [pyxis] ...'\n"


def test_pyxis_needs_slurm_and_is_asked_of_srun(here: Path, golden: GoldenMessages) -> None:
    container = {"container": {"image": "nvcr.io#nvidia/pytorch:24.05-py3"}}
    (error,) = errors_of(here, container, "local")
    assert golden.message(error).startswith("environment.container.runtime is pyxis, ")
    assert "a run on this machine does not use srun" in error
    assert "; write runtime: apptainer, " in error
    program(here, "srun")
    (warning,) = warnings_of(here, container)
    assert golden.message(warning).startswith("environment.container.runtime is pyxis, ")
    assert "srun has no --container-image here" in warning
    assert "(runtime: apptainer " in warning
    program(here, "srun", SRUN)
    assert warnings_of(here, container) == []


def test_apptainer_that_is_not_here_is_certain_on_this_machine_alone(here: Path, golden: GoldenMessages) -> None:
    container = {"container": {"image": "docker://ubuntu:22.04", "runtime": "apptainer"}}
    start = "environment.container.runtime is apptainer, which was not found here; "
    (error,) = errors_of(here, container, "local")
    assert golden.message(error).startswith(f"{start}install it, ")
    (warning,) = warnings_of(here, container)
    assert golden.message(warning).startswith(start)
    assert "environment.modules" in warning
    assert warnings_of(here, container | {"modules": ("apptainer",)}, more={"LMOD_CMD": "/lmod"}) == []
    program(here, "apptainer")
    assert warnings_of(here, container, "local") == []
    container["container"]["runtime"] = "singularity"
    (error,) = errors_of(here, container, "local")
    assert error.startswith("environment.container.runtime is singularity, which was not found here; ")


def test_files_that_a_container_needs_are_looked_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    program(here, "apptainer")
    container = {"image": "i.sif", "runtime": "apptainer", "mounts": ("/no/where:/data",)}
    image, mount = errors_of(here, {"container": container}, "local")
    assert golden.message(image).startswith("environment.container.image is 'i.sif', ")
    assert image.endswith("(docker://...)")
    assert golden.message(mount).startswith("environment.container.mounts names '/no/where', which is not here; ")
    Path("i.sif").touch()
    assert warnings_of(here, {"container": container}) == [mount]
    (here / "a,b").mkdir()
    monkeypatch.chdir(here / "a,b")
    (error,) = errors_of(here, {"container": container | {"image": str(here / "project" / "i.sif")}})
    assert f"'{here}/a,b', which holds a comma" in golden.message(error)
    assert error.endswith("; submit from another directory")
