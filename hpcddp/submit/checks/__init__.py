"""Checks of a job before it is queued, as far as the submitting machine can make them."""
