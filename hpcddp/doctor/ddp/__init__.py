"""Check whether a model, its data and its loss train the same on several ranks as in one process."""

from hpcddp.packages import require

require("hpcddp doctor ddp", "torch", "numpy")
