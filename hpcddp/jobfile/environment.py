"""The section `environment` of a job file: modules, conda, venv or uv, a container, variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from hpcddp.jobfile.field_facts import FieldFacts
from hpcddp.jobfile.fields import Line, Section, Text, VariableName, refusal

Runtime = Literal["pyxis", "apptainer", "singularity"]
CodeMode = Literal["live", "frozen", "snapshot"]

# All separate the parts of a mount by commas and colons. apptainer and singularity also drop ^ (ParseBindPath); pyxis
# writes its mounts into an fstab, whose fields end at a blank.
_UNMOUNTABLE: Mapping[Runtime, Mapping[str, str]] = {
    "apptainer": {",": "a comma", ":": "a colon", "^": "a ^"},
    "singularity": {",": "a comma", ":": "a colon", "^": "a ^"},
    "pyxis": {",": "a comma", ":": "a colon", " ": "a blank", "\t": "a tab"},
}


def unmountable(path: str, runtime: Runtime) -> str | None:
    """Return the character, in words, because of which a container's runtime cannot mount a path, or None."""
    return next((word for character, word in _UNMOUNTABLE[runtime].items() if character in path), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A directory or file of the host that is mounted in a container.

    Args:
        source: its absolute path on the host.
        target: its absolute path in the container.
        read_only: whether the container cannot write to it.
    """

    source: str
    target: str
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")

    def host_path(self, path: str) -> str | None:
        """Return the host's path for a path of the container, or None if it is not in this mount."""
        inside = f"{self.target.rstrip('/')}/"
        if f"{path}/".startswith(inside):
            return f"{self.source.rstrip('/')}/{path[len(inside) :]}"
        return None


def _split_mount(text: str) -> Mount | None:
    """Return the mount ``SOURCE[:TARGET[:ro|rw]]``, or None if the text is something else."""
    parts = text.split(":")
    defaults = (parts[0], parts[0], "rw")
    if len(parts) > len(defaults):
        return None
    source, target, mode = (*parts, *defaults[len(parts) :])
    absolute = source.startswith("/") and target.startswith("/")
    if absolute and mode in {"ro", "rw"}:
        return Mount(source=source, target=target, read_only=mode == "ro")
    return None


def _mount(text: str) -> str:
    if "," in text:
        raise refusal(
            "it holds a comma, which no container runtime accepts", "write an item of the list for each mount"
        )
    if _split_mount(text) is None:
        raise refusal(
            "a mount is SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with absolute paths, in which nothing is expanded",
            "write for example /scratch/data:/data:ro",
        )
    return text


def _absolute_source(path: str) -> str:
    if not path.startswith("/"):
        raise refusal("the path of what is copied must be absolute", "write it from the / on")
    return path


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise refusal("the path of a directory in the container must be absolute", "write for example /workspace")
    return path


class Container(Section):
    """The container that the tasks run in. The batch script stays outside, with the interpreter that called hpcddp."""

    image: Annotated[Line, FieldFacts(is_expanded=True, example="./train.sif")] = Field(
        description="Image: a file, or a name in a registry (`docker://...`; with pyxis also `nvcr.io#nvidia/...`). "
        "hpcddp must be installed in it."
    )
    runtime: Runtime = Field("pyxis", description="Container runtime.")
    mounts: Annotated[tuple[Annotated[Line, AfterValidator(_mount)], ...], Field(strict=False)] = Field(
        (),
        description="What it shows besides the directory of submission, the run directory and `train.data_dir`: "
        "`SOURCE`, `SOURCE:TARGET` or `SOURCE:TARGET:ro`.",
    )
    workdir: Annotated[Line, AfterValidator(_absolute)] | None = Field(
        None, description="Working directory of the tasks in it. null is the directory of submission."
    )
    python: Line = Field("python3", description="Interpreter of the tasks in it: a path there, or a name on its PATH.")

    @property
    def mounted(self) -> tuple[Mount, ...]:
        """The mounts, one by one."""
        return tuple(mount for mount in map(_split_mount, self.mounts) if mount is not None)

    @property
    def image_file(self) -> str | None:
        """The image's path, or None if it is a name in a registry."""
        if self.runtime == "pyxis":
            # As pyxis decides.
            return self.image if self.image.startswith(("/", ".")) else None
        return None if "://" in self.image else self.image


_VARIABLE_FIRST = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))(/[^$]*)?", re.ASCII)


