"""The report as a document: what it says, in its order, before anybody lays it out.

`render_text` and `render_html` are layouts of it; report.json has the history's values instead. Sentences come from
`wording`, the verdict from `verdict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from hpc_elastic.base.text import ranges, time_text
from hpc_elastic.failures.classify import kind_of, wording_of
from hpc_elastic.failures.fingerprint import normalise_message
from hpc_elastic.failures.traceback_text import find_python_traceback
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import NO_CLOCKS, Clocks
from hpc_elastic.report.goodput import Goodput, goodput_of
from hpc_elastic.report.history import AttemptHistory, NodeLoss, RoundHistory, RunHistory
from hpc_elastic.report.incidents import OutageKind
from hpc_elastic.report.subject import Subject, choose_subject, failure_count, nodes_done_without, verdict_of
from hpc_elastic.report.verdict import Cause
from hpc_elastic.report.wording import (
    describe_after_round,
    describe_class,
    describe_clock,
    describe_decision,
    describe_end,
    describe_exit,
    describe_losses,
    describe_outages,
    describe_outcome,
    describe_size,
)

NOT_AVAILABLE = "<N/A>"
_MOST_CAUSES = 2
_MOST_AGENTS = 3
_Key = tuple[str, str, int]


class SimilarFailures(Struct, frozen=True, kw_only=True):
    """Failures whose words differ in numbers, addresses and paths at most."""

    members: tuple[WorkerFailure, ...]
    """By time."""

    @property
    def first(self) -> WorkerFailure:
        """The earliest: it stands for the others."""
        return self.members[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, ascending."""
        return tuple(sorted(failure.global_rank for failure in self.members))


class Fold(Struct, frozen=True, kw_only=True):
    """Failures of one kind."""

    first: WorkerFailure
    """The earliest."""
    members: tuple[WorkerFailure, ...]
    """All of them, by time."""
    wordings: tuple[SimilarFailures, ...]
    """The most frequent first, then by their words; of what is no symptom there is one."""

    @property
    def headline(self) -> str:
        """What most of them say."""
        return self.wordings[0].first.headline

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, ascending."""
        return tuple(sorted(failure.global_rank for failure in self.members))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Each once, by node index."""
        return tuple(dict.fromkeys(f.host for f in sorted(self.members, key=lambda f: (f.node, f.host))))


def fold_failures(failures: Iterable[WorkerFailure], clocks: Clocks = NO_CLOCKS) -> tuple[Fold, ...]:
    """Group failures by their kind; groups and their members by time, then rank.

    Which ranks are in which group does not depend on which was first.
    """
    groups: dict[_Key, dict[_Key, list[WorkerFailure]]] = {}
    members: dict[_Key, list[WorkerFailure]] = {}
    for failure in sorted(failures, key=lambda f: (clocks.of_failure(f).at_ns, f.global_rank)):
        kind = kind_of(failure)
        groups.setdefault(kind, {}).setdefault(wording_of(failure), []).append(failure)
        members.setdefault(kind, []).append(failure)
    return tuple(
        Fold(first=members[kind][0], members=tuple(members[kind]), wordings=_by_frequency(wordings))
        for kind, wordings in groups.items()
    )


def _by_frequency(wordings: dict[_Key, list[WorkerFailure]]) -> tuple[SimilarFailures, ...]:
    found = [(wording, SimilarFailures(members=tuple(members))) for wording, members in wordings.items()]
    if len(found) > 1:
        found.sort(key=lambda item: (-len(item[1].members), normalise_message(item[1].first.headline), item[0]))
    return tuple(same for _, same in found)


class Fact(NamedTuple):
    """One line of a list of fields."""

    name: str
    """Empty: goes on with the field before it."""
    text: str


class RoundEntry(Struct, frozen=True, kw_only=True):
    """One round among the others."""

    part: RoundHistory
    size: str
    """``2 nodes, 4 workers``."""
    how: str
    """How it ended."""
    failure: str
    """What broke it; empty: nothing did."""
    alike: str
    """Equal for rounds that ended in the same way; empty: this one is like no other."""


