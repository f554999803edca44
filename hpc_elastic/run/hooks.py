"""The user's own commands around a run, and the files that say what has been done on a node."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from msgspec import Struct


class Hook(str, Enum):
    """A command, by its option's name."""

    SETUP = "setup"
    PROLOG = "node-prolog"
    EPILOG = "node-epilog"
    AFTER = "after"
    NOTIFY = "notify"


class HookFiles(Struct, frozen=True):
    """Of one node in one attempt."""

    folder: Path
    node: int

    @property
    def begun(self) -> Path:
        """An agent has begun to use the node."""
        return self.folder / f"node-{self.node:05d}"

    def mark(self, hook: Hook) -> Path:
        """The prolog has succeeded; the epilog was begun."""
        return self.folder / f"{hook.value}-{self.node:05d}"

    def log(self, hook: Hook) -> Path:
        """What it printed last."""
        return self.folder / f"{hook.value}-{self.node:05d}.log"
