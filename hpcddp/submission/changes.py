"""What a resumption changes in the training of a run: steps, order, learning rate, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hpcddp.batch.plan import BatchStart, Steps, plan_batch
from hpcddp.batch.scaling import ScaledRule, learning_rate_at, scaled_hyperparameters
from hpcddp.errors import counted
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.checkpoints import InvalidCheckpointError, Manifest, list_checkpoints, verify
from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import Change
from hpcddp.submission.request import first_plan


def newest_manifest(run: RunDirectory) -> Manifest | None:
    """Return the manifest of the newest checkpoint of a run that looks valid by its sizes; None without one."""
    for path in list_checkpoints(run.checkpoints):
        with suppress(InvalidCheckpointError):
            return verify(path, sizes_only=True).manifest
    return None


def consequences(run: RunDirectory, before: JobSpec, now: JobSpec, changes: Sequence[Change]) -> tuple[str, ...]:
    """Return what a resumption changes, and what follows from that, a sentence each.

    Args:
        run: the run.
        before: its job so far.
        now: the job with which it continues.
        changes: what has changed in the training.
    """
    if not changes:
        return ()
    manifest = newest_manifest(run)
    step = 0 if manifest is None else manifest.step
    if step:
        where = f"after step {step}, the newest checkpoint"
    elif now.command is None:
        where = "from the beginning: no step is saved"
    else:
        where = "from the next start of the program on"
    return (
        *(f"{change}, {where}" for change in changes),
        *(_of_command() if any(change.key == "command" for change in changes) else ()),
        *(_of_training(before, now, manifest, step) if now.train is not None else _of_program(before, now)),
    )


def _of_command() -> Iterator[str]:
    yield "the program restores its own state; hpcddp does not know what its arguments change"


def _of_program(before: JobSpec, now: JobSpec) -> Iterator[str]:
    """Yield what changes for a command or an entrypoint, which has a loop of its own."""
    if now.batch.global_batch_size != before.batch.global_batch_size:
        yield "the program must find the next sample itself; hpcddp does not know its data"
    if None in {now.batch.global_batch_size, before.batch.global_batch_size}:
        return
    old, new = scaled_hyperparameters(before), scaled_hyperparameters(now)
    if new.learning_rate != old.learning_rate:
        yield f"HPCDDP_LEARNING_RATE and the context say {new.learning_rate:g} instead of {old.learning_rate:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """The steps and rates of a job from a step on."""

    spec: JobSpec
    scaled: ScaledRule
    steps: Steps
    epochs: int

    @property
    def total(self) -> int:
        return self.steps.total(self.epochs)

    def rate(self, step: int) -> float:
        return learning_rate_at(
            self.scaled.course(self.spec.learning_rate),
            step=self.steps.schedule_step(*self.steps.place(step)),
            steps_per_epoch=self.steps.plan.steps_per_epoch or 1,
            epochs=self.epochs,
        )


def total_steps(run: RunDirectory, spec: JobSpec) -> int | None:
    """Return the optimizer steps of a training that goes on from its newest checkpoint; None if they are not known.

    Args:
        run: the run.
        spec: the job with which it continues.
    """
    if spec.train is None:
        return None
    manifest = newest_manifest(run)
    before = _steps_before(spec, manifest)
    return None if before is None else _course(spec, before, 0 if manifest is None else manifest.step).total


def _course(spec: JobSpec, before: Steps, step: int) -> _Course:
    """Return the course of a job that takes over after a step, until which the steps were others."""
    batch, steps = spec.global_batch_size, before
    if batch != before.plan.global_batch_size:
        steps = Steps(plan=replace(before.plan, global_batch_size=batch), start=before.change(step, batch))
    epochs = 1 if spec.train is None else spec.train.epochs
    return _Course(spec=spec, scaled=scaled_hyperparameters(spec), steps=steps, epochs=epochs)


def _of_training(before: JobSpec, now: JobSpec, manifest: Manifest | None, step: int) -> Iterator[str]:
    known = _steps_before(before, manifest)
    if known is not None:
        old, new = _course(before, known, step), _course(now, known, step)
        if new.steps != old.steps:
            yield _order_sentence(old.steps, new.steps)
        if new.total != old.total:
            yield f"the training ends after step {new.total} instead of step {old.total}"
        if (rate := new.rate(step)) != (rate_before := old.rate(step)):
            yield (
                f"the learning rate of step {step + 1} is {rate:g} instead of {rate_before:g}; schedule "
                f"{now.learning_rate.schedule}, {counted(new.epochs, 'epoch')}"
            )
        else:
            yield f"the learning rate of step {step + 1} stays {rate:g}; schedule {now.learning_rate.schedule}"
    if now.global_batch_size != before.global_batch_size:
        yield _rule_sentence(before, now)


def _steps_before(before: JobSpec, manifest: Manifest | None) -> Steps | None:
    """Return the steps of a run so far; None where nothing on this machine says how many samples the data have."""
    start: BatchStart | None = None
    if manifest is None:
        plan = first_plan(before)
        samples, size = (None if plan is None else plan.batch.samples), before.global_batch_size
    else:
        is_counted = manifest.contract.get("unit", "sample") == "sample"
        samples = manifest.contract.get("samples") if is_counted else None
        size = manifest.contract.get("global_batch_size", before.global_batch_size)
        with suppress(KeyError):
            start = BatchStart(**manifest.progress["batch_starts"][-1])
    if not isinstance(samples, int) or not isinstance(size, int):
        return None
    plan_of_one = plan_batch(global_batch_size=size, world_size=1, samples=samples, tail=before.batch.tail)
    return Steps.from_beginning(plan_of_one) if start is None else Steps(plan=plan_of_one, start=start)


def _order_sentence(old: Steps, new: Steps) -> str:
    start, samples = new.start, new.plan.samples or 0
    if not start.offset_samples:
        left = " (its last samples are fewer than one batch, and the tail is dropped)" if _drops(old, new) else ""
        return (
            f"epoch {start.epoch + 1} begins with batches of {start.global_batch_size}{left}, in the order that it "
            f"would have had; an epoch has {new.plan.steps_per_epoch} steps instead of {old.plan.steps_per_epoch}"
        )
    return (
        f"epoch {start.epoch + 1} goes on with its other {samples - start.offset_samples} of {samples} samples, in the "
        f"same order, in {new.count(start.epoch)} batches of {start.global_batch_size}; an epoch after that has "
        f"{new.plan.steps_per_epoch} steps instead of {old.plan.steps_per_epoch}"
    )


def _drops(old: Steps, new: Steps) -> bool:
    return bool(old.place(new.start.step)[1])


def _rule_sentence(before: JobSpec, now: JobSpec) -> str:
    """Return what the rule of the learning rate makes of another batch."""
    rate, old, new = now.learning_rate, scaled_hyperparameters(before), scaled_hyperparameters(now)
    if rate.base_global_batch_size is None:
        return (
            f"kappa is 1, because learning_rate.base_global_batch_size is null: learning_rate.base {rate.base:g} is "
            f"for the new batch too; to scale it by a rule: --set learning_rate.base_global_batch_size="
            f"{before.global_batch_size} --set learning_rate.rule=linear or sqrt"
        )
    constants = "" if old.betas == new.betas else f"; betas {_pair(new.betas)} instead of {_pair(old.betas)}"
    if old.ema_decay != new.ema_decay:
        constants += f"; averaged weights decay by {new.ema_decay:g} instead of {old.ema_decay:g}"
    return (
        f"kappa is {new.kappa:g} instead of {old.kappa:g}, and rule {rate.rule} makes the rate {new.learning_rate:g} "
        f"instead of {old.learning_rate:g}{constants}"
    )


def _pair(betas: tuple[float, float] | None) -> str:
    return "none" if betas is None else f"({betas[0]:g}, {betas[1]:g})"
