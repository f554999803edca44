"""The same failures done to the same training, under this project and under torchrun in a restart loop: goodput.

It takes 40 minutes and mostly sleeps; where `quick`, a few seconds of training for each and one failure.

One runs after the other: they fail after the same steps, and would import at the same time what a cluster's runs
import on nodes of their own.

A failure comes after so many seconds of training (steps, lost ones too), so that each system loses the same steps, and
the bound is known: a training that goes on at once. The loop is that of an sbatch script around ``srun
--kill-on-bad-exit=1 torchrun …``: where one agent has ended badly all end, and all are started again.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.goodput import goodput_of
from tests.bench.systems import NODES, Session, System, TookTooLong, ours, torchrun
from tests.bench.table import Number

TRAINER = Path(__file__).with_name("failing_trainer.py")
GOAL = 0.5
_KINDS = {"killed": 5, "exception": 3, "node": 1}
_RESTARTS = 1000
_SYSTEMS = (
    ours("hpc-elastic, `--start-method forkserver`", "--start-method", "forkserver", "--max-restarts", str(_RESTARTS)),
    ours("hpc-elastic", "--max-restarts", str(_RESTARTS)),
    torchrun("torchrun in a restart loop", restarts=_RESTARTS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    after: int
    """Steps that were done by then, lost ones too."""
    into: float
    """The share of the next one that has passed."""
    rank: int
    kind: str
    """``killed``, ``exception``, ``node`` (the agent with its worker) or ``hang``."""


@dataclass(frozen=True, slots=True)
class Plan:
    steps: int
    step_seconds: float
    save_every: int
    """Steps."""
    save_seconds: float
    failures: tuple[Failure, ...]
    has_torch: bool = True
    """At each step the ranks meet in a collective, and not by files."""

    def text(self) -> str:
        return json.dumps(asdict(self))


def plan(seed: int, *, steps: int, step_seconds: float, between: float, save_every: int, save_seconds: float) -> Plan:
    """Failures at random, `between` seconds of steps apart on average, until the training must have ended."""
    rng = random.Random(seed)
    failures: list[Failure] = []
    at = rng.expovariate(1 / between)
    while at < steps * step_seconds + len(failures) * save_every * step_seconds:
        after, into = divmod(at / step_seconds, 1)
        kind = rng.choices(list(_KINDS), weights=list(_KINDS.values()))[0]
        failures.append(Failure(after=int(after), into=into, rank=rng.randrange(NODES), kind=kind))
        at += max(step_seconds, rng.expovariate(1 / between))
    return Plan(steps, step_seconds, save_every, save_seconds, tuple(failures))


FULL = plan(3, steps=1200, step_seconds=0.5, between=120.0, save_every=24, save_seconds=0.6)
QUICK = Plan(40, 0.1, 10, 0.1, (Failure(after=25, into=0.5, rank=1, kind="killed"),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Where the time went from the begin of the first step to the end of the last; seconds."""

    wall: float
    kept: float
    lost: float
    """Steps that were done again, and what was done of the broken ones."""
    saving: float
    restarts: tuple[tuple[str, float], ...]
    """What failed, and for how long no rank was in a step then."""

    @property
    def goodput(self) -> float:
        return 100 * self.kept / self.wall

    @property
    def bound(self) -> float:
        """The goodput of the same steps, checkpoints and failures with restarts that take no time."""
        return 100 * self.kept / (self.kept + self.lost + self.saving)

    def restart_text(self) -> str:
        """The means, of failures of workers and of agents, and what each kind cost in all."""
        kinds: dict[str, list[float]] = {"a worker's failure": [], "an agent's": []}
        for kind, seconds in self.restarts:
            kinds["an agent's" if kind == "node" else "a worker's failure"].append(seconds)
        return ", ".join(
            f"{fmean(found):.2f} s to restart after {what} ({len(found)}: {100 * sum(found) / self.wall:.2f} points)"
            for what, found in kinds.items()
            if found
        )


def account(folder: Path) -> Measured:
    """Add up what the trainer's ranks have written down in `folder`."""
    lines = [json.loads(line) for line in (folder / "journal-0.jsonl").read_text().splitlines()]
    seconds = {(line["t"], line["what"]): (line["t"] - line["began"]) / 1e9 for line in lines if "began" in line}
    last = {line["step"]: line["t"] for line in lines if line["what"] == "step"}
    steps = sum(spent for (_, what), spent in seconds.items() if what == "step")
    kept = sum(seconds[when, "step"] for when in last.values())
    failed = [
        (line["t"], line["kind"])
        for path in folder.glob("journal-*.jsonl")
        for line in map(json.loads, path.read_text().splitlines())
        if line["what"] == "failure"
    ]
    broken = sum(when - max(line["t"] for line in lines if line["t"] <= when) for when, _ in failed) / 1e9
    begins = [line["t"] for line in lines if line["what"] == "begin"]
    return Measured(
        wall=(max(line["t"] for line in lines) - min(line["t"] for line in lines)) / 1e9,
        kept=kept,
        lost=steps - kept + broken,
        saving=sum(spent for (_, what), spent in seconds.items() if what == "save"),
        restarts=tuple((kind, (min(t for t in begins if t > when) - when) / 1e9) for when, kind in sorted(failed)),
    )


def measure(*, quick: bool) -> list[Number]:
    """All systems, or the first where `quick`."""
    training, systems = (QUICK, _SYSTEMS[:1]) if quick else (FULL, _SYSTEMS)
    return [_run(system, training) for system in systems]


def _run(system: System, training: Plan) -> Number:
    is_ours = system is not _SYSTEMS[-1]
    limit = 60 + 2 * training.steps * training.step_seconds + 20 * len(training.failures)
    with Session(system, training.text(), worker=TRAINER, limit=limit) as session:

        def has_ended() -> bool:
            codes = [process.poll() for process in session.started]
            if any(codes):
                if is_ours:
                    raise TookTooLong(f"{system.name} ended with {codes}; its log ends:\n{session.log_tail()}")
                session.start_again()
            return all(code == 0 for code in codes)

        session.wait_until(has_ended, "end")
        found = account(session.folder / "stamps")
        own = goodput_of(collect_run(next((session.folder / "runs").glob("*")))).share if is_ours else None
    print(f"… {system.name}: {found}", file=sys.stderr, flush=True)
    facts = f"{found.goodput:.2f} of {found.bound:.2f} % in {found.wall:.0f} s, {found.restart_text()}"
    if own is not None:
        facts += f"; by its report {100 * own:.1f} %, with the start"
    gap = found.bound - found.goodput
    goal = GOAL if system is _SYSTEMS[0] else None
    return Number(title=system.name, unit="points", values=[gap], goal=goal, note=facts)
