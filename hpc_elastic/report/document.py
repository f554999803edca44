"""The report as a document: what it says, in its order, before it is laid out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.text import first_of, plural, ranges, time_text
from hpc_elastic.failures.classify import NOT_OURS
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.traceback_text import find_python_traceback
from hpc_elastic.failures.worker_failure import WorkerFailure, user_frame
from hpc_elastic.report import wording
from hpc_elastic.report.blocks import (
    Advice,
    AttemptEntry,
    Block,
    advise,
    hung_ranks,
    measure_costs,
    other_failures,
    round_entry,
)
from hpc_elastic.report.clocks import NO_CLOCKS
from hpc_elastic.report.goodput import goodput_of
from hpc_elastic.report.history import AttemptHistory, NodeLoss, OutageKind, RoundHistory, RunHistory, refused_hosts
from hpc_elastic.report.root_cause import decide_start_verdict, verdict_of
from hpc_elastic.report.timeline_attempt import place_attempts
from hpc_elastic.report.verdict import Cause, Confidence, Verdict, of_several
from hpc_elastic.run.node_score import NodeScore
from hpc_elastic.run.paths import WITHOUT_VERDICT, Outcome

ROOT_CAUSE = "Root Cause (first observed failure)"
"""torchrun prints it so."""
_TITLES = {Confidence.TIE: "Root Cause (not certain)", Confidence.LOW: "Root Cause (likely)"}
_ASKED_TO_END = (Outcome.CANCELLED.value, Outcome.PREEMPTED.value, Outcome.TIMED_OUT.value)
"""Agents of such an attempt ended otherwise than well because they were asked to."""
_WITHOUT_FAILURE = (*_ASKED_TO_END, Outcome.SUCCEEDED.value, Outcome.SUPERSEDED.value)
_MOST_CAUSES = 2
_WITHOUT = 3
_MOST_SUSPECTS = 3


class Subject(Struct, frozen=True, kw_only=True):
    attempt: AttemptHistory | None
    round: RoundHistory | None
    verdict: Verdict


class Fact(NamedTuple):
    name: str
    """Empty: goes on with the field before it."""
    text: str


class Finding(Struct, frozen=True, kw_only=True):
    title: str
    """``Root Cause (first observed failure)``; or, where there is none, the sentence that says so."""
    headline: str = ""
    place: str = ""
    facts: tuple[Fact, ...] = ()
    evidence: WorkerFailure | None = None
    lost: str = ""
    """Why its stderr is not in its file; empty: it is."""
    details: tuple[Fact, ...] = ()
    """Search terms: exit code, file, time."""


class Document:
    """The report on one attempt; None: the verdict is on the last failure, the end the last attempt's."""

    def __init__(self, history: RunHistory, *, attempt: int | None = None) -> None:
        self.history = history
        self.subject = subject = choose_subject(history, attempt=attempt)
        numbered = [part for part in history.attempts if attempt is None or part.number == attempt]
        self.shown = shown = numbered[-1] if numbered else None
        self.status = wording.describe_status(history, shown)
        is_ended_well = not history.never_began if shown is None else shown.outcome in ("", "succeeded")
        self.is_fine = subject.verdict.cause is Cause.NONE and is_ended_well
        succeeded = shown is not None and shown.outcome == "succeeded"
        self.survived = _survived(numbered) if succeeded else ""
        self.finding = _nothing_failed(history, numbered) if self.is_fine else _find(history, subject, shown)
        self.agents = () if self.is_fine else _bad_agents(subject, shown)
        self.done = tuple(_done(subject, shown))
        """The recovery: what was decided, and what came of it."""
        self.notes = tuple(_notes(history, subject, shown))
        """Problems beside the cause: missing nodes, outages, lost output, files that can't be read."""
        self.placed = place_attempts(history)
        self.goodput = goodput_of(history, self.placed)

    @property
    def advice(self) -> tuple[Advice, ...]:
        return advise(measure_costs(self.history, self.goodput), self.goodput)

    @cached_property
    def attempts(self) -> tuple[AttemptEntry, ...]:
        history, entries = self.history, []
        for attempt in history.attempts:
            rounds = tuple(round_entry(history, attempt, part) for part in attempt.rounds)
            end = wording.describe_outcome(history, attempt)
            entries.append(AttemptEntry(attempt=attempt, end=end, rounds=rounds))
        return tuple(entries)

    @property
    def bad_nodes(self) -> list[tuple[NodeScore, bool]]:
        return [(score, score.node in self.history.excluded) for score in self.history.bad_nodes]

    def others(self, *, is_counted: bool = False) -> Block | None:
        part = self.subject.round
        return other_failures(part, self.subject.verdict, is_counted=is_counted) if part is not None else None

    @property
    def stacks(self) -> list[Block]:
        return hung_ranks(self.subject.round) if self.subject.round is not None else []

    @property
    def lines(self) -> list[tuple[str, Fact]]:
        """Every line below the title, with its part of the report: what is added to one of them stands everywhere."""
        return [
            *(("cause", fact) for fact in (*self.finding.facts, *self.finding.details)),
            *(("agents", Fact("", line)) for line in self.agents),
            *(("recovery", Fact("", line)) for line in self.done),
            *(("notes", fact) for fact in self.notes),
        ]


