"""A training that fails as it is planned: steps and checkpoints that sleep, in real processes; with or without torch.

Argument: the plan as JSON (`tests.bench.goodput.Plan`). What it did is in `journal-RANK.jsonl` of the folder that
BENCH_STAMPS names, by the wall clock of this host, and so is its checkpoint. It runs under torchrun as it is.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable

import hpc_elastic

FOLDER = os.environ["BENCH_STAMPS"]
RANK = int(os.environ["RANK"])
PLAN = json.loads(sys.argv[1])


def journal(what: str, **facts: object) -> int:
    """Add a line, whole or not at all. Returns when."""
    now = time.time_ns()
    fd = os.open(f"{FOLDER}/journal-{RANK}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, (json.dumps({"what": what, "t": now, **facts}) + "\n").encode())
    os.close(fd)
    return now


def steps_done() -> int:
    """How many this rank has done in all, those that were lost included."""
    try:
        with open(f"{FOLDER}/journal-{RANK}.jsonl") as file:
            return sum(json.loads(line)["what"] == "step" for line in file)
    except FileNotFoundError:
        return 0


def fail(kind: str) -> None:
    journal("failure", kind=kind)
    if kind == "exception":
        raise RuntimeError("a planned failure")
    if kind == "hang":
        time.sleep(3600)
    if kind == "node":  # the agent, and its worker with it
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def by_torch() -> Callable[[], None]:
    """Ranks that meet in a collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    one = torch.ones(1)
    return lambda: dist.all_reduce(one)


def by_files() -> Callable[[], None]:
    """Ranks that meet as soon as each has written down how often it came."""
    round_name = f"{os.environ['HPC_ELASTIC_ATTEMPT']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    names = [f"{FOLDER}/met-{round_name}-{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    met = 0

    def times(name: str) -> int:
        return os.path.getsize(name) if os.path.exists(name) else 0

    def meet() -> None:
        nonlocal met
        met += 1
        with open(names[RANK], "a") as file:
            file.write(".")
        while min(map(times, names)) < met:
            time.sleep(0.002)

    return meet


def main() -> None:
    meet = by_torch() if PLAN["has_torch"] else by_files()
    meet()
    step, done = 0, steps_done()
    if os.path.exists(f"{FOLDER}/checkpoint"):
        with open(f"{FOLDER}/checkpoint") as file:
            step = int(file.read())
    failures = {failure["after"]: failure for failure in PLAN["failures"] if failure["rank"] == RANK}
    began = 0
    while step < PLAN["steps"]:
        hpc_elastic.heartbeat(step=step)
        began = began or journal("begin")
        # One that was done is behind: its step was not journaled, so the count stands at it again.
        failure = failures.get(done)
        if failure is not None and not os.path.exists(f"{FOLDER}/failed-{done}"):
            time.sleep(failure["into"] * PLAN["step_seconds"])
            open(f"{FOLDER}/failed-{done}", "x").close()
            fail(failure["kind"])
        time.sleep(PLAN["step_seconds"])
        meet()
        step, done, began = step + 1, done + 1, journal("step", step=step, began=began)
        if step % PLAN["save_every"] == 0:
            with hpc_elastic.section("checkpoint"):
                time.sleep(PLAN["save_seconds"])
                if RANK == 0:
                    with open(f"{FOLDER}/checkpoint.new", "w") as file:
                        file.write(str(step))
                    os.replace(f"{FOLDER}/checkpoint.new", f"{FOLDER}/checkpoint")
                meet()
            began = journal("save", began=began)


main()
