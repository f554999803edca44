"""The steps that workers report: in their journals, in printed lines, or in a file of the script's."""

from __future__ import annotations

import json
import math
import re
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mode
from typing import Any

from msgspec import Struct

from hpc_elastic.base.files import open_file
from hpc_elastic.errors import UsageError
from hpc_elastic.output.log_streams import round_numbers, streams_of
from hpc_elastic.run.paths import RunPaths

Place = tuple[int, int]
"""(attempt, round): later ones are greater."""
Position = tuple[float, ...]
"""A step: (step,), or (epoch, step) where a line has both. Whole numbers, but for an epoch with a fraction."""

_NUMBER = r"([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf))"
_BETWEEN = r"[\"']?\s*[=:\[\s]\s*[\[\"']?\s*"
_STEP = re.compile(
    rf"\b(?:(?:global[_ ]?step|steps?|iter(?:ation)?|num_updates){_BETWEEN}|batch[ :]+\[?\s*)(\d+)", re.IGNORECASE
)
_EPOCH = re.compile(rf"\bepoch{_BETWEEN}(\d+(?:\.\d+)?)(?:\s*/\s*\d+)?", re.IGNORECASE)
"""Includes the fraction: some frameworks count steps like that."""
_COUNT = re.compile(r"(?<![\d./])(\d+)\s*/\s*\d+(?![\d/])")
"""``12/100``, counting batches or steps."""
_LOSS = re.compile(rf"\b((?:\w+[_ ])?)loss{_BETWEEN}{_NUMBER}", re.IGNORECASE)
_OTHER_LOSS = re.compile("val|eval|test", re.IGNORECASE)
_BAR = re.compile(r"\d+/\d+ \[.*(?:it/s|s/it)")


class StepSeen(Struct, frozen=True, kw_only=True):
    """A step that a worker has reported. `at` is in seconds of this machine's wall clock."""

    at: float
    place: Place
    rank: int
    position: Position
    loss: float | None = None
    world: int = 0
    """0: unknown."""


class LossSource(Struct, frozen=True, kw_only=True):
    pattern: re.Pattern[str] | None = None
    """Pattern of a printed line: groups ``step`` and ``loss``, or the first and the second; None: the usual ways."""
    file: str = ""
    is_asked: bool = False
    """The user has named it, and journals do not count."""


def parse_pattern(text: str) -> re.Pattern[str]:
    try:
        found = re.compile(text)
    except re.error as error:
        raise UsageError(f"--losses {text}: not a regular expression: {error}") from None
    if not {"step", "loss"} <= set(found.groupindex) and found.groups != 2:
        raise UsageError(f"--losses {text}: give two groups, the step and the loss, as in 'step (\\d+) loss (\\S+)'")
    return found


def step_of_line(line: str, pattern: re.Pattern[str] | None) -> tuple[Position, float] | None:
    if pattern is not None:
        match = pattern.search(line)
        if match is None:
            return None
        named = pattern.groupindex
        step, loss = (match["step"], match["loss"]) if "step" in named and "loss" in named else match.groups()
        try:
            return (_count(step),), float(loss)
        except (TypeError, ValueError):
            return None
    found = next((match for match in _LOSS.finditer(line) if not _OTHER_LOSS.match(match[1])), None)
    if found is None:
        return None
    epoch = _EPOCH.search(line)
    rest = line if epoch is None else line[: epoch.start()] + " " + line[epoch.end() :]
    step = _STEP.search(rest) or _COUNT.search(rest)
    position = tuple(_count(match[1]) for match in (epoch, step) if match is not None)
    return (position, float(found[2])) if position else None


def _count(text: str) -> float:
    return float(text) if "." in text else int(text)