def _survived(parts: Sequence[AttemptHistory]) -> str:
    failures = sum(1 for part in parts for item in part.rounds if verdict_of(item).cause is not Cause.NONE)
    failures += sum(1 for part in parts if not part.rounds and _had_too_few_nodes(part))
    if failures == 1:
        return "One failure was survived; the run went on and succeeded."
    if not failures:
        return ""
    return f"{failures} failures were survived, of which the last is described here; the run succeeded."


def _nothing_failed(history: RunHistory, parts: Sequence[AttemptHistory]) -> Finding:
    restarts = [one for part in parts for item in part.rounds for one in item.in_process if not one.gave_up]
    if not restarts:
        before = [part for part in parts if part is not parts[-1] and part.outcome not in _WITHOUT_FAILURE]
        parts_end = [f"attempt {part.number} {wording.describe_outcome(history, part)}" for part in before]
        if parts_end:
            return Finding(title=f"No failure is recorded, but {first_of(parts_end, _MOST_CAUSES)}.")
        return Finding(title="No failures." if not parts or parts[-1].outcome else "No failures so far.")
    seconds = sum(one.seconds for one in restarts)
    often = plural(len(restarts), "restart")
    return Finding(title=f"No failure ended a round: {often} within the processes, {seconds:.1f} s in all.")


def _find(history: RunHistory, subject: Subject, shown: AttemptHistory | None) -> Finding:
    verdict, failure, loss = subject.verdict, subject.verdict.failure, subject.verdict.lost_node
    title, evidence = _TITLES.get(verdict.confidence, ROOT_CAUSE), Fact("verdict", verdict.evidence)
    if verdict.cause is Cause.UNKNOWN:
        why = verdict.evidence.removeprefix("not known: ").partition(". Look at ")[0]
        return Finding(title=_not_known(subject), facts=(Fact("verdict", why),))
    if loss is not None:
        where = f"{loss.host} (node {loss.node}){_where(history, subject)}"
        return Finding(
            title=title,
            headline=loss.summary,
            place=where,
            facts=(evidence, *_last_steps(subject.round, loss)),
            details=(Fact("time", f"{time_text(loss.gone_ns)} ({loss.whose_clock})"),),
        )
    if failure is not None:
        return _of_failure(history, subject, failure)
    if verdict.headline:
        outages = subject.attempt.outages if subject.attempt is not None and verdict.cause is Cause.FILESYSTEM else ()
        since = min((one.since_ns for one in outages if one.kind is OutageKind.FILESYSTEM), default=None)
        details = (Fact("time", f"{time_text(since)} (since then)"),) if since is not None else ()
        return Finding(title=title, headline=verdict.headline, facts=(evidence,), details=details)
    if shown is None and history.never_began:
        return Finding(title="The job never began.", facts=(Fact("reason", history.never_began),))
    if shown is None:
        return Finding(title="No failures.")
    reason = (Fact("reason", shown.reason or wording.describe_end(shown)),)
    return Finding(
        title=f"{wording.describe_end_without_failure(shown)}.",
        facts=() if shown.outcome == Outcome.CANCELLED.value else reason,
    )


def _not_known(subject: Subject) -> str:
    suspects = subject.verdict.suspects
    if not suspects:
        return "Root cause: not known."
    named: dict[str, list[str]] = {}
    for one in suspects[:_MOST_SUSPECTS]:
        named.setdefault(one.why, []).append(f"rank {one.rank} ({one.host})")
    looks = "; and at ".join(
        f"{', '.join(ranks)}{f': {why if len(ranks) == 1 else of_several(why)}' if why else ''}"
        for why, ranks in named.items()
    )
    more = f"; and at {plural(len(suspects) - _MOST_SUSPECTS, 'more rank')}" if len(suspects) > _MOST_SUSPECTS else ""
    return f"Root cause: not known. Look at {looks}{more}"


