"""Experiment trackers, which show the records of ``metrics.jsonl`` and run in a process of their own beside rank 0.

The training and the trackers share no interpreter and no lock, so that a tracker's library, threads, network and
crashes cannot affect the training. ``opening`` belongs to the training; ``python -m hpcddp.train.tracking`` is the
process of the trackers, which does not import torch.
"""
