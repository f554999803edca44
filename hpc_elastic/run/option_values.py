"""The types of options' values, each with the one parser that makes it from the user's text.

The values travel in run.json (`run.spec`), whose readers get them back as these types. Every ``parse_*`` takes the
option as the user called it and raises UsageError, which names it and the wrong part.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping
from enum import Enum, IntFlag
from types import MappingProxyType
from typing import Annotated, TypeVar

from msgspec import Meta, Struct, field

from hpc_elastic.base.text import range_bounds
from hpc_elastic.errors import UsageError
from hpc_elastic.worker_api.records import NAME_LIMIT, STEP, is_section_name

E = TypeVar("E", bound=Enum)


def whole(*, least: int, most: int, wanted: str = "") -> Callable[[str, str], int]:
    """Make a parser of whole numbers, whose message asks for `wanted`."""

    def parse(text: str, option: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text[:10]) <= most):
            raise UsageError(f"{option} {text}: give {wanted or f'a whole number from {least} to {most}'}")
        return int(text)

    return parse


def parse_seconds(text: str, option: str, *, zero: bool = True) -> float:
    seconds = number_of(text)
    if not (0 <= seconds < 1e9 and (zero or seconds > 0)):
        raise UsageError(f"{option} {text}: give seconds, {'0 or more' if zero else 'more than 0'}")
    return seconds


def parse_positive_seconds(text: str, option: str) -> float:
    return parse_seconds(text, option, zero=False)


def number_of(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def one_of(kind: type[E]) -> Callable[[str, str], E]:
    def parse(text: str, option: str) -> E:
        try:
            return kind(text)
        except ValueError:
            names = ", ".join(str(item.value) for item in kind)
            raise UsageError(f"{option} {text}: give one of {names}") from None

    return parse


class StartMethod(str, Enum):
    SPAWN = "spawn"
    FORKSERVER = "forkserver"


def parse_start_method(text: str, option: str) -> StartMethod:
    """torchrun's values; its ``fork``, of a process that is an agent here, is a fresh interpreter too."""
    return StartMethod.SPAWN if text == "fork" else one_of(StartMethod)(text, option)


class NumaBinding(str, Enum):
    """``--numa-binding``: torchrun's values; `agent.numa_binding` has their meanings."""

    NODE = "node"
    SOCKET = "socket"
    EXCLUSIVE = "exclusive"
    CORE_COMPLEX = "core-complex"