def _of_failure(history: RunHistory, subject: Subject, failure: WorkerFailure) -> Finding:
    verdict = subject.verdict
    clocks = subject.attempt.clocks if subject.attempt is not None else NO_CLOCKS
    clock = wording.describe_clock(failure.host, failure.node, clocks)
    same = verdict.same_failure
    also = f"; the same on {len(same)} ranks: {ranges(same, limit=40)}" if len(same) > 1 and verdict.candidates else ""
    found = find_python_traceback(failure.traceback) if failure.traceback else None
    return Finding(
        title=_TITLES.get(verdict.confidence, ROOT_CAUSE),
        headline=failure.headline or "(no message)",
        place=f"{wording.describe_place(failure, user_frame(failure))}{_where(history, subject)}{also}",
        facts=(
            Fact("kind", wording.describe_class(failure, verdict.category, is_apart=bool(verdict.apart))),
            Fact("verdict", verdict.evidence),
            *([Fact("last step", str(failure.last_step))] if failure.last_step is not None else []),
            *_causes(found.causes if found else ()),
        ),
        evidence=failure,
        lost=wording.describe_lost_stderr(subject.attempt, failure),
        details=(
            Fact("exitcode", wording.describe_exit(failure)),
            Fact("error_file", failure.error_file or wording.NOT_AVAILABLE),
            *([Fact("", f"({failure.problem})")] if failure.problem else []),
            Fact("time", f"{time_text(failure.ended_ns, fine=True)} ({clock})"),
        ),
    )


def _causes(causes: Sequence[str]) -> Iterator[Fact]:
    for cause in causes if len(causes) <= _MOST_CAUSES else causes[:1]:
        yield Fact("caused by", cause)
    if len(causes) > _MOST_CAUSES:
        yield Fact("began with", f"{causes[-1]} ({plural(len(causes) - 2, 'exception')} between)")


def _where(history: RunHistory, subject: Subject) -> str:
    if subject.attempt is None or (len(history.attempts) == 1 and len(subject.attempt.rounds) < 2):
        return ""
    if subject.round is None:
        return f", attempt {subject.attempt.number}"
    return f", round {subject.round.index} of attempt {subject.attempt.number}"


def _last_steps(part: RoundHistory | None, loss: NodeLoss) -> list[Fact]:
    statuses = [status for status in (part.rank_statuses if part is not None else ()) if status.node == loss.node]
    mine = [(status, status.step) for status in statuses if status.step is not None]
    if not mine:
        return []
    steps = sorted({step for _, step in mine})
    at = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    seen = time_text(mine[0][0].reported_ns, date=False, fine=True)
    return [Fact("last step", f"{at} of its ranks {ranges([status.rank for status, _ in mine])}, reported at {seen}")]


def _bad_agents(subject: Subject, shown: AttemptHistory | None) -> tuple[str, ...]:
    verdict = subject.verdict
    is_explained = verdict.failure or verdict.lost_node or verdict.headline
    if shown is None or shown.outcome in _ASKED_TO_END or is_explained:
        return ()
    ends = [end for end in shown.agent_ends if end.code != 0][:3]
    return tuple(
        f"the agent on {end.name} ended{f' with code {end.code}' if end.code is not None else f': {end.detail}'}"
        for end in ends
    )


def _done(subject: Subject, shown: AttemptHistory | None) -> list[str]:
    lines: list[str] = []
    if subject.round is not None and subject.attempt is not None:
        lines += wording.describe_after_round(subject.attempt, subject.round)
        if subject.attempt is not shown and subject.attempt.decision:
            lines.append(wording.describe_decision(subject.attempt.decision))
    if shown is not None and shown.decision and shown.outcome != "succeeded":
        lines.append(wording.describe_decision(shown.decision))
    failures, root = subject.round.failures if subject.round is not None else (), subject.verdict.failure
    short = (wording.without_repeat(line, lines[0]) for line in dict.fromkeys(lines))
    return [wording.without_failure(line, failures, root) for line in short]


def _notes(history: RunHistory, subject: Subject, shown: AttemptHistory | None) -> list[Fact]:
    notes: list[Fact] = []
    clock = partial(time_text, date=False, fine=True)

    def add(name: str, *lines: str) -> None:
        notes.extend(Fact(name, line) for line in lines if line)

    if shown is not None:
        root = subject.verdict.failure
        for item in (item for item in shown.rounds if item.suspicion):
            if root is None or (root.failure_class, root.round) != (FailureClass.HANG, item.index):
                add("seemed to hang", f"{clock(item.suspected_ns)}, round {item.index}: {item.suspicion}")
        slow = [one for item in shown.rounds for one in item.slow_ranks]
        add("slow rank", *wording.describe_slow_ranks(slow, clock))
        add("slow run", *wording.describe_slow_run([one for item in shown.rounds for one in item.slow_run], clock))
        is_verdict = subject.round is None and subject.attempt is shown and subject.verdict.category is not None
        without = [] if is_verdict else [loss.summary for loss in shown.unable]
        more = f"{len(without) - _WITHOUT} more nodes" if len(without) > _WITHOUT else ""
        add("did without", *without[:_WITHOUT], more)
        for note in (*wording.describe_outages(shown.outages, clock), *wording.describe_commands(shown.commands)):
            notes.append(Fact(*note))
        add("checkpoint", wording.describe_checkpoint(shown))
        if orphans := [one for item in shown.rounds for one in item.orphans]:
            add("outlived", f"its worker, and was ended by the agent: {first_of(orphans, 3)}")
        add("output lost", *wording.describe_losses(shown.output_lost))
    add("not resumed", *wording.describe_rounds_begun_again(history))
    add("hang watch", *wording.describe_unused_timeouts(history))
    problems = [*history.problems, *(shown.problems if shown is not None else ())]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        add("incomplete", f"{problems[0]}{more}")
    return notes