def _stage_target(path: str) -> str:
    if not (re.fullmatch(r"/[^$]*[^$/][^$]*", path) or _VARIABLE_FIRST.fullmatch(path)):
        raise refusal(
            "it is neither an absolute path nor a variable with a path behind it",
            "write for example /tmp/imagenet or $SLURM_TMPDIR/imagenet",
        )
    if ".." in path.split("/"):
        raise refusal("it leads out of its own directory", "write the path without ..")
    return path


class Stage(Section):
    """Data that each node copies to a disk of its own before the tasks start, once for all ranks of the node."""

    source: Annotated[
        Line, AfterValidator(_absolute_source), FieldFacts(is_expanded=True, example="/shared/imagenet.tar")
    ] = Field(
        description="What is copied: a directory, a file, or an archive (`.tar`, `.tar.gz`, `.tgz`, `.tar.bz2`, "
        "`.tar.xz`, `.tar.zst`), which is unpacked. Every node must see it."
    )
    target: Annotated[Line, AfterValidator(_stage_target), FieldFacts(example="$SLURM_TMPDIR/imagenet")] = Field(
        description="Directory on each node that then holds the data: a path, which may begin with a variable that is "
        "expanded on the node, such as `$SLURM_TMPDIR/imagenet`. The tasks find it in `HPCDDP_STAGED`."
    )

    def directory(self, environment: Mapping[str, str]) -> str | None:
        """Return the target on a node with these variables; None if its variable is not set there, or is not a path."""
        match = _VARIABLE_FIRST.fullmatch(self.target)
        if match is None:
            return self.target
        begin = environment.get(match[1] or match[2], "")
        return f"{begin.rstrip('/')}{match[3] or ''}" if begin.startswith("/") else None


class Environment(Section):
    """The environment that the tasks run in."""

    modules: Annotated[tuple[Line, ...], Field(strict=False)] = Field((), description="Modules to load, in order.")
    conda: Annotated[Line | None, FieldFacts(is_expanded=True)] = Field(
        None, description="Conda environment to activate: its name, or its directory (with a slash in it)."
    )
    venv: Annotated[Line | None, FieldFacts(is_expanded=True)] = Field(
        None,
        description="Virtual environment to activate: its directory. `$NAME` and `~` in it, and in `conda`, `uv`, "
        "`python`, `container.image` and `stage.source`, are expanded when the job is submitted.",
    )
    uv: Annotated[Line | None, FieldFacts(is_expanded=True)] = Field(
        None,
        description="uv project to run in: its directory. Its environment is used as `uv sync` has left it, so that "
        "the nodes need neither uv nor a network.",
    )
    setup: Annotated[tuple[Text, ...], Field(strict=False), FieldFacts(may_be_secret=True)] = Field(
        (),
        description="Shell lines that run once, before srun. A command in them that fails ends the job, before a task "
        "starts; append `|| true` to one that may fail.",
    )
    env: Annotated[Mapping[VariableName, Text], FieldFacts(may_be_secret=True)] = Field(
        default_factory=dict,
        description="Plain values of environment variables; they are quoted for you.",
        json_schema_extra={"additionalProperties": False},
    )
    pass_env: Annotated[tuple[VariableName, ...], Field(strict=False)] = Field(
        (), description="Secrets, by name only: set when the job is submitted, never written into the script."
    )
    python: Annotated[Line | None, FieldFacts(is_expanded=True)] = Field(
        None,
        description="Interpreter of the batch script and, outside a container, of the tasks. null is that of `conda`, "
        "`venv` or `uv`, or the one with which you called hpcddp.",
    )
    container: Container | None = Field(None, description="Container to run in.")
    code: CodeMode = Field(
        "live",
        description="Which code an attempt runs after an edit in the project: with `live` the edited one, with a "
        "warning; with `frozen` none, the attempt is refused; with `snapshot` a copy of the code as it was submitted.",
    )
    stage: Stage | None = Field(None, description="Data to copy to a disk of each node before the tasks start.")

    @property
    def interpreter(self) -> str | None:
        """The interpreter outside a container; None for conda, and where the file names none."""
        if self.uv is not None:
            return f"{self.uv}/.venv/bin/python"
        return self.python if self.venv is None else f"{self.venv}/bin/python"


VARIABLES = ("environment", "env")
"""The key path of the environment variables."""
ACTIVATED = ("conda", "venv", "uv")
"""The fields that include an interpreter."""
