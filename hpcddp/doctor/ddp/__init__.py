"""Check whether a model, its data and its loss train the same on several ranks as in one process."""
