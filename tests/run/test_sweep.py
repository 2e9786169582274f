"""A sweep's manifest, and where its elements are."""

from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.sweep import (
    Chunk,
    ManifestError,
    Sweep,
    create_sweep,
    index_of,
    is_element,
    read_sweep,
    sweep_of,
    write_sweep,
)


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    elements = tuple({"train.seed": seed, "environment.env.WORD": "a\n\"ü'"} for seed in range(5))
    path = tmp_path / "20260101-120000-abcd"
    path.mkdir()
    chunks = (Chunk(job_id="7", first=0, count=3), Chunk(job_id="9", first=3, count=2))
    return Sweep(sweep_id=path.name, path=path, elements=elements, chunks=chunks)


def test_a_manifest_reads_back_as_it_was(sweep: Sweep) -> None:
    write_sweep(sweep)
    assert read_sweep(sweep.path) == sweep


def test_a_directory_without_a_manifest_is_no_sweep(tmp_path: Path) -> None:
    assert read_sweep(tmp_path) is None


@pytest.mark.parametrize(
    "text", ['{"sweep_id', "{}", "[1]", '{"format": 1, "sweep_id": "a", "elements": [], "chunks": [1]}']
)
def test_a_damaged_manifest_is_named(sweep: Sweep, text: str) -> None:
    sweep.manifest.write_text(text)
    with pytest.raises(ManifestError, match=r"sweep\.json is damaged"):
        read_sweep(sweep.path)


def test_the_first_manifest_stays_when_elements_write_it(sweep: Sweep) -> None:
    assert create_sweep(sweep)
    assert not create_sweep(Sweep(sweep_id=sweep.sweep_id, path=sweep.path, elements=(), chunks=()))
    assert read_sweep(sweep.path) == sweep


def test_an_element_is_a_run_beside_its_sweep(sweep: Sweep) -> None:
    assert sweep.run_id(4) == "20260101-120000-abcd_4"
    assert sweep.run(4).path == sweep.path.parent / "20260101-120000-abcd_4"


def test_a_job_id_counts_from_the_start_of_its_array(sweep: Sweep) -> None:
    assert [sweep.job_id(index) for index in range(6)] == ["7_0", "7_1", "7_2", "9_0", "9_1", None]


def test_a_run_knows_its_sweep_and_its_place_in_it(sweep: Sweep) -> None:
    write_sweep(sweep)
    assert sweep_of(sweep.run(1)) == sweep
    assert index_of(sweep.run(1)) == 1
    for name in (sweep.sweep_id, f"{sweep.sweep_id}_5", f"{sweep.sweep_id}_x", "other_1", "_1"):
        assert sweep_of(RunDirectory(sweep.path.parent / name)) is None


def test_the_runs_of_a_sweep_have_absolute_paths(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sweep(sweep)
    monkeypatch.chdir(sweep.path.parent)
    found = read_sweep(Path(sweep.path.name))
    assert found is not None
    assert found.run(0) == sweep.run(0)


def test_an_element_is_told_by_its_directory(sweep: Sweep) -> None:
    assert is_element(sweep.run(1).path, sweep.path)
    assert not is_element(sweep.path, sweep.path)
    assert not is_element(sweep.path / "run_1", sweep.path)
