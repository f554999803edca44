"""The last collectives of one rank, by torch's flight recorder: part of what the event ``ranks_observed`` has of it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Size = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""Of a tensor in one dimension."""


class Call(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A collective, a send or a receive, as the ranks that belong together in it must have called it."""

    name: str
    """``all_reduce``; of a send or a receive ``send`` or ``recv``."""
    group: str
    """The process group's name in torch, the same on all its ranks."""
    description: str = ""
    """What the script or the framework calls the group; empty: nothing."""
    backend: str = ""
    """``nccl`` or ``gloo``; empty: not known."""
    inputs: tuple[tuple[Size, ...], ...] = ()
    outputs: tuple[tuple[Size, ...], ...] = ()
    types: tuple[str, ...] = ()
    peers: tuple[int, int] | None = None
    """Of a send or a receive: from which rank of the group, to which."""


class TailTrack(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last calls of one rank in one process group, oldest first."""

    group: str
    backend: str = ""
    is_transfer: bool = False
    """Sends and receives; else collectives."""
    sequences: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()
    """Each a place in `FlightTail.calls`."""
    done: tuple[int, ...] = ()
    """1 for what is completed."""
    started: int = -1
    """The last number of those that its device has begun and not completed; -1: none, or not known."""


class FlightTail(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of one rank's dump, or what NCCL's watchdog printed in place of one."""

    calls: tuple[Call, ...] = ()
    tracks: tuple[TailTrack, ...] = ()
    members: tuple[tuple[str, str], ...] = ()
    """A group and its ranks (``0-3,8``), for each where the dump has them."""
    is_of_words: bool = False
    """Of the watchdog's words: a call without a name is not known, and no types are."""
