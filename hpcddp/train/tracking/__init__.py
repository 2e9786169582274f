"""Trackers: they show what ``metrics.jsonl`` says, in a process beside rank 0.

The loop and the trackers share neither an interpreter nor a lock: a tracker's library, its threads, its network and its
crashes are no business of the training. ``opening`` is the training's side; ``python -m hpcddp.train.tracking`` the
other one, which does not load torch.
"""
