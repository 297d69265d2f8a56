"""Settings of all property tests: no deadline (machines differ), and few enough examples for every commit."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("headwater", max_examples=60, deadline=None)
settings.load_profile("headwater")
