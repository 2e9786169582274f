"""Checkpoints on disk: whole or not there."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from hpcddp.run.checkpoints import (
    InvalidCheckpointError,
    NoCheckpointError,
    list_checkpoints,
    newest_valid,
    set_aside_newer,
    survey,
    valid_or_none,
    verify,
)
from hpcddp.run.ownership import FencedError
from hpcddp.run.publish import advance_latest, point_best, prune, publish
from tests.messages import GoldenMessages
from tests.run.checkpoints import correct_checksum, flip, manifest, nothing, replace, save, with_flipped_bit, write


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


def test_files_and_then_the_manifest_are_synced_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that loses its power leaves on disk what was synced, and no process can be shown what that is."""
    directory, fsync = tmp_path / "checkpoints", os.fsync
    synced: list[str] = []

    def note(descriptor: int) -> None:
        if not list_checkpoints(directory):
            synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", note)
    save(directory, 12)
    assert synced[:2] == ["a.bin", "b.bin"]
    assert synced[2].startswith(".manifest.json.")


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


def test_latest_that_names_a_step_that_was_never_saved_is_written_anew(tmp_path: Path) -> None:
    save(tmp_path, 20)
    latest = tmp_path / "latest"
    whole = latest.read_bytes()
    for bit in range(8 * len(whole)):
        latest.write_bytes(with_flipped_bit(whole, bit))
        advance_latest(tmp_path, 20, may_publish=nothing)
        # White space around the name is no damage.
        assert latest.read_text().strip() == "step-000020"
    latest.write_text("step-" + "9" * 5000)
    advance_latest(tmp_path, 20, may_publish=nothing)
    assert latest.read_bytes() == whole


def change_manifest(path: Path, **changes: Any) -> None:
    """Change values of a checkpoint's manifest, which keeps a checksum that fits."""
    document = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**document, **changes}, indent=2, ensure_ascii=False) + "\n")
    correct_checksum(path)


def damage_missing_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def damage_broken_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def damage_foreign_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"files": {}}')


def damage_cut_manifest_with_a_checksum(path: Path) -> None:
    replace(path / "manifest.json", b'"epoch": 2', b'"epoch')
    correct_checksum(path)


def damage_manifest_without_checksum(path: Path) -> None:
    first, _, rest = (path / "manifest.json").read_text().split("\n", 2)
    (path / "manifest.json").write_text(f"{first}\n{rest}")


def damage_flipped_manifest(path: Path) -> None:
    flip(path / "manifest.json", b'"epoch": 2', 8 * 9)


def damage_checksum_without_its_name(path: Path) -> None:
    flip(path / "manifest.json", b'"sha256": ', 8)


def damage_other_step(path: Path) -> None:
    change_manifest(path, step=3)


def damage_text_for_a_number(path: Path) -> None:
    change_manifest(path, attempt="0")


def damage_endless_time(path: Path) -> None:
    change_manifest(path, time=float("inf"))


def damage_same_key_twice(path: Path) -> None:
    replace(path / "manifest.json", b'"epoch": 2', b'"epoch": 2, "epoch": 3')
    correct_checksum(path)


def damage_nesting(path: Path) -> None:
    replace(path / "manifest.json", b'"epoch": 2', b'"epoch": ' + b"[" * 100_000 + b"]" * 100_000)
    correct_checksum(path)


def damage_no_text(path: Path) -> None:
    (path / "manifest.json").write_bytes(b"\xff\xfe{")


def damage_size_of_the_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 1 << 40)


def damage_record(path: Path) -> None:
    change_manifest(path, files={"a.bin": 5})


