from __future__ import annotations

from pathlib import Path

import pytest

from tests.submission.submitting import errors_of, program, warnings_of

SRUN = "#!/bin/sh\necho '      --container-image=PATH  [pyxis] ...'\n"


def test_pyxis_needs_slurm_and_is_asked_of_srun(here: Path) -> None:
    container = {"container": {"image": "nvcr.io#nvidia/pytorch:24.05-py3"}}
    assert errors_of(here, container, "local") == [
        (
            "environment.container.runtime is pyxis, which is a part of srun, and this machine is no cluster; "
            "write runtime: apptainer, or submit to Slurm"
        )
    ]
    program(here, "srun")
    assert warnings_of(here, container) == [
        (
            "environment.container.runtime is pyxis, and srun has no --container-image here; the job ends at its "
            "start unless its nodes have pyxis (runtime: apptainer is the other choice)"
        )
    ]
    program(here, "srun", SRUN)
    assert warnings_of(here, container) == []


def test_apptainer_that_is_not_here_is_certain_on_this_machine_alone(here: Path) -> None:
    container = {"container": {"image": "docker://ubuntu:22.04", "runtime": "apptainer"}}
    start = "environment.container.runtime is apptainer, which was not found here; "
    end = ", or load its module in environment.modules"
    assert errors_of(here, container, "local") == [f"{start}install it{end}"]
    assert warnings_of(here, container) == [f"{start}the job ends at its start unless its nodes have it{end}"]
    assert warnings_of(here, container | {"modules": ("apptainer",)}, more={"LMOD_CMD": "/lmod"}) == []
    program(here, "apptainer")
    assert warnings_of(here, container, "local") == []


def test_files_that_a_container_needs_are_looked_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(here, "apptainer")
    container = {"image": "i.sif", "runtime": "apptainer", "mounts": ("/no/where:/data",)}
    image = (
        "environment.container.image is 'i.sif', and there is no such file; correct it, or name an image in a registry "
        "(docker://...)"
    )
    mount = "environment.container.mounts names '/no/where', which is not here; correct it, unless the nodes have it"
    assert errors_of(here, {"container": container}, "local") == [image, mount]
    Path("i.sif").touch()
    assert warnings_of(here, {"container": container}) == [mount]
    (here / "a,b").mkdir()
    monkeypatch.chdir(here / "a,b")
    assert errors_of(here, {"container": container | {"image": str(here / "work" / "i.sif")}}) == [
        (
            f"the directory of submission is '{here}/a,b', which holds a comma, and apptainer cannot mount such a "
            "path; submit from another directory"
        )
    ]
