"""Recorded run directories of all kinds of ends, and everything that a user can read of each.

``recorded/NAME.tar.xz`` is the directory of a real run (on a machine called ``login1``, in ``/home/me``), ``NAME.txt``
what the program prints of it: the report as text, as JSON, as a page and at the end of the job log, ``status --json``
and ``logs --events``.
``list.txt`` is ``list`` of all. Nothing is normalised but the folder and the style: the time zone is UTC, and it is
three seconds after the last event. The page stands there as a parser sees it, one element or line of text a line.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.cli.main import main
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_text import render_job_log
from tests.browser.sample_runs import hostile_run, hung_run, requeued_run
from tests.rigs.run_builder import START_NS

RECORDED = Path(__file__).resolve().parent / "recorded"
NAMES = sorted(path.name.partition(".")[0] for path in RECORDED.glob("*.tar.xz"))
BUILT = {"built-hostile": hostile_run, "built-hung": hung_run, "built-requeued": requeued_run}
FRAME = 5
"""Lines of every report in a job log: three rules, the run and its directory."""
COMMANDS = (
    ("report", "{run}", "--width", "120"),
    ("report", "{run}", "--all"),
    ("report", "{run}", "--json"),
    ("report", "{run}", "--html", "--output", "-"),
    ("status", "{run}", "--json", "--no-slurm"),
    ("logs", "{run}", "--events"),
)


class PageLines(HTMLParser):
    """A page's elements with their attributes, and its text, each on a line of its own."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self._depth = 0
        self._raw = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self._depth += tag not in ("meta", "input", "wbr")
        self._raw = tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = (
            name if value is None else f"{name}={re.sub('sha256-[^ ]*;', '<HASH>;', value)}" for name, value in attrs
        )
        self.lines.append(" " * self._depth + " ".join([f"<{tag}>", *sorted(values)]))

    def handle_endtag(self, tag: str) -> None:
        self._depth -= 1
        self._raw = ""

    def handle_data(self, data: str) -> None:
        if self._raw != "style":
            self.lines += [f"{' ' * self._depth}{line}" for line in data.splitlines() if line.strip()]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of one length, wherever tests run: lines are cut at theirs."""
    monkeypatch.setenv("XDG_STATE_HOME", "/nonexistent")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr("os.fdatasync", lambda fd: None)
    monkeypatch.setattr("os.fsync", lambda fd: None)
    folder = Path(tempfile.mkdtemp(prefix="hpc-rec-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def golden(request: pytest.FixtureRequest, folder: Path, capsys: pytest.CaptureFixture[str]) -> Golden:
    return Golden(folder, capsys, update=bool(request.config.getoption("--update-golden")))


class Golden:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], *, update: bool) -> None:
        self._folder, self._capsys, self._update = folder, capsys, update

    def printed(self, *command: str) -> str:
        code = main([*command])
        out, err = self._capsys.readouterr()
        if "--html" in command:
            out = "\n".join(PageLines(out).lines)
        if "--json" in command:
            out = json.dumps(json.loads(out), indent=1, ensure_ascii=False)
        text = f"{out.rstrip()}\n{err}".replace(str(self._folder), "<RUNS>")
        return (
            f"$ hpc-elastic {' '.join(command)}\n".replace(str(self._folder), "<RUNS>") + f"{text}exit code {code}\n\n"
        )

    def check(self, name: str, found: str) -> None:
        path = RECORDED / f"{name}.txt"
        if self._update:
            path.write_text(found)
        golden = path.read_text() if path.exists() else ""
        difference = difflib.unified_diff(golden.splitlines(), found.splitlines(), str(path), "now", lineterm="")
        assert found == golden, "\n".join(["read it, then pytest tests/catalogue --update-golden:", *difference])


def unpack(folder: Path, name: str) -> Path:
    with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # type: ignore[arg-type]
    for path in (path for path in (folder / name).rglob("*") if not path.is_symlink()):
        path.chmod(0o700 if path.is_dir() else 0o600)  # as a run makes them: no mode is taken from the archive
    return folder / name


def stop_clock(monkeypatch: pytest.MonkeyPatch, *runs: Path) -> None:
    last = max(path.stat().st_mtime_ns for run in runs for path in run.rglob("*.jsonl"))
    monkeypatch.setattr(SystemClock, "time_ns", lambda self: last + 3_000_000_000)


@pytest.mark.parametrize("name", [*NAMES, *BUILT])
def test_what_is_read_of_a_run(name: str, folder: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in BUILT:
        BUILT[name](folder / name)
        monkeypatch.setattr(SystemClock, "time_ns", lambda self: START_NS + 9_000_000_000_000)
    else:
        stop_clock(monkeypatch, unpack(folder, name))
    parts = [golden.printed(*(word.format(run=folder / name) for word in command)) for command in COMMANDS]
    job_log = render_job_log(Document(collect_run(folder / name)))
    golden.check(name, "".join(parts) + f"the end of the job log\n{job_log}".replace(str(folder), "<RUNS>"))
    assert job_log.count("\n") - FRAME <= 25 or name == "built-hostile", job_log  # whose names are lines long


def test_the_list(folder: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_clock(monkeypatch, *(unpack(folder, name) for name in NAMES))
    runs = ("--runs-dir", str(folder), "--no-slurm", "--limit", "all")
    golden.check("list", golden.printed("list", *runs) + golden.printed("list", "--goodput", *runs))
