"""What of the workers' output never reached its files or the job log, as the agents told it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_elastic.report.fold import rank_ranges

_MOST_STREAMS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLoss:
    """Of one worker's stdout or stderr, in bytes."""

    round: int
    rank: int
    stream: str
    not_in_file: int
    not_in_job_log: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLoss:
    """What one node lost in one episode."""

    host: str
    node: int
    reason: str
    not_in_files: int
    not_in_job_log: int
    told_ns: int
    """When, by the node's clock."""
    streams: tuple[StreamLoss, ...]


def read_loss(event: Mapping[str, Any], when: int) -> OutputLoss:
    """From an agent's event ``output_lost``; what is not as it should be is left out."""
    streams = event.get("streams")
    found = []
    for item in streams[:_MOST_STREAMS] if isinstance(streams, list) else []:
        if isinstance(item, dict) and isinstance(item.get("rank"), int):
            found.append(
                StreamLoss(
                    round=_count(item.get("round")),
                    rank=item["rank"],
                    stream=str(item.get("stream"))[:16],
                    not_in_file=_count(item.get("not_in_file")),
                    not_in_job_log=_count(item.get("not_in_job_log")),
                )
            )
    return OutputLoss(
        host=str(event.get("host"))[:256],
        node=_count(event.get("node")),
        reason=str(event.get("reason"))[:256],
        not_in_files=_count(event.get("not_in_files")),
        not_in_job_log=_count(event.get("not_in_job_log")),
        told_ns=when,
        streams=tuple(found),
    )


def describe_losses(losses: Sequence[OutputLoss]) -> list[str]:
    """For a person: at most one line for the files, and one for the job log."""
    lines = []
    files = [loss for loss in losses if loss.not_in_files]
    if files:
        reasons = ", ".join(list(dict.fromkeys(loss.reason for loss in files))[:3])
        ranks = [one.rank for loss in files for one in loss.streams if one.not_in_file]
        lines.append(_line(sum(loss.not_in_files for loss in files), ranks, "are in no file", reasons))
    dropped = sum(loss.not_in_job_log for loss in losses)
    if dropped:
        ranks = [one.rank for loss in losses for one in loss.streams if one.not_in_job_log]
        lines.append(_line(dropped, ranks, "are not in the job log", "the job log could not keep up"))
    return lines


def losses_json(losses: Sequence[OutputLoss]) -> list[dict[str, Any]]:
    """For report.json."""
    return [
        {
            "host": loss.host,
            "node": loss.node,
            "reason": loss.reason,
            "not_in_files": loss.not_in_files,
            "not_in_job_log": loss.not_in_job_log,
            "told_ns": loss.told_ns,
            "streams": [
                {
                    "round": one.round,
                    "rank": one.rank,
                    "stream": one.stream,
                    "not_in_file": one.not_in_file,
                    "not_in_job_log": one.not_in_job_log,
                }
                for one in loss.streams
            ],
        }
        for loss in losses
    ]


def _line(count: int, ranks: Sequence[int], what: str, why: str) -> str:
    named = sorted(set(ranks))
    whose = f" of rank{'s' if len(named) > 1 else ''} {rank_ranges(named)}" if named else ""
    return f"{count} bytes of the output{whose} {what}: {why}"


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
