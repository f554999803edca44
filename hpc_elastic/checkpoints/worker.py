"""``hpc_elastic.checkpoint_dir`` and ``latest_checkpoint``, for a training script. No torch."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from functools import cache
from operator import index
from pathlib import Path
from types import TracebackType

from hpc_elastic.base import codec
from hpc_elastic.base.text import size_text
from hpc_elastic.checkpoints import layout
from hpc_elastic.checkpoints.layout import DIRTY, WHOLE, Start
from hpc_elastic.worker_api.heartbeat import section

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
                layout.remove(self._dirty)
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
            size, room = (layout.bytes_in(self._dirty), start.room) if start is not None else (0, 0)
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
    layout.remove(dirty)
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
    for name in layout.walk(source) if source.is_dir() else ():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(source / name, target / name)
        except FileNotFoundError:
            pass  # another rank was first


def read_start() -> Start | None:
    path = os.environ.get(layout.START_VARIABLE)
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
        sizes = [
            layout.bytes_in(layout.files_of(part, state, local))
            for part, state in layout.parts_in(local, WHOLE).items()
        ]
        if not sizes or (used := layout.bytes_in(local)) + sizes[-1] <= room:
            return
        if 2 * sizes[-1] > room or time.monotonic() > deadline:
            raise _no_room(local, f"another one of {size_text(sizes[-1])} beside {size_text(used)}", room)
        time.sleep(0.1)


def _no_room(local: Path, what: str, room: int) -> OSError:
    why = f"no room for {what}: checkpoints may take {size_text(room)} on this node"
    return OSError(errno.ENOSPC, f"{why}; give more with --checkpoint-local FOLDER:SIZE, or save less", str(local))
