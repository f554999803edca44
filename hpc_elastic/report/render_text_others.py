"""The text report's part on what else failed in the round of the root cause, and where its ranks stood: folded."""

from __future__ import annotations

from hpc_elastic.failures.classify import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import Clocks
from hpc_elastic.report.fold import Fold, fold_failures, kind_of, rank_ranges
from hpc_elastic.report.history import NodeLoss, RankStatus, RoundHistory, StackGroup
from hpc_elastic.report.order import moment_of_failure
from hpc_elastic.report.render_text_words import brief, clean_line, clock_text, fit, shorten
from hpc_elastic.report.verdict import Verdict

_CLASS_WORDS = {
    FailureClass.ROOT: "",
    FailureClass.SYMPTOM: "consequence",
    FailureClass.STOPPED_BY_US: "ended by this job",
    FailureClass.INFRASTRUCTURE: "infrastructure",
    FailureClass.HANG: "hang",
}
_ORDER = {
    FailureClass.ROOT: 0,
    FailureClass.HANG: 1,
    FailureClass.INFRASTRUCTURE: 2,
    FailureClass.SYMPTOM: 3,
    FailureClass.STOPPED_BY_US: 4,
}


def other_lines(part: RoundHistory, verdict: Verdict, width: int, *, cap: int | None) -> list[str]:
    """Failures besides the verdict's, folded, in at most `cap` lines; None: all."""
    root = verdict.failure
    rest = [failure for failure in part.failures if failure is not root]
    lost = [loss for loss in part.lost_nodes if loss is not verdict.lost_node]
    if not rest and not lost:
        return []
    folds = sorted(fold_failures(rest, part.clocks), key=lambda fold: _ORDER[fold.first.failure_class])
    lines = [fit(f"  {clean_line(loss.summary)}{_silence(loss)}", width) for loss in lost]
    for fold in folds:
        lines.append(fit(_fold_line(fold, root, part.clocks), width))
        lines += [fit(line, width) for line in (_wording_lines(fold) if cap is None else ())]
    if cap is not None and len(lines) > cap:
        hidden = sum(len(fold.members) for fold in folds[cap - 1 - len(lost) :]) if len(lost) < cap else len(rest)
        lines = [*lines[: cap - 1], f"  ... {hidden} failures of {len(lines) - cap + 1} more kinds (--all shows them)"]
    return [f"Other failures in that round: {len(rest) + len(lost)}", *lines]


def _silence(loss: NodeLoss) -> str:
    return f" ({loss.age:.1f} s without a sign)" if loss.age else ""


def _fold_line(fold: Fold, root: WorkerFailure | None, clocks: Clocks) -> str:
    first = fold.first
    count = len(fold.members)
    ranks = f"rank{'s' if count > 1 else ''} {shorten(rank_ranges(fold.ranks), 30)}"
    hosts = clean_line(fold.hosts[0]) if len(fold.hosts) == 1 else f"{len(fold.hosts)} hosts"
    what = _CLASS_WORDS[first.failure_class]
    if root is not None and (first.fingerprint == root.fingerprint or kind_of(first) == kind_of(root)):
        what = "the same failure"
    wordings = f"in {len(fold.wordings)} wordings" if len(fold.wordings) > 1 else ""
    label = ", ".join(filter(None, (what, wordings)))
    at = clock_text(moment_of_failure(first, clocks).at_ns)
    return f"  {ranks} on {hosts}, from {at}{f' [{label}]' if label else ''}: {brief(fold.headline)}"


def _wording_lines(fold: Fold) -> list[str]:
    """Who says what, where not all say the same."""
    if len(fold.wordings) == 1:
        return []
    return [
        f"    rank{'s' if len(same.ranks) > 1 else ''} {shorten(rank_ranges(same.ranks), 40)}: "
        f"{brief(same.first.headline)}"
        for same in fold.wordings
    ]


def stack_lines(part: RoundHistory, width: int, *, cap: int | None) -> list[str]:
    """Where all ranks stood, the odd one out first."""
    if not part.stacks:
        return []
    lines = []
    for group in part.stacks:
        ranks = f"rank{'s' if len(group.ranks) > 1 else ''} {shorten(rank_ranges(group.ranks), 40)}"
        lines.append(fit(f"  {ranks}: {_where(group)}", width))
    if cap is not None and len(lines) > cap:
        hidden = sum(len(group.ranks) for group in part.stacks[cap - 1 :])
        lines = [*lines[: cap - 1], f"  ... {hidden} more ranks (--all shows them)"]
    return [
        "Where each rank's main thread was (innermost call first):",
        *lines,
        *_thread_lines(part, width, is_short=cap is not None),
        *_heartbeat_lines(part, width, cap=cap),
    ]


def _where(group: StackGroup) -> str:
    if not group.stack:
        return f"no Python stack; {clean_line(group.state)}" if group.state else "no Python stack"
    return " < ".join(_frame(frame) for frame in reversed(group.stack[-3:]))


def _thread_lines(part: RoundHistory, width: int, *, is_short: bool) -> list[str]:
    """The other threads: of many ranks with a dozen each, their number will do."""
    if not part.threads:
        return []
    if is_short:
        kinds = f"{len(part.threads)} more place{'s' if len(part.threads) > 1 else ''}"
        return [fit(f"  other threads: {kinds} (--all shows them; stacks.txt has all)", width)]
    lines = []
    for group in part.threads:
        ranks = f"rank{'s' if len(group.ranks) > 1 else ''} {shorten(rank_ranges(group.ranks), 40)}"
        name = f" [{clean_line(group.name)}]" if group.name else ""
        lines.append(fit(f"  {ranks}{name}: {_where(group)}", width))
    return ["Where the other threads were:", *lines]


def _heartbeat_lines(part: RoundHistory, width: int, *, cap: int | None) -> list[str]:
    """Each rank's last one, those at the same step and in the same section together; the furthest behind first."""
    groups: dict[tuple[int, str], list[RankStatus]] = {}
    for status in part.rank_statuses:
        groups.setdefault((-1 if status.step is None else status.step, status.section), []).append(status)
    lines = []
    for (step, section), statuses in sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]), item[0][1])):
        ranks = (
            f"rank{'s' if len(statuses) > 1 else ''} {shorten(rank_ranges([status.rank for status in statuses]), 40)}"
        )
        at = f"at step {step}" if step >= 0 else "no step"
        least, most = (
            f"{age:.1f}" for age in (min(status.age for status in statuses), max(status.age for status in statuses))
        )
        silent = least if least == most else f"{least}-{most}"
        lines.append(fit(f"  {ranks}: {at}, section {clean_line(section)!r}, silent for {silent} s", width))
    if cap is not None and len(lines) > cap:
        lines = [*lines[: cap - 1], f"  ... {len(lines) - cap + 1} more steps and sections (--all shows them)"]
    return ["Last heartbeats:", *lines] if lines else []


def _frame(frame: str) -> str:
    """``/a/b/train.py:44 step`` -> ``step (train.py:44)``."""
    place, _, function = clean_line(frame).partition(" ")
    return f"{function} ({place.rsplit('/', 1)[-1]})"
