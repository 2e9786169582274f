"""``result.json``: what came of the run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpcddp import __version__
from hpcddp.batch.noise_scale import larger_batch_pays
from hpcddp.run.result import FINISHED, Result, write_result
from hpcddp.train.context import TrainContext
from hpcddp.train.data.fingerprint import tensor_bytes
from hpcddp.train.progress import Progress


def parameters_sha256(model: nn.Module) -> str:
    """Return one digest of all parameters: name, number format, shape and bytes, in the model's order."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name}\n{parameter.dtype}\n{tuple(parameter.shape)}\n".encode())
        digest.update(tensor_bytes(parameter))
    return digest.hexdigest()


def write_training_result(context: TrainContext, models: Mapping[str, nn.Module], progress: Progress) -> dict[str, Any]:
    """Write the result of a finished run, whole, and return it.

    Args:
        context: the run and this attempt.
        models: ``model``, which was trained, and ``ema``, its averaged weights, where they are what was evaluated.
        progress: where the training ended.
    """
    evaluation = progress.as_document()["evaluation"] or {}
    noise, batch = None if progress.noise is None else progress.noise.samples, context.spec.global_batch_size
    facts = {
        "epochs": progress.epoch,
        "final_loss": progress.last_loss,
        "val_top5": evaluation.get("val_top5"),
        "val_loss": evaluation.get("val_loss"),
        "val_samples": evaluation.get("val_samples"),
        "samples_seen": progress.samples_seen,
        "skipped_steps": progress.skipped_steps,
        "parameters_sha256": parameters_sha256(models["model"]),
        "ema_sha256": parameters_sha256(models["ema"]) if "ema" in models else None,
        "noise_scale": noise,
        "larger_batch_pays": None if noise is None else larger_batch_pays(noise, batch),
        "threads": context.threads,
        "precision": context.train.precision,
        "device": _device_name(context.device),
        "versions": {"hpcddp": __version__, "torch": str(torch.__version__)},
    }
    result = Result(
        status=FINISHED,
        steps=progress.step,
        val_accuracy=evaluation.get("val_accuracy"),
        world_size=context.world_size,
        attempts=context.attempt + 1,
        wall_s=round(progress.wall_s, 3),
        facts=facts,
    )
    write_result(context.run, result)
    return result.as_json()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
