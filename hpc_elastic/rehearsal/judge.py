"""The catalogue of faults, and their judgement: their cost, and whether the losses are the undisturbed run's; and the
outcome of it as text, page and JSON. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.codec import to_json
from hpc_elastic.base.text import plural
from hpc_elastic.errors import UsageError
from hpc_elastic.rehearsal.journal import LossCurve, Place, Position, RunJournal, StepSeen, is_close, step_text
from hpc_elastic.report.render_html import render_page

if TYPE_CHECKING:
    from hpc_elastic.rehearsal.live_run import RehearsalOptions


class Need(str, Enum):
    """A precondition of a fault; the value is the reason not to inject it."""

    SECOND_NODE = "it needs two nodes or more (--nodes 2)"
    SAVES = "no checkpoint was seen in the undisturbed run (--watch DIR, for checkpoints in another folder)"
    HOOK = "it needs a worker in Python that was started by rehearse"
    SMALL_DISK = "it needs a runs directory on a filesystem with less than 1 GiB free (--runs-dir)"


class Kind(Struct, frozen=True, kw_only=True):
    name: str
    title: str
    need: Need | None = None
    restarts: bool = True
    """Another round or another attempt follows; False: it may train on."""
    gives_notice: bool = False
    """The script may save before the end."""


WORKER_KILLED = Kind(name="kill-worker", title="worker killed -9")
SAVING_KILLED = Kind(name="kill-saving", title="workers killed while one saves", need=Need.SAVES)
WORKER_EXCEPTION = Kind(name="exception", title="worker's exception", need=Need.HOOK)
NODE_KILLED = Kind(name="kill-node", title="all processes of a node killed", need=Need.SECOND_NODE)
NOTICE = Kind(name="notice", title="notice of the job's end, then the end", gives_notice=True)
DISK_FULL = Kind(name="disk-full", title="disk of the runs directory full", need=Need.SMALL_DISK, restarts=False)
KINDS = (WORKER_KILLED, SAVING_KILLED, NOTICE, WORKER_EXCEPTION, NODE_KILLED, DISK_FULL)
QUICK = (WORKER_KILLED, SAVING_KILLED, NOTICE)
"""Those that find most: state that is not restored, a checkpoint that a kill spoils, progress that a requeue loses."""


class PlannedFault(Struct, frozen=True, kw_only=True):
    number: int
    kind: Kind
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"#{self.number} {self.kind.title}"


def parse_kinds(text: str) -> tuple[Kind, ...]:
    if text.strip() in ("all", "quick"):
        return KINDS if text.strip() == "all" else QUICK
    names = [name for name in (word.strip() for word in text.split(",")) if name]
    known = {kind.name: kind for kind in KINDS}
    for name in names:
        if name not in known:
            raise UsageError(f"--faults {text}: no fault {name!r}; there are {', '.join(known)}, quick and all")
    if not names:
        raise UsageError(f"--faults {text!r} names no fault")
    return tuple(kind for kind in KINDS if kind.name in names)


class Guilt(str, Enum):
    LOSSES_PART = "losses_part"
    NO_CHECKPOINT = "no_checkpoint"
    DID_NOT_GO_ON = "did_not_go_on"
    STEPS_LEFT_OUT = "steps_left_out"
    LEFT_BEHIND = "left_behind"


class ScriptFailure(Struct, frozen=True, kw_only=True):
    guilt: Guilt
    text: str


_AFTER_SECONDS = 15.0
"""A restart within this time after a fault that need not cause one is its effect."""
_WELL_BEFORE = 0.5
"""Seconds: a save that a fault has interrupted does not count."""


class InjectionSeen(Struct, frozen=True, kw_only=True):
    run: int = 0
    """Number of the disturbed run, from 1; 0: it still runs."""
    fault: PlannedFault
    what: str
    at: float
    before: Place
    trained_at: float | None = None
    resumed: Position | None = None
    """The first step after it."""
    redone: int = 0
    """Steps that had been done before, and were repeated."""
    saved_before: bool = False
    """Files had been saved in this run well before it, and after its first step."""
    used_notice: bool | None = None
    """A checkpoint was saved after its notice; None: it gives no notice."""
    why_stuck: str = ""

    @property
    def seconds(self) -> float | None:
        return None if self.trained_at is None else max(0.0, self.trained_at - self.at)


def look_back(
    injection: InjectionSeen,
    journal: RunJournal,
    saved_at: Sequence[float],
    course: LossCurve,
    *,
    is_asked: bool = False,
) -> InjectionSeen:
    """`is_asked`: the script asked for a signal as its notice."""
    kind, at, before = injection.fault.kind, injection.at, injection.before
    # A restart within the processes comes first: a later fault may have had another round begin.
    back = journal.went_back(at, before) if kind.restarts else None
    first = back or journal.first_after(at, beyond=before)
    over = at + injection.fault.seconds
    if not kind.restarts and (first is None or first.at > over + _AFTER_SECONDS):
        # It trained on in its round: the step done when the fault was over counts.
        first = journal.first_after(at) if journal.first_after(over) is not None else None
    ended = first.at if first is not None and back is not None else float("inf")
    earlier = [step.position for step in journal.steps if step.at <= at or (step.place <= before and step.at < ended)]
    redone, resumed = 0, None
    if first is not None and (back is not None or first.place != before):
        heads: dict[int, Position] = {}
        for step in journal.steps:
            if step.place == first.place and (back is None or step.at >= first.at):
                heads.setdefault(step.rank, step.position)
        resumed = min(heads.values(), key=course.number)
        redone = course.redone(max(earlier, key=course.number), resumed) if earlier else 0
    saves, end = (*saved_at, *journal.saves), first.at if first is not None else float("inf")
    used_notice: bool | None = None
    if kind.gives_notice:
        asked = is_asked or any(at <= moment <= end for moment in journal.notices)
        # A checkpoint may just have been complete by chance.
        used_notice = any(at <= moment <= end for moment in saves) and (asked or redone == 0)
    began = journal.steps[0].at if journal.steps else end
    return replace(
        injection,
        trained_at=None if first is None else first.at,
        resumed=resumed,
        redone=redone,
        saved_before=any(began < moment < at - _WELL_BEFORE for moment in saves),
        used_notice=used_notice,
        why_stuck="" if first is not None else injection.why_stuck,
    )


class Divergence(Struct, frozen=True, kw_only=True):
    """The first step whose loss is not that of the undisturbed run."""

    run: int
    step: Position
    rank: int
    place: Place
    loss: float
    expected: float
    at: float

    @property
    def by(self) -> float:
        """The difference relative to the expected loss."""
        return abs(self.loss - self.expected) / (abs(self.expected) or 1.0)


class LossComparison(Struct, frozen=True, kw_only=True):
    compared: int = 0
    divergence: Divergence | None = None
    largest: float = 0.0
    missing: tuple[Position, ...] = ()
    """Steps of the undisturbed run that a complete run never reported."""
    repeatable: bool = True
    """False: another undisturbed run differs from the first one as much."""


def compare_losses(
    expected: Sequence[StepSeen],
    runs: Mapping[int, Sequence[StepSeen]],
    *,
    tolerance: float,
    complete: Iterable[int] = (),
) -> LossComparison:
    """A rank's loss depends on the world size: in a round of another size, only a lone reporter's is compared."""
    known: dict[tuple[int, Position], list[float]] = {}
    worlds = {step.world for step in expected}
    reporters = {step.rank for step in expected if step.loss is not None}
    for step in expected:
        if step.loss is not None:
            known.setdefault((step.rank, step.position), []).append(step.loss)
    compared, largest, divergence = 0, 0.0, None
    for number, steps in runs.items():
        for step in sorted(steps, key=lambda step: step.at):
            losses = known.get((step.rank, step.position))
            if step.loss is None or losses is None or (step.world not in worlds and len(reporters) > 1):
                continue
            compared += 1
            best = min(losses, key=lambda loss, own=step.loss: abs(loss - own))  # type: ignore[misc]
            fits = is_close(step.loss, best, tolerance)
            largest = max(largest, abs(step.loss - best) / (abs(best) or 1.0))
            if not fits and divergence is None:
                divergence = Divergence(
                    run=number, step=step.position, rank=step.rank, place=step.place, loss=step.loss, expected=best,
                    at=step.at,
                )  # fmt: skip
    wanted = {step.position for step in expected}
    missing: set[Position] = set()
    for number in complete:
        missing |= wanted - {step.position for step in runs.get(number, ())}
    return LossComparison(compared=compared, divergence=divergence, largest=largest, missing=tuple(sorted(missing)))


class Rehearsed(Struct, frozen=True, kw_only=True):
    comparison: LossComparison
    injections: tuple[InjectionSeen, ...]
    first: Position | None
    steps: int
    failed: tuple[str, ...] = ()
    """Reasons of bad ends of runs that no fault explains."""
    left: tuple[str, ...] = ()


def attribute_failure(found: Rehearsed) -> tuple[ScriptFailure, ...]:
    """The script's failures; empty: it holds."""
    stuck = [
        f"{title_of(injection)}: it did not train again{injection.why_stuck and f': {injection.why_stuck}'}"
        for injection in found.injections
        if injection.trained_at is None
    ]
    findings = [ScriptFailure(guilt=Guilt.DID_NOT_GO_ON, text=text) for text in (*stuck, *found.failed)]
    findings += [*_losses(found), *_no_checkpoint(found)]
    findings += [ScriptFailure(guilt=Guilt.LEFT_BEHIND, text=f"left behind: {text}") for text in found.left]
    return tuple(findings)


