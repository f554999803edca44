"""What a node sees of the run's folder and when, and the folders of its own.

Times of two hosts are never compared. Each look is timed by the node that looks. The store, which makes caches expire,
shows it that a change has been made; a look as a script does it, which does not, may show the old state for longer.
Since the node's first look, that is how long its caches hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.host_facts import filesystem_type
from hpc_elastic.doctor.host_checks import Folders, Room, ask_quotas, measure_folders, try_to_write
from hpc_elastic.doctor.probe_site import ProbeSite

LOOK_SECONDS = 70.0
"""Beyond a minute, for which NFS clients keep what they know of a folder that is long unchanged (acdirmax)."""
_PAUSE = 0.02
_AT_ONCE = 0.25
_ROUNDS = 5
_BARRIER_SECONDS = LOOK_SECONDS + 20


class FileFacts(Struct, frozen=True, kw_only=True):
    """Of one node. Seconds by its own clock."""

    runs: Room
    folders: Folders
    filesystem: str = ""
    """The kind of the one with the run's folder; empty: not known."""
    quotas: str = ""
    """What ``quota``, or ``lfs quota``, prints; empty: neither is there, or there are none."""
    store_seconds: float | None = None
    """From the writing of a value until those of all others were read, through the store; None: they never came."""
    created: bool | None = None
    """Of one name that all nodes create at once: this node did. None: not tried."""
    late: Mapping[str, float | None] = field(default_factory=dict)
    """``new``, ``renamed``, ``listed``, ``rewritten``: for how long this node's caches hid another node's change; 0: it
    was seen at once; None: not in `LOOK_SECONDS`. Empty where there is one node alone."""
    writer: str = ""
    """The node whose changes `late` is about; empty: none."""


def probe_files(site: ProbeSite) -> FileFacts:
    """Measure, together with all other nodes."""
    settled = site.barrier("files", seconds=60.0)
    seconds: float | None = None
    created: bool | None = None
    late: Mapping[str, float | None] = {}
    writer = ""
    if not settled:
        seconds = _store_seconds(site)
        created = site.store.put_if_absent("create/one", site.node)
        if site.world_size > 1:
            late, writer = _look(site)
    kind = filesystem_type(os.path.realpath(site.folder)) or ""
    return FileFacts(
        runs=replace(try_to_write(site.folder), path=str(site.folder.parents[2])),
        folders=measure_folders(site.env),
        filesystem=kind,
        quotas=ask_quotas(site.folder, kind),
        store_seconds=seconds,
        created=created,
        late=late,
        writer=writer,
    )


def _store_seconds(site: ProbeSite) -> float | None:
    times = []
    for number in range(_ROUNDS):
        began = site.clock.monotonic()
        if len(site.gather(f"round-{number}")) < site.world_size:
            return None
        times.append(site.clock.monotonic() - began)
    return sorted(times)[_ROUNDS // 2]


# -- when changes are seen -----------------------------------------------------------------------------------------


def _look(site: ProbeSite) -> tuple[dict[str, float | None], str]:
    """Each node's changes are watched by the one before it: every node looks once, and none at its own."""
    folders = [Path(site.store.root, "looks", f"{rank:05d}") for rank in range(site.world_size)]
    watched = (site.rank + 1) % site.world_size
    own, theirs = _Change(folders[site.rank]), _Change(folders[watched])
    own.prepare()
    site.barrier("looks-prepared", seconds=_BARRIER_SECONDS)
    cached = site.clock.monotonic()
    for look in theirs.looks().values():
        _is_seen(look)  # so that caches hold what was there, and what was not
    site.barrier("looks-cached", seconds=_BARRIER_SECONDS)
    own.make()
    site.store.put_if_absent(f"made/{site.rank:05d}", "1")
    late = _watch(site, theirs.looks(), f"made/{watched:05d}", cached=cached)
    site.barrier("looks-done", seconds=_BARRIER_SECONDS)
    return late, site.hosts[watched]


def _watch(
    site: ProbeSite, looks: Mapping[str, Callable[[], bool]], made: str, *, cached: float
) -> dict[str, float | None]:
    """Look for each change until it is seen, and for `made` by the store.

    Returns:
        For how long each was hidden, since `cached`; 0 where it was seen when the store showed that it had been made.
    """
    known: float | None = None
    seen: dict[str, float] = {}
    deadline = site.clock.monotonic() + LOOK_SECONDS
    invalidate_at = 0.0
    while (len(seen) < len(looks) or known is None) and (now := site.clock.monotonic()) < deadline:
        if known is None:
            if now >= invalidate_at:
                site.store.invalidate("made")
                invalidate_at = now + 0.5
            known = site.clock.monotonic() if site.store.get(made) is not None else None
        for name, look in looks.items():
            if name not in seen and _is_seen(look):
                seen[name] = site.clock.monotonic()
        site.clock.wait(site.stop, _PAUSE)
    at_once = deadline if known is None else known + _AT_ONCE
    return {name: (0.0 if at <= at_once else at - cached) if (at := seen.get(name)) else None for name in looks}


def _is_seen(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except OSError:
        return False


class _Change:
    """What a node changes, each in a folder of its own: a look into one folder refreshes what is known of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        for name in ("new", "renamed", "listed", "rewritten"):
            (self._folder / name).mkdir(parents=True)
        (self._folder / "renamed" / "before").write_text("1")
        (self._folder / "rewritten" / "file").write_text("before")

    def make(self) -> None:
        (self._folder / "new" / "file").write_text("1")
        (self._folder / "renamed" / "before").rename(self._folder / "renamed" / "after")
        (self._folder / "listed" / "file").write_text("1")
        (self._folder / "rewritten" / "other").write_text("after")
        (self._folder / "rewritten" / "other").replace(self._folder / "rewritten" / "file")

    def looks(self) -> dict[str, Callable[[], bool]]:
        """How another node looks for each."""
        folder = self._folder
        return {
            "new": lambda: os.path.exists(folder / "new" / "file"),
            "renamed": lambda: os.path.exists(folder / "renamed" / "after"),
            "listed": lambda: "file" in os.listdir(folder / "listed"),
            "rewritten": lambda: (folder / "rewritten" / "file").read_text() == "after",
        }
