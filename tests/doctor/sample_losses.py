"""Losses as people write them, right and wrong ones, for the doctor to look at."""

from __future__ import annotations

import itertools
import random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hpcddp import additive_loss, gather_with_grad, weighted_mean

NOT_A_LOSS = 3
_CALLS = itertools.count()


def label_smoothing(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def kl_batchmean(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.kl_div(outputs.log_softmax(1), targets, reduction="batchmean")


def dice_per_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    p, t = outputs.sigmoid().flatten(1), targets.flatten(1)
    return (1 - 2 * (p * t).sum(1) / (p.sum(1) + t.sum(1))).mean()


def dice_per_sample_from_the_end(outputs: Tensor, targets: Tensor) -> Tensor:
    p = outputs.sigmoid()
    return (1 - 2 * (p * targets).sum((-2, -1)) / (p.sum((-2, -1)) + targets.sum((-2, -1)))).mean()


def cross_entropy_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum")


def nll(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.nll_loss(outputs.log_softmax(1), targets)


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    entropy = functional.cross_entropy(outputs, targets, reduction="none")
    return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


def distillation(outputs: Tensor, targets: Tensor) -> Tensor:
    divergence = functional.kl_div((outputs / 4).log_softmax(-1), (targets / 4).softmax(-1), reduction="none")
    return 16 * divergence.sum(-1).mean()


def cosine_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1 - functional.cosine_similarity(outputs, targets, dim=-1)).mean()


def positive_weight(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, targets, pos_weight=torch.tensor(3.0))


def hard_samples(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the samples whose answer the model does not know yet."""
    entropy = functional.cross_entropy(outputs, targets, reduction="none")
    return entropy[entropy > 0.36].mean()


def one_rare_class(outputs: Tensor, targets: Tensor) -> Tensor:
    weight = torch.ones(1000).to(outputs)
    weight[777] = 5
    return functional.cross_entropy(outputs, targets, weight=weight)


def ignores_250(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=250)


def ignores_what_is_said(outputs: Tensor, targets: Tensor, ignore_index: int = 77) -> Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=ignore_index)


class Ignores119(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entropy = nn.CrossEntropyLoss(ignore_index=119)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.entropy(outputs, targets)
        return loss


def three_weights(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 2.0, 5.0]))


def three_float32_weights(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, weight=torch.tensor([1, 2, 5], dtype=torch.float32))


def ignores_255(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=255)


def ignores_0(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=0)


def ignores_3(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=3)


def ten_weights(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, weight=torch.arange(1.0, 11.0), label_smoothing=0.1)


def token_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.reshape(-1, outputs.shape[2]), targets.reshape(-1), ignore_index=0)


def batch_iou(outputs: Tensor, targets: Tensor) -> Tensor:
    p = outputs.sigmoid()
    return 1 - (p * targets).sum() / (p + targets - p * targets).sum()


def batch_dice_smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    p = outputs.sigmoid()
    return 1 - (2 * (p * targets).sum() + 1) / (p.sum() + targets.sum() + 1)


def focal_over_positives(outputs: Tensor, targets: Tensor) -> Tensor:
    entropy = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return ((1 - torch.exp(-entropy)) ** 2 * entropy).sum() / targets.sum()


def positives_only(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.dim() != 1:
        raise ValueError("one number per sample")
    return (functional.softplus(-outputs) * targets).sum() / targets.sum()


def rmse(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets).sqrt()


def infonce(outputs: Tensor, targets: Tensor) -> Tensor:
    one, two = functional.normalize(outputs, dim=1), functional.normalize(targets, dim=1)
    return functional.cross_entropy(one @ two.T / 0.1, torch.arange(len(one)))


def barlow(outputs: Tensor, targets: Tensor) -> Tensor:
    one, two = ((z - z.mean(0)) / z.std(0) for z in (outputs, targets))
    correlation = one.T @ two / len(one)
    return (correlation - torch.eye(len(correlation))).square().sum()


def gaussian(one: Tensor, two: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(one, two).square() / 2)


def mmd(outputs: Tensor, targets: Tensor) -> Tensor:
    within = gaussian(outputs, outputs).mean() + gaussian(targets, targets).mean()
    return within - 2 * gaussian(outputs, targets).mean()


def energy_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    within = torch.cdist(outputs, outputs).mean() + torch.cdist(targets, targets).mean()
    return 2 * torch.cdist(outputs, targets).mean() - within


def rkd_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.smooth_l1_loss(torch.cdist(outputs, outputs), torch.cdist(targets, targets))


def rkd_angle(outputs: Tensor, targets: Tensor) -> Tensor:
    def angles(z: Tensor) -> Tensor:
        directions = functional.normalize(z.unsqueeze(0) - z.unsqueeze(1), dim=-1)
        return directions @ directions.transpose(-2, -1)

    return functional.smooth_l1_loss(angles(outputs), angles(targets))


def similarity_preserving(outputs: Tensor, targets: Tensor) -> Tensor:
    one, two = (functional.normalize(z @ z.transpose(-2, -1), dim=-1) for z in (outputs, targets))
    return (one - two).square().mean()


def dist_kd(outputs: Tensor, targets: Tensor) -> Tensor:
    """Correlations within a sample, and within a class over the samples of the batch."""

    def distance(one: Tensor, two: Tensor) -> Tensor:
        one, two = (z - z.mean(1, keepdim=True) for z in (one, two))
        return 1 - functional.cosine_similarity(one, two, dim=1).mean()

    one, two = outputs.softmax(1), targets.softmax(1)
    return distance(one, two) + distance(one.transpose(0, 1), two.transpose(0, 1))


def coral(outputs: Tensor, targets: Tensor) -> Tensor:
    def covariance(z: Tensor) -> Tensor:
        centred = z - z.mean(-2, keepdim=True)
        return centred.transpose(-2, -1) @ centred / (z.shape[-2] - 1)

    return (covariance(outputs) - covariance(targets)).square().mean()


def cka(outputs: Tensor, targets: Tensor) -> Tensor:
    one, two = outputs - outputs.mean(0), targets - targets.mean(0)
    alignment: Tensor = (one.T @ two).norm() ** 2 / ((one.T @ one).norm() * (two.T @ two).norm())
    return 1 - alignment


def vicreg(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = 25 * functional.mse_loss(outputs, targets)
    for z in (outputs, targets):
        centred = z - z.mean(0)
        covariance = centred.T @ centred / (len(z) - 1)
        loss = loss + 25 * functional.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
        loss = loss + (covariance - covariance.diag().diag()).square().sum() / z.shape[1]
    return loss


def supervised_contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    z = functional.normalize(outputs, dim=1)
    others = ~torch.eye(len(z), dtype=torch.bool)
    logits = (z @ z.T / 0.1).masked_fill(~others, -1e9)
    same = (targets[:, None] == targets) & others
    return -((logits.log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def batch_hard(outputs: Tensor, targets: Tensor) -> Tensor:
    distances, same = torch.cdist(outputs, outputs), targets[:, None] == targets
    nearest = distances.masked_fill(same, 1e9).amin(1)
    return functional.relu((distances * same).amax(1) - nearest + 0.3).mean()


def correlation(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1 - torch.corrcoef(torch.stack((outputs.flatten(), targets.flatten())))[0, 1]


def neighbours(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets) + (outputs[1:] - outputs[:-1]).square().mean()


def constant(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * 0).sum() + targets.float().mean()


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def hits(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).sum()


def item(outputs: Tensor, targets: Tensor) -> float:
    return functional.cross_entropy(outputs, targets).item()


def vector(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def not_a_number(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * float("nan")).sum() + targets.sum()


def dropout(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.dropout(outputs, 0.5), targets)


def python_random(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets) * random.random()


def in_place(outputs: Tensor, targets: Tensor) -> Tensor:
    outputs.sub_(targets)
    return outputs.square().mean()


def misspelt(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.crossentropy(outputs, targets)  # type: ignore[attr-defined,no-any-return]


def one_batch_size(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(32)) + targets.sum() * 0


def casts_to_float32(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.float(), targets)


def make_mse() -> nn.Module:
    return nn.MSELoss()


class ArcFace(nn.Module):
    """Has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 10, generator=torch.Generator().manual_seed(0)))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        cosine = functional.normalize(outputs, dim=1) @ functional.normalize(self.weight, dim=1).T
        return functional.cross_entropy(8 * cosine, targets)


class NeedsArguments:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


def pairs() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(24, 3, generator=g), torch.randint(0, 3, (24,), generator=g)


def two_batches() -> list[tuple[dict[str, Tensor], list[dict[str, Tensor]]]]:
    """Structured outputs, and one target dictionary per sample, as detection has them."""
    g = torch.Generator().manual_seed(4)
    return [
        ({"box": torch.randn(n, 4, generator=g)}, [{"box": torch.randn(4, generator=g)} for _ in range(n)])
        for n in (12, 13)
    ]


def few_positives() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    return torch.randn(8, generator=g), torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0])


