"""A report's words for every failure, outcome, decision, outage and restart; the renderers cut and escape them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from hpc_elastic.base.text import clean_line, first_of, plural, ranks_text, seconds_text, time_text
from hpc_elastic.failures.classify import NOT_OURS, wrong_input
from hpc_elastic.failures.failure_text import Frame
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import NOTABLE_NS, SUPERVISOR, Clocks
from hpc_elastic.report.history import (
    AttemptHistory,
    CommandFailure,
    InProcessRestart,
    Outage,
    OutageKind,
    OutputLoss,
    RoundHistory,
    RunHistory,
)
from hpc_elastic.run.agent_events import RunSlowEnded, SlowRankEnded
from hpc_elastic.run.paths import ExitCode, Outcome, outcome_text
from hpc_elastic.run.progress import describe_begun_again
from hpc_elastic.worker_api.records import SETUP

NOT_AVAILABLE = "<N/A>"
FAILURE_WORDS = {
    FailureClass.ROOT: "failure",
    FailureClass.HANG: "hang",
    FailureClass.INFRASTRUCTURE: "infrastructure",
    FailureClass.SYMPTOM: "consequence",
    FailureClass.STOPPED_BY_US: "ended by this job",
}
"""The most important first."""
_CATEGORY_WORDS = {
    Category.INPUT: "input: the call or the environment",
    Category.WORKER: "worker: the script",
    Category.PLATFORM: "platform: hpc-elastic",
    Category.INFRASTRUCTURE: "infrastructure: the node or the cluster",
}
_BLAMELESS = (FailureClass.STOPPED_BY_US, FailureClass.SYMPTOM)
_SENT_BY_OTHERS = (NOT_OURS, "from outside")
"""Parts of the reason of a signal that this package did not send; the second in records of versions before 0.2."""
_MOST_NAMES = 4
_MOST_SPARES = 3
_MOST_RESTARTS = 3


def describe_class(failure: WorkerFailure, category: Category | None = None, *, is_apart: bool = False) -> str:
    """`is_apart`: all workers of its node failed so, and none elsewhere."""
    retry = f"; {failure.host} is suspect" if failure.node_suspect or is_apart else ""
    retry += "" if failure.retryable or is_apart else "; not retryable"
    # A worker that another process killed or stopped may have done nothing wrong, nor one that lost a peer.
    blameless = failure.failure_class in _BLAMELESS or any(text in failure.reason for text in _SENT_BY_OTHERS)
    category = category or failure.category
    whose = category.value if blameless else _CATEGORY_WORDS[category]
    reason = (category is Category.INPUT and wrong_input(failure)) or failure.reason
    return f"{reason} ({whose}){retry}" if reason else f"{whose}{retry}"


def count_failures(failures: Sequence[WorkerFailure]) -> str:
    """``7 other ranks ended with it: ConnectionError x5, SIGABRT x2``."""
    counts = Counter(
        one.exception_type.rsplit(".")[-1] or one.signal or f"exit code {one.exitcode}" for one in failures
    )
    kinds = [f"{name} x{count}" for name, count in counts.most_common()]
    return f"{plural(len(failures), 'other rank')} ended with it: {first_of(kinds, _MOST_NAMES)}"


_CPP_PLACE = re.compile(r"\[[^\]\s]*\.(?:cc|cpp|hpp|h|cu):\d+\] ")


def brief(text: str) -> str:
    """One line, without the place in some library's C++ source that stands before what is meant."""
    return _CPP_PLACE.sub("", clean_line(text))


def describe_lost_stderr(attempt: AttemptHistory | None, failure: WorkerFailure) -> str:
    """Why its stderr is not in its file; empty where it is."""
    for loss in attempt.output_lost if attempt is not None else ():
        for stream in loss.streams:
            if (stream.round, stream.rank, stream.stream) == (failure.round, failure.global_rank, "stderr"):
                where = "" if stream.not_in_job_log else "; the job log has it"
                return f"what it printed is not in its file: {loss.reason}{where}" if stream.not_in_file else ""
    return ""


def describe_exit(failure: WorkerFailure) -> str:
    """``-11 (pid: 4711) (SIGSEGV)``."""
    return f"{failure.exitcode} (pid: {failure.pid})" + (f" ({failure.signal})" if failure.signal else "")


