"""Ranks of one job as processes of this machine: torch is imported once, then each rank is forked.

::

    python -m tests.rigs.inprocess_ranks FOLDER SCENARIO:COUNT[:OPTION=VALUE…] …

`RANKS_AT_ONCE` at the most run at once. Each rank of a scenario (`tests.rigs.inprocess_scenarios`) writes what the
scenario returns, or raises, to FOLDER/<number>/<rank>.json, and its output to FOLDER/<number>/output.txt.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rigs.processes import bare_environ

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE = 150.0
"""Seconds for one scenario. torch 2.13 takes 5 s for a new connection to a TCPStore now and then."""
RANKS_AT_ONCE = 12
"""Scenarios wait nearly all of their time, for timeouts; but two cores start no more ranks within the shortest ones."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    exit_code: int
    """As `subprocess.Popen.returncode`."""
    result: Any
    """What the scenario returned; None where it did not."""
    error: str
    """The type and the words of what it raised; empty where it did not."""


@dataclass(frozen=True, kw_only=True)
class Job:
    ranks: list[Ending]
    output: str
    folder: Path

    @property
    def results(self) -> list[Any]:
        return [ending.result for ending in self.ranks]


def run_jobs(folder: Path, *jobs: str, search: str = "") -> list[Job]:
    """Run scenarios to their ends, those that fit side by side. `search`: a folder for modules, after all others."""
    result = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.rigs.inprocess_ranks", str(folder), *jobs],
        cwd=ROOT,
        env={**bare_environ(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RING_SEARCH": search},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE * len(jobs) + 3600,  # each ends itself
    )
    assert result.returncode == 0, result.stdout
    found = []
    for number in range(len(jobs)):
        place = folder / str(number)
        codes = json.loads((place / "codes.json").read_text())
        output = (place / "output.txt").read_text(errors="replace")
        found.append(
            Job(
                ranks=[_ending(place / f"{rank}.json", code) for rank, code in enumerate(codes)],
                output=output,
                folder=place,
            )
        )
    return found


def run_ranks(scenario: str, count: int, folder: Path, **options: object) -> Job:
    return run_jobs(folder, ":".join([scenario, str(count), *(f"{name}={value}" for name, value in options.items())]))[
        0
    ]


def _ending(path: Path, code: int) -> Ending:
    found = json.loads(path.read_text()) if path.exists() else {}
    return Ending(exit_code=code, result=found.get("result"), error=found.get("error", ""))


def free_ports(*, taken: Collection[int] = ()) -> int:
    """The first of ten ports in a row, below those that the kernel gives to others, and not near those `taken`."""
    while True:
        first = random.randrange(10000, 30000, 10)
        if first in taken:
            continue
        try:
            for port in range(first, first + 10):
                with socket.socket() as found:
                    found.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def _rank_main(scenario: str, rank: int, count: int, folder: Path, port: int, options: dict[str, str]) -> int:
    import logging

    from tests.rigs import inprocess_endings, inprocess_gpu, inprocess_phases, inprocess_scenarios, inprocess_timing

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    logging.basicConfig(
        level=logging.DEBUG, format=f"%(asctime)s.%(msecs)03d initial rank {rank} %(message)s", datefmt="%H:%M:%S"
    )
    found: dict[str, Any] = {}
    code = 0
    try:
        places = (inprocess_scenarios, inprocess_phases, inprocess_endings, inprocess_timing, inprocess_gpu)
        place = next(place for place in places if hasattr(place, scenario))
        found["result"] = getattr(place, scenario)(rank, folder, options)
    except BaseException as error:
        logging.exception("initial rank %d raised", rank)
        found["error"] = f"{type(error).__name__}: {error}"
        code = 1
    (folder / f"{rank}.tmp").write_text(json.dumps(found))
    os.replace(folder / f"{rank}.tmp", folder / f"{rank}.json")
    return code


def main(argv: list[str]) -> int:
    import hpc_elastic.inprocess  # noqa: F401 - once, before the forks

    folder = Path(argv[0])
    if os.environ.get("RING_SEARCH"):
        sys.path.append(os.environ["RING_SEARCH"])
    # In a child of its own, whose threads no rank is forked beside.
    server, group_port = _serve_group_store()
    os.environ["GROUP_STORE_PORT"] = str(group_port)
    try:
        return _run_side_by_side(argv[1:], folder)
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _run_side_by_side(jobs: list[str], folder: Path) -> int:
    """Run each job in a child that forks its ranks, in order; the exit code."""
    running: dict[int, int] = {}
    ports: list[int] = []
    sizes = [int(job.split(":")[1]) for job in jobs]
    failed = False
    for number, job in enumerate(jobs):
        while running and sum(sizes[each] for each in running.values()) + sizes[number] > RANKS_AT_ONCE:
            failed |= _reap(running)
        if failed:
            break
        (folder / str(number)).mkdir(mode=0o700)
        ports.append(free_ports(taken=ports))
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if _run_job(job, folder / str(number), number, ports[-1]) else 1
            finally:
                sys.stdout.flush()
                os._exit(status)
        running[pid] = number
    while running:
        failed |= _reap(running)
    return int(failed)


def _reap(running: dict[int, int]) -> bool:
    """Wait for the end of one of the jobs; whether it failed."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if running.pop(pid, None) is not None:
            return status != 0


def _run_job(job: str, folder: Path, number: int, port: int) -> bool:
    """Whether it has ended in time; its output is printed where not."""
    import faulthandler

    scenario, count, *given = job.split(":")
    options = {"job": str(number), **dict(option.split("=", 1) for option in given)}
    ranks = {}
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for rank in range(int(count)):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setsid()
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
                faulthandler.register(signal.SIGUSR2, all_threads=True)
                status = _rank_main(scenario, rank, int(count), folder, port, options)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        ranks[pid] = rank
    os.close(output)
    has_ended = _wait(ranks, folder, seconds=float(options.get("deadline", DEADLINE)))
    if not has_ended:
        print(job, (folder / "output.txt").read_text(errors="replace"), sep="\n")
    return has_ended


def _serve_group_store() -> tuple[int, int]:
    """A TCPStore's server for the functions' own groups: its process, and its port."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            import torch.distributed as dist

            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(writer, str(store.port).encode())
            os.close(writer)
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as port:
        return pid, int(port.read())


def _wait(ranks: dict[int, int], folder: Path, *, seconds: float) -> bool:
    codes = [0] * len(ranks)
    left = dict(ranks)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
        elif pid in left:
            codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
    for pid, rank in left.items():
        print(f"rank {rank} has not ended", flush=True)
        os.kill(pid, signal.SIGUSR2)
    if left:
        time.sleep(2)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return False
    (folder / "codes.json").write_text(json.dumps(codes))
    return True


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
