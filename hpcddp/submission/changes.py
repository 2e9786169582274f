"""What a resumption changes in the training of a run: steps, order, learning rate, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hpcddp.batch.plan import BatchStart, Steps, plan_batch
from hpcddp.batch.scaling import learning_rate_at, scaled_hyperparameters
from hpcddp.errors import counted
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.checkpoints import InvalidCheckpointError, Manifest, list_checkpoints, verify
from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import Change
from hpcddp.submission.request import first_plan


def consequences(
    run: RunDirectory, job_before: JobSpec, job_now: JobSpec, changes: Sequence[Change]
) -> tuple[str, ...]:
    """Return what a resumption changes in the training, and what follows from that, a sentence each."""
    manifest = _newest_manifest(run)
    first_step = _where_changes_begin(job_now, manifest)
    sentences = [f"{change}, {first_step}" for change in changes]
    if any(change.key == "command" for change in changes):
        sentences.append("the program restores its own state; hpcddp does not know what its arguments change")
    if job_now.train is None:
        sentences += _consequences_for_program(job_before, job_now)
    else:
        sentences += _consequences_for_training(job_before, job_now, manifest)
    return tuple(sentences)


def total_steps(run: RunDirectory, job: JobSpec) -> int | None:
    """Return the optimizer steps of a training that goes on with a job from its newest checkpoint; None if unknown."""
    if job.train is None:
        return None
    manifest = _newest_manifest(run)
    steps_so_far = _steps_so_far(job, manifest)
    if steps_so_far is None:
        return None
    return _continue_with(job, steps_so_far, _saved_step(manifest)).total_steps


def _newest_manifest(run: RunDirectory) -> Manifest | None:
    """Return the manifest of the newest checkpoint of a run that looks valid by its sizes; None without one."""
    for path in list_checkpoints(run.checkpoints):
        with suppress(InvalidCheckpointError):
            return verify(path, sizes_only=True).manifest
    return None


def _saved_step(manifest: Manifest | None) -> int:
    return 0 if manifest is None else manifest.step


def _where_changes_begin(job_now: JobSpec, manifest: Manifest | None) -> str:
    step = _saved_step(manifest)
    if step > 0:
        return f"after step {step}, the newest checkpoint"
    if job_now.command is None:
        return "from the beginning: no step is saved"
    return "from the next start of the program on"


def _consequences_for_program(job_before: JobSpec, job_now: JobSpec) -> Iterator[str]:
    """Yield what changes for a command or an entrypoint, which has a loop of its own."""
    batch_before = job_before.batch.global_batch_size
    batch_now = job_now.batch.global_batch_size
    if batch_now != batch_before:
        yield "the program must find the next sample itself; hpcddp does not know its data"
    if batch_before is None or batch_now is None:
        return
    rate_before = scaled_hyperparameters(job_before).learning_rate
    rate_now = scaled_hyperparameters(job_now).learning_rate
    if rate_now != rate_before:
        yield f"HPCDDP_LEARNING_RATE and the context say {rate_now:g} instead of {rate_before:g}"


def _consequences_for_training(job_before: JobSpec, job_now: JobSpec, manifest: Manifest | None) -> Iterator[str]:
    steps_so_far = _steps_so_far(job_before, manifest)
    if steps_so_far is not None:
        step = _saved_step(manifest)
        training_before = _continue_with(job_before, steps_so_far, step)
        training_now = _continue_with(job_now, steps_so_far, step)
        end_before = training_before.total_steps
        end_now = training_now.total_steps
        if training_now.steps != training_before.steps:
            yield _order_sentence(training_before.steps, training_now.steps)
        if end_now != end_before:
            yield f"the training ends after step {end_now} instead of step {end_before}"
        yield _rate_sentence(training_before, training_now, step)
    if job_now.global_batch_size != job_before.global_batch_size:
        yield _rule_sentence(job_before, job_now)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Continuation:
    """A training from the newest checkpoint on: its job, and its steps with the batch of this job."""

    job: JobSpec
    steps: Steps

    @property
    def epochs(self) -> int:
        return 1 if self.job.train is None else self.job.train.epochs

    @property
    def total_steps(self) -> int:
        return self.steps.total(self.epochs)

    def learning_rate_after(self, step: int) -> float:
        """Return the learning rate of the step that follows ``step`` optimizer steps."""
        epoch, step_in_epoch = self.steps.place(step)
        return learning_rate_at(
            scaled_hyperparameters(self.job).course(self.job.learning_rate),
            step=self.steps.schedule_step(epoch, step_in_epoch),
            steps_per_epoch=self.steps.plan.steps_per_epoch or 1,
            epochs=self.epochs,
        )


def _continue_with(job: JobSpec, steps_so_far: Steps, step: int) -> _Continuation:
    """Return the training that goes on after a step with a job, whose global batch may be another one."""
    batch = job.global_batch_size
    if batch == steps_so_far.plan.global_batch_size:
        return _Continuation(job=job, steps=steps_so_far)
    plan = replace(steps_so_far.plan, global_batch_size=batch)
    return _Continuation(job=job, steps=Steps(plan=plan, start=steps_so_far.change(step, batch)))


def _steps_so_far(job_before: JobSpec, manifest: Manifest | None) -> Steps | None:
    """Return the steps of a run so far; None where nothing on this machine says how many samples the data have."""
    if manifest is None:
        plan = first_plan(job_before)
        samples = None if plan is None else plan.batch.samples
        batch = job_before.global_batch_size
    else:
        counts_samples = manifest.contract.get("unit", "sample") == "sample"
        samples = manifest.contract.get("samples") if counts_samples else None
        batch = manifest.contract.get("global_batch_size", job_before.global_batch_size)
    if not isinstance(samples, int) or not isinstance(batch, int):
        return None
    # The steps of a training do not depend on the number of its ranks.
    plan_of_one_rank = plan_batch(global_batch_size=batch, world_size=1, samples=samples, tail=job_before.batch.tail)
    if manifest is None or not manifest.progress.get("batch_starts"):
        return Steps.from_beginning(plan_of_one_rank)
    return Steps(plan=plan_of_one_rank, start=BatchStart(**manifest.progress["batch_starts"][-1]))


def _order_sentence(steps_before: Steps, steps_now: Steps) -> str:
    """Return which samples the next batches have, if these begin to have another size."""
    start = steps_now.start
    steps_per_epoch = steps_now.plan.steps_per_epoch
    steps_per_epoch_before = steps_before.plan.steps_per_epoch
    if start.offset_samples == 0:
        dropped = ""
        _, step_in_epoch_before = steps_before.place(steps_now.start.step)
        if step_in_epoch_before > 0:
            dropped = " (its last samples are fewer than one batch, and the tail is dropped)"
        return (
            f"epoch {start.epoch + 1} begins with batches of {start.global_batch_size}{dropped}, in the order that it "
            f"would have had; an epoch has {steps_per_epoch} steps instead of {steps_per_epoch_before}"
        )
    samples = steps_now.plan.samples or 0
    return (
        f"epoch {start.epoch + 1} goes on with its other {samples - start.offset_samples} of {samples} samples, in the "
        f"same order, in {steps_now.count(start.epoch)} batches of {start.global_batch_size}; an epoch after that has "
        f"{steps_per_epoch} steps instead of {steps_per_epoch_before}"
    )


def _rate_sentence(training_before: _Continuation, training_now: _Continuation, step: int) -> str:
    rate_before = training_before.learning_rate_after(step)
    rate_now = training_now.learning_rate_after(step)
    schedule = training_now.job.learning_rate.schedule
    if rate_now == rate_before:
        return f"the learning rate of step {step + 1} stays {rate_now:g}; schedule {schedule}"
    return (
        f"the learning rate of step {step + 1} is {rate_now:g} instead of {rate_before:g}; schedule {schedule}, "
        f"{counted(training_now.epochs, 'epoch')}"
    )


def _rule_sentence(job_before: JobSpec, job_now: JobSpec) -> str:
    """Return what the rule of the learning rate makes of another batch."""
    learning_rate = job_now.learning_rate
    if learning_rate.base_global_batch_size is None:
        return (
            f"kappa is 1, because learning_rate.base_global_batch_size is null: learning_rate.base "
            f"{learning_rate.base:g} is for the new batch too; to scale it by a rule: --set "
            f"learning_rate.base_global_batch_size={job_before.global_batch_size} --set learning_rate.rule=linear or "
            "sqrt"
        )
    scaled_before = scaled_hyperparameters(job_before)
    scaled_now = scaled_hyperparameters(job_now)
    return (
        f"kappa is {scaled_now.kappa:g} instead of {scaled_before.kappa:g}, and rule {learning_rate.rule} makes the "
        f"rate {scaled_now.learning_rate:g} instead of {scaled_before.learning_rate:g}"
    )
