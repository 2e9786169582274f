"""What a training writes, says and refuses."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hpcddp.batch.plan import PlanError
from hpcddp.run.checkpoints import list_checkpoints
from hpcddp.run.events import accounts_of, read_events
from hpcddp.run.job_records import write_plan_record
from hpcddp.train.checkpoint import writer
from hpcddp.train.errors import NonFiniteError, SaveError, TrainingError
from tests.distributed.training import evaluations, result, steps
from tests.messages import GoldenMessages
from tests.train.conftest import Training

NORM = "tests.distributed.own_code:norm_model"
POISONED: dict[str, Any] = {"train__dataset_args": {"poison": 5}}


def test_metrics_have_a_record_for_every_step_and_evaluation(training: Training) -> None:
    training.train(train__epochs=2)
    found = steps(training.run.path)
    assert [record["step"] for record in found] == list(range(1, 9))
    assert [record["epoch"] for record in found] == [0] * 4 + [1] * 4
    assert [record["samples_seen"] for record in found] == [32, 64, 96, 100, 132, 164, 196, 200]
    assert set(found[0]) == {"step", "epoch", "loss", "lr", "samples_seen", "samples_per_s", "time"}
    assert all(record["samples_per_s"] > 0 for record in found)
    (first, second) = evaluations(training.run.path)
    assert set(first) == {"step", "epoch", "val_loss", "val_accuracy", "val_top5", "val_samples", "eval_s"}
    assert [(first["step"], first["epoch"]), (second["step"], second["epoch"])] == [(4, 0), (8, 1)]


def test_evaluation_comes_every_so_many_epochs_and_at_the_end(training: Training) -> None:
    training.train(train__epochs=5, train__eval_every=2)
    assert [record["epoch"] for record in evaluations(training.run.path)] == [1, 3, 4]


def test_result_holds_what_came_of_the_run(training: Training) -> None:
    training.train(train__epochs=2)
    document = result(training.run.path)
    last = evaluations(training.run.path)[-1]
    assert document["final_loss"] == steps(training.run.path)[-1]["loss"]
    assert (document["val_loss"], document["val_accuracy"]) == (last["val_loss"], last["val_accuracy"])
    assert document["skipped_steps"] == 0
    assert document["wall_s"] > 0


def test_same_job_gives_the_same_parameters_and_another_seed_others(new_training: Any) -> None:
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run = new_training(name)
        run.train(train__model=NORM, train__seed=seed)
        digests.append(result(run.run.path)["parameters_sha256"])
    assert digests[0] == digests[1] != digests[2]


def test_events_tell_the_beginning_saves_and_the_end(training: Training) -> None:
    training.train(train__epochs=2, checkpoint={"every": {"steps": 3}})
    events = read_events(training.run.events)
    assert [account.step for account in accounts_of(events)] == [3, 4, 6, 8]
    assert [(event.kind, event.step, event.reason) for event in events if event.kind != "account"] == [
        ("train", 0, "from the beginning"),
        ("save", 3, "every 3 steps"),
        ("save", 4, "end of epoch"),
        ("save", 6, "every 3 steps"),
        ("save", 8, "end of training"),
        ("finish", 8, "all steps are done"),
    ]
    assert [path.name for path in list_checkpoints(training.run.checkpoints)] == [
        "step-000008",
        "step-000006",
        "step-000004",
    ]


def test_saves_counted_in_epochs_leave_other_epochs_out(training: Training) -> None:
    training.train(train__epochs=5, checkpoint={"every": {"epochs": 2}})
    assert [event.step for event in read_events(training.run.events) if event.kind == "save"] == [8, 16, 20]


def test_saves_by_the_clock_are_decided_by_all_ranks_one_step_later(training: Training) -> None:
    clock = iter(range(10_000))
    training.train(train__epochs=1, checkpoint={"every": "3s"}, monotonic=lambda: float(next(clock)))
    reasons = [event.reason for event in read_events(training.run.events) if event.kind == "save"]
    assert "the interval of checkpoint.every" in reasons


def test_checkpoint_says_what_it_belongs_to(training: Training) -> None:
    training.train()
    manifest = json.loads((list_checkpoints(training.run.checkpoints)[0] / "manifest.json").read_text())
    assert manifest["step"] == 4
    assert manifest["contract"]["samples"] == 100
    assert manifest["contract"] == {**manifest["contract"], "version": 1, "seed": 0, "tail": "keep", "order": "keyed"}
    assert manifest["progress"]["epoch"] == 1
    assert manifest["progress"]["samples_seen"] == 100
    assert manifest["information"]["world_size"] == 1


def test_plan_is_written_again_from_the_data_that_is_there(training: Training) -> None:
    write_plan_record(training.run, {"steps_per_epoch": None, "total_steps": None})
    training.train()
    plan = json.loads(training.run.plan.read_text())
    assert (plan["steps_per_epoch"], plan["tail_samples"], plan["total_steps"]) == (4, 4, 4)


def test_start_up_lines_print_every_derived_number(golden: GoldenMessages, training: Training) -> None:
    training.train(batch__max_per_device_batch_size=9, train__epochs=2)
    text = "\n".join(training.said)
    golden.message(text.partition("epoch 1/2")[0])
    for part in (
        "run run, attempt 0: 1 rank on cpu",
        "1 thread and 0 loader workers; seed 0",
        "(3,258 parameters), fp64, sgd",
        "100 training and 50 validation samples, 10 classes",
        "global batch     32 samples, over 1 rank",
        "4 micro-steps per optimizer step; at most 9 samples per device at once",
        "steps            4: 3 of 32 samples, then one of 4",
        "length           8 steps in 2 epochs",
        "learning rate    0.1, constant",
        "epoch 2/2, step 8/8: loss ",
    ):
        assert part in text
    assert re.fullmatch(r"finished: 8 steps in [0-9.]+ s, val_accuracy [0-9]\.[0-9]{4}", training.said[-1])


def test_few_samples_for_batch_norm_are_noted(training: Training) -> None:
    training.train(train__model=NORM, batch__max_per_device_batch_size=4, batch__tail="drop")
    assert any("BatchNorm sees micro-batches of 4 samples" in line for line in training.said)


def test_one_sample_for_batch_norm_is_refused_before_the_first_step(training: Training) -> None:
    with pytest.raises(PlanError, match="BatchNorm"):
        training.train(train__model=NORM, batch__global_batch_size=33)
    assert not training.run.metrics.exists()


def test_another_number_of_ranks_than_the_job_asks_for_is_refused(golden: GoldenMessages, training: Training) -> None:
    with pytest.raises(TrainingError) as caught:
        training.train(resources={"tasks_per_node": 2})
    message = golden.message(caught.value)
    assert "asks for 2 ranks" in message
    assert "1 have started" in message


def test_loss_that_is_no_number_stops_the_run_and_is_never_saved(golden: GoldenMessages, training: Training) -> None:
    with pytest.raises(NonFiniteError) as caught:
        training.train(**POISONED)
    message = golden.message(caught.value)
    assert f"loss of step {caught.value.step} (epoch 0) is nan" in message
    assert "train.nonfinite_loss is stop" in message
    assert "or write skip" in message
    assert caught.value.exit_code == 70
    last = steps(training.run.path)[-1]
    assert (last["step"], last["loss"]) == (caught.value.step, None)
    assert list_checkpoints(training.run.checkpoints) == []


def test_parameters_that_are_no_numbers_are_never_saved(golden: GoldenMessages, training: Training) -> None:
    # The loss of the last step is finite, its update is not.
    with pytest.raises(NonFiniteError) as caught:
        training.train(
            learning_rate__base=1e308,
            train__epochs=1,
            batch__global_batch_size=100,
            train__optimizer={"weight_decay": 10.0},
        )
    message = golden.message(caught.value)
    assert "after step 1 " in message
    assert "weight is not finite" in message
    assert "the state is not saved" in message
    assert list_checkpoints(training.run.checkpoints) == []


def test_steps_with_a_loss_that_is_no_number_can_be_left_out(training: Training) -> None:
    training.train(**POISONED, train__epochs=2, train__nonfinite_loss="skip", train__model=NORM)
    skipped = [record for record in steps(training.run.path) if record.get("skipped")]
    assert len(skipped) == 2
    assert all(record["loss"] is None for record in skipped)
    assert result(training.run.path)["skipped_steps"] == 2
    # Running statistics of the poisoned batch did not stay either.
    assert result(training.run.path)["val_loss"] is not None


def test_leaving_out_changes_nothing_where_all_losses_are_numbers(new_training: Any) -> None:
    digests = []
    for choice in ("stop", "skip"):
        run = new_training(choice)
        run.train(train__nonfinite_loss=choice, train__clip_grad_norm=0.5)
        digests.append(result(run.run.path)["parameters_sha256"])
    assert digests[0] == digests[1]


def test_failed_save_warns_and_the_third_after_a_long_time_ends_the_run(
    golden: GoldenMessages, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_OUTAGE_ALLOWED_S", 0.0)
    training.run.checkpoints.write_text("a file where the folder should be")
    with pytest.raises(SaveError) as caught:
        training.train(train__epochs=5)
    assert caught.value.exit_code == 71
    message = golden.message(re.sub(r"last \d+ s", "last N s", str(caught.value)))
    assert "saving after step 12 failed" in message
    assert "all 3 saves of the last" in message
    assert f"make {training.run.checkpoints} writable" in message
    warnings = [line for line in training.said if line.startswith("warning: ")]
    assert len(warnings) == 2
    for warning in warnings:
        assert "saving after step " in golden.message(warning)
        assert "the training goes on" in warning
        assert "checkpoints before it are kept" in warning


def test_failed_save_that_is_followed_by_a_good_one_is_forgiven(training: Training) -> None:
    training.run.checkpoints.write_text("a file where the folder should be")

    def repair() -> int:
        # A thread writes, so that the warning may come some steps after the save.
        if training.run.checkpoints.is_file() and any("saving after step 4 failed" in line for line in training.said):
            training.run.checkpoints.unlink()
        return 0

    training.train(train__epochs=3, stop_reason=repair)
    assert result(training.run.path)["status"] == "finished"
    kept = [path.name for path in list_checkpoints(training.run.checkpoints)]
    assert kept[0] == "step-000012"
    assert "step-000004" not in kept


def test_clipping_and_label_smoothing_change_the_training(new_training: Any) -> None:
    digests = set()
    changes: list[dict[str, Any]] = [{}, {"train__clip_grad_norm": 0.01}, {"train__label_smoothing": 0.1}]
    for number, change in enumerate(changes):
        run = new_training(str(number))
        run.train(**change)
        digests.add(result(run.run.path)["parameters_sha256"])
    assert len(digests) == 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_works_in_narrow_precision(training: Training, precision: str) -> None:
    training.train(train__precision=precision, train__channels_last=True, train__deterministic=True, train__epochs=2)
    found = steps(training.run.path)
    assert found[-1]["loss"] < found[0]["loss"]
    assert result(training.run.path)["precision"] == precision


def test_torchvision_model_trains_on_digits(training: Training) -> None:
    training.train(
        train__model="squeezenet1_1",
        train__dataset="synthetic",
        train__precision="fp32",
        train__dataset_args={"samples": 20, "val_samples": 6},
    )
    assert result(training.run.path)["samples_seen"] == 20


def test_auxiliary_outputs_are_trained(training: Training) -> None:
    training.train(
        train__model="googlenet",
        train__dataset="synthetic",
        train__precision="fp32",
        train__dataset_args={"samples": 8, "val_samples": 2, "image_size": 64},
        batch__global_batch_size=4,
    )
    assert result(training.run.path)["status"] == "finished"


def test_model_with_idle_parameters_is_trained_and_noted(golden: GoldenMessages, training: Training) -> None:
    training.train(train__model="tests.train.odd_code:idle_parameters")
    (note,) = (line for line in training.said if "no gradient" in line)
    golden.message(note)
    assert "2 parameters" in note
    assert "idle.weight" in note
    assert result(training.run.path)["status"] == "finished"


def test_loader_worker_that_dies_is_a_clear_error(training: Training) -> None:
    with pytest.raises(TrainingError, match=r"loader worker 0 .* exit code 3"):
        training.train(train__dataset="tests.train.odd_code:fatal", train__num_workers=1)


def test_training_leaves_no_loader_worker_behind(training: Training) -> None:
    training.train(train__num_workers=2)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [child for child in children if "pytest" in Path(f"/proc/{child}/cmdline").read_text()]
