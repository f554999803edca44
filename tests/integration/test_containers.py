"""Workers in a real container of charliecloud's; agents, supervisor and store outside."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.base.outcome import ExitCode
from tests.rigs.container_image import interpreters_folders, make_image, require_charliecloud
from tests.rigs.local_run import LocalRun

_LOOKS = """
tell("saw", cwd=os.getcwd(), image=os.path.exists("/etc/of-the-image"), srv=os.path.exists("/srv"),
     run_dir=os.path.isdir(os.environ["HPC_ELASTIC_RUN_DIR"]), kept=os.environ.get("KEPT"),
     library_path=os.environ.get("LD_LIBRARY_PATH"), home_of_python=os.environ.get("PYTHONHOME"),
     shm=os.path.isdir("/dev/shm"), error_file=os.path.isdir(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])))
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    require_charliecloud()
    return make_image(tmp_path / "image", mounted_at=[*interpreters_folders(), "/elsewhere"])


def in_container(folder: Path, image: Path, script: str, *, options: tuple[str, ...] = (), **how: Any) -> LocalRun:
    return LocalRun(
        folder,
        script,
        options=[
            *("--container-image", f"charliecloud:{image}"),
            *("--container-mounts", ",".join(interpreters_folders())),
            *("--python", sys.executable),
            *options,
        ],
        **how,
    )


def test_a_worker_sees_the_image_and_what_it_needs_of_the_host(tmp_path: Path, image: Path) -> None:
    environ = {"KEPT": "1", "LD_LIBRARY_PATH": "/opt/of-the-host"}
    with in_container(tmp_path, image, _LOOKS, nodes=2, nproc=2, environ=environ) as run:
        assert run.finish() == ExitCode.OK
        saw = run.moments("saw")
    assert len(saw) == 4
    for one in saw:
        assert (one["image"], one["srv"], one["run_dir"], one["error_file"], one["shm"]) == (
            True,
            False,
            True,
            True,
            True,
        )
        assert (one["cwd"], one["kept"]) == (str(tmp_path), "1")
        assert (one["library_path"], one["home_of_python"]) == (None, None)
    assert f"in charliecloud:{image}" in run.log()


def test_workdir_and_variables_that_keep_the_hosts_value(tmp_path: Path, image: Path) -> None:
    (image / "ch").mkdir()
    (image / "ch" / "environment").write_text("KEPT=of the image\nOWN=of the image\n")
    script = 'tell("saw", cwd=os.getcwd(), kept=os.environ["KEPT"], own=os.environ["OWN"])'
    options = ("--container-workdir", "/opt", "--container-env", "KEPT")
    environ = {"KEPT": "$HOME of the host", "OWN": "of the host"}
    with in_container(tmp_path, image, script, options=options, nodes=1, environ=environ) as run:
        assert run.finish() == ExitCode.OK
        (saw,) = run.moments("saw")
    assert (saw["cwd"], saw["kept"], saw["own"]) == ("/opt", "$HOME of the host", "of the image")


def test_an_exception_and_a_signal_are_the_scripts_own(tmp_path: Path, image: Path) -> None:
    script = """
    tell("here")
    others_in_round()
    if RANK == 1:
        if ROUND == 0:
            raise KeyError("labels")
        os.kill(os.getpid(), signal.SIGSEGV)
    wait_for("never")
    """
    with in_container(tmp_path, image, script, nodes=2, options=("--max-restarts", "1")) as run:
        assert run.finish() in (ExitCode.WORKERS_FAILED, ExitCode.NOT_RETRYABLE)
        log = run.log()
    assert "KeyError: 'labels'" in log
    assert "exitcode  : -11" in log
    assert "SIGSEGV" in log


def test_sigterm_reaches_the_script(tmp_path: Path, image: Path) -> None:
    script = """
    def save(*_):
        tell("saved")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    tell("here")
    wait_for("never")
    """
    with in_container(tmp_path, image, script, nodes=1, nproc=2) as run:
        run.wait_moments("here", count=2)
        run.signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM
        assert len(run.moments("saved")) == 2


def test_nothing_outlives_an_agent(tmp_path: Path, image: Path) -> None:
    script = """
    import subprocess
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    tell("here")
    others_in_round()
    if ROUND == 0:
        wait_for("never")
    """
    with in_container(tmp_path, image, script, nodes=2, min_nodes=1) as run:
        run.wait_moments("here", count=2)
        agent = run.agent(1)
        before = [process for process in run.processes() if "sleep" in process.argv or "RANK" in process.environ]
        os.kill(agent.pid, signal.SIGKILL)
        assert run.finish() == ExitCode.OK
        run.until(lambda: not any(process.lives() for process in before), "end of all", after_its_end=True)


def test_a_hang_is_found_and_its_stack_shown(tmp_path: Path, image: Path) -> None:
    script = """
    import hpc_elastic
    hpc_elastic.heartbeat(step=1)
    tell("here")
    others_in_round()
    def waits_for_nothing():
        wait_for("never")
    if ROUND == 0 and RANK == 1:
        waits_for_nothing()
    for step in range(2, 2000):
        hpc_elastic.heartbeat(step=step)
        if ROUND == 1:
            break
        time.sleep(0.05)
    """
    options = ("--section-timeouts", "step:2", "--max-restarts", "1")
    with in_container(tmp_path, image, script, nodes=2, options=options) as run:
        assert run.finish() == ExitCode.OK
        log = run.log()
    assert "waits_for_nothing" in log
    assert "rank 1" in log


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--container-mounts", "/srv:/not-in-the-image"), "no such folder"),
        (("--python", "/opt/no-python"), "no such program"),
        (("--container-args=--bind=/nowhere:/mnt",), "runtime failed on this node"),
    ],
    ids=["mount", "program", "runtime"],
)
def test_a_runtime_that_can_not_start_the_script_is_not_the_scripts_failure(
    tmp_path: Path, image: Path, options: tuple[str, ...], says: str
) -> None:
    with in_container(tmp_path, image, 'tell("never")', nodes=1, options=(*options, "--max-restarts", "0")) as run:
        assert run.finish() in (ExitCode.WORKERS_FAILED, ExitCode.NOT_RETRYABLE)
        log = run.log()
    assert says in log
    assert "ch-run[" in log
    assert "uncaught exception" not in log
