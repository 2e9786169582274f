"""The training: steps, data, losses, metrics, checkpoints. The only package, with `doctor`, that imports torch."""
