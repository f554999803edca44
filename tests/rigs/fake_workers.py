"""Stand-ins for `LocalWorkers`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from hpc_elastic.agent.part import Condemned
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.workers.stop import Stopped


def failure(rank: int = 0, **changes: Any) -> WorkerFailure:
    plain = WorkerFailure(
        global_rank=rank, message="boom", failure_class=FailureClass.ROOT, fingerprint="F", category=Category.WORKER
    )
    return replace(plain, **changes)


class FakeWorkers:
    """They end when a test says so; stopping takes `looks_to_stop` looks."""

    pids: Any = (4711,)
    running: Any = (0, 1)
    seconds: Any = 12.0
    looks_to_stop = 1
    socket_looks = 0
    failed = succeeded = stopping = news = waits = moment_ended = False
    took_stacks = wants_look = has_symptoms_only = want_no_other_try = False
    early: WorkerFailure | None = None
    left: Any = ()
    own_ends: Any = ()

    def __init__(
        self, round_index: int, layout: Any, excluding: Callable[[], Any] = set, start_error: Exception | None = None
    ) -> None:
        self.round, self.layout, self.excluding, self.evidence = round_index, layout, excluding, self
        self.start_error = start_error
        self.argv: list[str] = []
        self.environments: list[Mapping[str, str]] = []
        self.graces: list[float] = []
        self.excluded: list[Any] = []
        self.condemned: list[Condemned] = []
        self.failures: list[WorkerFailure] = []
        self.stacks: dict[int, Any] = {}
        self.activities: list[Any] = []
        self.unwritten: list[Callable[[], object]] = []
        self.sockets = SimpleNamespace(due=math.inf, ranks=(), network="")

    def look_at_sockets(self) -> None:
        self.socket_looks += 1
        self.sockets.due = math.inf

    def condemn(self, found: Condemned) -> None:
        self.condemned.append(found)
        self.took_stacks |= found.failure_class is FailureClass.HANG

    def condemn_unstarted(self, error: Exception) -> Condemned:
        self.failures = [failure(message=str(error))]
        return Condemned(reason=str(error), failure_class=FailureClass.INFRASTRUCTURE, ranks={0: str(error)})

    def look_first(self) -> None:
        self.wants_look = True

    def end_delay(self) -> None:
        self.moment_ended = True

    def look_at_failure(self) -> WorkerFailure | None:
        return self.early

    def begin_grace(self) -> None:
        self.waits = True

    def start(self, argv: list[str], environment: Callable[[int, str], Mapping[str, str]], **_how: object) -> None:
        if self.start_error is not None:
            raise self.start_error
        self.argv = argv
        self.environments = [environment(n, f"error{n}") for n in range(self.layout.local_world_size)]

    def watched(self) -> list[int]:
        return []

    def poll(self) -> bool:
        news, self.news = self.news, False
        return news

    def exit_summary(self) -> str:
        return "rank 0 ended with exit code 1"

    def begin_stop(self, *, grace: float, at_once: bool = False) -> None:
        self.graces.append(-1.0 if at_once else grace)
        self.excluded.append(set(self.excluding()))
        self.stopping = True

    def step_stop(self) -> Stopped | float:
        if self.looks_to_stop > 0:
            self.looks_to_stop -= 1
            return 0.0
        self.stopping = False
        return Stopped(exits={}, killed=0, left=self.left, seconds=0.1)

    def show_causes(self, reason: str) -> None: ...

    def describe_failures(self) -> list[WorkerFailure]:
        return self.failures

    def fall(self, *failures: WorkerFailure) -> None:
        self.failed, self.news, self.failures = True, True, list(failures)

    def finish(self) -> None:
        self.succeeded, self.news = True, True


def started(round_index: int, count: int) -> Any:
    """Workers of a round that have just been started."""
    return SimpleNamespace(round=round_index, layout=SimpleNamespace(local_world_size=count))


class IdleWorkers(SimpleNamespace):
    """What a `HangDetector` needs of them; a worker that is asked for its dump does some work."""

    def __init__(self, *, group_rank: int = 0, answers: bool = True) -> None:
        layout = SimpleNamespace(group_rank=group_rank, first_rank=0)
        super().__init__(running_pids={0: 2**22 + 1}, running=[0], layout=layout, answers=answers)
        self.asked, self.dumps, self.mute, self.cost = [], {}, {}, 0.0

    def ask_for_dumps(self, local_ranks: Iterable[int]) -> bool:
        self.asked += local_ranks
        self.cost = 20.0
        return self.answers or bool(self.dumps)

    def read_dumps(self) -> dict[int, Any]:
        return self.dumps  # type: ignore[no-any-return]

    def find_mute(self) -> dict[int, float]:
        return self.mute  # type: ignore[no-any-return]
