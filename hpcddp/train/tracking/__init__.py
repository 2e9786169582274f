"""Trackers: they show what ``metrics.jsonl`` says. Everything here happens on rank 0, beside the training."""

from hpcddp.train.tracking.opening import Tracking, tracked

__all__ = ["Tracking", "tracked"]
