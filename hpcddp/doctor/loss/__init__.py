"""Check whether a loss is the same on several ranks as in one process."""

from hpcddp.packages import require

require("hpcddp doctor loss", "torch")