def damage_manifest_that_is_a_pipe(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def damage_pipe(path: Path) -> None:
    (path / "a.bin").unlink()
    os.mkfifo(path / "a.bin")


def damage_link(path: Path) -> None:
    (path / "a.bin").rename(path.parent / "elsewhere")
    (path / "a.bin").symlink_to(path.parent / "elsewhere")


def damage_directory(path: Path) -> None:
    (path / "a.bin").unlink()
    (path / "a.bin").mkdir()


def damage_file_for_a_directory(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


def damage_missing_file(path: Path) -> None:
    (path / "a.bin").unlink()


def damage_truncated(path: Path) -> None:
    (path / "a.bin").write_bytes(b"stat")


def damage_flipped(path: Path) -> None:
    (path / "a.bin").write_bytes(b"stbte")


DAMAGES = {
    damage_missing_manifest: "step-000020/manifest.json is missing",
    damage_broken_manifest: "manifest.json is damaged (its second line is not the checksum of the lines after it)",
    damage_foreign_manifest: "manifest.json is damaged (its second line is not the checksum of the lines after it)",
    damage_manifest_without_checksum: (
        "manifest.json is damaged (its second line is not the checksum of the lines after it)"
    ),
    damage_cut_manifest_with_a_checksum: "manifest.json is damaged (Invalid control character",
    damage_flipped_manifest: "manifest.json is damaged (its content does not have its checksum)",
    damage_checksum_without_its_name: (
        "manifest.json is damaged (its second line is not the checksum of the lines after it)"
    ),
    damage_text_for_a_number: 'manifest.json is damaged (its attempt is "0")',
    damage_endless_time: "manifest.json is damaged (its time is ",
    damage_same_key_twice: "manifest.json is damaged (it has the same key twice)",
    damage_nesting: "manifest.json is damaged (its content is nested too deeply)",
    damage_no_text: "manifest.json is damaged ('utf-8' codec can't decode",
    damage_size_of_the_manifest: "manifest.json is damaged (it has 1099511627776 bytes)",
    damage_record: "manifest.json is damaged (it holds 5, not a JSON object)",
    damage_manifest_that_is_a_pipe: "manifest.json is not a regular file",
    damage_pipe: "a.bin is not a regular file",
    damage_link: "cannot be read (it is a symbolic link)",
    damage_directory: "a.bin cannot be read (Is a directory)",
    damage_file_for_a_directory: "manifest.json cannot be read (Not a directory)",
    damage_other_step: "manifest.json is of step 3, not of its directory's",
    damage_missing_file: "a.bin is missing",
    damage_truncated: "a.bin has 4 bytes, not the 5",
    damage_flipped: "a.bin has another sha256",
}


@pytest.mark.parametrize(("damage", "fact"), DAMAGES.items(), ids=[damage.__name__ for damage in DAMAGES])
def test_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, damage: Callable[[Path], None], fact: str, golden: GoldenMessages
) -> None:
    older = save(tmp_path, 10)
    damage(save(tmp_path, 20).path)
    warnings: list[str] = []
    assert newest_valid(tmp_path, expected=True, warn=warnings.append) == older
    (warning,) = warnings
    assert "checkpoint step-000020 is skipped: " in golden.message(warning)
    assert fact in warning
    with pytest.raises(InvalidCheckpointError):
        verify(tmp_path / "step-000020")
    assert [state.damage is None for state in survey(tmp_path)] == [False, True]


@pytest.mark.parametrize(
    "name", ["../step-000010/a.bin", "../../dev/zero", "/etc/hostname", "", ".", "..", ".hidden", "a\0b", "a" * 300]
)
def test_manifest_that_names_files_outside_of_its_directory_is_damaged(
    tmp_path: Path, name: str, golden: GoldenMessages
) -> None:
    older = save(tmp_path, 10)
    newer = save(tmp_path, 20)
    files = {name: older.manifest.files["a.bin"]}
    (newer.path / "manifest.json").write_text(dataclasses.replace(newer.manifest, files=files).to_text())
    with pytest.raises(InvalidCheckpointError, match="not the name of a file") as caught:
        verify(newer.path)
    # A long name is cut.
    assert repr(name)[:50] in golden.message(caught.value)


def test_files_that_the_manifest_does_not_name_are_not_looked_at(tmp_path: Path) -> None:
    published = save(tmp_path, 10)
    os.mkfifo(published.path / ".nfs0001")
    assert verify(published.path) == published
    assert survey(tmp_path)[0].damage is None


def flip_one_bit(content: bytes, chance: random.Random) -> bytes:
    return with_flipped_bit(content, chance.randrange(8 * len(content)))


def flip_three_bits(content: bytes, chance: random.Random) -> bytes:
    for bit in chance.sample(range(8 * len(content)), 3):
        content = with_flipped_bit(content, bit)
    return content


def truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


@pytest.mark.parametrize(("change", "times"), [(flip_one_bit, 2000), (flip_three_bits, 500), (truncate, 500)])
def test_no_checkpoint_is_accepted_with_another_content(
    tmp_path: Path, change: Callable[[bytes, random.Random], bytes], times: int
) -> None:
    path = save(tmp_path, 188, bytes(range(256))).path
    contents = {file: file.read_bytes() for file in sorted(path.iterdir())}
    chance = random.Random(0)
    places = chance.choices(list(contents), weights=[len(content) for content in contents.values()], k=times)
    for file in places:
        file.write_bytes(change(contents[file], chance))
        assert valid_or_none(path) is None, file.read_bytes()
        file.write_bytes(contents[file])
    assert valid_or_none(path) is not None


def test_checksum_of_a_manifest_can_be_computed_by_hand(tmp_path: Path) -> None:
    lines = (save(tmp_path, 10).path / "manifest.json").read_bytes().splitlines(keepends=True)
    assert lines[1] == f'  "sha256": "{hashlib.sha256(b"".join(lines[2:])).hexdigest()}",\n'.encode()


def test_manifest_that_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    monkeypatch.setattr("hpcddp.run.checkpoints.LARGEST_RECORD", 1000)
    large = dataclasses.replace(manifest(10), progress={"log": "x" * 1000})
    with pytest.raises(ValueError, match="put what is large into the objects") as caught:
        publish(tmp_path, large, {}, may_publish=nothing)
    assert "1000" in golden.message(caught.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["step-20", "step-0000020", "step-" + 19 * "9", "step-000020.bak"])
def test_other_names_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    save(tmp_path, 20).path.rename(tmp_path / name)
    assert list_checkpoints(tmp_path) == []


def test_all_damaged_is_an_error_and_no_fresh_start(tmp_path: Path, golden: GoldenMessages) -> None:
    damage_flipped(save(tmp_path, 10).path)
    with pytest.raises(NoCheckpointError, match="holds no valid checkpoint") as caught:
        newest_valid(tmp_path, expected=False, warn=lambda _: None)
    assert str(tmp_path) in golden.message(caught.value)
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


def test_fenced_attempt_does_not_replace_the_best_checkpoint(tmp_path: Path) -> None:
    def fenced() -> None:
        raise FencedError("attempt 1 owns the run")

    for step in (10, 20):
        publish(tmp_path, manifest(step), {"a.bin": write(b"x")}, may_publish=nothing)
    point_best(tmp_path, {10: 0.5}, "max", may_publish=nothing)
    with pytest.raises(FencedError):
        point_best(tmp_path, {10: 0.5, 20: 0.9}, "max", may_publish=fenced)
    assert (tmp_path / "best").readlink() == Path("step-000010")


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
    # A process that was killed while it wrote the file left this one.
    (tmp_path / ".latest.4711.0a1b2c3d").touch()
    prune(tmp_path, keep=2, newest=newest.path, attempt=1)
    assert names(tmp_path) == [".step-000020.1.abcd", ".step-000020.2.abcd", "latest", "step-000010"]


def test_files_and_folders_belong_to_their_owner_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 10).path
    assert path.stat().st_mode & 0o077 == 0
    assert (path / "a.bin").stat().st_mode & 0o077 == 0
