"""What a rehearsal shows: whether the losses are those of the undisturbed run, and what each fault cost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from hpc_elastic.base.text import plural
from hpc_elastic.rehearsal.faults import Fault
from hpc_elastic.rehearsal.journal import Place, Position, StepSeen, is_close, step_text


class Guilt(str, Enum):
    """What a script can be found guilty of."""

    LOSSES_PART = "losses_part"
    NO_CHECKPOINT = "no_checkpoint"
    NOTICE_IGNORED = "notice_ignored"
    DID_NOT_GO_ON = "did_not_go_on"
    STEPS_LEFT_OUT = "steps_left_out"
    LEFT_BEHIND = "left_behind"


class NoticeUse(str, Enum):
    """What a script did with a notice."""

    USED = "used"
    NEEDLESS = "nothing was lost"
    """It ended without a checkpoint after the notice, and no step was done again."""
    IGNORED = "not used"


def judge_notice(
    *, saved: bool, asked: bool, ended_by_signal: bool, redone: int, saves_each_step: bool = False
) -> NoticeUse:
    """What a script did with a notice.

    Args:
        saved: A checkpoint was written between the notice and the next attempt.
        asked: The script has seen the notice, or asked for a signal in its place.
        ended_by_signal: A worker was ended by its agent: it did not end by itself.
        redone: Steps that were done again.
        saves_each_step: It saves after each step that it reports, so that a notice has nothing to add.
    """
    if saved and (asked or not ended_by_signal):
        return NoticeUse.USED
    # By chance a checkpoint may just have been complete: that is no use of the notice.
    return (
        NoticeUse.IGNORED if redone or (ended_by_signal and not asked and not saves_each_step) else NoticeUse.NEEDLESS
    )


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that does not hold."""

    guilt: Guilt
    text: str


class Parts(Struct, frozen=True, kw_only=True):
    """The seconds of a restart; None: not seen."""

    stop: float | None = None
    """From the fault until no worker of the old round was left: finding it, and stopping the others."""
    rendezvous: float | None = None
    start: float | None = None
    imports: float | None = None
    """From the workers' start until the first of them opened a checkpoint; until its first step where none did."""
    load: float | None = None
    step: float | None = None
    """Until the first step was done."""


class InjectionSeen(Struct, frozen=True, kw_only=True):
    """A fault that was done, and what came of it. Times in seconds by one wall clock."""

    run: int
    """Which of the disturbed runs, from 1."""
    fault: Fault
    what: str
    at: float
    before: Place
    trained_at: float | None
    """When the training went on; None: it did not."""
    after: Place | None = None
    last: Position | None = None
    """The last step before it, by any rank."""
    resumed: Position | None = None
    """The first step after it."""
    redone: int = 0
    """Steps that had been done before, and were done again."""
    saved_before: bool = False
    """Whether files had been saved in this run well before it, and after its first step."""
    notice: NoticeUse | None = None
    """What became of its notice; None: it gives none."""
    parts: Parts = Parts()
    why_stuck: str = ""
    """Where it did not go on: what the run reports."""

    @property
    def seconds(self) -> float | None:
        return None if self.trained_at is None else max(0.0, self.trained_at - self.at)


class Parting(Struct, frozen=True, kw_only=True):
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
        """Relative to the expected loss."""
        return abs(self.loss - self.expected) / (abs(self.expected) or 1.0)


class Comparison(Struct, frozen=True, kw_only=True):
    """Losses of disturbed runs beside those of the undisturbed one."""

    compared: int = 0
    parting: Parting | None = None
    largest: float = 0.0
    """The largest difference, relative."""
    missing: tuple[Position, ...] = ()
    """Steps of the undisturbed run that were never reported, in a run that came to its end."""
    repeatable: bool = True
    """False: another undisturbed run differs from the first one just so."""


def compare_losses(
    expected: Sequence[StepSeen],
    runs: Mapping[int, Sequence[StepSeen]],
    *,
    tolerance: float,
    complete: Iterable[int] = (),
) -> Comparison:
    """Compare each loss with that of the same step and rank of the undisturbed run.

    Where several losses were reported for a step, one of them has to fit: a script prints its last one twice, say. A
    rank's own loss depends on how many ranks there are: in a round of another size, only a rank that reports alone is
    compared.

    Args:
        expected: Of the undisturbed run.
        runs: Number → the steps of a disturbed run.
        tolerance: Relative.
        complete: The runs that came to their end.
    """
    known: dict[tuple[int, Position], list[float]] = {}
    worlds = {step.world for step in expected}
    reporters = {step.rank for step in expected if step.loss is not None}
    for step in expected:
        if step.loss is not None:
            known.setdefault((step.rank, step.position), []).append(step.loss)
    compared, largest, parting = 0, 0.0, None
    for number, steps in runs.items():
        for step in sorted(steps, key=lambda step: step.at):
            losses = known.get((step.rank, step.position))
            if step.loss is None or losses is None or (step.world not in worlds and len(reporters) > 1):
                continue
            compared += 1
            best = min(losses, key=lambda loss, own=step.loss: abs(loss - own))  # type: ignore[misc]
            fits = is_close(step.loss, best, tolerance)
            largest = max(largest, abs(step.loss - best) / (abs(best) or 1.0))
            if not fits and parting is None:
                parting = Parting(
                    run=number, step=step.position, rank=step.rank, place=step.place, loss=step.loss, expected=best,
                    at=step.at,
                )  # fmt: skip
    wanted = {step.position for step in expected}
    missing: set[Position] = set()
    for number in complete:
        missing |= wanted - {step.position for step in runs.get(number, ())}
    return Comparison(compared=compared, parting=parting, largest=largest, missing=tuple(sorted(missing)))


