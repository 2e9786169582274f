"""The version of hpcddp."""

__version__ = "0.2.0"