def describe_clock(host: str, node: int, clocks: Clocks) -> str:
    """``n2's clock``, and how far that is off where it is off by much."""
    offset = clocks.offsets.get(node)
    if offset is None or abs(offset.offset_ns) <= max(NOTABLE_NS, offset.bound_ns):
        return f"{host}'s clock"
    way = "ahead of" if offset.offset_ns > 0 else "behind"
    return f"{host}'s clock, {seconds_text(abs(offset.offset_ns) / 1e9)} {way} {clocks.host or 'the others'}'s"


def describe_outcome(history: RunHistory, attempt: AttemptHistory | None) -> str:
    if attempt is None:
        return "has no attempt yet"
    if attempt.outcome:
        return outcome_text(attempt.outcome, attempt.reason)
    if attempt.number < history.attempts[-1].number:
        return "ended, and its end was not recorded"
    return _describe_running(attempt)


def _describe_running(attempt: AttemptHistory) -> str:
    """Its events may be half a minute old."""
    part = attempt.rounds[-1] if attempt.rounds else None
    if part is None:
        return "is starting: no round has begun (no end is recorded)"
    steps = [status.step for status in part.rank_statuses if status.step is not None]
    at = f", at step {max(steps)}" if steps else ""
    if part.broken or part.stopping_reasons:
        return f"is running: after round {part.index}{at} (no end is recorded)"
    since = f" since {time_text(part.started_ns, date=False)}" if part.started_ns else ""
    return f"is running: round {part.index}{since}{at} (no end is recorded)"


def describe_status(history: RunHistory, attempt: AttemptHistory | None) -> str:
    """The first line of a report: an attempt that another one follows is no failed run."""
    if attempt is None or not attempt.outcome:
        return describe_outcome(history, attempt)
    if attempt.outcome != Outcome.SUCCEEDED.value and is_requeued(attempt):
        return f"REQUEUED as attempt {attempt.number + 1}"
    return describe_outcome(history, attempt).upper()


def is_requeued(attempt: AttemptHistory) -> bool:
    return attempt.decision.startswith("requeue: ")


def describe_place(failure: WorkerFailure, frame: Frame | None) -> str:
    """``rank 5 (local_rank 1) on n3 (node 2), in step (train.py:61)``."""
    rank = f"rank {failure.global_rank} (local_rank {failure.local_rank}) on {failure.host} (node {failure.node})"
    if frame is None:
        return rank
    place = f"{frame.file.rsplit('/', 1)[-1]}:{frame.line}"
    return f"{rank}, in {frame.function} ({place})" if frame.function else f"{rank}, at {place}"


_ENDED_BY = {
    Outcome.TIMED_OUT.value: "Time limit reached",
    Outcome.SUPERSEDED.value: "Superseded by a later attempt",
    Outcome.TOO_FEW_NODES.value: "Too few nodes",
}


def describe_end_without_failure(attempt: AttemptHistory) -> str:
    if attempt.outcome == Outcome.CANCELLED.value:
        is_ctrl_c = attempt.exit_code == ExitCode.INTERRUPTED or attempt.reason.startswith("SIGINT")
        return "Cancelled by Ctrl-C" if is_ctrl_c else f"Cancelled: {attempt.reason or 'no reason is recorded'}"
    ended = _ENDED_BY.get(attempt.outcome) or outcome_text(attempt.outcome, attempt.reason).capitalize()
    if attempt.outcome in ("", Outcome.FAILED.value):
        return "Root cause: not known. No failure of a worker is recorded"
    if is_requeued(attempt):
        return f"{ended}: requeued as attempt {attempt.number + 1}"
    return ended


def describe_end(attempt: AttemptHistory) -> str:
    if not attempt.outcome:
        return "no end is recorded"
    notices = f" (notice: {', '.join(attempt.notices)})" if attempt.notices else ""
    return f"{outcome_text(attempt.outcome, attempt.reason)}{notices}"


def describe_decision(text: str) -> str:
    """``requeue: requeue 1 of 3: …`` → the reason alone; ``end: …`` → that it was not requeued."""
    action, separator, reason = text.partition(": ")
    if not separator:
        return text
    if action == "end":
        return f"not requeued: {reason}"
    return reason if reason.startswith(action) else text


