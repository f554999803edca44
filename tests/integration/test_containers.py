"""Workers in real containers of charliecloud's and podman's; agents, supervisor and store outside.

After each run nothing that it started lives (`LocalRun`), and what is asked of both runtimes is asked in one table.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.container_image import (
    ROOT,
    interpreters_folders,
    make_image,
    podman_environment,
    podmans_sockets,
    require_charliecloud,
)
from tests.rigs.local_run import LocalRun
from tests.rigs.memory_limit import memory_limit

_LOOKS = """
tell("saw", cwd=os.getcwd(), image=os.path.exists("/etc/of-the-image"), srv=os.path.exists("/srv"),
     run_dir=os.path.isdir(os.environ["HPC_ELASTIC_RUN_DIR"]), kept=os.environ.get("KEPT"),
     library_path=os.environ.get("LD_LIBRARY_PATH"), home_of_python=os.environ.get("PYTHONHOME"),
     shm=os.path.isdir("/dev/shm"), rank=os.environ["RANK"], master=os.environ["MASTER_ADDR"],
     error_file=os.path.isdir(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])))
"""


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    require_charliecloud()
    yield make_image(tmp_path / "image", mounted_at=[*interpreters_folders(), "/elsewhere"])
    shutil.rmtree(podmans_sockets(tmp_path), ignore_errors=True)


RUNTIMES = pytest.mark.parametrize("runtime", ["charliecloud", "podman"])
IN_LONG_TIER = {("podman", "end"), ("podman", "code"), ("podman", "killed"), ("charliecloud", "deaf")}
"""The two differ in how they hand a signal on and in what stays of a container; a code is handed on alike."""
ENDINGS = [
    pytest.param(runtime, how, marks=[pytest.mark.slow] * ((runtime, how) in IN_LONG_TIER))
    for runtime in ("charliecloud", "podman")
    for how in ("end", "code", "term", "deaf", "killed", "agent")
]


def in_container(
    folder: Path,
    image: Path,
    script: str,
    *,
    runtime: str = "charliecloud",
    options: tuple[str, ...] = (),
    environ: dict[str, str] | None = None,
    **how: Any,
) -> LocalRun:
    if runtime == "podman":
        environ = {**(environ or {}), **podman_environment(folder)}
    return LocalRun(
        folder,
        script,
        environ=environ or {},
        options=[
            *("--container-image", f"{runtime}:{image}"),
            *("--container-mounts", ",".join(interpreters_folders())),
            *("--python", sys.executable),
            *options,
        ],
        **how,
    )


def test_an_image_that_no_node_has_is_given_up_and_no_node_is_suspect(tmp_path: Path, image: Path) -> None:
    environ = podman_environment(tmp_path)
    options = ["--container-image", "podman:localhost/no-such-image:1", "--max-restarts", "6", "--max-requeues", "3"]
    with LocalRun(tmp_path, "", nodes=2, options=options, environ=environ) as run:
        assert run.finish() == ExitCode.NOT_RETRYABLE
        assert len({event["round"] for event in run.events("worker_failed")}) == 2
        assert "localhost/no-such-image:1" in next(line for line in run.log().splitlines() if "each start ends" in line)
        assert run.report()["bad_nodes"] == []
        assert "suspect" not in run.paths.attempt(0).report_text.read_text()


@RUNTIMES
def test_a_worker_sees_the_image_and_what_it_needs_of_the_host(tmp_path: Path, image: Path, runtime: str) -> None:
    environ = {"KEPT": "1", "LD_LIBRARY_PATH": "/opt/of-the-host"}
    with in_container(tmp_path, image, _LOOKS, runtime=runtime, nodes=2, nproc=2, environ=environ) as run:
        assert run.finish() == ExitCode.OK
        saw = run.moments("saw")
    assert sorted(one["rank"] for one in saw) == ["0", "1", "2", "3"]
    assert all(one["master"] for one in saw)
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
    assert f"in {runtime}:{image}" in run.log()


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


@RUNTIMES
def test_an_exception_and_a_signal_are_the_scripts_own(tmp_path: Path, image: Path, runtime: str) -> None:
    script = """
    tell("here")
    others_in_round()
    if RANK == 1:
        if ROUND == 0:
            raise KeyError("labels")
        os.kill(os.getpid(), signal.SIGSEGV)
    wait_for("never")
    """
    with in_container(tmp_path, image, script, runtime=runtime, nodes=2, options=("--max-restarts", "1")) as run:
        assert run.finish() in (ExitCode.WORKERS_FAILED, ExitCode.NOT_RETRYABLE)
        log = run.log() + run.attempt().report_text.read_text()
    assert "KeyError: 'labels'" in log
    assert "exitcode  : -11" in log
    assert "SIGSEGV" in log


def podmans_own(folder: Path) -> str:
    """What podman still knows of containers; it was asked with the run's own configuration."""
    environ = {**os.environ, **podman_environment(folder)}
    done = subprocess.run(["podman", "ps", "--all", "--quiet"], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def mounts_below(folder: Path) -> list[str]:
    return [line for line in Path("/proc/mounts").read_text().splitlines() if f" {folder}" in line]


_ENDS = """
import subprocess
subprocess.Popen(["sleep", "1000"], start_new_session=True)
def save(*_):
    if os.path.exists(f"{FOLDER}/got-{RANK}"):
        tell("got-another")
    open(f"{FOLDER}/got-{RANK}", "w").close()
    time.sleep(0.5)
    tell("saved")
    sys.exit(0)
if HOW == "term":
    signal.signal(signal.SIGTERM, save)
if HOW == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell("here")
others_in_round()
if HOW == "code":
    sys.exit(42)
if HOW != "end" and not (HOW == "agent" and ROUND > 0):
    wait_for("never")
"""


@pytest.mark.parametrize(("runtime", "how"), ENDINGS)
def test_however_it_ends_nothing_is_left_running_or_mounted(
    tmp_path: Path, image: Path, runtime: str, how: str
) -> None:
    """What the script started in a session of its own has ended too."""
    options = (
        ("--max-restarts", "0") if how in ("code", "killed") else ("--shutdown-timeout", "2" if how == "deaf" else "30")
    )
    script = f"HOW = {how!r}\n{_ENDS}"
    with in_container(tmp_path, image, script, runtime=runtime, nodes=1, nproc=2, options=options) as run:
        run.wait_moments("here", count=2)
        began = time.monotonic()
        if how in ("term", "deaf"):
            run.signal(signal.SIGTERM)
        elif how == "killed":
            os.kill(run.worker(1, round_index=0), signal.SIGKILL)  # of the host's pids, as the OOM killer's
        elif how == "agent":
            os.kill(run.agent(0).pid, signal.SIGKILL)
        code = run.finish()
        seconds = time.monotonic() - began
        saved = run.moments("saved")
        assert not run.moments("got-another"), "the same signal twice: a handler that saves is interrupted"
        report = run.attempt().report_text.read_text()
    expected = {"end": 0, "agent": 0, "term": 143, "deaf": 143}
    assert code == expected.get(how, code)
    if how in ("code", "killed"):
        assert code in (ExitCode.WORKERS_FAILED, ExitCode.NOT_RETRYABLE)
        assert f"exitcode  : {42 if how == 'code' else -9}" in report
    assert [one["rank"] for one in sorted(saved, key=lambda one: one["rank"])] == ([0, 1] if how == "term" else [])
    assert seconds < 25, "it takes the script's time, not the grace"
    assert mounts_below(tmp_path) == []
    if runtime == "podman":
        assert podmans_own(tmp_path) == ""


@RUNTIMES
def test_the_kernels_oom_killer_is_named(tmp_path: Path, image: Path, runtime: str) -> None:
    script = """
    tell("here")
    others_in_round()
    if RANK == 1:
        cache = [b"x" * (8 << 20) for _ in range(128)]
        sys.exit("there is no limit")
    wait_for("never")
    """
    # podman's container has a cgroup of its own, wherever podman itself runs.
    options = ("--max-restarts", "0", *(["--container-args=--memory=192m"] if runtime == "podman" else []))
    run = in_container(tmp_path, image, script, runtime=runtime, nodes=1, nproc=2, options=options)
    with memory_limit(512 << 20, run):
        assert run.finish() in (ExitCode.WORKERS_FAILED, ExitCode.NOT_RETRYABLE)
    assert "Out of memory: Signal 9 (SIGKILL)" in run.log()
    assert "killed by the kernel" in run.log()


@pytest.mark.parametrize(
    ("runtime", "more"),
    [
        ("charliecloud", ()),
        pytest.param("podman", (), marks=pytest.mark.slow),
        ("podman", ("--container-args=--pid=private",)),
    ],
    ids=["charliecloud", "podman", "podman-pid-namespace"],
)
def test_a_hang_is_found_and_its_stack_shown(tmp_path: Path, image: Path, runtime: str, more: tuple[str, ...]) -> None:
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
    # Longer than a busy machine holds a step up. (podman may take longer to end: that is no hang.)
    # A script that is the first process of its namespace, and has no handler, gets no SIGTERM: the kernel's rule.
    options = ("--section-timeouts", "step:4", "--max-restarts", "1", "--shutdown-timeout", "3", *more)
    with in_container(tmp_path, image, script, runtime=runtime, nodes=2, options=options) as run:
        assert run.finish() == ExitCode.OK
        log = run.log()
    assert "waits_for_nothing" in log
    assert "rank 1" in log


@pytest.mark.parametrize(
    ("runtime", "options", "says"),
    [
        ("charliecloud", ("--container-mounts", "/srv:/not-in-the-image"), "no such folder"),
        ("charliecloud", ("--python", "/opt/no-python"), "no such program"),
        ("charliecloud", ("--container-args=--bind=/nowhere:/mnt",), "runtime failed on this node"),
        ("charliecloud", ("--container-args=--no-such-option",), "does not take these options"),
        ("podman", ("--python", "/opt/no-python"), "no such program"),
        ("podman", ("--container-image", "podman:localhost/absent:latest"), "image does not exist"),
        ("podman", ("--container-args=--volume=/nowhere:/mnt",), "runtime failed on this node"),
        ("podman", ("--container-args=--no-such-option",), "does not take these options"),
    ],
)
def test_a_runtime_that_can_not_start_the_script_is_not_the_scripts_failure(
    tmp_path: Path, image: Path, runtime: str, options: tuple[str, ...], says: str
) -> None:
    options = (*options, "--max-restarts", "0")
    with in_container(tmp_path, image, 'tell("never")', runtime=runtime, nodes=1, options=options) as run:
        assert run.finish() in (ExitCode.WORKERS_FAILED, ExitCode.NOT_RETRYABLE)
        log = run.log()
    assert says in log
    assert "uncaught exception" not in log
    assert ("ch-run" if runtime == "charliecloud" else "Error: ") in log


@RUNTIMES
def test_what_setup_has_made_of_the_environment_reaches_the_worker_inside(
    tmp_path: Path, image: Path, runtime: str
) -> None:
    script = 'tell("saw", new=os.environ.get("NEW"), gone=os.environ.get("GONE"))'
    options = ("--setup", "export NEW='by setup'; unset GONE")
    with in_container(tmp_path, image, script, runtime=runtime, options=options, environ={"GONE": "1"}) as run:
        assert run.finish() == ExitCode.OK
        assert [(one["new"], one["gone"]) for one in run.moments("saw")] == [("by setup", None)] * 2


@RUNTIMES
def test_with_the_packages_folder_alone_a_worker_is_asked_to_save(tmp_path: Path, image: Path, runtime: str) -> None:
    """The image's Python has neither this package nor what it needs; its folder is mounted where it looks."""
    script = """
    import os, sys, time
    try:
        import msgspec
        sys.exit("msgspec is there")
    except ImportError:
        import hpc_elastic
    for step in range(1, 100000):
        if os.environ["HPC_ELASTIC_ATTEMPT"] == "1" or hpc_elastic.should_checkpoint(step):
            with hpc_elastic.section("checkpoint"):
                print("saved at", step, flush=True)
            break
        if step == 20:
            print("trains", flush=True)
        time.sleep(0.01)
    """
    (image / "opt/lib/hpc_elastic").mkdir(parents=True)
    mounts = f"/usr:/usr,{ROOT / 'hpc_elastic'}:/opt/lib/hpc_elastic"
    options = ["--container-image", f"{runtime}:{image}", "--container-mounts", mounts, "--python", "/usr/bin/python3"]
    options += ["--container-env", "PYTHONPATH", "--max-requeues", "1"]
    environ = {"PYTHONPATH": "/opt/lib", **(podman_environment(tmp_path) if runtime == "podman" else {})}
    with LocalRun(tmp_path, script, prelude="", nodes=1, options=options, environ=environ) as run:
        run.until(lambda: "] trains" in run.log(), "training")
        run.signal(signal.SIGUSR2)
        assert run.finish() == ExitCode.OK
        assert run.log().count("] saved at") == 2