def parse_modules(text: str, option: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or not all(part.isidentifier() for name in names for part in name.split(".")):
        raise UsageError(
            f"{option} {text!r}: give modules separated by commas, such as auto,mylib.models, or auto alone"
        )
    return names


class GrowPolicy(str, Enum):
    """``--grow``: when a waiting node is taken into a healthy round that is smaller than MAX."""

    CHECKPOINT = "checkpoint"
    """After the next checkpoint that the script reports; at once after some minutes without a report."""
    NOW = "now"
    NEVER = "never"
    """Only where a new round begins for another reason."""


class RestartWith(str, Enum):
    PROCESSES = "processes"
    """All workers of the run start again."""
    IN_PROCESS = "in-process"
    """The worker alone is replaced, if it was in the in-process restart group; the others keep their processes."""


class RequeueChoice(str, Enum):
    """``--requeue-with``: how a run gets its next attempt."""

    AUTO = "auto"
    """CHAIN where the job can't be requeued, else SCONTROL."""
    SCONTROL = "scontrol"
    CHAIN = "chain"


def parse_signal(text: str, option: str) -> str:
    """``USR1`` or ``SIGUSR1`` → ``SIGUSR1``."""
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
        raise UsageError(f"{option} {text}: give a signal that a program can handle, as in USR1")
    return name


_ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def parse_handled_signals(text: str, option: str) -> tuple[str, ...]:
    """Read torchrun's ``SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1``, without its first four, which always end a run."""
    names = dict.fromkeys(parse_signal(word.strip(), option) for word in text.split(",") if word.strip())
    if "SIGCHLD" in names:
        raise UsageError(f"{option} {text}: SIGCHLD reports the end of a process here; leave it out")
    return tuple(name for name in names if name not in _ENDING)


MOST_WORKERS = 4096
"""Limit of one node. A larger figure has a digit too many, and the node would fork until it stands still."""


def parse_nproc(text: str, option: str) -> str:
    """Read a number of workers, ``auto``, ``gpu`` or ``cpu``: each node resolves the last three."""
    if text in ("auto", "gpu", "cpu") or (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MOST_WORKERS):
        return text
    raise UsageError(f"{option} {text}: give a number of workers from 1 to {MOST_WORKERS}, or auto, gpu or cpu")


class Std(IntFlag):
    """A worker's output streams, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class StreamChoice(Struct, frozen=True, kw_only=True):
    """``--redirects`` and ``--tee``, in torchrun's grammar: which streams are named, per local rank.

    A worker's stdout and stderr always go to its files. `redirects` keeps streams from the job log, ``--tee`` brings
    them back, and ``--local-ranks-filter`` and ``--job-log-ranks`` leave out all streams of other ranks.
    """

    default: Std = Std.NONE
    by_local_rank: Mapping[int, Std] = field(default_factory=dict)

    def of(self, local_rank: int) -> Std:
        return self.by_local_rank.get(local_rank, self.default)

    def __str__(self) -> str:
        return ",".join(f"{rank}:{int(std)}" for rank, std in self.by_local_rank.items()) or str(int(self.default))


def parse_std_streams(text: str, option: str) -> StreamChoice:
    """Read ``0`` (none), ``1`` (stdout), ``2`` (stderr), ``3`` (both) or ``0:3,1:1``: ranks that are not named have
    none."""
    words = [word.strip() for word in text.strip().split(",")]
    if words[0] in ("0", "1", "2", "3") and len(words) == 1:
        return StreamChoice(default=Std(int(words[0])))
    chosen: dict[int, Std] = {}
    for word in words:
        rank_text, _, stream = word.partition(":")
        if not (_is_rank(rank_text) and stream in ("0", "1", "2", "3")):
            raise UsageError(
                f"{option} {text!r}: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or these by local rank, such "
                "as 0:3,1:1"
            )
        if int(rank_text) in chosen:
            raise UsageError(f"{option} {text}: local rank {int(rank_text)} is named twice; name each rank once")
        chosen[int(rank_text)] = Std(int(stream))
    return StreamChoice(by_local_rank=chosen)


def parse_local_ranks(text: str, option: str = "--local-ranks-filter") -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(map(_is_rank, words)):
        raise UsageError(f"{option} {text!r}: give local ranks separated by commas, such as 0,2")
    return tuple(sorted({int(word) for word in words}))


RankRanges = tuple[tuple[int, int], ...]
"""``0-3,8`` as ((0, 3), (8, 8)): sorted, and no two that touch."""


def parse_rank_ranges(text: str, option: str) -> RankRanges:
    found = range_bounds(re.sub(r"\s*,\s*", ",", text.strip()))
    if found is None:
        raise UsageError(f"{option} {text!r}: give ranks and ranges of ranks separated by commas, such as 0 or 0-3,8")
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(found):
        if merged and begin <= merged[-1][1] + 1:
            begin, end = merged[-1][0], max(merged.pop()[1], end)
        merged.append((begin, end))
    return tuple(merged)


def shown_in_job_log(
    local_rank: int,
    rank: int,
    *,
    redirects: StreamChoice,
    tee: StreamChoice,
    only_local_ranks: tuple[int, ...] | None,
    only_ranks: RankRanges | None = None,
) -> Std:
    """The streams of a worker that go to the job log: only for ranks in both filters, if given, and `tee` wins."""
    if only_local_ranks is not None and local_rank not in only_local_ranks:
        return Std.NONE
    if only_ranks is not None and not any(first <= rank <= last for first, last in only_ranks):
        return Std.NONE
    return (Std.ALL & ~redirects.of(local_rank)) | tee.of(local_rank)


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 7


LEARNED_LEAST = 60.0


class SectionTimeouts(Struct, frozen=True, kw_only=True):
    """``--section-timeouts``: seconds without a heartbeat that make a hang, by section; false: no worker is judged."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    learns_step: bool = False
    """The timeout of ``step`` is learned from the run's own steps."""

    def __bool__(self) -> bool:
        return bool(self.seconds) or self.learns_step

    @property
    def by_section(self) -> dict[str, float]:
        return {**self.seconds, **({STEP: LEARNED_LEAST} if self.learns_step else {})}

    @property
    def shortest(self) -> float | None:
        return min(self.by_section.values(), default=None)


def parse_section_timeouts(text: str, option: str = "--section-timeouts") -> SectionTimeouts:
    """Read ``setup:900,step:60,checkpoint:300`` or ``step:auto``."""
    seconds: dict[str, float] = {}
    learns = False
    for part in text.split(","):
        name, colon, value = part.strip().partition(":")
        if not colon:
            raise UsageError(f"{option} {text}: {part!r} is not of the form section:seconds, as in step:60")
        if not is_section_name(name):
            raise UsageError(
                f"{option} {text}: {name!r} is not a section name; use 1 to {NAME_LIMIT} letters, digits, _, - and ."
            )
        if name in seconds or (learns and name == STEP):
            raise UsageError(f"{option} {text}: section {name!r} is given twice")
        if value == "auto":
            if name != STEP:
                raise UsageError(f"{option} {text}: only step:auto can be learned, not {part!r}; give it seconds")
            learns = True
            continue
        number = number_of(value)
        if not 0 < number <= 1e8:
            raise UsageError(f"{option} {text}: {value!r} is not a number of seconds above 0")
        seconds[name] = number
    return SectionTimeouts(seconds=seconds, learns_step=learns)


def parse_words(text: str, option: str) -> tuple[str, ...]:
    """Read arguments that are quoted as for a shell; no shell is started."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}; quote as for a shell") from None


def command_like(example: str) -> Callable[[str, str], tuple[str, ...]]:
    def parse(text: str, option: str) -> tuple[str, ...]:
        argv = parse_words(text, option)
        if not argv or not argv[0]:
            raise UsageError(f"{option} {text!r}: give a command, as in {example!r}")
        return argv

    return parse


MIB = 1 << 20


class Check(str, Enum):
    TMP = "tmp"
    """Room on the node's own disk: TMPDIR, or /tmp."""
    SHM = "shm"
    MEMORY = "memory"
    """Memory that can still be had: the node's, and below the cgroup's limits."""
    SHARED = "shared"
    CLOCK = "clock"
    """The wall clock against that of the run directory's server: only ever a warning."""
    GPU = "gpu"
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


class MetricsTarget(Struct, frozen=True, kw_only=True):
    path: str
    """Absolute; ``{host}`` stands for the node's name."""


class CheckpointRoom(Struct, frozen=True, kw_only=True):
    folder: str = "/dev/shm"
    room: int | None = None
    """Bytes; None: half of what is free."""


def parse_metrics(text: str, option: str = "--metrics") -> MetricsTarget:
    form, _, path = text.partition(":")
    if form == "jsonl":
        raise UsageError(f"{option} {text!r}: JSON lines were removed; give prometheus:FILE.prom")
    if form != "prometheus" or not path:
        raise UsageError(f"{option} {text!r}: give prometheus:FILE.prom")
    if not os.path.isabs(path):
        raise UsageError(f"{option} {text!r}: give an absolute path, which means the same on every node")
    if not path.endswith(".prom"):
        raise UsageError(f"{option} {text!r}: the node exporter only reads files that end in .prom")
    return MetricsTarget(path=path)


class Scope(str, Enum):
    RUN = "run"
    OFF = "off"


DEFAULT_HOURS = 24.0
DEFAULT_SHARE = 1 / 3
MOST_HOURS = 24.0 * 365


class BadNodeSettings(Struct, frozen=True, kw_only=True):
    scope: Scope = Scope.RUN
    hours: Annotated[float, Meta(ge=0, le=MOST_HOURS)] = DEFAULT_HOURS
    share: float = DEFAULT_SHARE
    """Maximum share of the partition to exclude."""

    def __str__(self) -> str:
        hours = f",hours={self.hours:g}" if self.hours != DEFAULT_HOURS else ""
        share = f",share={self.share:g}" if self.share != DEFAULT_SHARE else ""
        return f"{self.scope.value}{hours}{share}"


def parse_bad_nodes(text: str, option: str = "--bad-nodes") -> BadNodeSettings:
    """Read ``run`` or ``off``, with ``hours=24`` and ``share=0.33`` behind it; empty: the default."""
    scope, found = Scope.RUN, {"hours": DEFAULT_HOURS, "share": DEFAULT_SHARE}
    for index, word in enumerate(text.split(",")) if text else ():
        name, equals, value = word.strip().partition("=")
        if name == "jobs":
            raise UsageError(
                f"{option} {text}: memory across jobs was removed; give run, and leave nodes out with --exclude"
            )
        if not equals and index == 0 and name in {item.value for item in Scope}:
            scope = Scope(name)
        elif equals and name in found:
            most = MOST_HOURS if name == "hours" else 1.0
            found[name] = number_of(value)
            if not 0 < found[name] <= most:
                raise UsageError(f"{option} {word}: give a number above 0, at most {most:g}")
        else:
            raise UsageError(f"{option} {text}: give run or off, with hours=24 or share=0.33 after it")
    return BadNodeSettings(scope=scope, hours=found["hours"], share=found["share"])
