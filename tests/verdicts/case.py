"""A case of the calibration catalogue: a script as users write it, how it fails, and what is right to report of it.

The expectation is written before the case is run for the first time. It changes only where it was a mistake, and the
case's comment says so.

The cases stand in ``cases/*.txt``, a file for each group::

    === NAME of the case
    ranks = [1]              the fields of `Case`, as TOML
    ---
    @@GLOO                   the script; this line stands for a shared text: === @@GLOO, in _shared.txt or in this file
    raise ValueError         ($1, $2 … in it: what follows the name, parted by " | ")
    --- data.txt             the texts of further files
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rigs.local_run import LocalRun

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).resolve().parent / "cases"
_NO_LINE_END = "@@NO-LINE-END"
"""A text's last line: the one before it ends without a line feed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One failure. The script runs in a folder of its own, as ``train.py``, on nodes named node0, node1 …"""

    name: str
    group: str
    """The class of failures in the table."""
    script: str
    """The whole of train.py."""
    ranks: tuple[int, ...]
    """Global ranks that are right to name; empty: only `node` is. Where that is None too, no rank is at fault: a
    report may name one for its text (`says`), and must suspect none."""
    says: tuple[str, ...] = ()
    """One of these stands in the headline or in what is shown of the root cause; letter case does not count. Empty: no
    exception has the cause, and a rank is right to suspect but not for what a victim reports."""
    options: Sequence[str] = ()
    """Further ones of ``hpc-elastic run``."""
    arguments: Sequence[str] = ()
    """Of the script."""
    command: Sequence[str] | None = None
    """What is started in place of ``train.py``, as in ``["--no-python", "./wrapper.sh"]``."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files in the folder: name → text. What begins with ``#!`` can be executed."""
    environ: Mapping[str, str] = field(default_factory=dict)
    tmpfs: Mapping[str, str] = field(default_factory=dict)
    """Small filesystems that are mounted in the folder: name → size, as in ``{"scratch": "1m"}``."""
    nodes: int = 2
    nproc: int = 2
    seconds: float = 150.0
    """The run is killed after this time, and counts as wrong."""
    act: Callable[[LocalRun], None] | None = None
    """What happens from outside while the run lives (see `pid_of`)."""
    unknown_is_right: bool = False
    """An honest report states "not known", with one of `ranks` as the suspect."""
    node: str | None = None
    """The host that is right to name, where the cause is a node and no single rank."""
    not_says: tuple[str, ...] = ()
    """None of these stands in the headline."""
    category: str | None = None
    """Of the verdict; None: either."""
    retryable: bool | None = None
    """Of the verdict; None: either."""
    succeeds: bool = False
    """The run goes on after the failure, and succeeds; its report is on what it survived."""


def pid_of(run: LocalRun, rank: int, *, name: str = "pid") -> int:
    """For `Case.act`: wait until a rank has written its pid to ``<name>-<rank>`` in the working directory."""
    path = run.folder / f"{name}-{rank}"
    return int(run.until(lambda: path.exists() and path.read_text().strip(), f"file {path.name}"))


def _wait_files(run: LocalRun, name: str) -> None:
    for path in (run.folder / f"{name}-{rank}" for rank in range(4)):
        run.until(path.exists, f"file {path.name}")


def _kill(run: LocalRun, rank: int, number: str) -> None:
    for other in range(4):
        pid_of(run, other)
    os.kill(pid_of(run, rank), signal.Signals[number])


def _kill_loader(run: LocalRun) -> None:
    os.kill(pid_of(run, 2, name="loader"), signal.SIGKILL)


def _kill_agent(run: LocalRun) -> None:
    _wait_files(run, "here")
    (run.folder / "second-round").touch()
    os.kill(run.agent(1).pid, signal.SIGKILL)


def _remove_checkpoint(run: LocalRun) -> None:
    """What a clean-up job does in the night."""
    _wait_files(run, "waiting")
    (run.folder / "step-100.ckpt").unlink()
    (run.folder / "cleaned").touch()


_ACTS: Mapping[str, Callable[..., None]] = {
    "kill": _kill,
    "kill_loader": _kill_loader,
    "kill_agent": _kill_agent,
    "remove_checkpoint": _remove_checkpoint,
}


def _filled(text: str, shared: Mapping[str, str]) -> str:
    """Put the shared texts in."""
    lines = []
    for line in text.splitlines(keepends=True):
        name, _, given = line.strip().partition(" ")
        if line.startswith("@@") and name in shared:
            line = shared[name]
            for number, argument in enumerate(given.split(" | "), start=1):
                line = line.replace(f"${number}", argument)
        lines.append(line)
    return "".join(lines).removesuffix(f"\n{_NO_LINE_END}\n")


def _parse(text: str, shared: dict[str, str]) -> list[Case]:
    """The cases of one file, whose own shared texts come first."""
    cases: list[Case] = []
    top, *sections = re.split(r"^=== (.+)\n", text, flags=re.MULTILINE)
    group = tomllib.loads(top).get("group")
    for name, body in zip(sections[::2], sections[1::2], strict=True):
        if name.startswith("@@"):
            shared[name] = _filled(body, shared)
            continue
        head, _, script, *files = re.split(r"^---(?: (.+))?\n", body, flags=re.MULTILINE)
        facts: dict[str, Any] = {"group": group, **tomllib.loads(head)}
        facts |= {key: tuple(facts[key]) for key in ("ranks", "says", "not_says") if key in facts}
        if "act" in facts:
            act, *arguments = facts["act"]
            facts["act"] = functools.partial(_ACTS[act], **dict(zip(("rank", "number"), arguments, strict=False)))
        texts = {key: _filled(text, shared) for key, text in zip(files[::2], files[1::2], strict=True)}
        cases.append(Case(name, script=_filled(script, shared), files=texts, **facts))
    return cases


def all_cases() -> tuple[Case, ...]:
    """The cases of all files, by group and in the order in which they stand there.

    Raises:
        ValueError: Two cases have one name.
    """
    shared: dict[str, str] = {}
    _parse((FOLDER / "_shared.txt").read_text(encoding="utf-8"), shared)
    cases: list[Case] = []
    for path in sorted(FOLDER.glob("[!_]*.txt")):
        cases += _parse(path.read_text(encoding="utf-8"), dict(shared))
    names = [case.name for case in cases]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"cases of the same name: {', '.join(double)}")
    return tuple(cases)
