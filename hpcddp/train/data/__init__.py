"""Data sets of the built-in training, and the loader of a rank's share of them."""
