"""Rendezvous handlers of one run in one folder, each in a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from hpc_elastic.rendezvous.handler import FileRendezvousHandler, RoundResult
from hpc_elastic.rendezvous.handler_config import HandlerConfig
from hpc_elastic.run.spec import RendezvousSettings

SETTINGS = RendezvousSettings(
    timeout=60.0, last_call_timeout=0.3, heartbeat_interval=0.2, heartbeat_ttl=3.0, poll_interval=0.05
)


class HandlerRig:
    """Handlers of one run in one folder; all are withdrawn at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[FileRendezvousHandler] = []
        self.pool = ThreadPoolExecutor(8)

    def make(
        self,
        least: int = 1,
        most: int | None = None,
        *,
        run_id: str = "run",
        job: str = "",
        node: int | None = None,
        reopen: bool = False,
        **settings: float,
    ) -> FileRendezvousHandler:
        number = len(self.made)
        config = HandlerConfig(
            directory=str(self.folder),
            run_id=run_id,
            min_nodes=least,
            max_nodes=most or least,
            settings=replace(SETTINGS, **settings),  # type: ignore[arg-type]
            job=job,
            node=node,
            reopen=reopen,
            host=f"host{number}",
            addresses=("127.0.0.1",),
        )
        handler = FileRendezvousHandler(config, open_master=lambda: f"host{number}:1")
        self.made.append(handler)
        return handler

    def end(self) -> None:
        for handler in self.made:
            handler.withdraw()
        self.pool.shutdown()

    def meet(self, *handlers: FileRendezvousHandler) -> list[RoundResult]:
        return [future.result(90) for future in [self.start(handler) for handler in handlers]]

    def start(self, handler: FileRendezvousHandler) -> Future[RoundResult]:
        return self.pool.submit(handler.next_rendezvous)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun <= seconds
