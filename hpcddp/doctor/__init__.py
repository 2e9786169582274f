"""Check whether a loss or a model trains the same on several ranks as in one process, and check an installation."""
