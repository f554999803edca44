"""``--health-checks``: the checks of a node, and the limits beyond which it is unfit."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from hpc_elastic.errors import UsageError
from hpc_elastic.run.option_values import number_of

MIB = 1 << 20


class Check(str, Enum):
    """The checks that ``--health-checks`` names."""

    TMP = "tmp"
    """Room on the node's own disk: TMPDIR, or /tmp."""
    SHM = "shm"
    """Room in /dev/shm."""
    MEMORY = "memory"
    """Memory that can still be had: the node's, and below the cgroup's limits."""
    SHARED = "shared"
    CLOCK = "clock"
    """The wall clock against that of the run directory's server: only ever a warning."""
    GPU = "gpu"
    """The node's GPUs, as NVML sees them."""
    GPU_MEMORY = "gpu-memory"
    """The GPUs have given back the memory that ended workers held."""
    LINK = "link"
    """The network interfaces by which other nodes reach this one have a link."""


DEFAULT_LIMITS: Mapping[Check, float] = MappingProxyType(
    {
        Check.TMP: 16 * MIB,
        Check.SHM: 1 * MIB,
        Check.MEMORY: 64 * MIB,
        Check.SHARED: 120.0,
        Check.CLOCK: 60.0,
        Check.GPU: 1.0,
        Check.GPU_MEMORY: 50.0,
        Check.LINK: 3.0,
    }
)
"""Free bytes; seconds for the run directory's answer, between clocks, until GPUs have given memory back, and without a
link; uncorrectable ECC errors that make a GPU unfit. Floors below which no training could start on a node."""
_SIZES = {Check.TMP, Check.SHM, Check.MEMORY}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_health_checks(text: str, option: str = "--health-checks") -> Mapping[Check, float]:
    """Read ``none``, or a list such as ``default,tmp=10G,shared=30``; ``default`` stands for all checks."""
    if text == "none":
        return {}
    limits: dict[Check, float] = {}
    for part in (text or "default").split(","):
        name, equals, value = part.strip().partition("=")
        if name == "default" and not equals:
            limits = {**DEFAULT_LIMITS, **limits}
            continue
        if name == "network":
            raise UsageError(f"{option} {text}: network was removed; hpc-elastic doctor --nodes N measures it")
        try:
            check = Check(name)
        except ValueError:
            known = ", ".join(item.value for item in Check)
            raise UsageError(f"{option} {text}: {name!r} is not a check; there are {known}, default and none") from None
        limits[check] = _limit(check, value, text, option) if equals else DEFAULT_LIMITS[check]
    return limits


def _limit(check: Check, value: str, text: str, option: str) -> float:
    unit = value[-1:].upper() if check in _SIZES and value[-1:].isalpha() else ""
    number = number_of(value[: len(value) - len(unit)]) * _UNITS[unit] if unit in _UNITS else -1.0
    if not 0 <= number < 1e18 or (number == 0 and check not in _SIZES):
        wanted = "a size, as in 500M or 10G" if check in _SIZES else "a number above 0"
        raise UsageError(f"{option} {text}: {check.value}={value} is not {wanted}")
    return number