class Rehearsed(Struct, frozen=True, kw_only=True):
    """All that is known when a rehearsal is over."""

    comparison: Comparison
    injections: tuple[InjectionSeen, ...]
    first: Position | None
    """The undisturbed run's first step."""
    steps: int
    """How many it had."""
    failed: tuple[str, ...] = ()
    """Why runs ended badly with no fault that explains it."""
    left: tuple[str, ...] = ()
    """What was there after a run's end: processes, files in shared memory."""


def find_guilt(found: Rehearsed) -> tuple[Finding, ...]:
    """What the script is guilty of; nothing: it holds."""
    findings = [*_stuck(found), *_losses(found), *_no_checkpoint(found), *_notices(found)]
    findings += [Finding(guilt=Guilt.LEFT_BEHIND, text=f"left behind: {text}") for text in found.left]
    return tuple(findings)


def _stuck(found: Rehearsed) -> list[Finding]:
    texts = [
        f"{title_of(injection)}: it did not train again{_because(injection.why_stuck)}"
        for injection in found.injections
        if _is_stuck(injection)
    ]
    return [Finding(guilt=Guilt.DID_NOT_GO_ON, text=text) for text in (*texts, *found.failed)]


def _is_stuck(injection: InjectionSeen) -> bool:
    return injection.trained_at is None


def _because(why: str) -> str:
    return f": {why}" if why else ""


def _losses(found: Rehearsed) -> list[Finding]:
    comparison = found.comparison
    parting = comparison.parting
    if parting is not None and comparison.repeatable:
        cause = _cause_of(parting, found.injections)
        text = (
            f"the losses part at step {step_text(parting.step)} (rank {parting.rank}), "
            f"{f'after {cause}' if cause else 'before any fault'}: {parting.loss:.9g}, undisturbed "
            f"{parting.expected:.9g} ({parting.by:.2%} off); what is not restored? the optimizer's state, the "
            "schedule, the place in the data, random generators, each rank's own part"
        )
        return [Finding(guilt=Guilt.LOSSES_PART, text=text)]
    if comparison.missing and not comparison.compared:
        steps = ", ".join(map(step_text, comparison.missing[:5]))
        return [Finding(guilt=Guilt.STEPS_LEFT_OUT, text=f"steps that were never done: {steps}")]
    return []


def _cause_of(parting: Parting, injections: Sequence[InjectionSeen]) -> str:
    before = [injection for injection in injections if injection.run == parting.run and injection.at < parting.at]
    return title_of(before[-1]) if before else ""


_MUCH = 4
"""A quarter of the steps without a checkpoint are too many."""


def _no_checkpoint(found: Rehearsed) -> list[Finding]:
    """Each restart began with the first step, also after a save; or, where none was seen, after many steps."""
    injections = [injection for injection in found.injections if injection.resumed is not None and injection.redone > 0]
    resumed = [injection for injection in found.injections if injection.resumed is not None]
    most = max((injection.redone for injection in injections), default=0)
    if not injections or any(injection.resumed != found.first for injection in resumed):
        return []
    if not any(injection.saved_before for injection in injections) and _MUCH * most < found.steps:
        return []
    text = f"every restart began at the first step again, also when {plural(most, 'step')} of {found.steps} were done"
    return [Finding(guilt=Guilt.NO_CHECKPOINT, text=text)]


def _notices(found: Rehearsed) -> list[Finding]:
    ignored = [injection for injection in found.injections if injection.notice is NoticeUse.IGNORED]
    if not ignored:
        return []
    most = max(ignored, key=lambda injection: injection.redone)
    text = (
        f"{title_of(most)}: the notice was not used: no checkpoint after it, {plural(most.redone, 'step')} done again; "
        "call hpc_elastic.should_checkpoint(step) after each step, and save when it is True"
    )
    return [Finding(guilt=Guilt.NOTICE_IGNORED, text=text)]


def title_of(injection: InjectionSeen) -> str:
    """``#3 worker killed -9 (rank 1 on node0)``."""
    return f"#{injection.fault.number} {injection.fault.title}{f' ({injection.what})' if injection.what else ''}"
