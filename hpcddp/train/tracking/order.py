"""What rank 0 tells the process of the trackers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from hpcddp.run.directory import RunDirectory
from hpcddp.spec.trackers import Trackers
from hpcddp.train.tracking.memory import Memory
from hpcddp.train.tracking.protocol import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which trackers show which run.

    Args:
        names: the trackers.
        run: the run's directory.
        attempt: the attempt that begins; it owns the run.
        first_step: optimizer steps done, where ``metrics.jsonl`` holds nothing later; None where it may.
        config: the resolved job, without what may be secret.
        settings: ``trackers`` of the job.
    """

    names: tuple[str, ...]
    run: str
    attempt: int
    first_step: int | None
    config: Mapping[str, Any]
    settings: Mapping[str, Any]

    def as_json(self) -> str:
        """Return one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the order that ``as_json`` wrote."""
        return cls(**json.loads(line))

    def subject(self, name: str) -> Subject:
        """Return what a tracker shows."""
        run = RunDirectory(Path(self.run))
        return Subject(
            run=run,
            attempt=self.attempt,
            job=self.config["name"],
            settings=Trackers.model_validate(self.settings),
            config=self.config,
            memory=Memory(run.tracker(name)),
        )