class Document(Struct, frozen=True, kw_only=True):
    """Everything that the text and the page say of a run."""

    history: RunHistory
    subject: Subject
    shown: AttemptHistory | None
    """The attempt whose end the report states."""
    status: str
    """How that ended."""
    is_fine: bool
    """Nothing failed that the report would have to explain."""
    survived: str
    """How many failures a run survived that succeeded; empty: none."""
    headline: str
    """What happened."""
    facts: tuple[Fact, ...]
    """About the cause."""
    agents: tuple[str, ...]
    """Where no worker failed: the agents that ended otherwise than well."""
    done: tuple[str, ...]
    """What was done about it."""
    notes: tuple[Fact, ...]
    """What went wrong beside the cause: nodes that were not there, outages, lost output, files that can't be read."""
    goodput: Goodput


def build_document(
    history: RunHistory, *, attempt: int | None = None, goodput: Goodput | None = None, separator: str = "_"
) -> Document:
    """Put the report together.

    Args:
        history: The run.
        attempt: The attempt that it is about; None: the verdict is on the last failure, the end is the last attempt's.
        goodput: Of the run, where it has been measured before.
        separator: Between a date and a time.
    """
    times = partial(time_text, separator=separator)
    subject = choose_subject(history, attempt=attempt)
    shown = choose_attempt(history, attempt)
    succeeded = shown is not None and shown.outcome == "succeeded"
    headline, facts = _cause(subject, shown, times)
    return Document(
        history=history,
        subject=subject,
        shown=shown,
        status=describe_outcome(history, shown),
        is_fine=subject.verdict.cause is Cause.NONE and (shown is None or shown.outcome in ("", "succeeded")),
        survived=_describe_survived(failure_count(history, attempt=attempt)) if succeeded else "",
        headline=headline,
        facts=tuple(facts),
        agents=_bad_agents(subject, shown),
        done=tuple(_done(subject, shown)),
        notes=tuple(_notes(history, subject, shown, partial(times, date=False, fine=True))),
        goodput=goodput or goodput_of(history),
    )


def choose_attempt(history: RunHistory, attempt: int | None) -> AttemptHistory | None:
    """The attempt of that number; None: the last one."""
    if attempt is None:
        return history.attempts[-1] if history.attempts else None
    return next((part for part in history.attempts if part.number == attempt), None)


def _describe_survived(failures: int) -> str:
    if failures < 2:
        return "One failure was survived; the run went on and succeeded." if failures else ""
    return f"{failures} failures were survived, of which the last is told here; the run succeeded."


def _cause(subject: Subject, shown: AttemptHistory | None, times: Callable[..., str]) -> tuple[str, list[Fact]]:
    """What happened, and the fields about it: torch's, in torch's order, and the verdict."""
    verdict, failure, loss = subject.verdict, subject.verdict.failure, subject.verdict.lost_node
    evidence = Fact("verdict", verdict.evidence)
    if loss is not None:
        facts = [
            Fact("time", f"{times(loss.gone_ns)} ({loss.whose_clock})"),
            Fact("host", f"{loss.host} (node {loss.node}){_where(subject)}"),
            *_last_steps(subject.round, loss, times),
        ]
        return loss.summary, [*facts, evidence]
    if failure is not None:
        return failure.headline, _of_failure(subject, failure, times)
    if verdict.what:
        outages = subject.attempt.outages if subject.attempt is not None else ()
        since = min((one.since_ns for one in outages if one.kind is OutageKind.FILESYSTEM), default=None)
        return verdict.what, [*([Fact("time", f"{times(since)} (since then)")] if since is not None else []), evidence]
    if verdict.headline:
        return verdict.headline, [evidence]
    reason = shown.reason if shown is not None and shown.reason else describe_end(shown)
    return f"none of the workers: {verdict.evidence}", [Fact("reason", reason)]


def _of_failure(subject: Subject, failure: WorkerFailure, times: Callable[..., str]) -> list[Fact]:
    verdict = subject.verdict
    clocks = subject.attempt.clocks if subject.attempt is not None else NO_CLOCKS
    clock = describe_clock(failure.host, failure.node, clocks)
    same = verdict.same_failure
    also = f"; the same on {len(same)} ranks: {ranges(same, limit=40)}" if len(same) > 1 else ""
    facts = [
        Fact("time", f"{times(failure.ended_ns, fine=True)} ({clock})"),
        Fact("host", f"{failure.host} (node {failure.node}){_where(subject)}"),
        Fact("rank", f"{failure.global_rank} (local_rank: {failure.local_rank}){also}"),
        Fact("exitcode", describe_exit(failure)),
        Fact("error_file", failure.error_file or NOT_AVAILABLE),
        *([Fact("", f"({failure.problem})")] if failure.problem else []),
        Fact("verdict", verdict.evidence),
        Fact("kind", describe_class(failure)),
        *([Fact("last step", str(failure.last_step))] if failure.last_step is not None else []),
    ]
    found = find_python_traceback(failure.traceback) if failure.traceback else None
    return [*facts, *(Fact("caused by", cause) for cause in (found.causes if found else ())[:_MOST_CAUSES])]


