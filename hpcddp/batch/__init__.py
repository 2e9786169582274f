"""The batch contract: the samples of each rank and the learning rate of each step. Does not need torch."""
