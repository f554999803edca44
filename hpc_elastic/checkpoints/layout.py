"""The names on a node and on the shared filesystem, and what can be read from them.

::

    <node folder>/                       0700, one of each agent; removed when the agent ends
      dirty-1200-0-3-1-4/                a part that workers write: step, attempt, round, index of the node, nodes
        step-1200/                       the scripts' files
        rank-00002.left  .failed         how each rank left it
      whole-1200-0-3-1-4/                the same, renamed when all ranks have left
      copy-1200-0-3-0-4/                 a neighbour's part; `owner` has the uid of its agent
      start.json                         what the workers of this round continue from
    <checkpoint dir>/
      .step-1200.9f3c01d2.0.3.4/         a checkpoint that is being copied: run, attempt, round, nodes
        files/  parts/part-00001.json
      step-1200/                         `files`, renamed when all is there; the index was written last
        hpc-elastic-index.json
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base import codec

START_VARIABLE = "HPC_ELASTIC_CHECKPOINTS"
"""The path of `start.json`, in the workers' environment."""
INDEX_NAME = "hpc-elastic-index.json"
DIRTY, WHOLE, COPY = "dirty", "whole", "copy"
_PART = re.compile(r"(dirty|whole|copy)-(\d+)-(\d+)-(\d+)-(\d+)-(\d+)\Z")
_STEP = re.compile(r"step-(\d+)\Z")
_TARGET = re.compile(r"(\.step-|\.replica-)(\d+)\.([0-9a-f]{8})\.(\d+)\.(\d+)\.(\d+)\Z")
TARGET, REPLICA = ".step-", ".replica-"


class Saving(Struct, frozen=True, order=True):
    """One checkpoint: two rounds may each write the same step, and their files do not belong together."""

    step: int
    attempt: int
    round: int
    count: int
    """Its parts: the nodes of that round."""

    def is_of_round_of(self, other: Saving) -> bool:
        return (self.attempt, self.round) == (other.attempt, other.round)

    def target(self, run_uid: str, *, prefix: str = TARGET) -> str:
        """The folder's name while the checkpoint is being copied, or replicated."""
        return f"{prefix}{self.step}.{run_uid[:8]}.{self.attempt}.{self.round}.{self.count}"


class NodePart(Struct, frozen=True, order=True):
    saving: Saving
    index: int
    """The node's group rank in that round."""

    def name(self, state: str) -> str:
        saving = self.saving
        return f"{state}-{saving.step}-{saving.attempt}-{saving.round}-{self.index}-{saving.count}"


class CopiedFile(Struct, frozen=True, array_like=True):
    size: int
    crc: int


class Manifest(Struct, frozen=True, kw_only=True):
    files: dict[str, CopiedFile] = {}
    without: str = ""
    """Why the node has not its part, so that this checkpoint is never complete."""


class Index(Struct, frozen=True, kw_only=True):
    run_id: str
    saving: Saving
    files: dict[str, CopiedFile]


class NodePlace(Struct, frozen=True, kw_only=True):
    attempt: int
    round: int
    index: int
    """Its group rank."""
    uids: tuple[str, ...]
    ranks: int

    def part(self, step: int) -> NodePart:
        return NodePart(Saving(step, self.attempt, self.round, len(self.uids)), self.index)


class Start(Struct, frozen=True, kw_only=True):
    """The checkpoint that the workers of a round continue from, and the place for theirs."""

    local: str
    place: NodePlace
    room: int
    """Bytes that checkpoints may take on this node."""
    latest: tuple[str, ...] = ()
    """Folders with the checkpoint to continue from; the first one that is there is read."""


class NodeReport(Struct, frozen=True, kw_only=True):
    """The parts that a node has when a round begins."""

    uid: str
    address: str = ""
    """``host:port`` where its agent takes a neighbour's part; empty: it does not."""
    whole: tuple[NodePart, ...] = ()
    shapes: tuple[str, ...] = ()
    """The names of each one's files without their digits, in the order of `whole`; empty: it has no files."""
    copies: tuple[NodePart, ...] = ()


