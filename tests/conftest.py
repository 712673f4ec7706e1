"""Shared by all tests: what makes them repeatable on slow and busy machines."""

from __future__ import annotations

from hypothesis import settings

# No deadline per example: other jobs share the cores. Random seeds stay random; hypothesis prints how to repeat a failure.
settings.register_profile("default", deadline=None)
settings.load_profile("default")
