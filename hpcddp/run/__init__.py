"""The run directory: its layout, atomic files, events and checkpoints on disk. No torch."""