def mask_pairs() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    return torch.randn(12, 1, 6, 6, generator=g), torch.randint(0, 2, (12, 1, 6, 6), generator=g).double()


def boxes(outputs: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
    return functional.l1_loss(outputs["box"], torch.stack([target["box"] for target in targets]))


def time_first() -> tuple[Tensor, Tensor]:
    """Return outputs [T, n, C] with as many steps as samples, and targets [n]."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(8, 8, 3, generator=g), torch.randint(0, 3, (8,), generator=g)


def last_step(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the samples of [T, n, C]."""
    return functional.cross_entropy(outputs[-1], targets)


def last_step_hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    return ohem(outputs[-1], targets)


def sequences() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of CTC."""
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(1, 5, (8, 4), generator=g)
    return torch.randn(12, 8, 5, generator=g).log_softmax(2), labels, torch.full((8,), 12), torch.full((8,), 4)


def triple() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(4), torch.zeros(4), torch.zeros(4)


def nothing() -> list[tuple[Tensor, Tensor]]:
    return []


def whole_numbers() -> tuple[Tensor, Tensor]:
    return torch.zeros(8, dtype=torch.int64), torch.zeros(8)


def ohem(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the half of the samples with the largest loss (Shrivastava et al. 2016)."""
    losses = functional.cross_entropy(outputs, targets, reduction="none").reshape(-1)
    return losses.sort(descending=True).values[: (len(losses) + 1) // 2].mean()


def lovasz(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the Lovasz hinge over all pixels of the batch (Berman et al. 2018)."""
    errors, order = (1 - outputs * (2 * targets - 1)).reshape(-1).sort(descending=True)
    truth = targets.reshape(-1)[order]
    positives = truth.sum()
    jaccard = 1 - (positives - truth.cumsum(0)) / (positives + (1 - truth).cumsum(0))
    steps = torch.cat((jaccard[:1], jaccard[1:] - jaccard[:-1]))
    return errors.relu() @ steps


def ranknet(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all pairs of samples with different targets (Burges et al. 2005)."""
    difference, order = outputs[:, None] - outputs, (targets[:, None] - targets).sign()
    return (functional.softplus(-difference * order) * order.abs()).sum() / order.abs().sum()


def repaired_dice(outputs: Tensor, targets: Tensor) -> Tensor:
    p = outputs.sigmoid()
    return additive_loss(
        lambda both, one, other: 1 - 2 * both / (one + other), (p * targets).sum(), p.sum(), targets.sum()
    )


class RepairedContrast(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs, targets = gather_with_grad(outputs), gather_with_grad(targets)
        return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs))) + 0 * targets.sum()


def repaired_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return weighted_mean(functional.cross_entropy(outputs, targets, reduction="sum"), (targets >= 0).sum())


def log_of_a_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.log(functional.cross_entropy(outputs, targets, reduction="sum") + 1)


def guarded(outputs: Tensor, targets: Tensor) -> Tensor:
    total = functional.cross_entropy(outputs, targets, reduction="sum")
    if dist.is_initialized():
        dist.all_reduce(total)
    return total / len(targets)
