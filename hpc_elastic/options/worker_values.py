"""``--tee``, ``--redirects`` and ``--local-ranks-filter``: torchrun's grammar, and what it means here. Pure.

Every worker's stdout and stderr always go to its files, whatever was asked for. The three options say what *also*
goes to the job log, with torchrun's result on the console:

- ``--redirects S``: these streams go to the files only;
- ``--tee S``: these go to the job log in any case;
- ``--local-ranks-filter 0,1``: of the others, nothing goes to the job log.

``S`` is ``0`` (none), ``1`` (stdout), ``2`` (stderr) or ``3`` (both), for all local ranks, or ``0:3,1:1``: local rank 0
both, 1 stdout, the ranks that are not named none. Without any of them, everything is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag
from types import MappingProxyType

from msgspec import Struct, field

from hpc_elastic.errors import UsageError


class Std(IntFlag):
    """A worker's output streams, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class StreamChoice(Struct, frozen=True, kw_only=True):
    """Which streams an option named, per local rank."""

    default: Std
    by_local_rank: Mapping[int, Std] = field(default_factory=dict)

    def of(self, local_rank: int) -> Std:
        """The streams of `local_rank`."""
        return self.by_local_rank.get(local_rank, self.default)


def parse_std_streams(text: str, *, option: str) -> StreamChoice:
    """Read ``3`` or ``0:3,1:1``.

    Args:
        text: As the user gave it.
        option: The option's name, for the error.

    Raises:
        UsageError: anything else.
    """
    words = [word.strip() for word in text.strip().split(",")]
    if len(words) == 1 and ":" not in words[0]:
        return StreamChoice(default=_stream(words[0], text, option))
    chosen: dict[int, Std] = {}
    for word in words:
        rank_text, colon, stream_text = word.partition(":")
        if not colon or not _is_number(rank_text):
            raise _bad(text, option)
        rank = int(rank_text)
        if rank in chosen:
            raise UsageError(f"{option} {text}: local rank {rank} is named twice; name each rank once")
        chosen[rank] = _stream(stream_text, text, option)
    return StreamChoice(default=Std.NONE, by_local_rank=MappingProxyType(chosen))


def parse_local_ranks(text: str, *, option: str = "--local-ranks-filter") -> tuple[int, ...]:
    """Read ``0,2``: local ranks, sorted, each once.

    Raises:
        UsageError: anything else.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(_is_number(word) for word in words):
        raise UsageError(f"{option} {text!r}: give local ranks separated by commas, such as 0,2")
    return tuple(sorted({int(word) for word in words}))


def shown_in_job_log(
    local_rank: int, *, redirects: StreamChoice, tee: StreamChoice, only_local_ranks: tuple[int, ...] | None
) -> Std:
    """Which streams of `local_rank` go to the job log.

    Args:
        local_rank: The worker's.
        redirects: ``--redirects``.
        tee: ``--tee``.
        only_local_ranks: ``--local-ranks-filter``; None: all.
    """
    if only_local_ranks is not None and local_rank not in only_local_ranks:
        return Std.NONE
    return (Std.ALL & ~redirects.of(local_rank)) | tee.of(local_rank)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 7


def _stream(word: str, text: str, option: str) -> Std:
    if word not in ("0", "1", "2", "3"):
        raise _bad(text, option)
    return Std(int(word))


def _bad(text: str, option: str) -> UsageError:
    return UsageError(
        f"{option} {text!r}: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or these by local rank, such as 0:3,1:1"
    )
