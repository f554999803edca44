"""What the trainers have noted of themselves: who trains where, how far, and since when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.rehearsal.journal import LossSource, Place, RunJournal
from hpc_elastic.run.paths import RunPaths


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


class Journal(RunJournal):
    """What the trainers note beside their steps, too: that they have begun, planted faults, the end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, paths=RunPaths(folder), work=folder, source=LossSource())
        self._lines: list[dict[str, Any]] = []

    def _take(self, line: dict[str, Any]) -> None:
        super()._take(line)
        if line.get("step") is None:
            self._lines.append(line)

    @property
    def began(self) -> list[Began]:
        found = []
        for line in self._lines:
            if "began" in line:
                facts = {key: line[key] for key in ("rank", "world", "node", "pid")}
                place = (line["attempt"], line["round"])
                found.append(Began(at=line["t"], place=place, step=line["began"], **facts))
        return found

    @property
    def planted(self) -> list[dict[str, Any]]:
        return [line for line in self._lines if "planted" in line]

    @property
    def final(self) -> dict[str, Any] | None:
        return next((line for line in self._lines if "final" in line), None)

    def members(self) -> list[Began]:
        """Those who train in the newest round that trains, by rank."""
        if self.last is None:
            return []
        return sorted((b for b in self.began if b.place == self.last.place), key=lambda began: began.rank)

    def overlaps(self) -> list[str]:
        """Steps of an older round that were done after a newer one had begun: two trainings at once."""
        found, newest = [], (-1, -1)
        for step in self.steps:
            if step.place < newest:
                found.append(f"step {step.position[0]} of round {step.place} was done after round {newest} had begun")
            newest = max(newest, step.place)
        return found
