"""What submitit's documentation shows, in words of our own: one program that any executor of its family must carry out.

``python submitit_examples.py EXECUTOR FOLDER [PARAMETER=VALUE …]`` runs all of it with
``submitit.AutoExecutor(FOLDER, cluster=EXECUTOR)`` and prints what came out, as JSON: the same for every executor.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import submitit

PATIENCE = 200.0
"""Seconds that the queue and a requeue may take, on a machine that is busy with much else."""


def add(left: int, right: int) -> int:
    return left + right


def named(*, greeting: str, to: str) -> str:
    return f"{greeting}, {to}"


class Scale:
    """A callable with a state, as a configured model would be."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, value: int) -> int:
        return self.factor * value


def divide(left: int, right: int) -> float:
    return left / right


def where_am_i() -> tuple[int, int, int]:
    env = submitit.JobEnvironment()
    print(f"task {env.global_rank} of {env.num_tasks}", flush=True)
    return env.global_rank, env.local_rank, env.num_tasks


class Count(submitit.helpers.Checkpointable):
    """Counts, and goes on counting where it was when it was interrupted."""

    def __init__(self) -> None:
        self.done = 0
        self.lives = 1

    def __call__(self, last: int, word: str) -> tuple[int, int]:
        while self.done < last:
            print(f"life {self.lives} at {self.done}", flush=True)
            self.done += 1
            deadline = time.monotonic() + PATIENCE
            while self.done == 3 and not os.path.exists(word):
                if time.monotonic() > deadline:
                    raise TimeoutError(word)
                time.sleep(0.02)
        return self.done, self.lives

    def checkpoint(self, *args: Any, **kwargs: Any) -> submitit.helpers.DelayedSubmission:
        self.lives += 1
        return super().checkpoint(*args, **kwargs)


def sequence() -> submitit.helpers.FunctionSequence:
    found = submitit.helpers.FunctionSequence()
    found.add(add, 1, 2)
    found.add(named, greeting="good day", to="you")
    return found


def failure_of(job: submitit.Job[Any]) -> list[Any]:
    error = job.exception()
    try:
        job.results()
        raised = ""
    except submitit.core.utils.UncompletedJobError as problem:
        raised = "UncompletedJobError" if "FailedJobError" not in _bases(problem) else "FailedJobError"
    return [raised, "FailedJobError" in _bases(error), "ZeroDivisionError: division by zero" in str(error)]


def _bases(error: BaseException | None) -> list[str]:
    return [base.__name__ for base in type(error).__mro__]


def until_it_says(job: submitit.Job[Any], words: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while words not in (job.stdout() or ""):
        if time.monotonic() > deadline:
            info = job.get_info(mode="force")
            raise TimeoutError(f"no {words!r} of {job.job_id}: {job.state} {info}\n{job.stdout()}\n{job.stderr()}")
        time.sleep(0.05)


async def first_and_all(jobs: list[submitit.Job[int]]) -> list[int]:
    first = await jobs[0].awaitable().result(0.1)
    rest = await asyncio.gather(*[job.awaitable().result(0.1) for job in jobs[1:]])
    return [first, *rest]


def main(cluster: str, folder: Path, **given: Any) -> dict[str, Any]:
    """Everything at once, so that the queue is full, and then what came of it."""
    executor = submitit.AutoExecutor(folder=folder / "%j", cluster=cluster)
    executor.update_parameters(timeout_min=60, name="example", **given)
    word = folder / "go-on"

    one = executor.submit(add, 5, 7)
    words = executor.submit(named, greeting="hello", to="world")
    closure = executor.submit(lambda: one.job_id)
    scaled = executor.map_array(Scale(3), [1, 2, 3])
    partial = executor.submit_array([functools.partial(add, 1, 1), functools.partial(add, 2, 2)])
    with executor.batch():
        batched = [executor.submit(add, index, 100) for index in range(2)]
    failing = executor.submit(divide, 1, 0)
    counting = executor.submit(Count(), 6, str(word))
    in_sequence = executor.submit(sequence())
    command = executor.submit(submitit.helpers.CommandFunction(["echo", "said"], verbose=False))
    executor.update_parameters(tasks_per_node=2)
    tasks = executor.submit(where_am_i)

    until_it_says(counting, "life 1 at 2")
    counting._interrupt()
    until_it_says(counting, "life 2")
    word.touch()

    again = pickle.loads(pickle.dumps(one))
    return {
        "one": [one.result(), one.results(), one.done(), one.exception(), one.num_tasks],
        "words": words.result(),
        "closure": closure.result() == one.job_id,
        "submission": [one.submission().args, one.submission().function(*one.submission().args)],
        "map_array": [job.result() for job in scaled],
        "array ids": sorted(job.job_id.partition("_")[2] for job in scaled),
        "submit_array": [job.result() for job in partial],
        "batch": asyncio.run(first_and_all(batched)),
        "failure": failure_of(failing),
        "checkpoint": counting.result(),
        "sequence": in_sequence.result(),
        "command": command.result(),
        "tasks": sorted(tasks.results()),
        "one task": tasks.task(1).result(),
        "stdout": ["task 1 of 2" in (tasks.task(1).stdout() or ""), "task 0 of 2" in (tasks.stdout() or "")],
        "count": tasks.num_tasks,
        "reloaded": [again.result(), again.job_id == one.job_id],
        "done": sum(1 for _ in submitit.helpers.as_completed([one, *scaled], timeout=PATIENCE, poll_frequency=0.1)),
        "files": [one.paths.submitted_pickle.exists(), one.paths.result_pickle.exists(), one.paths.stdout.exists()],
    }


if __name__ == "__main__":
    given = dict(item.split("=", 1) for item in sys.argv[3:])
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), **given)), flush=True)
