"""What became of a submitted function, from the run's files alone: results, what was raised, and printed."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.atomic_file import read_bytes, read_json
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.launch.attempts import begun_attempts, newest_stored
from hpc_elastic.log_pieces import find_pieces, piece_path
from hpc_elastic.outcome import Outcome
from hpc_elastic.requeue import RequeueAction
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.submission import places
from hpc_elastic.submission.objects import UnreadableObjectError, read_head, read_object

STREAMS = ("stdout", "stderr")
_LONGEST_REPORT = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How the run ended, once and for all."""

    outcome: str
    reason: str

    @property
    def succeeded(self) -> bool:
        return self.outcome == Outcome.SUCCEEDED.value

    @property
    def state(self) -> str:
        """As Slurm would say it."""
        return _STATES.get(self.outcome, "FAILED")


_STATES = {
    Outcome.SUCCEEDED.value: "COMPLETED",
    Outcome.CANCELLED.value: "CANCELLED",
    Outcome.PREEMPTED.value: "PREEMPTED",
    Outcome.TIMED_OUT.value: "TIMEOUT",
}


def find_end(paths: RunPaths) -> RunEnd | None:
    """How it ended; None while it runs, waits, or is about to come back."""
    stored = newest_stored(paths)
    if stored is None or stored.action == RequeueAction.REQUEUE.value:
        return None
    return RunEnd(outcome=stored.outcome, reason=stored.decision)


def world_size(paths: RunPaths) -> int | None:
    """Workers of the newest round; None where none has begun."""
    place = places.newest_round(paths)
    found = places.ranks(place.attempt.round_dir(place.round)) if place is not None else []
    return found[-1] + 1 if found else None


def read_result(paths: RunPaths, rank: int) -> Any:
    """What `rank` returned in the round in which all did.

    Raises:
        UnreadableObjectError: it left nothing, or what can't be made again here.
    """
    place = places.newest_round(paths)
    if place is None:
        raise UnreadableObjectError(path=str(paths.root), why="no worker has begun", errno=errno.ENOENT)
    path = places.result_file(place.rank_dir(rank))
    try:
        return read_object(path)
    except UnreadableObjectError as error:
        if error.errno is None:
            raise
        raise UnreadableObjectError(
            path=str(path), why=f"rank {rank} ended without returning anything (by sys.exit, say)", errno=error.errno
        ) from None


def results_count(paths: RunPaths) -> int | None:
    """How many ranks returned something, as rank 0's says; None where it does not.

    That file says it for sure: a mount may show a folder as it was a minute ago, with fewer ranks in it.
    """
    place = places.newest_round(paths)
    if place is None:
        return None
    try:
        return int(read_head(places.result_file(place.rank_dir(0)))["world_size"])
    except (UnreadableObjectError, KeyError, TypeError, ValueError):
        return None


def read_exception(paths: RunPaths) -> tuple[BaseException | None, dict[str, Any]] | None:
    """What the rank raised that the report names as the cause, or, where it names none, the first that raised anything.

    Returns:
        The exception, None where no copy could be made, and the head of its file; None where nothing was raised.
    """
    for path in _exception_files(paths):
        try:
            head = read_head(path)
        except (UnreadableObjectError, UnsafePathError):
            continue
        try:
            found = read_object(path)
        except UnreadableObjectError:
            continue
        except UnsafePathError:
            found = None  # a copy: its head is only text
        return found if isinstance(found, BaseException) else None, head
    return None


def _exception_files(paths: RunPaths) -> Iterator[Path]:
    found = begun_attempts(paths)
    if not found:
        return
    report = read_json(found[-1].report_json)
    verdict = {} if isinstance(report, str) else report.get("verdict") or {}
    failure = verdict.get("failure") or {}
    try:
        attempt, number, rank = int(verdict["attempt"]), int(verdict["round"]), int(failure["global_rank"])
        yield places.exception_file(paths.attempt(attempt).rank(number, rank).root)
    except (KeyError, TypeError, ValueError):
        pass  # it is about a node, say
    place = places.newest_round(paths)
    if place is not None:
        written = [places.exception_file(place.rank_dir(rank)) for rank in places.ranks(_folder(place))]
        yield from sorted(filter(Path.exists, written), key=lambda path: path.stat().st_mtime_ns)


def _folder(place: places.RoundPlace) -> Path:
    return place.attempt.round_dir(place.round)


def report_text(paths: RunPaths) -> str:
    """The newest attempt's report; empty where there is none."""
    found = begun_attempts(paths)
    try:
        return read_bytes(found[-1].report_text, limit=_LONGEST_REPORT).decode("utf-8", "replace").strip()
    except (IndexError, OSError, UnsafePathError):
        return ""


def output(paths: RunPaths, rank: int, stream: str) -> str | None:
    """What a rank printed, in all attempts and rounds one after the other; None where it has not begun.

    Args:
        paths: The run's.
        rank: Global.
        stream: ``stdout`` or ``stderr``.
    """
    texts = []
    for attempt in begun_attempts(paths):
        for number in places.rounds(attempt):
            text = _whole(getattr(attempt.rank(number, rank), stream))
            if text is not None:
                texts.append(text)
    return "".join(texts) if texts else None


def _whole(path: Path) -> str | None:
    try:
        pieces = [piece_path(path, number) for number in find_pieces(path)]
    except OSError:
        return None
    parts = []
    for piece in (*pieces, path):
        try:
            parts.append(read_bytes(piece, limit=sys.maxsize))
        except (OSError, UnsafePathError):
            continue  # rotated away meanwhile, or planted in what this is a copy of
    return b"".join(parts).decode("utf-8", "replace") if parts else None