_LONG_REASON = 20
_FIRST_SEEN = ", first seen"


def without_repeat(line: str, first: str) -> str:
    """A line of the recovery without the coordinator's reason, which the first line has already."""
    reason = first.partition(": ")[2]
    if line is first or len(reason) <= _LONG_REASON:
        return line
    return line.replace(f": {reason}", "").replace(reason, "").rstrip(" :")


def without_failure(line: str, failures: Sequence[WorkerFailure], root: WorkerFailure | None) -> str:
    """A line of the recovery without the failure that it quotes; where it is not the root cause's, its rank is left."""
    for failure in failures:
        before, quote, rest = line.partition(f": rank {failure.global_rank}: ")
        said, arrow, after = rest.rpartition(" -> round ")
        said = said if arrow else rest
        if not quote or not failure.headline.startswith(said.removesuffix("...").rstrip()):
            continue
        if failure is not root and not before.endswith((" restarts used)", " after", _FIRST_SEEN)):
            before += f" (rank {failure.global_rank})"
        return f"{before.removesuffix(' after').removesuffix(_FIRST_SEEN)}{arrow}{after if arrow else ''}"
    return line


def describe_after_round(attempt: AttemptHistory, part: RoundHistory) -> list[str]:
    lines: list[str] = []
    after = next((item for item in attempt.rounds if item.index > part.index), None)
    decision = part.decision
    if decision is not None:
        text = decision.reason
        if decision.action == "close":
            text = f"{'none was needed' if attempt.outcome == Outcome.SUCCEEDED.value else 'given up'}: {text}"
        elif decision.action == "continue":
            text = f"a new round, which costs no restart: {text}"
        elif not text.startswith(decision.action):
            text = f"{decision.action}: {text}"
        if after is not None and decision.action != "close":
            text += f" -> round {after.index}"
        lines.append(text)
    if after is not None:
        lines += _membership(part, after)
    back = [name for name in attempt.relaunched if name]
    if back:
        lines.append(f"agent started again on {', '.join(dict.fromkeys(back))}")
    return lines


def _membership(part: RoundHistory, after: RoundHistory) -> list[str]:
    took = {item.node: item for item in after.replaced}
    lines = [f"spare {item.host} took over from {item.replaces_host}" for item in after.replaced[:_MOST_SPARES]]
    if len(after.replaced) > _MOST_SPARES:
        lines.append(f"{len(after.replaced) - _MOST_SPARES} more spares took over")
    before_nodes = {node.node: node.host for node in part.nodes}
    after_nodes = {node.node: node.host for node in after.nodes}
    taken = {item.replaces_node for item in after.replaced}
    gone = [host for node, host in before_nodes.items() if node not in after_nodes and node not in taken]
    came = [host for node, host in after_nodes.items() if node not in before_nodes and node not in took]
    if not before_nodes or not after_nodes or not (gone or came):
        return lines
    now, then = len(after_nodes), len(before_nodes)
    size = f"{'shrunk' if now < then else 'grown'} to {plural(now, 'node')} from {then}"
    if now == then:
        size = f"{plural(now, 'node')} as before"
    change = [f"without {first_of(gone, 5)}"] if gone else []
    change += [f"with {first_of(came, 5)}"] if came else []
    return [*lines, f"round {after.index}: {size}, {'; '.join(change)}"]


def describe_unused_timeouts(history: RunHistory) -> list[str]:
    """The sections in ``--section-timeouts`` that no worker was ever in; none where that can't be known (yet)."""
    if not history.section_timeouts or not history.attempts or not history.attempts[-1].outcome:
        return []
    entered: set[str] = set()
    for item in (item for attempt in history.attempts for item in attempt.rounds):
        for node in item.nodes:
            done = item.progress.get(node.node)
            if done is None or done.sections is None:
                return []  # the node was lost, or its files are missing
            entered.update(done.sections)
    if entered <= {SETUP} and history.attempts[-1].outcome == Outcome.FAILED.value:
        return []  # it failed before there was anything to watch
    unused = [name for name in history.section_timeouts if name not in entered]
    return [f"section '{name}' was never entered; its hang detection did nothing" for name in unused]


