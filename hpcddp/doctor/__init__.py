"""Is this loss, this model, the same on N ranks as on one?"""
