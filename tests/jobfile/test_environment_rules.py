from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcddp.jobfile.environment import Mount
from hpcddp.jobfile.read import ResolvedJob
from tests.facts import assert_facts

Refuse = Callable[..., list[str]]
Load = Callable[..., ResolvedJob]

CONTAINER = "environment: {container: {image: /i.sif, runtime: apptainer, "
PYXIS = "environment: {container: {image: /i.sqsh, "
STAGE = "environment: {stage: {source: "
REFUSED = {
    STAGE + "data.tar, target: /tmp/a}}": ("environment.stage.source: is 'data.tar'", "write it from the / on"),
    STAGE + "/a, target: tmp}}": (
        "environment.stage.target: is 'tmp'",
        "write for example /tmp/imagenet or $SLURM_TMPDIR/imagenet",
    ),
    STAGE + "/a, target: /tmp/$USER}}": (
        "environment.stage.target: is '/tmp/$USER'",
        "write for example /tmp/imagenet or $SLURM_TMPDIR/imagenet",
    ),
    STAGE + "/a, target: $(id)}}": (
        "environment.stage.target: is '$(id)'",
        "write for example /tmp/imagenet or $SLURM_TMPDIR/imagenet",
    ),
    STAGE + "/a, target: /}}": (
        "environment.stage.target: is '/'",
        "write for example /tmp/imagenet or $SLURM_TMPDIR/imagenet",
    ),
    STAGE + "/a, target: /tmp/../etc}}": ("environment.stage.target: is '/tmp/../etc'", "write the path without .."),
    "environment: {conda: a, venv: b}": ("environment.venv: is given", "environment.conda", "keep one of them"),
    "environment: {venv: a, uv: b}": ("environment.uv: is given", "environment.venv", "keep one of them"),
    "environment: {venv: a, python: /p}": (
        "environment.python: is given",
        "environment.venv",
        "keep one of them",
        "null",
    ),
    "environment: {conda: a, container: {image: x}}": (
        "environment.conda: is given",
        "environment.container",
        "remove it",
        "write environment.container.python",
        "an interpreter in the container",
    ),
    "environment: {venv: ~/a}": ("environment.venv: is '~/a'", "write the whole path"),
    "environment: {uv: $HOME/a}": ("environment.uv: is '$HOME/a'", "write the whole path"),
    "environment: {venv: 'a:b'}": ("environment.venv: is 'a:b'", "choose another directory"),
    "environment: {container: {image: a.sqsh}}": ("environment.container.image: is 'a.sqsh'", "write ./a.sqsh"),
    CONTAINER + "mounts: [data]}}": (
        "environment.container.mounts.0: is 'data'",
        "write for example /scratch/data:/data:ro",
    ),
    CONTAINER + "mounts: [/a:b]}}": (
        "environment.container.mounts.0: is '/a:b'",
        "write for example /scratch/data:/data:ro",
    ),
    CONTAINER + "mounts: ['/a:/b:rx']}}": (
        "environment.container.mounts.0: is '/a:/b:rx'",
        "write for example /scratch/data:/data:ro",
    ),
    CONTAINER + "mounts: ['/a:/b:ro:x']}}": (
        "environment.container.mounts.0: is '/a:/b:ro:x'",
        "write for example /scratch/data:/data:ro",
    ),
    CONTAINER + "mounts: ['/a,/b']}}": (
        "environment.container.mounts.0: is '/a,/b'",
        "a comma",
        "an item of the list for each mount",
    ),
    CONTAINER + "mounts: ['/a^b']}}": ("environment.container.mounts: holds a ^", "apptainer", "choose one without"),
    PYXIS + "mounts: ['/a b']}}": ("environment.container.mounts: holds a blank", "pyxis", "choose one without"),
    CONTAINER + "workdir: src}}": ("environment.container.workdir: is 'src'", "write for example /workspace"),
    CONTAINER + "}}\nrun_root: 'a:b'": ("run_root: holds a colon", "apptainer", "choose one without"),
    CONTAINER.replace("apptainer", "singularity") + "mounts: ['/a^b']}}": (
        "environment.container.mounts: holds a ^",
        "singularity",
        "choose one without",
    ),
    PYXIS + "}}\nrun_root: 'a b'": ("run_root: holds a blank", "pyxis", "choose one without"),
}


@pytest.mark.parametrize(("more", "facts"), REFUSED.items(), ids=REFUSED)
def test_an_environment_that_cannot_be_is_refused(more: str, facts: tuple[str, ...], refuse: Refuse) -> None:
    (line,) = refuse(f"{more}\n")
    assert_facts(line, *facts)


def test_a_data_directory_that_cannot_be_mounted_is_refused_unless_a_mount_shows_it(refuse: Refuse, load: Load) -> None:
    good = "name: a\nbatch: {global_batch_size: 8}\ntrain: {model: resnet18, dataset: imagefolder, data_dir: '/a,b'}\n"
    (line,) = refuse(CONTAINER + "}}\n", good=good)
    assert_facts(line, "train.data_dir: holds a comma", "apptainer", "choose one without")
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
        ("i.sif", "singularity", "i.sif"),
    ],
)
def test_an_image_is_a_file_or_a_name_in_a_registry(image: str, runtime: str, file: str | None, load: Load) -> None:
    container = load(
        f"environment: {{container: {{image: '{image}', runtime: {runtime}}}}}\n"
    ).spec.environment.container
    assert container is not None
    assert container.image_file == file
