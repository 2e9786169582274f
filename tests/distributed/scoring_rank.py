"""One rank that evaluates metrics: ``python scoring_rank.py STORE RANK RANKS``; prints the results as JSON."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.train.scoring import (
    AreaUnderRocCurve,
    CrossEntropy,
    MeanIoU,
    Metric,
    MetricError,
    TopKAccuracy,
    ValidationShare,
    evaluate,
)

CLASSES = 4


class SecondLogit(AreaUnderRocCurve):
    """Class 1 against the rest, by its rounded logit."""

    def rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().rows((outputs[:, 1] * 2).round(), (targets == 1).int())


class SumsOfOtherShapes:
    """Returns as many numbers per sample as the batch has samples."""

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002
        return torch.ones(len(outputs), len(outputs))

    def from_sums(self, sums: Tensor, samples: int) -> float:
        return float(sums.sum()) / samples


METRICS: dict[str, Metric] = {
    "top1": TopKAccuracy(1),
    "auc": SecondLogit(),
    "loss": CrossEntropy(),
    "iou": MeanIoU(CLASSES),
    "top2": TopKAccuracy(2),
}


def outputs_and_targets(samples: int) -> tuple[Tensor, Tensor]:
    """Return logits ``[N, 4]`` and labels; those of fewer samples are the first ones of more."""
    generator = torch.Generator().manual_seed(samples)
    outputs = torch.randn(samples, CLASSES, generator=generator, dtype=torch.float64)
    return outputs, torch.randint(CLASSES, (samples,), generator=generator)


def evaluate_samples(samples: int, metrics: dict[str, Metric]) -> dict[str, float]:
    outputs, targets = outputs_and_targets(samples)
    share = ValidationShare(samples, batch_size=3)
    return evaluate(share, ((outputs[indices], targets[indices]) for indices in share), metrics)


def main(store: str, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = [evaluate_samples(samples, METRICS) for samples in range(1, 51)]
    try:
        # The first rank's only batch has more samples than the others'.
        evaluate_samples(ranks + 1, {"odd": SumsOfOtherShapes()})
    except MetricError as error:
        print(json.dumps({"found": found, "error": error.message}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
