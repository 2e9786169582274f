"""Run one rank of a comparison: ``python -m hpcddp.doctor.ddp.rank FOLDER STEPS DIRECTORY TIMEOUT``.

The rank is that of the environment. The folder contains ``job.yaml``; the report of this rank is written to
``rank-<rank>.json`` there.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, not marked so

from hpcddp.doctor.ddp.observe import observe
from hpcddp.errors import HpcddpError
from hpcddp.jobfile.write import parse_resolved
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import write_json
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.train.context import TrainContext
from hpcddp.train.loop.assembly import Setting, derive_setting
from hpcddp.train.precision import Precision, set_up_backends
from hpcddp.train.user_code import describe


def main(folder: Path, steps: int, timeout_s: float) -> int:
    """Run one rank; return the exit code."""
    torch.set_num_threads(1)
    env = RankEnv.from_env(os.environ)
    store = FileStore(str(folder / "store"), env.world_size)
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    path = folder / f"rank-{env.rank}.json"
    try:
        report = observe(_setting(folder, env), folder.parent, steps=steps)
    except HpcddpError as error:
        write_json(path, _failed(error.kind, error.message))
        return 1
    except Exception as error:  # noqa: BLE001  the user's model may raise anything; it is reported
        write_json(path, _failed("unexpected", describe(error)))
        return 1
    write_json(path, {"error": None, **report})
    dist.barrier()
    return 0


def _failed(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message, "time": time.monotonic()}}


def _setting(folder: Path, env: RankEnv) -> Setting:
    context = TrainContext(
        spec=parse_resolved((folder / "job.yaml").read_text(encoding="utf-8")),
        rank_env=env,
        device=torch.device("cpu"),
        run=RunDirectory(folder),
        attempt=0,
        threads=1,
        write_line=lambda _: None,
    )
    set_up_backends(Precision(context.train.precision, "cpu"), deterministic=False)
    return derive_setting(context)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _folder, _steps, _directory, _timeout = sys.argv[1:]
    sys.path.insert(0, _directory)
    _code = main(Path(_folder), int(_steps), float(_timeout))
    sys.stdout.flush()
    sys.stderr.flush()
    # Destroying the process group of a failed rank may hang.
    os._exit(_code)
