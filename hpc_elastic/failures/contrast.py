"""Contrasts nodes: the same failure on all workers of some nodes, and on none elsewhere. Pure.

What is missing on one node raises the same exception in every worker there; the same on all nodes is the user's
mistake. Whether the workers elsewhere would have failed a moment later shows only where they got that moment, or had
come to a collective, and failed in it when the peer was gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from hpc_elastic.failures.classify import is_same_failure
from hpc_elastic.failures.patterns import IMAGE_MISSING
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure

MOMENT_SECONDS = 1.0
"""So long the other workers may go on, so that those which would fail in the same way do; see `moment_after`."""
_LONGEST_MOMENT_SECONDS = 5.0
_START_SECONDS = 120.0
"""Imports from a cold network filesystem have been seen to take more than a minute."""
_ENOUGH = 0.8
_TYPES = frozenset({"ImportError", "ModuleNotFoundError", "FileNotFoundError", "NotADirectoryError", "PermissionError"})
"""Python raises them where a package, a file or the right to read it is missing."""
_TEXTS = re.compile(
    r"cannot open shared object file|error while loading shared libraries|version `\w+_[\d.]+' not found"
    r"|command not found|can't open file '|no such file or directory|no cuda gpus are available"
    r"|driver on your system is too old|driver version is insufficient",
    re.IGNORECASE,
)
_CANNOT_RUN = (126, 127)


class NodeFailures(Struct, frozen=True, kw_only=True):
    node: int
    workers: int
    alike: int = 0
    fingerprint: str = ""
    """A failure that may be the node's; empty where there is none."""
    waited: float = 0.0
    """Seconds for which the workers elsewhere were let go on after that."""
    passed: bool = False
    """Its workers had come further: one of them lost a peer in a collective."""


_READ_ONLY = re.compile(r"read-only file system", re.IGNORECASE)


def wrong_input(failure: WorkerFailure) -> str:
    """Name the wrong input behind an infrastructure failure that is no single node's; empty for any other failure."""
    if failure.failure_class is FailureClass.INFRASTRUCTURE and _READ_ONLY.search(failure.headline):
        return "it wrote to a path whose filesystem is read-only"
    return "the container's image does not exist, or can't be fetched" if failure.reason == IMAGE_MISSING else ""


def may_be_of_node(failure: WorkerFailure) -> bool:
    if wrong_input(failure):
        return True
    if failure.failure_class is not FailureClass.ROOT:
        return False
    name = failure.exception_type.rsplit(".", 1)[-1]
    if name in _TYPES or failure.exitcode in _CANNOT_RUN:
        return True
    return bool(_TEXTS.search(failure.headline) or (not name and _TEXTS.search(failure.stderr_tail)))


def sum_up_node(failures: Sequence[WorkerFailure], *, node: int, workers: int) -> NodeFailures:
    by_itself = [one for one in failures if not one.stopped_by_agent]
    # One that the stop overtook had failed in the same way, and shows that it is not another node's alone.
    own = [one for one in failures if may_be_of_node(one)]
    if not own:
        passed = any(one.failure_class is FailureClass.SYMPTOM for one in by_itself)
        return NodeFailures(node=node, workers=workers, passed=passed)
    first = min(own, key=lambda one: (one.stopped_by_agent, one.ended_uptime_ns, one.global_rank))
    alike = [one for one in by_itself if is_same_failure(one, first)]
    waited = max((one.waited for one in alike), default=0.0)
    return NodeFailures(node=node, workers=workers, alike=len(alike), fingerprint=first.fingerprint, waited=waited)


def nodes_apart(nodes: Iterable[NodeFailures]) -> tuple[int, ...]:
    """Find the nodes on which all workers failed alike, where no worker of the others did; none where that is most."""
    found = list(nodes)
    whole: dict[str, list[NodeFailures]] = {}
    for one in found:
        if one.fingerprint and 0 < one.workers <= one.alike:
            whole.setdefault(one.fingerprint, []).append(one)
    apart: list[int] = []
    for fingerprint, those in whole.items():
        elsewhere = [one for one in found if one not in those]
        had_time = max(one.waited for one in those) >= _ENOUGH * MOMENT_SECONDS
        if not elsewhere or any(one.fingerprint == fingerprint for one in elsewhere):
            continue
        if had_time or all(one.passed for one in elsewhere):
            apart += [one.node for one in those]
    return tuple(sorted(apart)) if 2 * len(apart) <= len(found) else ()


def apart_in_round(failures: Sequence[WorkerFailure], workers: Mapping[int, int]) -> tuple[int, ...]:
    if len(workers) < 2 or not any(may_be_of_node(one) for one in failures):
        return ()
    return nodes_apart(
        sum_up_node([one for one in failures if one.node == node], node=node, workers=count)
        for node, count in workers.items()
    )


def moment_after(age: float) -> float:
    """Give the seconds that the other workers get after one failed at `age`: where starts take long, as long again."""
    return max(MOMENT_SECONDS, min(age, _LONGEST_MOMENT_SECONDS)) if age <= _START_SECONDS else MOMENT_SECONDS
