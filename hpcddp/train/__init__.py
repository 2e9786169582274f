"""The training: steps, data, losses, metrics, checkpoints. The only package, with `doctor`, that imports torch."""

from hpcddp.packages import require

# Every module of the training, and every name of the public API, is imported through this one.
require("a training of hpcddp", "torch", "numpy")
