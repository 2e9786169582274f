"""The training itself: the only room that imports torch."""
