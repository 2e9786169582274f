"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# A busy machine makes an example slow, never wrong.
settings.register_profile("hpcddp", deadline=None)
settings.load_profile("hpcddp")
