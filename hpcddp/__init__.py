"""hpcddp: Slurm job templating and PyTorch DDP with the right start, batch, stop and resume.

The names of ``__all__`` are the public API. They are loaded when they are first used (PEP 562), so that the command
line does not wait for torch.
"""

from __future__ import annotations

import importlib

from hpcddp.version import __version__

# A type checker takes it for true. The import of typing would be the longest one before hpcddp.__main__ handles Ctrl-C.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from hpcddp.api import Run, Sweep, plan, render, runs, submit
    from hpcddp.errors import HpcddpError
    from hpcddp.run.metrics_log import log
    from hpcddp.train.checkpoint.checkpointer import Checkpointer
    from hpcddp.train.entry import Context
    from hpcddp.train.losses import (
        DeclaredLoss,
        LossError,
        Reduction,
        Share,
        ShareLoss,
        accumulate_additive,
        additive_loss,
        gather_with_grad,
        sum_statistics,
        weighted_mean,
    )
    from hpcddp.train.scoring import (
        AdditiveMetric,
        AreaUnderRocCurve,
        CrossEntropy,
        GatheredMetric,
        MeanIoU,
        Metric,
        MetricError,
        TopKAccuracy,
        ValidationShare,
        evaluate,
    )
    from hpcddp.train.stopper import Stopper

__all__ = [
    "AdditiveMetric",
    "AreaUnderRocCurve",
    "Checkpointer",
    "Context",
    "CrossEntropy",
    "DeclaredLoss",
    "GatheredMetric",
    "HpcddpError",
    "LossError",
    "MeanIoU",
    "Metric",
    "MetricError",
    "Reduction",
    "Run",
    "Share",
    "ShareLoss",
    "Stopper",
    "Sweep",
    "TopKAccuracy",
    "ValidationShare",
    "__version__",
    "accumulate_additive",
    "additive_loss",
    "evaluate",
    "gather_with_grad",
    "log",
    "plan",
    "render",
    "runs",
    "submit",
    "sum_statistics",
    "weighted_mean",
]

_SCORING = {
    "AdditiveMetric",
    "AreaUnderRocCurve",
    "CrossEntropy",
    "GatheredMetric",
    "MeanIoU",
    "Metric",
    "MetricError",
    "TopKAccuracy",
    "ValidationShare",
    "evaluate",
}
_OTHERS = {
    "Checkpointer": "hpcddp.train.checkpoint.checkpointer",
    "Context": "hpcddp.train.entry",
    "HpcddpError": "hpcddp.errors",
    "Stopper": "hpcddp.train.stopper",
    "log": "hpcddp.run.metrics_log",
    **dict.fromkeys(("Run", "Sweep", "plan", "render", "runs", "submit"), "hpcddp.api"),
}
_MODULES = {
    name: _OTHERS.get(name) or ("hpcddp.train.scoring" if name in _SCORING else "hpcddp.train.losses")
    for name in __all__
    if name != "__version__"
}


if not TYPE_CHECKING:
    # A type checker sees the imports above, and any other name is an error to it.
    def __getattr__(name: str) -> object:
        """Load a public name from its module."""
        if name not in _MODULES:
            raise AttributeError(f"module 'hpcddp' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the public names too, loaded or not."""
    return sorted({*globals(), *__all__})
