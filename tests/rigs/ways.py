"""The ways of docs/explanation/ways.md: lists of functions in the order in which one event passes through
them, and the calls of a real run that they are compared with.

The product has no hook for this. `Tracer` puts a ``sitecustomize.py`` on the path of a run, which has every process of
it write a line for each call of a listed function.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "explanation"
WAYS = PAGES / "ways.md"
MOST_STEPS = 13
_ROW = re.compile(r"^(\d+)\. \[`([\w.]+)`\]\(([^)\s]+)\),\s+([^:]*?):", re.MULTILINE)

_SITECUSTOMIZE = """
import json, os, sys, threading, time

FOLDER = os.environ["WAYS_TRACE"]
with open(FOLDER + "/wanted.json") as file:
    WANTED = {(path, line): name for path, line, name in json.load(file)}


def profile(frame, event, _):
    if event != "call":
        return
    code = frame.f_code
    name = WANTED.get((code.co_filename, code.co_firstlineno))
    if name is None:
        return
    line = f"{time.monotonic_ns()} {os.getpid()} {name}\\n".encode()
    try:
        # Opened anew each time: an agent closes descriptors that it does not know.
        fd = os.open(FOLDER + "/calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(fd, line)
        os.close(fd)
    except OSError:
        pass


threading.setprofile(profile)
sys.setprofile(profile)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One item of a list."""

    number: int
    name: str
    """As ``Class.method`` or ``function``."""
    path: Path
    where: str
    """In which process."""

    @property
    def key(self) -> str:
        return f"{self.path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}:{self.name}"

    def find(self) -> object:
        """The function or class. Raises AttributeError, ImportError: there is none."""
        module, _, name = self.key.partition(":")
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = inspect.getattr_static(found, part)
        return found

    def code(self) -> CodeType:
        """The function's; of a class, that it is made. Raises as `find`."""
        found = self.find()
        if isinstance(found, type):
            found = found.__init__  # type: ignore[misc]
        if isinstance(found, property):
            found = found.fget
        if isinstance(found, staticmethod | classmethod):
            found = found.__func__
        return inspect.unwrap(found).__code__  # type: ignore[arg-type, attr-defined, no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a listed function in a real run."""

    at_ns: int
    """CLOCK_MONOTONIC, the same for all processes."""
    pid: int
    key: str


def read_way(title: str) -> list[Step]:
    """The rows of the table below a heading: number, linked function, process."""
    text = WAYS.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [
        Step(number=int(number), name=name, path=(PAGES / path).resolve(), where=where)
        for number, name, path, where in _ROW.findall(text)
    ]


class Tracer:
    """For a run: its environment, and the calls that it made."""

    def __init__(self, folder: Path, steps: Iterable[Step]) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700)
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        codes = {step.key: step.code() for step in steps}
        wanted = [(code.co_filename, code.co_firstlineno, key) for key, code in codes.items()]
        (folder / "wanted.json").write_text(json.dumps(wanted))

    def environ(self, pythonpath: str) -> dict[str, str]:
        """What the run's environment has besides `pythonpath`."""
        return {"PYTHONPATH": f"{self._folder}:{pythonpath}", "WAYS_TRACE": str(self._folder)}

    def calls(self) -> list[Call]:
        path = self._folder / "calls"
        found = [line.split(" ", 2) for line in path.read_text().splitlines()] if path.exists() else []
        return sorted((Call(at_ns=int(at), pid=int(pid), key=key) for at, pid, key in found), key=lambda c: c.at_ns)


def first_missing(steps: Sequence[Step], calls: Sequence[Call], processes: dict[str, set[int]]) -> Step | None:
    """The first step that the run did not make after the step before it; None where it made all in their order."""
    left = iter(calls)
    for step in steps:
        allowed = processes[step.where]
        if not any(call.key == step.key and call.pid in allowed for call in left):
            return step
    return None
