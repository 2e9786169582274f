"""The model of a rank: built, checked, wrapped in DDP, compared and merged over ranks."""
