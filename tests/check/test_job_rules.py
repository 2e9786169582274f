"""What the rules about a job file know: earlier runs, the grace time of a partition, the memory of GPUs, classes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.api import read_job, request_to_submit
from hpcddp.check.check import RULES
from hpcddp.check.finding import Example, Subject, model_refusal
from hpcddp.jobfile.cluster import ClusterFacts, Partition
from tests.check.examples import report_of

HERE = {"PATH": os.environ["PATH"]}
# A process that imports torch builds the model, or reads the data.
TORCH = pytest.mark.depends_on("hpcddp/check", "hpcddp/jobfile", "hpcddp/train", "tests/check")
RUN = Path("runs/a/20260101-000000-0000")


def codes(example: Example, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return [finding.rule.code for finding in report_of(example, directory, monkeypatch, HERE).findings]


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}\n'])
def test_a_damaged_record_of_an_earlier_run_is_as_if_it_were_not_there(
    name: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = RULES["save-too-late"].bad
    damaged = replace(bad, files={**bad.files, str(RUN / name): content})
    assert codes(damaged, tmp_path, monkeypatch) == []


def test_a_run_on_other_ranks_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = RULES["save-too-late"].bad
    name = str(RUN / "plan.json")
    plan = {**json.loads(bad.files[name]), "world_size": 2}
    assert codes(replace(bad, files={**bad.files, name: json.dumps(plan)}), tmp_path, monkeypatch) == []


def test_a_time_limit_counts_with_the_requeues_that_the_job_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = RULES["time-limit-too-short"].good
    # 160 steps of 10 s need three times 10 minutes.
    for allowed, found in ((1, ["time-limit-too-short"]), (2, [])):
        text = good.text.replace("causes:", f"max_time_limits: {allowed}, causes:")
        assert codes(replace(good, text=text), tmp_path, monkeypatch) == found


@pytest.mark.parametrize(
    ("mode", "grace_time_s", "is_found"), [("REQUEUE", 30, True), ("REQUEUE", 300, False), ("OFF", 30, False)]
)
def test_the_grace_time_of_the_partition_is_compared_with_a_step_and_a_save(
    mode: str, grace_time_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_found: bool
) -> None:
    good = RULES["save-too-late"].good
    for name, text in good.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "job.yaml").write_text(good.text)
    monkeypatch.chdir(tmp_path)
    partition = Partition(default=True, preempt_mode=mode, grace_time_s=grace_time_s)
    job = replace(read_job(Path("job.yaml"), None), cluster=ClusterFacts(name="c", partitions={"low": partition}))
    request = request_to_submit(job, run_id=None, environment=HERE)
    subject = Subject(text="", directory=tmp_path, environment=HERE, request=request)
    hits = list(RULES["save-too-late"].find(subject))
    assert [hit.key for hit in hits] == (["resources.partition"] if is_found else [])


@pytest.mark.slow
@TORCH
@pytest.mark.parametrize(
    "source",
    ["import os\nos._exit(0)\n", "def build(num_classes):\n    raise ValueError\n", "import nothing_like_it\n"],
)
def test_a_model_of_the_user_that_cannot_be_built_here_says_nothing(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(source)
    Path("job.yaml").write_text(
        "name: a\nbatch: {global_batch_size: 8}\ntrain: {model: 'mine:build', dataset: synthetic, num_classes: 10}\n"
    )
    assert model_refusal(read_job(Path("job.yaml"), None).spec, directory=tmp_path) is None


@pytest.mark.slow
@TORCH
def test_a_model_that_cannot_be_built_without_memory_is_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchvision computes its widths with tensors.
    train = "{model: regnet_y_400mf, dataset: digits, model_args: {stem_width: 32}}"
    text = f"name: a\nbatch: {{global_batch_size: 8}}\ntrain: {train}\n"
    assert codes(Example(text), tmp_path, monkeypatch) == []


@pytest.mark.slow
@TORCH
def test_an_unknown_argument_of_the_data_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = RULES["data"].good
    example = replace(good, text=good.text.replace("num_classes: 5", "num_classes: 5, dataset_args: {sise: 3}"))
    findings = report_of(example, tmp_path, monkeypatch, HERE).findings
    assert {finding.rule.code for finding in findings} == {"data"}
    assert all("sise" in finding.hit.problem for finding in findings)


@pytest.mark.slow
@TORCH
def test_an_image_folder_with_more_classes_than_the_model_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"data/{part}/{name}/1.jpg": "" for part in ("train", "val") for name in ("a", "b", "c")}
    text = (
        "name: a\nbatch: {global_batch_size: 2}\n"
        "train: {model: vit_b_16, dataset: imagefolder, data_dir: data, num_classes: 2}\n"
    )
    (finding,) = report_of(Example(text, files=files), tmp_path, monkeypatch, HERE).findings
    assert (finding.rule.code, finding.hit.key, finding.line) == ("data", "train.num_classes", 3)
