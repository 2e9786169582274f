from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcddp.jobfile.environment import Mount
from hpcddp.jobfile.read import ResolvedJob

Refuse = Callable[..., list[str]]
Load = Callable[..., ResolvedJob]

CONTAINER = "environment: {container: {image: /i.sif, runtime: apptainer, "
PYXIS = "environment: {container: {image: /i.sqsh, "
OWN = "which has an interpreter of its own; remove it, or write environment.container.python for an interpreter in the"
SYNTAX = (
    "and a mount is SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with absolute paths, in which nothing is expanded; write "
    "for example /scratch/data:/data:ro"
)
STAGE = "environment: {stage: {source: "
PLACE = "it is neither an absolute path nor a variable with a path behind it; write for example"
REFUSED = {
    STAGE + "data.tar, target: /tmp/a}}": "environment.stage.source: is 'data.tar', and what is copied has an absolute "
    "path, in which nothing is expanded; write it from the / on",
    STAGE + "/a, target: tmp}}": f"environment.stage.target: is 'tmp', and {PLACE} /tmp/imagenet or "
    "$SLURM_TMPDIR/imagenet",
    STAGE + "/a, target: /tmp/$USER}}": f"environment.stage.target: is '/tmp/$USER', and {PLACE} /tmp/imagenet or "
    "$SLURM_TMPDIR/imagenet",
    STAGE + "/a, target: $(id)}}": f"environment.stage.target: is '$(id)', and {PLACE} /tmp/imagenet or "
    "$SLURM_TMPDIR/imagenet",
    STAGE + "/a, target: /}}": f"environment.stage.target: is '/', and {PLACE} /tmp/imagenet or $SLURM_TMPDIR/imagenet",
    STAGE + "/a, target: /tmp/../etc}}": "environment.stage.target: is '/tmp/../etc', and it leads out of its own "
    "directory; write the path without ..",
    "environment: {conda: a, venv: b}": "environment.venv: is given, and environment.conda is given too; "
    "keep one of them",
    "environment: {venv: a, uv: b}": "environment.uv: is given, and environment.venv is given too; keep one of them",
    "environment: {venv: a, python: /p}": "environment.python: is given, and environment.venv has an interpreter of "
    "its own; keep one of them (null takes a profile's value away)",
    "environment: {conda: a, container: {image: x}}": "environment.conda: is given, and the tasks run in "
    f"environment.container, {OWN} container",
    "environment: {venv: ~/a}": "environment.venv: is '~/a', and hpcddp expands nothing in it; write the whole path",
    "environment: {uv: $HOME/a}": "environment.uv: is '$HOME/a', and hpcddp expands nothing in it; "
    "write the whole path",
    "environment: {venv: 'a:b'}": "environment.venv: is 'a:b', and a directory in PATH cannot contain a colon; "
    "choose another directory",
    "environment: {container: {image: a.sqsh}}": "environment.container.image: is 'a.sqsh', and pyxis takes a name "
    "without a slash in front for one in a registry; write ./a.sqsh",
    CONTAINER + "mounts: [data]}}": f"environment.container.mounts.0: is 'data', {SYNTAX}",
    CONTAINER + "mounts: [/a:b]}}": f"environment.container.mounts.0: is '/a:b', {SYNTAX}",
    CONTAINER + "mounts: ['/a:/b:rx']}}": f"environment.container.mounts.0: is '/a:/b:rx', {SYNTAX}",
    CONTAINER + "mounts: ['/a:/b:ro:x']}}": f"environment.container.mounts.0: is '/a:/b:ro:x', {SYNTAX}",
    CONTAINER
    + "mounts: ['/a,/b']}}": "environment.container.mounts.0: is '/a,/b', and it holds a comma, which no runtime "
    "can carry; write an item of the list for each mount",
    CONTAINER
    + "mounts: ['/a^b']}}": "environment.container.mounts: holds a ^, and apptainer cannot mount such a path; "
    "choose one without",
    PYXIS + "mounts: ['/a b']}}": "environment.container.mounts: holds a blank, and pyxis cannot mount such a path; "
    "choose one without",
    CONTAINER
    + "workdir: src}}": "environment.container.workdir: is 'src', and a directory in the container is an absolute "
    "path; write for example /workspace",
    CONTAINER
    + "}}\nrun_root: 'a:b'": "run_root: holds a colon, and apptainer cannot mount such a path; choose one without",
    PYXIS + "}}\nrun_root: 'a b'": "run_root: holds a blank, and pyxis cannot mount such a path; choose one without",
}


@pytest.mark.parametrize(("more", "line"), REFUSED.items())
def test_an_environment_that_cannot_be_is_refused(more: str, line: str, refuse: Refuse) -> None:
    assert [found.partition(" ")[2] for found in refuse(f"{more}\n")] == [line]


def test_a_data_directory_that_cannot_be_mounted_is_refused_unless_a_mount_shows_it(refuse: Refuse, load: Load) -> None:
    good = "name: a\nbatch: {global_batch_size: 8}\ntrain: {model: resnet18, dataset: imagefolder, data_dir: '/a,b'}\n"
    (line,) = refuse(CONTAINER + "}}\n", good=good)
    assert line.endswith("train.data_dir: holds a comma, and apptainer cannot mount such a path; choose one without")
    load(CONTAINER + "mounts: ['/c:/']}}\n", good=good)


def test_every_way_to_write_a_mount_is_understood(load: Load) -> None:
    container = load(CONTAINER + "mounts: [/a, '/b:/c', '/d:/e:ro', '/f:/g:rw']}}\n").spec.environment.container
    assert container is not None
    assert [str(mount) for mount in container.mounted] == ["/a:/a", "/b:/c", "/d:/e:ro", "/f:/g"]


@pytest.mark.parametrize(
    ("path", "there"), [("/data", "/scratch"), ("/data/x/y", "/scratch/x/y"), ("/database", None), ("/", None)]
)
def test_a_mount_tells_where_the_host_has_a_path(path: str, there: str | None) -> None:
    found = Mount(source="/scratch", target="/data").host_path(path)
    assert (found.rstrip("/") if found else None) == there


@pytest.mark.parametrize(
    ("environment", "python"),
    [
        ("{}", None),
        ("{conda: train}", None),
        ("{python: /p/python}", "/p/python"),
        ("{venv: envs/a}", "envs/a/bin/python"),
        ("{uv: /project}", "/project/.venv/bin/python"),
    ],
)
def test_the_interpreter_is_known_where_the_file_says_it(environment: str, python: str | None, load: Load) -> None:
    assert load(f"environment: {environment}\n").spec.environment.interpreter == python


@pytest.mark.parametrize(
    ("image", "runtime", "file"),
    [
        ("/i.sqsh", "pyxis", "/i.sqsh"),
        ("./i.sqsh", "pyxis", "./i.sqsh"),
        ("nvcr.io#nvidia/pytorch:24.05-py3", "pyxis", None),
        ("docker://ubuntu:22.04", "pyxis", None),
        ("i.sif", "apptainer", "i.sif"),
        ("docker://ubuntu:22.04", "apptainer", None),
    ],
)
def test_an_image_is_a_file_or_a_name_in_a_registry(image: str, runtime: str, file: str | None, load: Load) -> None:
    container = load(
        f"environment: {{container: {{image: '{image}', runtime: {runtime}}}}}\n"
    ).spec.environment.container
    assert container is not None
    assert container.image_file == file