class Choice(Struct, frozen=True, kw_only=True):
    """The checkpoint that all nodes of a round continue from; a node that has its own part of it reads that."""

    saving: Saving | None = None
    is_committed: bool = True


def parts_in(folder: Path, *states: str) -> dict[NodePart, str]:
    """The parts below a node's folder in any of `states`, the oldest first, with their states."""
    found = {}
    for name in names_in(folder):
        if (match := _PART.match(name)) and match[1] in states:
            step, attempt, round_index, index, count = map(int, match.groups()[1:])
            found[NodePart(Saving(step, attempt, round_index, count), index)] = match[1]
    return dict(sorted(found.items()))


def files_of(part: NodePart, state: str, folder: Path) -> Path:
    return folder / part.name(state) / f"step-{part.saving.step}"


def targets_in(shared: Path, run_uid: str, *, prefix: str = TARGET) -> list[Saving]:
    """The checkpoints of this run that are being copied, or were; or that are replicated."""
    found = (match for name in names_in(shared) if (match := _TARGET.match(name)))
    mine = (match for match in found if match[1] == prefix and match[3] == run_uid[:8])
    return sorted(Saving(int(match[2]), int(match[4]), int(match[5]), int(match[6])) for match in mine)


def remove_dead_targets(shared: Path, run_uid: str, *, now: float, after: float) -> None:
    """`now` is a file's time on that filesystem: the clocks of two machines are never compared."""
    for name in names_in(shared):
        match = _TARGET.match(name)
        if match and match[3] != run_uid[:8] and now - _changed_at(shared / name) > after:
            remove(shared / name)


def _changed_at(folder: Path) -> float:
    found = [os.stat(folder).st_mtime]
    for path, folders, files in os.walk(folder):
        found += [os.lstat(os.path.join(path, name)).st_mtime for name in (*folders, *files)]
    return max(found)


def committed_steps(shared: Path) -> list[int]:
    """Steps of all folders that may hold a checkpoint; `read_index` says which do."""
    return sorted(int(match[1]) for name in names_in(shared) if (match := _STEP.match(name)))


def read_index(shared: Path, step: int) -> Index | None:
    found = codec.load(shared / f"step-{step}" / INDEX_NAME, Index, limit=1 << 30)
    return found if isinstance(found, Index) else None


def last_committed(shared: Path) -> Index | None:
    """The newest checkpoint whose files all have their sizes. Looks at each file of it."""
    for step in reversed(committed_steps(shared)):
        index = read_index(shared, step)
        if index is not None and all(
            _size(shared / f"step-{step}" / name) == f.size for name, f in index.files.items()
        ):
            return index
    return None


def shape_of(names: Iterable[str]) -> list[str]:
    """The names of files without their digits: equal on all nodes where each rank writes files of its own."""
    return sorted(re.sub(r"\d+", "#", name) for name in names)


def walk(folder: Path) -> Iterator[str]:
    """The paths of regular files below `folder`, relative to it. Raises OSError: it is gone."""
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            yield from (f"{name}/{below}" for below in walk(path))
        elif path.is_file() and not path.is_symlink():
            yield name


def bytes_in(folder: Path) -> int:
    try:
        return sum(_size(folder / name) for name in walk(folder))
    except OSError:
        return 0


def remove(folder: Path) -> None:
    gone = folder.with_name(f".gone-{folder.name}")
    try:
        os.rename(folder, gone)
    except OSError:
        pass  # it is gone, or another one is being removed under that name
    shutil.rmtree(gone, ignore_errors=True)


def finish_removals(shared: Path) -> None:
    for name in names_in(shared):
        if name.startswith((".gone-step-", f".gone-{TARGET}", f".gone-{REPLICA}")):
            shutil.rmtree(shared / name, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove from a node's folder what killed workers left: all folders but parts, and what a neighbour sends now."""
    for name in names_in(folder):
        if not (_PART.match(name) or name.startswith(".incoming-")) and (folder / name).is_dir():
            shutil.rmtree(folder / name, ignore_errors=True)


def names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
