"""Words about clocks, for the text report and the page."""

from __future__ import annotations

from hpc_elastic.report.clocks import Clocks

NOTABLE_NS = 50_000_000
"""A wall clock that is off by no more disturbs nobody who reads times."""


def whose_clock(host: str, node: int, clocks: Clocks) -> str:
    """``n2's clock``, and how far that is off where it is off by much."""
    offset = clocks.offsets.get(node)
    if offset is None or abs(offset.offset_ns) <= max(NOTABLE_NS, offset.bound_ns):
        return f"{host}'s clock"
    way = "ahead of" if offset.offset_ns > 0 else "behind"
    return f"{host}'s clock, {seconds_text(abs(offset.offset_ns))} {way} {clocks.host or 'the others'}'s"


def seconds_text(ns: int) -> str:
    """``0.800 s``, ``3600.0 s``."""
    return f"{ns / 1e9:.3f} s" if ns < 1_000_000_000 else f"{ns / 1e9:.1f} s"


def milliseconds_text(ns: int) -> str:
    """``0.4 ms``, rounded up: no more is claimed than is known."""
    tenths = -(-ns // 100_000)
    if tenths < 100:
        return f"{tenths / 10:g} ms"
    return f"{-(-ns // 1_000_000)} ms" if ns < 10_000_000_000 else f"{-(-ns // 1_000_000_000)} s"