def _where(subject: Subject) -> str:
    if subject.attempt is None:
        return ""
    if subject.round is None:
        return f", in attempt {subject.attempt.number}"
    return f", in round {subject.round.index} of attempt {subject.attempt.number}"


def _last_steps(part: RoundHistory | None, loss: NodeLoss, times: Callable[..., str]) -> list[Fact]:
    """Where a lost node's workers were."""
    statuses = [status for status in (part.rank_statuses if part is not None else ()) if status.node == loss.node]
    steps = [status.step for status in statuses if status.step is not None]
    if not steps:
        return []
    at = f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    mine = [status for status in statuses if status.step is not None]
    seen = times(mine[0].told_ns, date=False, fine=True)
    return [Fact("last step", f"{at} of its ranks {ranges([status.rank for status in mine])}, told at {seen}")]


def _bad_agents(subject: Subject, shown: AttemptHistory | None) -> tuple[str, ...]:
    verdict = subject.verdict
    if (
        shown is None
        or verdict.failure is not None
        or verdict.lost_node is not None
        or verdict.what
        or verdict.headline
    ):
        return ()
    ends = [end for end in shown.agent_ends if end.code != 0][:_MOST_AGENTS]
    return tuple(
        f"the agent on {end.name} ended{f' with code {end.code}' if end.code is not None else f': {end.detail}'}"
        for end in ends
    )


def _done(subject: Subject, shown: AttemptHistory | None) -> list[str]:
    """What the coordinator and the supervisor decided, and what the next round looks like."""
    lines: list[str] = []
    if subject.round is not None and subject.attempt is not None:
        lines += describe_after_round(subject.attempt, subject.round)
        if subject.attempt is not shown and subject.attempt.decision:
            lines.append(describe_decision(subject.attempt.decision))
    if shown is not None and shown.decision and shown.outcome != "succeeded":
        lines.append(describe_decision(shown.decision))
    return list(dict.fromkeys(lines))


def _notes(
    history: RunHistory, subject: Subject, shown: AttemptHistory | None, clock: Callable[[int], str]
) -> list[Fact]:
    notes: list[Fact] = []
    if shown is not None:
        notes += [Fact("did without", line) for line in nodes_done_without(subject, shown)]
        notes += [Fact(*note) for note in describe_outages(shown.outages, clock)]
        notes += [Fact("output lost", line) for line in describe_losses(shown.output_lost)]
    problems = [*history.problems, *(shown.problems if shown is not None else ())]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        notes.append(Fact("incomplete", f"{problems[0]}{more}"))
    return notes


def round_entry(
    history: RunHistory, attempt: AttemptHistory, part: RoundHistory, *, separator: str = "_"
) -> RoundEntry:
    """How a round ended, in one line; `separator` as in `build_document`."""
    verdict = verdict_of(part)
    size = describe_size(part)
    alike = failure = ""
    if verdict.cause is not Cause.NONE:
        failure = verdict.summary
        others = len(part.failures) - (1 if verdict.failure is not None else 0)
        how = f"{verdict.summary}{f' (+{others} more)' if others else ''}"
        where = verdict.failure.global_rank if verdict.failure is not None else None
        where = verdict.lost_node.node if where is None and verdict.lost_node is not None else where
        unknown = verdict.failure if verdict.cause is Cause.UNKNOWN else None
        same = kind_of(unknown)[0] if unknown is not None else verdict.fingerprint
        alike = "" if part.in_process else f"{size}|{same}|{where}|{others}"
    elif part.succeeded:
        how = "all workers ended with 0"
    elif part.stopping_reasons:
        how = f"stopped: {part.stopping_reasons[0]}"
    elif part.failures:
        how = "ended by this job"
    elif attempt.outcome or attempt is not history.attempts[-1]:
        how = "no end is recorded"
    else:
        how = f"running since {time_text(part.started_ns, separator=separator)}" if part.started_ns else "running"
    return RoundEntry(part=part, size=size, how=how, alike=alike, failure=failure)
