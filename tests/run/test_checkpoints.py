"""Checkpoints on disk: whole or not there."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from hpcddp.run.checkpoints import (
    Checkpoint,
    InvalidCheckpointError,
    NoCheckpointError,
    list_checkpoints,
    newest_valid,
    set_aside_newer,
    verify,
)
from hpcddp.run.lease import FencedError
from hpcddp.run.manifest import Manifest
from hpcddp.run.publish import advance_latest, prune, publish


def manifest(step: int, attempt: int = 0) -> Manifest:
    return Manifest(
        step=step,
        attempt=attempt,
        time=1.5,
        contract={"seed": 1},
        progress={"epoch": 2},
        information={"world_size": 3},
        files={},
    )


def write(content: bytes) -> Callable[[IO[bytes]], None]:
    def writer(stream: IO[bytes]) -> None:
        stream.write(content)

    return writer


def nothing() -> None:
    pass


def save(directory: Path, step: int, content: bytes = b"state") -> Checkpoint:
    writers = {"a.bin": write(content), "b.bin": write(b"more")}
    published = publish(directory, manifest(step), writers, may_publish=nothing)
    advance_latest(directory, step, may_publish=nothing)
    return published


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def no_warning(text: str) -> None:
    raise AssertionError(text)


def test_published_checkpoint_is_found_with_its_manifest(tmp_path: Path) -> None:
    published = save(tmp_path / "checkpoints", 12)
    found = newest_valid(tmp_path / "checkpoints", expected=True, warn=no_warning)
    assert found == published
    assert found is not None
    assert found.path.name == "step-000012"
    assert found.manifest.contract == {"seed": 1}
    assert found.manifest.files["a.bin"].size == 5
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000012\n"
    assert names(tmp_path / "checkpoints") == ["latest", "step-000012"]


def test_directory_that_never_held_one_gives_none(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "nothing", expected=False, warn=no_warning) is None


def test_newest_means_the_largest_step_even_beyond_six_digits(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 20):
        save(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1000000", "step-999999", "step-000020"]


def test_latest_never_goes_back(tmp_path: Path) -> None:
    for step in (30, 20):
        save(tmp_path, step)
    assert (tmp_path / "latest").read_text() == "step-000030\n"


def test_rotten_latest_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    save(tmp_path, 20)
    assert (tmp_path / "latest").read_text() == "step-000020\n"


def damage_missing_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def damage_broken_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def damage_foreign_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"files": {}}')


def damage_other_step(path: Path) -> None:
    document = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**document, "step": 3}))


def damage_missing_file(path: Path) -> None:
    (path / "a.bin").unlink()


def damage_truncated(path: Path) -> None:
    (path / "a.bin").write_bytes(b"stat")


def damage_flipped(path: Path) -> None:
    (path / "a.bin").write_bytes(b"stbte")


DAMAGES = {
    damage_missing_manifest: "step-000020 has no manifest.json",
    damage_broken_manifest: "manifest.json is damaged (JSONDecodeError",
    damage_foreign_manifest: "manifest.json is damaged (TypeError",
    damage_other_step: "manifest.json is of step 3, not of its directory's",
    damage_missing_file: "a.bin is missing",
    damage_truncated: "a.bin has 4 bytes, not the 5 of its manifest",
    damage_flipped: "a.bin has another sha256 than its manifest says",
}


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES.items())
def test_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    older = save(tmp_path, 10)
    damage(save(tmp_path, 20).path)
    warnings: list[str] = []
    assert newest_valid(tmp_path, expected=True, warn=warnings.append) == older
    assert len(warnings) == 1
    assert "checkpoint step-000020 is passed over: " in warnings[0]
    assert sentence in warnings[0]
    with pytest.raises(InvalidCheckpointError):
        verify(tmp_path / "step-000020")


def test_all_damaged_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    damage_flipped(save(tmp_path, 10).path)
    with pytest.raises(NoCheckpointError, match="holds no valid checkpoint although the run has saved some") as caught:
        newest_valid(tmp_path, expected=False, warn=lambda _: None)
    assert caught.value.exit_code == 65


@pytest.mark.parametrize("expected", [True, False])
def test_none_where_there_should_be_one_is_an_error(tmp_path: Path, *, expected: bool) -> None:
    if not expected:
        (tmp_path / "latest").write_text("step-000010\n")
    with pytest.raises(NoCheckpointError):
        newest_valid(tmp_path, expected=expected, warn=no_warning)


def test_disk_that_is_full_leaves_the_older_checkpoint_and_no_trace(tmp_path: Path) -> None:
    save(tmp_path, 10)

    def full(stream: IO[bytes]) -> None:
        stream.write(b"begin")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path, manifest(20), {"a.bin": full}, may_publish=nothing)
    assert names(tmp_path) == ["latest", "step-000010"]


def test_disk_error_is_reported_even_where_the_writer_hides_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def hide(stream: IO[bytes]) -> None:
        monkeypatch.setattr(os, "write", fail)
        try:
            stream.write(b"x")
        except OSError as error:
            raise RuntimeError("something else") from error
        finally:
            monkeypatch.undo()

    with pytest.raises(OSError, match="Input/output error"):
        publish(tmp_path, manifest(20), {"a.bin": hide}, may_publish=nothing)


def test_fenced_attempt_publishes_nothing(tmp_path: Path) -> None:
    def fenced() -> None:
        raise FencedError("attempt 1 owns the run")

    with pytest.raises(FencedError):
        publish(tmp_path, manifest(20), {"a.bin": write(b"x")}, may_publish=fenced)
    assert names(tmp_path) == []


def test_valid_checkpoint_of_the_same_step_stays(tmp_path: Path) -> None:
    first = save(tmp_path, 10)
    assert save(tmp_path, 10, b"other") == first
    assert (first.path / "a.bin").read_bytes() == b"state"
    assert names(tmp_path) == ["latest", "step-000010"]


def test_damaged_checkpoint_of_the_same_step_is_set_aside(tmp_path: Path) -> None:
    damage_flipped(save(tmp_path, 10).path)
    save(tmp_path, 10, b"again")
    assert (tmp_path / "step-000010" / "a.bin").read_bytes() == b"again"
    (aside,) = tmp_path.glob("invalid-step-000010-*")
    assert (aside / "a.bin").read_bytes() == b"stbte"


def test_newer_ones_can_be_set_aside(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    set_aside_newer(tmp_path, 10)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000010"]


def test_prune_keeps_the_newest_ones(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        newest = save(tmp_path, step)
    prune(tmp_path, keep=2, newest=newest.path, attempt=0)
    assert names(tmp_path) == ["latest", "step-000030", "step-000040"]


def test_prune_never_removes_the_newest_valid_one(tmp_path: Path) -> None:
    for step in (20, 30, 40):
        save(tmp_path, step)
    newest = save(tmp_path, 10)
    prune(tmp_path, keep=2, newest=newest.path, attempt=0)
    assert names(tmp_path) == ["latest", "step-000010", "step-000030", "step-000040"]


def test_prune_removes_what_earlier_attempts_left_half_written(tmp_path: Path) -> None:
    newest = save(tmp_path, 10)
    for name in (".step-000020.0.abcd", ".step-000020.1.abcd", ".step-000020.2.abcd"):
        (tmp_path / name).mkdir()
    prune(tmp_path, keep=2, newest=newest.path, attempt=1)
    assert names(tmp_path) == [".step-000020.1.abcd", ".step-000020.2.abcd", "latest", "step-000010"]


def test_files_and_folders_belong_to_their_owner_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 10).path
    assert path.stat().st_mode & 0o077 == 0
    assert (path / "a.bin").stat().st_mode & 0o077 == 0
