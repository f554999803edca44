"""The text report's answer to "and what about rank 7?": everything that is known of single ranks, uncut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hpc_elastic.base.text import clean_line, clean_lines, plural, time_text
from hpc_elastic.failures.excerpt import fold_repeats
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.history import AttemptHistory, RoundHistory, RunHistory
from hpc_elastic.report.render_text import text_field
from hpc_elastic.report.subject import choose_subject
from hpc_elastic.report.wording import NOT_AVAILABLE, describe_class, describe_exit
from hpc_elastic.run.paths import RankPaths, RunPaths

_RULE = 60
ReadStacks = Callable[[RankPaths], str]


def world_size(history: RunHistory, *, attempt: int | None) -> int:
    """How many ranks there were at most; 0: not known."""
    rounds = [part for item in history.attempts if attempt in (None, item.number) for part in item.rounds]
    known = [part.world_size or 0 for part in rounds]
    seen = [1 + failure.global_rank for part in rounds for failure in part.failures]
    return max([0, *known, *seen])


def render_ranks(
    history: RunHistory,
    ranks: Sequence[int],
    *,
    attempt: int | None = None,
    everywhere: bool = False,
    stacks: ReadStacks = lambda paths: "",
) -> str:
    """Everything that is known of `ranks`, by round and rank. Lines are not cut.

    Of all rounds, or `everywhere` unset of the one that the report is about, or the newest where nothing failed.
    `stacks` reads the stacks of a hung round.
    """
    rounds = [(item, part) for item in history.attempts if attempt in (None, item.number) for part in item.rounds]
    rounds = [(item, part) for item, part in rounds if part.nodes] or rounds
    subject = choose_subject(history, attempt=attempt)
    chosen = rounds
    if not everywhere:
        chosen = [(item, part) for item, part in rounds if item is subject.attempt and part is subject.round]
        chosen = chosen or rounds[-1:]
    if not chosen:
        return "no round has begun: nothing is known of any rank\n"
    lines = [line for item, part in chosen for line in _round_lines(history, item, part, ranks, stacks)]
    others = [part for _, part in rounds if not any(part is other for _, other in chosen)]
    elsewhere = [failure for part in others for failure in part.failures if failure.global_rank in ranks]
    if elsewhere:
        lines.append(f"... and {plural(len(elsewhere), 'failure')} of theirs in other rounds (--all shows them)")
    return "\n".join(map(clean_line, lines)) + "\n"


def _round_lines(
    history: RunHistory, attempt: AttemptHistory, part: RoundHistory, ranks: Sequence[int], stacks: ReadStacks
) -> list[str]:
    lines = ["=" * _RULE, f"Attempt {attempt.number}, round {part.index}"]
    failures = {failure.global_rank: failure for failure in part.failures}
    paths = RunPaths(Path(history.run_dir)).attempt(attempt.number)
    shown: dict[str, int] = {}
    for rank in ranks:
        place = paths.rank(part.index, rank)
        lines.append("-" * _RULE)
        failure = failures.get(rank)
        lines += _failed(failure, shown) if failure is not None else _well(part, rank)
        output = paths.output if paths.records.exists() and not place.root.is_dir() else place.root
        lines.append(text_field("output", clean_line(str(output))))
        text = stacks(place)
        if text.strip():
            lines += [text_field("stacks", "of all its threads:"), *(f"    {line}" for line in clean_lines(text))]
    return lines


def _failed(failure: WorkerFailure, shown: dict[str, int]) -> list[str]:
    local = f" (local_rank: {failure.local_rank})" if failure.local_rank >= 0 else ""
    fields = [
        ("time", f"{time_text(failure.ended_ns, fine=True)} ({failure.host}'s clock)"),
        ("exitcode", describe_exit(failure)),
        ("kind", describe_class(failure)),
        ("error_file", failure.error_file or NOT_AVAILABLE),
        *([("", failure.problem)] if failure.problem else []),
        *([("last step", str(failure.last_step))] if failure.last_step is not None else []),
    ]
    lines = [f"Rank {failure.global_rank}{local} on {clean_line(failure.host)}: {clean_line(failure.headline)}"]
    lines += [text_field(name, clean_line(text)) for name, text in fields]
    message = clean_lines(failure.message)
    if len(message) > 1:
        lines += [text_field("message", "").rstrip(), *(f"    {line}" for line in message)]
    for name, text in (("traceback", failure.traceback), ("stderr", failure.stderr_tail)):
        if not text or (name == "stderr" and failure.traceback and failure.traceback.strip() in text):
            continue
        before = shown.setdefault(text, failure.global_rank)
        if before != failure.global_rank:
            lines.append(text_field(name, f"the same as that of rank {before} above"))
        else:
            lines += [text_field(name, "").rstrip(), *(f"    {line}" for line in fold_repeats(clean_lines(text)))]
    if not failure.traceback and not failure.stderr_tail:
        lines.append(text_field("stderr", "empty, so there is no traceback"))
    return lines


def _well(part: RoundHistory, rank: int) -> list[str]:
    node = next((node for node in part.nodes if rank in node.ranks), None)
    where = f" on {clean_line(node.host)}" if node is not None else ""
    if node is None and part.nodes:
        return [f"Rank {rank}: was not in this round, or its node reported nothing"]
    status = next((status for status in part.rank_statuses if status.rank == rank), None)
    loss = next((loss for loss in part.lost_nodes if node is not None and loss.node == node.node), None)
    lost = f"; {clean_line(loss.summary)}" if loss is not None else ""
    lines = [f"Rank {rank}{where}: no failure of it is recorded{lost}"]
    if status is not None:
        section = f" in {clean_line(status.section)}" if status.section else ""
        sign = f"{status.at}{section}, {status.age:.1f} s old at {time_text(status.reported_ns)}"
        lines.append(text_field("last sign", sign))
    group = next((group for group in part.stacks if rank in group.ranks and group.stack), None)
    if group is not None:
        lines += [text_field("stack", "of its main thread:"), *(f"    {clean_line(line)}" for line in group.stack)]
    return lines
