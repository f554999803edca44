"""What a node trains: units of work, each printed, then noted in a journal on its own disk. No imports of ours.

``python -S worker.py <stage>``; ends with 0 when ``<stage>/finish`` is there.
"""

import json
import os
import sys
import time

STEP_SECONDS = 0.05


def main() -> None:
    stage = sys.argv[1]
    _, node, agent = os.environ["HPC_ELASTIC_TAG"].split(":")
    journal = os.open(
        f"{stage}/journal/{node}-{os.getpid()}-{time.monotonic_ns()}.jsonl", os.O_WRONLY | os.O_CREAT, 0o600
    )

    def note(event: str, **facts: object) -> None:
        line = {"event": event, "t": time.clock_gettime(time.CLOCK_BOOTTIME), **facts}
        os.write(journal, json.dumps(line).encode() + b"\n")

    note(
        "start",
        node=int(node),
        agent=agent,
        pid=os.getpid(),
        round=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        rank=int(os.environ["RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
    )
    unit = 0
    while not os.path.exists(f"{stage}/finish"):
        time.sleep(STEP_SECONDS)
        os.write(1, b"unit %d\n" % unit)
        note("unit", unit=unit)
        unit += 1
    note("end")


main()
