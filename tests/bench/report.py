"""What a report takes: of a small run, of a very large one, and of one with a huge error file.

Each report is made by a process of its own, whose time and memory are the kernel's figures. The page is opened in
headless Chromium where there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tests.bench.report_run import LARGE, RunSize
from tests.bench.systems import ROOT
from tests.bench.table import Number
from tests.browser import chromium

_BOTH = """
import sys
from hpc_elastic.report.write import write_report
result = write_report(sys.argv[1], attempt=0, outcome="failed", exit_code=1)
assert not result.problems and "ValueError: bad batch" in result.text, result
"""
"""What the supervisor does at the end of an attempt: text and JSON; of so large a run it makes no page."""
_HUGE = 100 << 20
_SPAWN = """
import os, sys
null = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in (0, 1)]
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=null)
_, status, usage = os.wait4(pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""
"""A small parent: the kernel counts what a process's parent has as its own, until it is another program."""
_COMPILED: dict[str, str] = {}


def measure(*, quick: bool) -> list[Number]:
    """All of them: half a minute; where `quick`, a fifth of the failures."""
    with tempfile.TemporaryDirectory(prefix="bench-report-") as name:
        folder = Path(name)
        # Compiled, as an installation is: with PYTHONDONTWRITEBYTECODE each report would compile all.
        _COMPILED.update(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=str(folder / "compiled"))
        small = _write(folder / "small", RunSize(nodes=2, rounds=2, failures=2))
        size = replace(LARGE, rounds=20) if quick else LARGE
        large = _write(folder / "large", size)
        huge = _write(folder / "huge", RunSize(nodes=2, rounds=1, failures=1))
        _make_huge(huge)
        return [*_all(small, large, size.words, huge, repetitions=3 if quick else 7)]


def _all(small: Path, large: Path, words: str, huge: Path, *, repetitions: int) -> Iterator[Number]:
    command = [sys.executable, "-m", "hpc_elastic", "report"]
    few = repetitions // 3
    _run([*command, str(small)])
    _run([sys.executable, "-c", _BOTH, str(small)])
    runs = [_run([*command, str(small)]) for _ in range(repetitions)]
    yield Number(title="`hpc-elastic report` of a small run", unit="s", values=[r[0] for r in runs], goal=0.15)
    runs = [_run([sys.executable, "-c", _BOTH, str(large)]) for _ in range(few)]
    yield Number(title=f"{words}: text and JSON", unit="s", values=[r[0] for r in runs], goal=3)
    yield Number(title="its memory", unit="MB", values=[r[1] for r in runs], goal=300)
    runs = [_run([*command, str(large)]) for _ in range(few)]
    yield Number(title="the same run: `hpc-elastic report`", unit="s", values=[r[0] for r in runs], goal=3)
    runs = [_run([*command, str(huge)]) for _ in range(few)]
    yield Number(title="a run with an error file of 100 MB", unit="s", values=[r[0] for r in runs], goal=0.5)
    yield Number(title="its memory", unit="MB", values=[r[1] for r in runs], goal=100)
    page = large.parent / "page.html"
    runs = [_run([*command, str(large), "--format", "html", "--output", str(page)])]
    yield Number(title="the page of the large run", unit="s", values=[r[0] for r in runs])
    yield Number(title="its memory", unit="MB", values=[r[1] for r in runs], goal=300)
    yield Number(title="its size", unit="MB", values=[page.stat().st_size / 1e6], goal=5)
    if not chromium.missing():
        with chromium.started() as browser:
            values = [_open(browser, page) for _ in range(few)]
        yield Number(title="opening it in Chromium", unit="s", values=values, goal=2)


def _write(root: Path, size: RunSize) -> Path:
    argv = [sys.executable, "-m", "tests.bench.report_run", str(root)]
    argv += [str(number) for number in (size.nodes, size.rounds, size.failures)]
    subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return root


def _run(argv: Sequence[str]) -> tuple[float, float]:
    """Seconds of CPU, and the most megabytes that were resident."""
    env = {**os.environ, **_COMPILED, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", _SPAWN, *argv], env=env, stdout=subprocess.PIPE, check=True)
    code, seconds, most = done.stdout.split()
    assert not int(code), f"{' '.join(argv[:4])} ended with {int(code)}"
    return float(seconds), int(most) * 1024 / 1e6


def _open(browser: chromium.Browser, page: Path) -> float:
    """Seconds until it has loaded, and the first picture of it has been drawn."""
    browser.size(1400, 1000)
    started = time.perf_counter()
    browser.open(page)
    browser.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.run("return document.querySelectorAll('.row').length") >= 1, "the page has no rows"
    return time.perf_counter() - started


def _make_huge(run: Path) -> None:
    (path,) = run.glob("attempt-000/round-000/rank-*/error.json")
    text = path.read_text()
    head = '{"message": {"message": "ValueError'
    assert text.startswith(head)
    path.write_text(f"{head}: {'x' * _HUGE}{text[len(head) :]}")
