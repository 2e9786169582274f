"""Check whether a loss is the same on several ranks as in one process."""
