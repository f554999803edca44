"""Workers whose Python is another than the agents': a bare environment, another version, with and without this package.

Tried is each of CPython 3.8 to 3.14 that is installed here, in PATH or by pyenv; in CI the oldest and the newest.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun
from tests.rigs.pythons import pythons

ROOT = Path(__file__).resolve().parents[2]


PYTHONS = {f"python{version}": path for version, path in pythons(8).items()}
_BARE = """
import json, os, signal, sys, time
for name in ("hpc_elastic", "msgspec", "torch"):
    if name in HAS:
        continue
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"{name} is there")
"""


ENDS = {next(iter(PYTHONS)), list(PYTHONS)[-1]}
"""The oldest and the newest: those between are tried in the long tier."""


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name not in ENDS)) for name in PYTHONS])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The interpreter of an environment that has nothing but its standard library."""
    subprocess.run([PYTHONS[request.param], "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    return tmp_path / "env/bin/python"


def with_folder(python: Path) -> None:
    """Link the package's folder into the environment, and none of what it needs."""
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    folder = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hpc_elastic").symlink_to(ROOT / "hpc_elastic")


def run_with(python: Path, folder: Path, script: str, *, has: tuple[str, ...] = (), **how: object) -> LocalRun:
    options = ["--python", str(python), *how.pop("options", ())]  # type: ignore[misc]
    text = f"HAS = {has!r}\n{_BARE}\n{script}"
    environ = {"PYTHONPATH": ""}
    return LocalRun(folder, text, prelude="", nodes=1, environ=environ, options=options, **how)  # type: ignore[arg-type]


def test_an_exception_is_reported_and_the_next_round_starts(tmp_path: Path, python: Path) -> None:
    script = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise KeyError("labels")
"""
    with run_with(python, tmp_path, script, nproc=2) as run:
        assert run.finish() == ExitCode.OK
        # The rank that failed first; the other may have been stopped before it wrote one.
        error = next(run.rank(rank).error_file for rank in (0, 1) if run.rank(rank).error_file.exists()).read_text()
    assert "KeyError: 'labels'" in error
    assert "raise KeyError" in error


def test_a_script_without_this_package_is_judged_by_nothing_and_stopped_as_any_other(
    tmp_path: Path, python: Path
) -> None:
    script = """
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("here", flush=True)
time.sleep(1000)
"""
    with run_with(python, tmp_path, script, options=("--section-timeouts", "setup:1000")) as run:
        run.until(lambda: "] here" in run.log(), "here")
        run.signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM
        assert "] saved" in run.log()


def test_with_the_packages_folder_alone_heartbeats_and_notices_work(tmp_path: Path, python: Path) -> None:
    """The agent sees the step of a worker that hangs, and its stack; a notice reaches the worker."""
    with_folder(python)
    script = """
import hpc_elastic
for step in range(1, 100000):
    if os.environ["HPC_ELASTIC_ATTEMPT"] == "1":
        break
    if step == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        def waits_for_nothing():
            time.sleep(1000)
        waits_for_nothing()
    if hpc_elastic.should_checkpoint(step):
        with hpc_elastic.section("checkpoint"):
            print("saved", hpc_elastic.preemption_notice().is_agreed, flush=True)
        break
    if step == 20:
        print("trains", flush=True)
    time.sleep(0.01)
"""
    options = ("--section-timeouts", "step:3", "--max-requeues", "1", "--max-restarts", "1")
    with run_with(python, tmp_path, script, has=("hpc_elastic",), options=options) as run:
        run.until(lambda: "] trains" in run.log(), "training")
        run.signal(signal.SIGUSR2)
        assert run.finish() == ExitCode.OK
        log = run.log()
    assert "waits_for_nothing" in log
    assert "step 6" in log
    assert "] saved True" in log
