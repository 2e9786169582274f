"""Data sets of the built-in training, and the batches of a rank's share of them."""