def find_remarks(found: Rehearsed) -> tuple[str, ...]:
    unused = [one for one in found.injections if one.used_notice is False and one.redone > 0]
    if not unused:
        return ()
    most = max(unused, key=lambda injection: injection.redone)
    return (
        f"{title_of(most)}: no checkpoint was saved after the notice; done again: {plural(most.redone, 'step')}; "
        "call hpc_elastic.should_checkpoint(step) after each step, and save when it is True",
    )


def _losses(found: Rehearsed) -> list[ScriptFailure]:
    comparison = found.comparison
    divergence = comparison.divergence
    if divergence is not None and comparison.repeatable:
        before = [one for one in found.injections if one.run == divergence.run and one.at < divergence.at]
        cause = title_of(before[-1]) if before else ""
        text = (
            f"the losses part at step {step_text(divergence.step)} (rank {divergence.rank}), "
            f"{f'after {cause}' if cause else 'before any fault'}: {divergence.loss:.9g}, undisturbed "
            f"{divergence.expected:.9g} ({divergence.by:.2%} off); what is not restored? the optimizer's state, the "
            "schedule, the place in the data, random generators, each rank's own part"
        )
        return [ScriptFailure(guilt=Guilt.LOSSES_PART, text=text)]
    if comparison.missing and not comparison.compared:
        steps = ", ".join(map(step_text, comparison.missing[:5]))
        return [ScriptFailure(guilt=Guilt.STEPS_LEFT_OUT, text=f"steps that were never done: {steps}")]
    return []


