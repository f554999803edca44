"""For all tests."""

from __future__ import annotations

import os

# What the machine and the developer have configured is no part of a test; processes that tests start inherit it.
os.environ["HPC_ELASTIC_SITE_CONFIG"] = os.environ["HPC_ELASTIC_USER_CONFIG"] = ""
# torch looks up the name of each address that a TCPStore connects to; a DNS server that loses a packet takes it 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

try:
    from hypothesis import settings
except ImportError:
    pass  # tests/gpu, on a machine with little else than torch, needs none
else:
    # A busy machine is no defect: the tiers' budgets are what holds the time.
    settings.register_profile("tests", deadline=None)
    settings.load_profile("tests")
