"""What a mount is told: how its caches behave, what its server does wrong."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSettings:
    """Seconds. The defaults are Linux's NFSv3 with ``actimeo=3``."""

    attributes: float = 3.0
    """How long a file's attributes, and the contents that go with them, are trusted without an open."""
    directories: float = 3.0
    """How long a directory's own attributes are trusted: its time decides whether names and listings still hold."""
    revalidation: str = "directory"
    """"directory": names and listings hold while their directory's time is unchanged. "time": they hold for
    `directories` seconds, and opening a directory asks nobody."""
    write_behind: bool = True
    """Whether writes wait for close, fsync or stat. False: each goes to the server at once (``sync``)."""
    written_back: float = 30.0
    """What waits is older than this when it goes to the server by itself (``dirty_expire_centisecs``)."""
    granularity: float = 0.0
    """Of the server's times; 0 is the backing filesystem's own."""
    clock_offset: float = 0.0
    """Of the server's clock against this host's."""
    latency: float = 0.0
    """Of each operation on the server."""
    bandwidth: float = 0.0
    """Bytes per second of the server for this mount; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with operations on the server, from now on."""

    error: str
    """Name of an errno: EIO, ENOSPC, EACCES, ESTALE, ENOSYS …"""
    operation: str = "*"
    """As counted: getattr, lookup, readlink, read, write, create, mkdir, symlink, link, remove, rmdir, rename,
    readdir, setattr, commit, lock, statfs; or ``*``."""
    name: str = ""
    """Only where the file's name contains this (operations on an open file have the name that it was opened by)."""
    done: bool = False
    """Whether the work is done all the same: the reply was lost."""
    times: int | None = None
    """How often. None: until `heal`."""

    @property
    def number(self) -> int:
        found: int = getattr(errno, self.error)
        return found

    def matches(self, operation: str, name: str) -> bool:
        return self.operation in ("*", operation) and self.name in name


def settings_to_json(settings: MountSettings) -> str:
    return json.dumps(asdict(settings))


def changed_settings(settings: MountSettings, changes: Mapping[str, Any]) -> MountSettings:
    """Raises: ValueError: a name that is no setting."""
    unknown = set(changes) - {f.name for f in fields(MountSettings)}
    if unknown:
        raise ValueError(f"no such settings: {', '.join(sorted(unknown))}")
    return replace(settings, **changes)
