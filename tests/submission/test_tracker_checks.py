"""What keeps a tracker from working is said before the job queues."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.packages import is_installed
from hpcddp.run.trackers import chosen
from hpcddp.submission import checks as job_checks
from hpcddp.submission.checks import check_submittable
from hpcddp.submission.request import SubmissionError
from tests.messages import GoldenMessages
from tests.submission.requests import request_of


def job(**changes: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "a",
            "batch": {"global_batch_size": 8},
            "train": {"model": "resnet18", "dataset": "digits"},
            **changes,
        }
    )


def check(spec: JobSpec, environment: dict[str, str]) -> None:
    check_submittable(request_of(spec, cluster="local", environment=environment))


KEY = {"WANDB_API_KEY": "x"}


def refusal(spec: JobSpec, **environment: str) -> str:
    with pytest.raises(SubmissionError) as caught:
        check(spec, environment)
    return caught.value.message


def test_missing_tracker_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    monkeypatch.setattr(job_checks, "is_installed", lambda name: name != "mlflow")
    message = refusal(job(trackers={"use": ["wandb", "mlflow"], "tracking_uri": "http://host"}), **KEY)
    assert golden.message(message, {sys.executable: "PYTHON"}).startswith("trackers.use names mlflow, ")
    assert f"; run: {sys.executable} -m pip install mlflow-skinny, " in message


def test_mlflow_without_a_server_is_refused(golden: GoldenMessages) -> None:
    named = {"trackers": {"use": ["mlflow"]}}
    message = golden.message(refusal(job(**named)))
    assert message.startswith("trackers.use names mlflow, ")
    assert "; export MLFLOW_TRACKING_URI, " in message
    assert message.endswith(" trackers.tracking_uri")
    check(job(**named), {"MLFLOW_TRACKING_URI": "http://host"})
    check(job(**named, environment={"env": {"MLFLOW_TRACKING_URI": "http://host"}}), {})
    check(job(trackers={"use": ["mlflow"], "tracking_uri": "http://host"}), {})


def test_another_interpreter_is_not_asked_for_its_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_checks, "is_installed", lambda _: False)
    named = {"trackers": {"use": ["wandb"]}}
    check(job(**named, environment={"python": "/bin/true"}), KEY)
    assert "wandb" in refusal(job(**named, environment={"python": sys.executable}))


def test_folder_that_a_tracker_has_left_behind_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("a_tracker")
    assert is_installed("tensorboard")


def test_tensorboard_is_the_default_where_it_is_installed() -> None:
    assert chosen(job().trackers) == ("tensorboard",)
    assert chosen(job(trackers={"use": ["mlflow"]}).trackers) == ("mlflow",)
    assert chosen(job(trackers={"use": []}).trackers) == ()


def test_wandb_without_a_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden: GoldenMessages
) -> None:
    monkeypatch.setattr(job_checks, "is_installed", lambda _: True)
    named = job(trackers={"use": ["wandb"]})
    message = golden.message(refusal(named, HOME=str(tmp_path)))
    assert message.startswith("trackers.use names wandb, ")
    assert "; run: wandb login, or export WANDB_API_KEY " in message
    assert "WANDB_MODE=offline" in message
    for variables in ({"WANDB_API_KEY": "x"}, {"WANDB_MODE": "offline"}):
        check(named, {"HOME": str(tmp_path), **variables})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    check(named, {"HOME": str(tmp_path)})
    (tmp_path / "other").write_text("machine wandb.example.org login user password x\n")
    check(named, {"HOME": str(tmp_path / "none"), "NETRC": str(tmp_path / "other")})
