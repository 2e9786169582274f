"""The version of hpcddp."""

__version__ = "0.3.0.dev0"
