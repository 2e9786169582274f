"""Message with which rank 0 starts the process of the trackers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from hpcddp.jobfile.sections import Trackers
from hpcddp.run.directory import RunDirectory
from hpcddp.train.tracking.memory import Memory
from hpcddp.train.tracking.protocol import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The trackers to run, and the run that they show.

    Args:
        names: names of the trackers.
        run: the run's directory.
        attempt: the attempt that begins; it owns the run.
        first_step: optimizer steps done if ``metrics.jsonl`` has no later records; None if it may have.
        config: the resolved job without possible secrets.
        settings: ``trackers`` of the job.
    """

    names: tuple[str, ...]
    run: str
    attempt: int
    first_step: int | None
    config: Mapping[str, Any]
    settings: Mapping[str, Any]

    def as_json(self) -> str:
        """Return the order as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the order that ``as_json`` wrote."""
        return cls(**json.loads(line))

    def subject(self, name: str) -> Subject:
        """Return the subject of the tracker ``name``."""
        run = RunDirectory(Path(self.run))
        return Subject(
            run=run,
            attempt=self.attempt,
            job=self.config["name"],
            settings=Trackers.model_validate(self.settings),
            config=self.config,
            memory=Memory(run.tracker(name)),
        )
