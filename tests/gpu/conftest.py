"""The optional tier for one NVIDIA GPU: ``python -m tests.check --tier gpu [--record FILE]``.

The machine may be bare: Python with CUDA's torch, no network, no Slurm. What the tests import besides (pytest, and this
package's run-time dependencies: msgspec, psutil, filelock, submitit, cloudpickle, jinja2) is brought along where
it is missing: `docs/reference/versions.md` says how. Nothing here imports torch into pytest: each test starts
processes, with deadlines, and none depends on another.

FILE gets the table of what was seen, after every test; the folder of that name without its ending gets what the tests
recorded (the words of failures, flight recorder dumps, RAS's and NVML's answers), for tests that run without a GPU.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.gpu import Machine, find_machine, render, try_sharing
from tests.rigs.torch_ranks import SHARING


class Record:
    """What this session saw."""

    def __init__(self, file: str) -> None:
        self.file = Path(file).absolute() if file else None
        self.folder = self.file.with_suffix("") if self.file else None
        if self.folder is not None and self.folder == self.file:
            self.folder = self.file.with_name(f"{self.file.name}-recorded")
        self.machine = Machine()
        self.seen: list[tuple[str, str]] = []
        self.outcomes: dict[str, str] = {}

    def table(self) -> str:
        return render(self.machine, day=time.strftime("%Y-%m-%d"), seen=self.seen, outcomes=self.outcomes)

    def write(self) -> None:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.table())

    def keep(self, name: str, found: str | Path) -> None:
        if self.folder is None or (isinstance(found, Path) and not found.exists()):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if isinstance(found, Path):
            shutil.copyfile(found, self.folder / name)
        else:
            (self.folder / name).write_text(found)


RECORD = pytest.StashKey[Record]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-record", metavar="FILE", default="", help="where the table of what was seen is written")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RECORD] = Record(config.getoption("--gpu-record", ""))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    record = item.config.stash[RECORD]
    if call.excinfo is not None and report.outcome != "passed":
        said = str(call.excinfo.value).strip().splitlines() or [call.excinfo.typename]
        record.outcomes[item.name] = f"{report.outcome}: {said[0][:400]}"
    elif call.when == "call":
        record.outcomes[item.name] = report.outcome
    record.write()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    record = config.stash[RECORD]
    if record.outcomes:
        terminalreporter.section("what was seen")
        terminalreporter.write(record.table())


@pytest.fixture(scope="session")
def machine(pytestconfig: pytest.Config) -> Machine:
    found = find_machine()
    pytestconfig.stash[RECORD].machine = found
    return found


@pytest.fixture(autouse=True)
def _needs_a_gpu(machine: Machine) -> None:
    if machine.reason:
        pytest.skip(machine.reason)


@pytest.fixture
def seen(pytestconfig: pytest.Config) -> Callable[[str, str], None]:
    """Adds a row to the table."""
    return lambda what, how: pytestconfig.stash[RECORD].seen.append((what, how))


@pytest.fixture
def keep(pytestconfig: pytest.Config) -> Callable[[str, str | Path], None]:
    """Records a text, or the copy of a file, under a name."""
    return pytestconfig.stash[RECORD].keep


@pytest.fixture(scope="session")
def sharing(machine: Machine, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The first way of `SHARING` in which two ranks of NCCL sum here, or none; and what was said of the others."""
    if machine.reason:
        return "", machine.reason
    refused = []
    for way in SHARING:
        why = try_sharing(way, tmp_path_factory.mktemp("sharing"))
        if not why:
            break
        refused.append(f"{way}: {why}")
    else:
        way = ""
    heard = "; ".join([f"works: {way}"] * bool(way) + refused)
    pytestconfig.stash[RECORD].seen.append(("two ranks of NCCL on one GPU", heard))
    return way, heard


@pytest.fixture
def way(sharing: tuple[str, str]) -> str:
    """How two ranks of NCCL share the GPU; skips where they can't."""
    if not sharing[0]:
        pytest.skip(f"NCCL lets no two ranks share this GPU: {sharing[1]}")
    return sharing[0]
