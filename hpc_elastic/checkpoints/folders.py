"""The folders of checkpoints: what a training script does in them, their names, what can be read of them. No torch.

``hpc_elastic.checkpoint_dir`` and ``latest_checkpoint`` are the script's; the rest is the agents', too.
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

import errno
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from functools import cache
from operator import index
from pathlib import Path
from types import TracebackType

from msgspec import Struct

from hpc_elastic.base import codec
from hpc_elastic.base.text import size_text
from hpc_elastic.worker_api.heartbeat import section

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


ROOM_SECONDS = 60.0
PEERS_SECONDS = 1800.0
"""Outside of a run with ``--checkpoint-dir``: how long rank 0 waits for the other ranks to leave."""
_OF_A_START = (
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_PORT",
)


class checkpoint_dir:
    """``with checkpoint_dir(step=1200) as folder:``: an empty folder for the files of one checkpoint.

    All ranks enter it, also those that write nothing. The ranks of a node share the folder: a file's name has the rank
    where each rank writes one. The checkpoint counts when all ranks have left; where one left by an exception, or was
    killed, nothing stays. It is a section ``checkpoint`` of the heartbeats, too.

    In a run with ``--checkpoint-dir`` the folder is on the node, and the agent copies it. Elsewhere it is below `into`
    on a filesystem that all ranks share, rank 0 waits for the others to leave, and nothing is removed.
    """

    def __init__(self, step: int, *, into: str | os.PathLike[str] = "checkpoints") -> None:
        """Args:
        step: The last step that the checkpoint holds; 0 or more.
        into: The folder for checkpoints without ``--checkpoint-dir``, as for `latest_checkpoint`.

        Raises:
            TypeError, ValueError: `step` is no whole number, or negative.
        """
        self._step = index(step)
        self._section = section("checkpoint", step=step)
        self._into = Path(into)
        self._dirty = self._final = Path()
        self._rank = int(os.environ.get("RANK", "0"))
        self._ranks = int(os.environ.get("WORLD_SIZE", "1"))

    def __enter__(self) -> Path:
        """Raises OSError: the node has no room for another checkpoint (ENOSPC), or mkdir's."""
        start = read_start()
        if start is not None:
            place, local = start.place, Path(start.local)
            part, self._ranks = place.part(self._step), place.ranks
            self._dirty, self._final = local / part.name(DIRTY), local / part.name(WHOLE)
            if not self._dirty.exists():
                _await_room(local, start.room)
        else:
            values = (re.sub("[^A-Za-z0-9-]", "-", os.environ.get(name, "")) for name in _OF_A_START)
            self._dirty = self._into / ".".join((f".dirty-step-{self._step}", *values))
            self._final = self._into / f"step-{self._step}"
            self._into.mkdir(parents=True, exist_ok=True)
            if self._ranks == 1:
                remove(self._dirty)
        folder = self._dirty / f"step-{self._step}"
        self._dirty.mkdir(mode=0o700, exist_ok=True)
        for how in ("left", "failed"):
            self._mark(how).unlink(missing_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._section.__enter__()
        return folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises OSError: this node's part is larger than all room for checkpoints (ENOSPC)."""
        start = read_start()
        is_plain = start is None
        deadline = time.monotonic() + PEERS_SECONDS
        try:
            size, room = (bytes_in(self._dirty), start.room) if start is not None else (0, 0)
            self._mark("left" if kind is None and size <= room else "failed").touch(mode=0o600)
            while not settle(self._dirty, self._final, self._ranks, rank=self._rank if is_plain else None):
                if not is_plain or self._rank or kind is not None:
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self._dirty}: not all {self._ranks} ranks left their checkpoint_dir")
                time.sleep(0.02)
            if kind is None and size > room:
                raise _no_room(self._final.parent, f"a checkpoint of {size_text(size)}", room)
        except FileNotFoundError:
            pass  # another rank was first, or the round is over
        except BaseException as failed:
            kind = kind or type(failed)
            raise
        finally:
            self._section.__exit__(kind, error, trace)

    def _mark(self, how: str) -> Path:
        return self._dirty / f"rank-{self._rank:05d}.{how}"