def _no_checkpoint(found: Rehearsed) -> list[ScriptFailure]:
    # Each restart began with the first step, also after a save; or, if no save was seen, after a quarter of the steps.
    injections = [injection for injection in found.injections if injection.resumed is not None and injection.redone > 0]
    resumed = [injection for injection in found.injections if injection.resumed is not None]
    most = max((injection.redone for injection in injections), default=0)
    if not injections or any(injection.resumed != found.first for injection in resumed):
        return []
    if not any(injection.saved_before for injection in injections) and 4 * most < found.steps:
        return []
    text = f"every restart began at the first step again, also when {plural(most, 'step')} of {found.steps} were done"
    return [ScriptFailure(guilt=Guilt.NO_CHECKPOINT, text=text)]


def title_of(injection: InjectionSeen) -> str:
    """``#3 worker killed -9 (rank 1 on node0)``."""
    return f"{injection.fault}{f' ({injection.what})' if injection.what else ''}"


class RehearsalResult(Struct, frozen=True, kw_only=True):
    options: RehearsalOptions
    found: Rehearsed
    findings: tuple[ScriptFailure, ...]
    skipped: dict[str, str]
    seconds: float

    @property
    def code(self) -> int:
        """The exit code: 0 if all holds, 1 for findings, 2 where a fault that was named was not done."""
        if self.findings:
            return 1
        is_set = self.options.kinds in (KINDS, QUICK)  # those of them that can be done
        return 0 if self.found.injections and (is_set or not self.skipped) else 2


_VERDICTS = ("holds", "guilty", "not certain")
_HEAD = ("fault", "hit", "resumed at", "done again", "trains again after", "notice")