def describe_rounds_begun_again(history: RunHistory) -> list[str]:
    """The rounds that began at the first step again, though an earlier one had come further."""
    done = [
        (attempt.number, item.index, [one for one in item.progress.values() if one.first_step is not None])
        for attempt in history.attempts
        for item in attempt.rounds
    ]
    if any(one.redone_seconds for *_, found in done for one in found):
        return []  # each epoch's steps begin at 0, say
    lines, furthest = [], -1
    for attempt_number, index, found in done:
        first = min((one.first_step for one in found if one.first_step is not None), default=None)
        if first is not None and (begun_again := describe_begun_again(first, furthest)):
            lines.append(f"attempt {attempt_number}, round {index}: {begun_again}")
        furthest = max([furthest, *(one.step for one in found)])
    return lines


def describe_size(part: RoundHistory) -> str:
    size = [plural(len(part.nodes), "node")] if part.nodes else []
    size += [plural(part.world_size, "worker")] if part.world_size is not None else []
    return ", ".join(size) or "never started"


def describe_slow_ranks(found: Sequence[SlowRankEnded], clock: Callable[[int], str]) -> list[str]:
    """One line for each rank, those first that cost the most; 0 seconds: to the end, which its agent did not report."""
    by_rank: dict[int, list[SlowRankEnded]] = {}
    for one in found:
        by_rank.setdefault(one.slow.rank, []).append(one)
    lines: list[tuple[float, str]] = []
    for times in by_rank.values():
        seconds, lost = sum(one.seconds for one in times), sum(one.seconds * one.slow.share for one in times)
        often = f"{len(times)} times, " if len(times) > 1 else ""
        lasted = f"for {seconds_text(seconds)}" if all(one.seconds for one in times) else "to the end"
        cost = f", {seconds_text(lost)} lost" if lost else ""
        lines.append((-lost, f"{times[-1].slow}; {often}from {clock(times[0].slow.since_ns)} on {lasted}{cost}"))
    lines.sort()
    more = [f"and {plural(len(lines) - _MOST_NAMES, 'more rank')}"] if len(lines) > _MOST_NAMES else []
    return [line for _, line in lines[:_MOST_NAMES]] + more


def describe_slow_run(found: Sequence[RunSlowEnded], clock: Callable[[int], str]) -> list[str]:
    return [
        f"{one.pace}; from {clock(one.pace.since_ns)} on "
        + (
            f"for {seconds_text(one.seconds)}, {seconds_text(one.seconds * one.pace.share)} lost"
            if one.seconds
            else "to the end"
        )
        for one in found[-_MOST_NAMES:]
    ]


def describe_outages(outages: Sequence[Outage], clock: Callable[[int], str]) -> list[tuple[str, str]]:
    """Each error with its duration, and the path in a line of its own; and each lost link."""
    lines = []
    by_error: dict[str, list[Outage]] = {}
    by_link: dict[str, list[Outage]] = {}
    for one in outages:
        groups, key = (by_link, one.host) if one.kind is OutageKind.LINK else (by_error, one.error)
        groups.setdefault(key or f"node {one.node}", []).append(one)
    for error, found in by_error.items():
        longest = max(found, key=lambda one: one.seconds)
        hosts = list(dict.fromkeys("the supervisor" if one.node == SUPERVISOR else one.host for one in found))
        often = max(sum(1 for one in found if (one.node, one.host) == (other.node, other.host)) for other in found)
        times = f"{often} times, at most" if often > 1 else "for"
        lasts = "" if all(one.over for one in found) else ", to the end"
        when = f"{times} {longest.seconds:.0f} s from {clock(found[0].since_ns)} on{lasts}"
        *names, last = hosts[:_MOST_NAMES] + ([f"{len(hosts) - _MOST_NAMES} more"] if len(hosts) > _MOST_NAMES else [])
        lines.append(("filesystem", f"refused {', '.join(names)}{' and ' if names else ''}{last} {when}: {error}"))
        lines += [("", longest.path)] if longest.path else []
    for host, found in by_link.items():
        often_lost = "once" if len(found) == 1 else f"{len(found)} times"
        lasts = "" if found[-1].over else "; it was not back at the end"
        in_all = f"{sum(one.seconds for one in found):.0f} s{' in all' if len(found) > 1 else ''}"
        first = clock(found[0].since_ns)
        lines.append(("network", f"{host}: network link lost {often_lost}, {in_all}, first at {first}{lasts}"))
    return lines


