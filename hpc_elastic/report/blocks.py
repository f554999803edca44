"""Blocks of the document: parts of the report that are lists, as values that a layout may shorten."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

from hpc_elastic.base.text import clean_line, plural, time_text
from hpc_elastic.failures.classify import kind_of, wording_of
from hpc_elastic.failures.failure_text import normalise_message
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report import wording
from hpc_elastic.report.clocks import NO_CLOCKS, Clocks
from hpc_elastic.report.history import AttemptHistory, RankStatus, RoundHistory, RunHistory, StackGroup
from hpc_elastic.report.root_cause import verdict_of
from hpc_elastic.report.verdict import Cause, Verdict

_CONSEQUENCES = (FailureClass.SYMPTOM, FailureClass.STOPPED_BY_US)
_SILENCE = " ({:.1f} s without a heartbeat)"
_Key = tuple[str, str, int]


class SimilarFailures(Struct, frozen=True, kw_only=True):
    members: tuple[WorkerFailure, ...]

    @property
    def first(self) -> WorkerFailure:
        return self.members[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(failure.global_rank for failure in self.members))


class Fold(SimilarFailures, frozen=True, kw_only=True):
    wordings: tuple[SimilarFailures, ...]
    """The most frequent first, then by their words; of what is no symptom there is one."""

    @property
    def headline(self) -> str:
        return self.wordings[0].first.headline

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.host for f in sorted(self.members, key=lambda f: (f.node, f.host))))


def fold_failures(failures: Iterable[WorkerFailure], clocks: Clocks = NO_CLOCKS) -> tuple[Fold, ...]:
    """Groups and their members are ordered by time, then rank; which was first does not change a group."""
    groups: dict[_Key, dict[_Key, list[WorkerFailure]]] = {}
    members: dict[_Key, list[WorkerFailure]] = {}
    for failure in sorted(failures, key=lambda f: (clocks.of_failure(f).at_ns, f.global_rank)):
        kind = kind_of(failure)
        groups.setdefault(kind, {}).setdefault(wording_of(failure), []).append(failure)
        members.setdefault(kind, []).append(failure)
    return tuple(
        Fold(members=tuple(members[kind]), wordings=_by_frequency(wordings)) for kind, wordings in groups.items()
    )


def _by_frequency(wordings: dict[_Key, list[WorkerFailure]]) -> tuple[SimilarFailures, ...]:
    found = [(key, SimilarFailures(members=tuple(members))) for key, members in wordings.items()]
    found.sort(key=lambda item: (-len(item[1].members), normalise_message(item[1].first.headline), item[0]))
    return tuple(same for _, same in found)


class RanksLine(NamedTuple):
    """``ranks 0-3: at step 12``; without ranks the text alone."""

    ranks: tuple[int, ...]
    text: str
    details: tuple[RanksLine, ...] = ()
    stack: tuple[str, ...] = ()
    """All of it where `text` has its end, innermost call last."""


class Block(Struct, frozen=True, kw_only=True):
    title: str = ""
    lines: tuple[RanksLine, ...] = ()
    more: str = ""
    """The lines that a layout leaves out: ``{ranks} more ranks``."""
    most_ranks: int = 40
    """Characters, where not everything is shown."""
    short: str = ""
    """One line in place of it all, where not everything is shown."""
    foot: str = ""
    evidence: WorkerFailure | None = None

    def left_out(self, shown: int) -> str:
        """The lines after so many, in a line; empty: there are none."""
        hidden = self.lines[shown:]
        ranks = sum(len(line.ranks) for line in hidden)
        return f"... {self.more.format(ranks=ranks, lines=len(hidden))}" if hidden else ""


def other_failures(part: RoundHistory, verdict: Verdict, *, is_counted: bool = False) -> Block | None:
    """The failures beside the root cause. `is_counted`: its consequences, and the same on other ranks, as a number."""
    is_known = verdict.cause is not Cause.UNKNOWN
    root = verdict.failure if is_known else None
    rest = [failure for failure in part.failures if failure is not root]
    lost = [loss for loss in part.lost_nodes if loss is not verdict.lost_node]
    if not rest and not lost:
        return None
    counted = ""
    if is_counted and is_known:
        same = set(verdict.same_failure)
        follow = [one for one in rest if one.failure_class in _CONSEQUENCES or one.global_rank in same]
        counted = f"  {wording.count_failures(follow)}" if follow else ""
        rest = [one for one in rest if not any(one is other for other in follow)]
        if not rest and not lost:
            return Block(foot=counted)
    order = list(wording.FAILURE_WORDS)
    folds = sorted(fold_failures(rest, part.clocks), key=lambda fold: order.index(fold.first.failure_class))
    title, evidence = f"Other failures in that round: {len(rest) + len(lost)}", None
    if not is_known:
        title = title.replace("Other failures", "Failures")
        evidence = verdict.failure
    if evidence is not None:
        counted = f"What rank {evidence.global_rank} on {evidence.host} printed, the first of them:"
    return Block(
        title=title,
        lines=(
            *(
                RanksLine((), f"{clean_line(loss.summary)}{_SILENCE.format(loss.age) if loss.age else ''}")
                for loss in lost
            ),
            *(_fold_line(fold, root, verdict, part.clocks) for fold in folds),
        ),
        more="{ranks} failures of {lines} more kinds",
        most_ranks=30,
        foot=counted,
        evidence=evidence,
    )


def _fold_line(fold: Fold, root: WorkerFailure | None, verdict: Verdict, clocks: Clocks) -> RanksLine:
    first = fold.first
    hosts = clean_line(fold.hosts[0]) if len(fold.hosts) == 1 else f"{len(fold.hosts)} hosts"
    what = wording.FAILURE_WORDS[first.failure_class] if first.failure_class is not FailureClass.ROOT else ""
    if root is not None and set(fold.ranks) <= set(verdict.same_failure):
        what = "the same failure"
    several = len(fold.wordings) > 1
    label = ", ".join(filter(None, (what, f"in {len(fold.wordings)} wordings" if several else "")))
    at = time_text(clocks.of_failure(first).at_ns, date=False, fine=True)
    text = f" on {hosts}, from {at}{f' [{label}]' if label else ''}: {wording.brief(fold.headline)}"
    wordings = (RanksLine(same.ranks, f": {wording.brief(same.first.headline)}") for same in fold.wordings)
    return RanksLine(fold.ranks, text, tuple(wordings) if several else ())


def hung_ranks(part: RoundHistory) -> list[Block]:
    """The places of a hung round's ranks: main threads, other threads, last heartbeats; none without a stack."""
    stacks = wording.known_stacks(part)
    if not stacks:
        return []
    names = [f" [{clean_line(group.name)}]" if group.name else "" for group in part.threads]
    found = [
        Block(
            title="Where each rank's main thread was (innermost call first):",
            lines=tuple(RanksLine(group.ranks, f": {_where_stood(group)}", stack=group.stack) for group in stacks),
            more="{ranks} more ranks",
        ),
        Block(
            title="Where the other threads were:",
            lines=tuple(
                RanksLine(group.ranks, f"{name}: {_where_stood(group)}", stack=group.stack)
                for name, group in zip(names, part.threads, strict=True)
            ),
            more="{lines} more places",
            short=f"  other threads: {plural(len(names), 'more place')} (--all shows them; stacks.txt has all)",
        ),
        Block(title="Last heartbeats:", lines=tuple(_heartbeats(part)), more="{lines} more steps and sections"),
    ]
    return [block for block in found if block.lines]