def rows(injections: Sequence[InjectionSeen]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [_HEAD]
    for injection in injections:
        if injection.resumed is not None:
            resumed, redone = f"step {step_text(injection.resumed)}", str(injection.redone)
        else:
            resumed, redone = ("trained on", "-") if injection.trained_at is not None else ("never", "-")
        found.append(
            (
                str(injection.fault),
                injection.what or "-",
                resumed,
                redone,
                f"{injection.seconds:.1f} s" if injection.seconds is not None else "never",
                "-" if injection.used_notice is None else "used" if injection.used_notice else "not used",
            )
        )
    return found


def verdict_lines(outcome: RehearsalResult) -> list[str]:
    found, comparison = outcome.found, outcome.found.comparison
    lines = [losses_text(comparison, outcome.options.tolerance)]
    lines += [f"not done: {name}: {why}" for name, why in outcome.skipped.items()]
    lines += [f"remark: {text}" for text in find_remarks(found)]
    lines += [f"GUILTY: {finding.text}" for finding in outcome.findings]
    if not outcome.findings:
        lacks = f"; not tried: {', '.join(outcome.skipped)}" if outcome.skipped else ""
        lines.append(f"{_VERDICTS[outcome.code]}: {plural(len(found.injections), 'fault')}{lacks}")
    return lines


def losses_text(comparison: LossComparison, tolerance: float) -> str:
    if comparison.divergence is not None and not comparison.repeatable:
        return (
            f"losses: the script does not repeat itself: two undisturbed runs differ, too (by up to "
            f"{comparison.largest:.2%}); seed its random generators, or give a larger --tolerance"
        )
    if not comparison.compared:
        return "losses: none to compare: print them, or hpc_elastic.heartbeat(step, loss=loss), or --losses"
    if comparison.divergence is not None:
        one = comparison.divergence
        where = f"step {step_text(one.step)} of run {one.run}, attempt {one.place[0]} round {one.place[1]}"
        return f"losses: they part at {where}, by {one.by:.2%}; at most by {comparison.largest:.2%}"
    return (
        f"losses: {comparison.compared} compared, equal to those of the undisturbed run within {tolerance:g} "
        f"(at most {comparison.largest:.1e} off)"
    )


def as_text(outcome: RehearsalResult) -> str:
    parts = []
    if outcome.found.injections:
        table = rows(outcome.found.injections)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
        parts.append("\n".join(line.rstrip() for line in lines))
    parts.append("\n".join(verdict_lines(outcome)))
    return "\n\n".join(parts) + "\n"


def as_json(outcome: RehearsalResult) -> dict[str, Any]:
    found, comparison = outcome.found, outcome.found.comparison
    return {
        "version": 1,
        "holds": outcome.code == 0,
        "seconds": round(outcome.seconds, 3),
        "steps": found.steps,
        "tolerance": outcome.options.tolerance,
        "losses": {
            "compared": comparison.compared,
            "largest_difference": comparison.largest,
            "repeatable": comparison.repeatable,
            "parts": None if comparison.divergence is None else to_json(comparison.divergence),
        },
        "faults": [
            {
                "fault": injection.fault.kind.name,
                "number": injection.fault.number,
                "run": injection.run,
                "hit": injection.what,
                "resumed": None if injection.resumed is None else list(injection.resumed),
                "done_again": injection.redone,
                "seconds": injection.seconds,
                "used_notice": injection.used_notice,
            }
            for injection in found.injections
        ],
        "remarks": list(find_remarks(found)),
        "guilty": [{"of": finding.guilt.value, "text": finding.text} for finding in outcome.findings],
        "not_done": [f"{name}: {why}" for name, why in outcome.skipped.items()],
    }


def as_page(outcome: RehearsalResult) -> str:
    """A page with the look of report.html, and without anything from elsewhere."""
    options, lines = outcome.options, verdict_lines(outcome)
    head, *faults = rows(outcome.found.injections)
    return render_page(
        "rehearsal/page.html",
        title=f"Rehearsal of {options.spec.name}",
        verdict=_VERDICTS[outcome.code],
        tone=("good", "bad", "warn")[outcome.code],
        findings=[line for line in lines if _is_verdict(line)],
        others=[line for line in lines if not _is_verdict(line)],
        facts=(
            ("script", str(options.spec.entrypoint)),
            ("steps", str(outcome.found.steps)),
            ("took", f"{outcome.seconds:.0f} s"),
        ),
        head=head,
        faults=faults,
    )


def _is_verdict(line: str) -> bool:
    return line.startswith(("GUILTY", *_VERDICTS))
