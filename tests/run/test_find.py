"""Which run a person means."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.run.find import NoRunError, find_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for run in ("digits/cluster-12", "digits/cluster-123", "resnet/other-7"):
        (tmp_path / "runs" / run / "attempts").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "no-run").mkdir()
    (tmp_path / "runs" / "file").write_text("")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("text", "run"),
    [("cluster-123", "digits/cluster-123"), ("cluster-12", "digits/cluster-12"), ("oth", "resnet/other-7")],
)
def test_id_or_its_unique_beginning_names_a_run(root: Path, text: str, run: str) -> None:
    assert find_run(text, root).path == root / run


def test_path_names_a_run_wherever_it_is(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert find_run("digits/cluster-12", tmp_path / "elsewhere").path == root / "digits" / "cluster-12"


@pytest.mark.parametrize("text", ["", "no-run", "12", "file"])
def test_what_is_no_run_is_refused(root: Path, text: str) -> None:
    with pytest.raises(NoRunError) as caught:
        find_run(text, root)
    assert caught.value.message.startswith(f"{text!r} is no run: it is no run directory, and no run under {root}")


def test_beginning_of_several_ids_is_refused_and_names_them(root: Path) -> None:
    with pytest.raises(
        NoRunError, match=r"'cluster-1' means 2 runs, digits/cluster-12, digits/cluster-123; write more of the id"
    ):
        find_run("cluster-1", root)


def test_same_id_under_two_names_is_refused(root: Path) -> None:
    (root / "resnet" / "cluster-12" / "attempts").mkdir(parents=True)
    with pytest.raises(NoRunError, match="means 2 runs, digits/cluster-12, resnet/cluster-12"):
        find_run("cluster-12", root)


def test_root_that_does_not_exist_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(NoRunError):
        find_run("any", tmp_path / "nothing")
