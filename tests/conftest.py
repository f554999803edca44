"""For all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no defect: the tiers' budgets are what holds the time.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