def choose_subject(history: RunHistory, *, attempt: int | None = None) -> Subject:
    """The last round that something broke, of one attempt or, going back, of any; or the nodes it began without."""
    candidates = [part for part in history.attempts if attempt is None or part.number == attempt]
    for part in reversed(candidates):
        if part.filesystem_failed and part.outcome != "succeeded":
            return _filesystem_subject(part)
        for item in reversed(part.rounds):
            verdict = verdict_of(item)
            if verdict.cause is not Cause.NONE:
                return Subject(attempt=part, round=item, verdict=_by_slurms_end(part, verdict))
        if _had_too_few_nodes(part):
            start = decide_start_verdict(part.unable, nodes=len(part.nodes))
            return Subject(attempt=part, round=None, verdict=start)
    last = candidates[-1] if candidates else None
    return Subject(attempt=last, round=None, verdict=decide_start_verdict((), nodes=0))


def _by_slurms_end(attempt: AttemptHistory, verdict: Verdict) -> Verdict:
    """Slurm's SIGTERM to the workers is a consequence where Slurm alone knows how the attempt ended."""
    action, _, end = attempt.decision.partition(WITHOUT_VERDICT)
    failure = verdict.failure
    is_slurms = failure is not None and failure.signal == "SIGTERM" and NOT_OURS in failure.reason
    if action != "end: " or "(Slurm:" not in end or not is_slurms:
        return verdict
    return Verdict(
        headline=end,
        evidence="Slurm's own record; it ended the workers by SIGTERM after that",
        category=Category.INFRASTRUCTURE,
        fingerprint="ended_by_slurm",
    )


def _filesystem_subject(attempt: AttemptHistory) -> Subject:
    """The filesystem ended the attempt: whatever else failed in it, the nodes could not go on from that."""
    refused = [one for one in attempt.outages if one.kind is OutageKind.FILESYSTEM]
    longest = max(refused, key=lambda one: one.seconds, default=None)
    gone = sorted(attempt.nodes[node] for node in attempt.without_files if 0 <= node < len(attempt.nodes))
    parts = [f"given up after the patience of a health check by the agents on {', '.join(gone)}"]
    how = "refused its nodes, or did not answer"
    if longest is not None:
        how = f"refused its nodes: {longest.error}{f' ({longest.path})' if longest.path else ''}"
        lasts = f"for {longest.seconds:.0f} s{'' if longest.over else ', to the end'}"
        hosts = ", ".join(dict.fromkeys([*gone, *refused_hosts(attempt.outages)]))
        parts.insert(0, f"seen on {hosts}, {lasts}")
    broken = next((item for item in reversed(attempt.rounds) if item.failures), None)
    if broken is not None:
        parts.append(f"a failure that the nodes could not go on from: {verdict_of(broken).summary}")
    verdict = Verdict(
        cause=Cause.FILESYSTEM,
        headline=f"the filesystem of the run directory {how}",
        evidence="; ".join(parts),
        category=Category.INFRASTRUCTURE,
        fingerprint="filesystem_refused",
    )
    return Subject(attempt=attempt, round=broken or (attempt.rounds[-1] if attempt.rounds else None), verdict=verdict)


def _had_too_few_nodes(part: AttemptHistory) -> bool:
    is_refused = part.outcome == Outcome.FAILED.value and all(loss.refusal for loss in part.unable)
    return bool(part.unable) and (part.outcome == Outcome.TOO_FEW_NODES.value or is_refused)


def with_end(history: RunHistory, *, attempt: int, outcome: str, exit_code: int | None, decision: str) -> RunHistory:
    """The history with an attempt's end as its supervisor knows it, before the events say so."""
    parts = tuple(
        replace(part, outcome=outcome, exit_code=exit_code, decision=decision or part.decision)
        if part.number == attempt
        else part
        for part in history.attempts
    )
    return replace(history, attempts=parts)