def describe_commands(failures: Sequence[CommandFailure]) -> list[tuple[str, str]]:
    alike: dict[tuple[str, str, str], list[CommandFailure]] = {}
    for one in failures:
        alike.setdefault((one.command, one.about, one.reason), []).append(one)
    lines: list[tuple[str, str]] = []
    for (command, about, reason), same in alike.items():
        hosts = first_of(list(dict.fromkeys(one.host for one in sorted(same, key=lambda one: one.node))), 4)
        where = f" on {hosts}" if any(one.node != SUPERVISOR for one in same) else ""
        lines.append((command, f"failed{where}{f' ({about})' if about else ''}: {reason}"))
        printed = same[0].output[-8:]
        lines += [("", text) for text in (printed if len(printed) > 1 else ())]
    return lines


def describe_checkpoint(attempt: AttemptHistory) -> str:
    """The last checkpoint of `checkpoint_dir` that is safe, and why a later one is not; empty: there was none."""
    last, lacking = attempt.committed, attempt.not_committed
    found = []
    if last is not None:
        found.append(f"step {last.step} is committed{' (flushed at the end)' if last.at_end else ''}")
    if lacking is not None:
        which = "the later ones are" if lacking.step is None else f"step {lacking.step} is"
        found.append(f"{which} not: {lacking.reason}")
    return "; ".join(found)


def describe_losses(losses: Sequence[OutputLoss]) -> list[str]:
    lines = []
    if files := [one for one in losses if one.not_in_files]:
        numbers = [one.rank for loss in files for one in loss.streams if one.not_in_file]
        why = ", ".join(list(dict.fromkeys(loss.reason for loss in files))[:3])
        lines.append((sum(loss.not_in_files for loss in files), numbers, f"are in no file: {why}"))
    if dropped := sum(loss.not_in_job_log for loss in losses):
        numbers = [one.rank for loss in losses for one in loss.streams if one.not_in_job_log]
        lines.append((dropped, numbers, "are not in the job log: the job log could not keep up"))
    return [f"{count} bytes of the output{f' of {ranks_text(of)}' if of else ''} {lack}" for count, of, lack in lines]


def describe_restart(restart: InProcessRestart) -> str:
    if restart.gave_up:
        return f"the in-process restart group gave up: {restart.gave_up}"
    kinds: dict[str, list[int]] = {}
    for rank, kind in restart.interruptions:
        kinds.setdefault(kind, []).append(rank)
    named = [f"{kind} on {ranks_text(numbers)}" for kind, numbers in kinds.items()]
    why = "; ".join(named[:_MOST_NAMES]) or "a fault"
    fresh = f"; fresh process in place of {ranks_text(restart.joined)}" if restart.joined else ""
    return f"iteration {restart.iteration} after {restart.seconds:.2f} s: {why}{fresh}"


def describe_fresh_starts(starts: Sequence[tuple[str, str]]) -> list[str]:
    """Why workers that were to be forks were interpreters of their own, with the hosts: one line for each reason."""
    hosts: dict[str, list[str]] = {}
    for host, why in starts:
        hosts.setdefault(why, []).append(host)
    return [f"workers started fresh on {first_of(names, 4, noun='node')}: {why}" for why, names in hosts.items()]


def describe_restarts(restarts: Sequence[InProcessRestart], *, everything: bool) -> list[str]:
    """The last ones in their order, and how many there were. Ranks that gave up in one iteration are one line."""
    lines = list(dict.fromkeys(describe_restart(restart) for restart in restarts))
    if everything or len(lines) <= _MOST_RESTARTS:
        return lines
    done = [restart for restart in restarts if not restart.gave_up]
    total = sum(restart.seconds for restart in done)
    return [f"{len(done)} restarts within the processes, {total:.2f} s in all; the last:", *lines[1 - _MOST_RESTARTS :]]