def _where_stood(group: StackGroup) -> str:
    if not group.stack:
        return f"no Python stack; {clean_line(group.state)}" if group.state else "no Python stack"
    # ``/a/b/train.py:44 step`` -> ``step (train.py:44)``
    frames = [clean_line(frame).partition(" ") for frame in reversed(group.stack[-3:])]
    return " < ".join(f"{function} ({place.rsplit('/', 1)[-1]})" for place, _, function in frames)


def _heartbeats(part: RoundHistory) -> Iterable[RanksLine]:
    groups: dict[tuple[int, str], list[RankStatus]] = {}
    for status in part.rank_statuses:
        step = status.counted_steps if status.step is None else status.step
        groups.setdefault((-1 if step is None else step, status.section), []).append(status)
    for (_, section), statuses in sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]), item[0][1])):
        at = f"at {statuses[0].at}" if statuses[0].step is not None else statuses[0].at
        ages = [status.age for status in statuses]
        silent = "-".join(dict.fromkeys((f"{min(ages):.1f}", f"{max(ages):.1f}")))
        text = f": {at}, section {clean_line(section)!r}, silent for {silent} s"
        yield RanksLine(tuple(status.rank for status in statuses), text)


class RoundEntry(Struct, frozen=True, kw_only=True):
    part: RoundHistory
    size: str
    how: str
    since_ns: int | None
    """It goes on since then."""
    failure: str
    alike: str
    """Equal for rounds that ended in the same way; empty: this one is like no other."""


class AttemptEntry(Struct, frozen=True, kw_only=True):
    attempt: AttemptHistory
    end: str
    rounds: tuple[RoundEntry, ...]


def round_entry(history: RunHistory, attempt: AttemptHistory, part: RoundHistory) -> RoundEntry:
    verdict = verdict_of(part)
    size = wording.describe_size(part)
    alike = failure = ""
    since_ns = None
    if verdict.cause is not Cause.NONE:
        failure = verdict.summary
        others = len(part.failures) - (1 if verdict.failure is not None else 0)
        how = f"{verdict.summary}{f' (+{others} more)' if others else ''}"
        where = verdict.failure.global_rank if verdict.failure is not None else None
        where = verdict.lost_node.node if where is None and verdict.lost_node is not None else where
        unknown = verdict.failure if verdict.cause is Cause.UNKNOWN else None
        same = kind_of(unknown)[0] if unknown is not None else verdict.fingerprint
        alike = "" if part.in_process or part.fresh_starts else f"{size}|{same}|{where}|{others}"
    elif part.succeeded:
        how = "all workers ended with 0"
    elif part.stopping_reasons:
        how = f"stopped: {part.stopping_reasons[0]}"
    elif part.failures:
        how = "ended by this job"
    elif attempt.outcome or attempt is not history.attempts[-1]:
        how = "no end is recorded"
    else:
        how, since_ns = "no end yet", part.started_ns
    return RoundEntry(part=part, size=size, how=how, since_ns=since_ns, alike=alike, failure=failure)
