"""One node of a chaotic rendezvous without agents: a real handler, and work between its rounds. A process of its own.

``python -m tests.rigs.chaos.member CONFIG``. Its journal is the same as a worker's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from hpc_elastic.rendezvous.handler import FileRendezvousHandler
from hpc_elastic.rendezvous.handler_config import HandlerConfig
from hpc_elastic.rendezvous.state import RendezvousClosedError
from hpc_elastic.run.spec import RendezvousSettings, settings_from_conf

STEP_SECONDS = 0.1


def main() -> int:
    config: dict[str, Any] = json.loads(sys.argv[1])
    stage, node = Path(config["stage"]), int(config["node"])
    name = stage / "journal" / f"{node}-{os.getpid()}-{time.monotonic_ns()}.jsonl"
    journal = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600)

    def note(event: str, **facts: object) -> None:
        line = {"event": event, "t": time.clock_gettime(time.CLOCK_BOOTTIME), **facts}
        os.write(journal, json.dumps(line).encode() + b"\n")

    handler = FileRendezvousHandler(
        HandlerConfig(
            directory=config["directory"],
            run_id=config["run_id"],
            min_nodes=config["min_nodes"],
            max_nodes=config["max_nodes"],
            settings=settings_from_conf(config["conf"], RendezvousSettings()),
            node=node,
            host=f"n{node}",
            addresses=("127.0.0.1",),
        ),
        open_master=lambda: f"n{node}:1",
    )
    while True:
        try:
            result = handler.next_rendezvous()
        except RendezvousClosedError:
            return 0
        note(
            "start",
            node=node,
            agent=f"{node}-{os.getpid()}",
            pid=os.getpid(),
            round=result.version,
            rank=result.rank,
            world=result.world_size,
        )
        unit = 0
        while not handler.round_is_over():
            time.sleep(STEP_SECONDS)
            note("unit", unit=unit)
            unit += 1
            if (stage / "finish").exists():
                note("end")
                return 0 if handler.shutdown(workers_done=True) else 1
        note("stopped")


if __name__ == "__main__":
    sys.exit(main())