def settle(dirty: Path, final: Path, ranks: int, *, rank: int | None = None) -> bool:
    """Whoever sees first that all have left does it. Raises FileNotFoundError: another process was first.

    `rank`: without an agent, the one that asks. The files alone become `final` then, in place of an older one; that
    takes two steps, so rank 0 alone does it, which waits for the others.
    """
    marks = [name for name in os.listdir(dirty) if name.startswith("rank-")]
    if len(marks) < ranks:
        return False
    is_whole = not any(name.endswith(".failed") for name in marks)
    if is_whole and rank is not None:
        if rank:
            return True
        if final.exists():
            os.rename(final, final.with_name(f".old-{final.name}"))
        os.rename(dirty / final.name, final)
        shutil.rmtree(final.with_name(f".old-{final.name}"), ignore_errors=True)
    elif is_whole and not final.exists():
        os.rename(dirty, final)
        return True
    remove(dirty)
    return True


def latest_checkpoint(*, into: str | os.PathLike[str] = "checkpoints") -> Path | None:
    """The folder with the checkpoint to continue from, of all ranks the same step; None: begin from the start.

    It was chosen when this round's workers started, and does not change in the round. The name is ``step-<step>``. The
    folder is the node's own where that has what its ranks wrote, else the one on the shared filesystem.
    """
    start = read_start()
    if start is not None:
        if not start.latest:
            return None
        return next((path for path in map(Path, start.latest) if path.exists()), Path(start.latest[-1]))
    root, found = Path(into), {}
    for name in sorted(os.listdir(root) if root.is_dir() else ()):
        if match := re.fullmatch(r"(?:\.old-)?step-(\d+)", name):
            found[int(match[1])] = name  # a whole one sorts after an older one of its step
    if not found:
        return None
    step = max(found)
    if found[step].startswith("."):  # a process was killed as it replaced it
        os.rename(root / found[step], root / f"step-{step}")
    return root / f"step-{step}"


def node_folder(name: str) -> Path | None:
    """A folder of this node for files on their way to a `checkpoint_dir`; None without ``--checkpoint-dir``."""
    start = read_start()
    if start is None:
        return None
    folder = Path(start.local, f"{name}-{start.place.attempt}-{start.place.round}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def move_files(source: Path, target: Path) -> None:
    """Move what is there; other ranks may be writing to their own files, or moving them. Both on one filesystem."""
    for name in walk(source) if source.is_dir() else ():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(source / name, target / name)
        except FileNotFoundError:
            pass  # another rank was first


def read_start() -> Start | None:
    path = os.environ.get(START_VARIABLE)
    return _read_start(path) if path else None


@cache
def _read_start(path: str) -> Start:
    found = codec.load(Path(path), Start)
    if not isinstance(found, Start):
        raise RuntimeError(f"{path}, which this node's agent wrote, is {found}")
    return found


def _await_room(local: Path, room: int) -> None:
    """The agent removes what is committed. The newest part stays until the next one is whole: nothing is waited for
    where both have no room.
    """
    deadline = time.monotonic() + ROOM_SECONDS
    while True:
        sizes = [bytes_in(files_of(part, state, local)) for part, state in parts_in(local, WHOLE).items()]
        if not sizes or (used := bytes_in(local)) + sizes[-1] <= room:
            return
        if 2 * sizes[-1] > room or time.monotonic() > deadline:
            raise _no_room(local, f"another one of {size_text(sizes[-1])} beside {size_text(used)}", room)
        time.sleep(0.1)


def _no_room(local: Path, what: str, room: int) -> OSError:
    why = f"no room for {what}: checkpoints may take {size_text(room)} on this node"
    return OSError(errno.ENOSPC, f"{why}; give more with --checkpoint-local FOLDER:SIZE, or save less", str(local))
