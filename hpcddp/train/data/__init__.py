"""The data sets of the built-in training, one's own, and the loader that takes this rank's share of them."""
