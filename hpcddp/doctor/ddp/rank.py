"""Run one rank of a comparison: ``python -m hpcddp.doctor.ddp.rank FOLDER RANK RANKS STEPS DIRECTORY TIMEOUT``.

The folder contains ``job.yaml``; the report of this rank is written to ``rank-<rank>.json`` there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # public, not marked so

from hpcddp.doctor.ddp.observe import digest, digests, forward, freeze_batch_norm, observe_steps
from hpcddp.errors import HpcddpError
from hpcddp.jobfile.write import parse_resolved
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import write_json
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.train.buffers import buffers_restored
from hpcddp.train.context import TrainContext
from hpcddp.train.data.own import first_samples
from hpcddp.train.loop.assembly import Setting, derive_setting
from hpcddp.train.model.models import build_model, check_model_input, place_model
from hpcddp.train.model.normalisation import choose_batch_norm, local_batch_norms, synchronised_batch_norms
from hpcddp.train.precision import Precision, set_up_backends
from hpcddp.train.randomness import seed_initialisation, seed_step
from hpcddp.train.user_code import describe

_LIVE_STEPS: Final = 1
# Larger than rounding errors of sums in different orders.
_SAME: Final = 1e-4


def main(folder: Path, rank: int, world_size: int, steps: int, timeout_s: float) -> int:
    """Run one rank; return the exit code."""
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), world_size)
    store.set_timeout(timedelta(seconds=timeout_s))
    group = PrefixStore("group", store)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
    path = folder / f"rank-{rank}.json"
    try:
        report = _examine(_setting(folder, rank, world_size), PrefixStore("doctor", store), folder, steps)
    except HpcddpError as error:
        write_json(path, _failed(rank, error.kind, error.message))
        return 1
    except Exception as error:  # noqa: BLE001  the user's model may raise anything; it is reported
        write_json(path, _failed(rank, "unexpected", describe(error)))
        return 1
    write_json(path, {"rank": rank, "error": None, **report})
    dist.barrier()
    return 0


def _failed(rank: int, kind: str, message: str) -> dict[str, Any]:
    return {"rank": rank, "error": {"kind": kind, "message": message, "time": time.monotonic()}}


def _setting(folder: Path, rank: int, world_size: int) -> Setting:
    spec = parse_resolved((folder / "job.yaml").read_text(encoding="utf-8"))
    context = TrainContext(
        spec=spec,
        rank_env=RankEnv(
            rank=rank,
            local_rank=rank,
            world_size=world_size,
            local_world_size=world_size,
            node_rank=0,
            nodes=1,
            source="torchrun",
        ),
        device=torch.device("cpu"),
        run=RunDirectory(folder),
        attempt=0,
        threads=1,
        write_line=lambda _: None,
    )
    set_up_backends(Precision(context.train.precision, "cpu"), deterministic=False)
    return derive_setting(context)


def _examine(setting: Setting, store: Store, folder: Path, steps: int) -> dict[str, Any]:
    report = _before_ddp(setting)
    if not report["finds_unused"] and not _is_same_on_all_ranks(store, setting, report["unused"]):
        # DDP would deadlock waiting for gradients.
        return {**report, "observed": {}}
    record = folder.parent / "fixed_statistics"
    observed = {"fixed_statistics": observe_steps(setting, record, steps=steps, frozen=True)}
    if report["batch_norm"]["local"]:
        record = folder.parent / "batch_statistics"
        observed["batch_statistics"] = observe_steps(setting, record, steps=_LIVE_STEPS, frozen=False)
    return {**report, "observed": observed}


def _is_same_on_all_ranks(store: Store, setting: Setting, unused: Sequence[str]) -> bool:
    context = setting.context
    store.set(f"unused/{context.rank}", json.dumps(unused))
    return len({store.get(f"unused/{rank}") for rank in range(context.world_size)}) == 1


def _before_ddp(setting: Setting) -> dict[str, Any]:
    """Return what DDP would hide by making the ranks equal: initial parameters, unused parameters, random numbers."""
    train = setting.context.train
    data = setting.data
    placement = setting.placement
    seed_initialisation(train.seed)
    model = build_model(train.model, train.model_args, data.classes)
    initial = digests(model)
    choose_batch_norm(model, train.batch_norm, "cpu")
    norms = {"local": len(local_batch_norms(model)), "sync": len(synchronised_batch_norms(model))}
    place_model(model, placement.device, placement.dtype, channels_last=False)
    inputs = placement.place_inputs(first_samples(data))
    unused = check_model_input(train, model, inputs, Precision(train.precision, "cpu"), classes=data.classes)
    return {
        "initial": initial,
        "unused": [*unused],
        "finds_unused": bool(getattr(model, "find_unused_parameters", False)),
        "batch_norm": norms,
        "noise": _noise(setting, model, inputs),
    }


def _noise(setting: Setting, model: nn.Module, inputs: torch.Tensor) -> Mapping[str, Any]:
    """Return which random numbers the model draws, and whether its output for a sample depends on other samples."""
    seed = setting.context.train.seed
    rank = setting.context.rank

    def outputs(step: int, *, dropout: bool, rows: torch.Tensor = inputs) -> torch.Tensor:
        seed_step(seed, step, rank, inputs.device)
        with buffers_restored(model):
            return forward(model, rows, dropout=dropout)

    noisy_1 = outputs(1, dropout=True)
    noisy_0 = outputs(0, dropout=True)
    noisy_0_again = outputs(0, dropout=True)
    # After a forward, torch's generator has equal states on two ranks only if the model has seeded it.
    generator = digest(torch.get_rng_state())
    without_dropout = outputs(0, dropout=False)
    # A model that seeds torch draws the same numbers in steps 0 and 1; its outputs change without dropout.
    changes_with_step = not torch.equal(noisy_1, noisy_0)
    changes_without_dropout = not torch.equal(noisy_0, without_dropout)

    freeze_batch_norm(model, inputs)
    frozen_0 = outputs(0, dropout=False)
    frozen_1 = outputs(1, dropout=False)
    first = frozen_0[0]
    # The first sample beside a copy of itself, in place of another sample.
    first_alone = outputs(0, dropout=False, rows=inputs[[0, 0]])[0]
    scale = float(first_alone.abs().max())
    return {
        "random": changes_with_step or changes_without_dropout,
        "repeats": torch.equal(noisy_0, noisy_0_again),
        "masks": digest(noisy_0),
        "generator": generator,
        "only_dropout": torch.equal(frozen_0, frozen_1),
        "mixes_samples": not torch.allclose(first, first_alone, rtol=_SAME, atol=_SAME * scale),
    }


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _folder, _rank, _ranks, _steps, _directory, _timeout = sys.argv[1:]
    sys.path.insert(0, _directory)
    _code = main(Path(_folder), int(_rank), int(_ranks), int(_steps), float(_timeout))
    sys.stdout.flush()
    sys.stderr.flush()
    # Destroying the process group of a failed rank may hang.
    os._exit(_code)
