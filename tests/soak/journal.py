"""What the trainers have noted of themselves: who trains where, how far, and since when."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Place = tuple[int, int]
"""(attempt, round): later ones are greater."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """A worker that has loaded its checkpoint and is about to train."""

    at: float
    place: Place
    rank: int
    world: int
    node: str
    pid: int
    """As its node numbers it."""
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that rank 0 has done. `at`: this machine's wall clock, in seconds."""

    at: float
    place: Place
    step: int
    loss: float


class Journal:
    """Reads on where it had come to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.began: list[Began] = []
        self.steps: list[Step] = []
        self.planted: list[dict[str, Any]] = []
        self.final: dict[str, Any] | None = None

    def read(self) -> None:
        for path in sorted(self._folder.iterdir()):
            data = path.read_bytes()
            start = self._offsets.get(path, 0)
            end = data.rfind(b"\n") + 1
            self._offsets[path] = max(start, end)
            for raw in data[start:end].splitlines():
                try:
                    self._take(json.loads(raw))
                except ValueError:
                    continue  # torn: the disk was full, or its writer was killed
        self.steps.sort(key=lambda step: step.at)

    def _take(self, line: dict[str, Any]) -> None:
        place = (line["attempt"], line["round"])
        if "step" in line:
            self.steps.append(Step(at=line["t"], place=place, step=line["step"], loss=line.get("loss", 0.0)))
        elif "began" in line:
            facts = {key: line[key] for key in ("rank", "world", "node", "pid")}
            self.began.append(Began(at=line["t"], place=place, step=line["began"], **facts))
        elif "planted" in line:
            self.planted.append(line)
        elif "final" in line:
            self.final = line

    @property
    def last(self) -> Step | None:
        return self.steps[-1] if self.steps else None

    def members(self) -> list[Began]:
        """Those who train in the newest round that trains, by rank."""
        if self.last is None:
            return []
        return sorted((b for b in self.began if b.place == self.last.place), key=lambda began: began.rank)

    def first_step_after(self, at: float, *, beyond: Place | None = None) -> Step | None:
        """The first step done after `at`, and where wanted, in a later round than `beyond`."""
        return next((s for s in self.steps if s.at > at and (beyond is None or s.place > beyond)), None)

    def overlaps(self) -> list[str]:
        """Steps of an older round that were done after a newer one had begun: two trainings at once."""
        found, newest = [], (-1, -1)
        for step in self.steps:
            if step.place < newest:
                found.append(f"step {step.step} of round {step.place} was done after round {newest} had begun")
            newest = max(newest, step.place)
        return found