class RunJournal:
    """Follows the steps of a run: its journals in `folder`, its output in `paths`, and a file of `source` in `work`."""

    def __init__(self, folder: Path, *, paths: RunPaths, work: Path, source: LossSource) -> None:
        self._folder = folder
        self._paths = paths
        self._work = work
        self._source = source
        self._offsets: dict[Path, int] = {}
        self.steps: list[StepSeen] = []
        """Sorted by time; from journals, or from prints where only those have losses."""
        self._reported: list[StepSeen] = []
        self._printed: list[StepSeen] = []
        self._bars: dict[Path, StepSeen] = {}
        """A progress bar's latest step by output: its number may be drawn before its loss is, and both again."""
        self.saves: list[float] = []
        self.notices: list[float] = []

    def read(self) -> None:
        for path in sorted(self._folder.glob("*.jsonl")):
            for raw in self._new_lines(path):
                try:
                    self._take(json.loads(raw))
                except (ValueError, KeyError, TypeError):
                    continue  # torn: the disk was full, or its writer was killed
        if self._source.file:
            last = max((step.place for step in self._reported), default=(0, 0))
            self._read_prints(self._work / self._source.file, place=last, rank=0)
        else:
            for attempt in self._paths.begun_attempts():
                for index in round_numbers(attempt):
                    for stream in streams_of(attempt, index):
                        self._read_prints(stream.path, place=(attempt.number, index), rank=stream.rank)
        use_reported = not self._source.is_asked and self._reported
        if use_reported and self._printed and all(step.loss is None for step in self._reported):
            use_reported = []
        self.steps = sorted(self._reported if use_reported else self._printed, key=lambda step: step.at)

    def _new_lines(self, path: Path) -> Iterator[bytes]:
        start = self._offsets.get(path, 0)
        try:
            with open(open_file(path), "rb") as file:
                file.seek(start)
                data = file.read()
        except OSError:
            return
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._offsets[path] = start + end
        yield from data[:end].splitlines()

    def _read_prints(self, path: Path, *, place: Place, rank: int) -> None:
        now = time.time()
        for raw in self._new_lines(path):
            line = raw.decode("utf-8", "replace")
            found = step_of_line(line, self._source.pattern)
            if found is None:
                continue
            position, loss = found
            step = StepSeen(at=now, place=place, rank=rank, position=position, loss=loss)
            if not _BAR.search(line):
                self._printed.append(step)
                continue
            before = self._bars.get(path)
            self._bars[path] = step
            if before is not None and before.position != position:
                self._printed.append(before)

    def _take(self, line: dict[str, Any]) -> None:
        place = (int(line["attempt"]), int(line["round"]))
        if line.get("step") is not None:
            self._reported.append(
                StepSeen(
                    at=float(line["t"]),
                    place=place,
                    rank=int(line.get("rank", 0)),
                    position=(int(line["step"]),),
                    loss=line.get("loss"),
                    world=int(line.get("world", 0)),
                )
            )
        elif "saved" in line:
            self.saves.append(float(line["t"]))
        elif "notice" in line:
            self.notices.append(float(line["t"]))

    @property
    def last(self) -> StepSeen | None:
        return self.steps[-1] if self.steps else None

    def first_after(self, at: float, *, beyond: Place | None = None) -> StepSeen | None:
        """The first step done after `at`, in a later round than `beyond` if given."""
        return next((s for s in self.steps if s.at > at and (beyond is None or s.place > beyond)), None)

    def went_back(self, at: float, place: Place) -> StepSeen | None:
        """The first step after `at` at which a rank went back within a round: its processes restarted the training."""
        furthest: dict[int, Position] = {}
        for step in self.steps:
            if step.place == place:
                if step.at > at and step.position < furthest.get(step.rank, step.position):
                    return step
                furthest[step.rank] = max(step.position, furthest.get(step.rank, step.position))
        return None


class LossCurve:
    """A script may report only every tenth step: the numbers show how many it has done."""

    def __init__(self, steps: Sequence[StepSeen], *, started: float, saves: int = 0) -> None:
        self.steps = steps
        self.saves = saves
        self.first = steps[0].position if steps else None
        self.reporters = {step.rank for step in steps}
        self.until_first = steps[0].at - started if steps else 0.0
        self.seconds = steps[-1].at - steps[0].at if steps else 0.0
        """Time from the first step to the last one."""
        self.full_seconds = min(20.0, max(2.0, 1.5 * self.seconds / (saves + 1)))
        """Time for which a disk has to be full to meet a save."""
        self._order = sorted({step.position for step in steps})
        self._are_numbers = all(len(position) == 1 and position[0] == int(position[0]) for position in self._order)
        apart = [int(after[0] - one[0]) for one, after in pairwise(self._order)] if self._are_numbers else []
        self._stride = mode(apart) if apart else 1
        """Steps between two reports."""

    def __len__(self) -> int:
        return self.number(self._order[-1]) if self._order else 0

    def number(self, position: Position) -> int:
        if self._are_numbers and self._order and len(position) == 1:
            first = int(self._order[0][0])
            return max(0, int(position[0]) - first) + min(max(1, first), self._stride)
        return bisect_right(self._order, position)

    def progress(self, steps: Sequence[StepSeen]) -> int:
        return max((self.number(step.position) for step in steps), default=0)

    def redone(self, furthest: Position, resumed: Position) -> int:
        """How many steps a run repeated that had come to `furthest`, and then reported `resumed` first."""
        return max(0, self.number(furthest) - self.number(resumed) + self._stride)


def step_text(position: Position) -> str:
    return ".".join(map(str, position))


def is_close(one: float, other: float, tolerance: float) -> bool:
    """Compare two losses with a relative tolerance; two NaN are equal, too."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
