"""Replay a schedule, or try one seed after the other.

::

    python -m tests.rigs.chaos --seed 7                          the agents, on emulated NFS
    python -m tests.rigs.chaos --seed 7 --place disk --nodes 6 --min-nodes 2 --bursts 10
    python -m tests.rigs.chaos --seed 7 --handlers --nodes 32    the rendezvous alone
    python -m tests.rigs.chaos --seed 1 --minutes 10             seeds 1, 2, 3 … until the time is over
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.rigs.chaos.runs import PLACES, ChaosRun, run_chaos


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rigs.chaos", description="Disturb a real run at random.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--minutes", type=float, help="go on with the next seeds until so much time has passed")
    parser.add_argument("--place", choices=sorted(PLACES), default="nfs")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--min-nodes", type=int, default=2)
    parser.add_argument("--bursts", type=int, default=6)
    parser.add_argument("--ttl", type=float, default=3.0)
    parser.add_argument("--no-doorbell", action="store_true")
    parser.add_argument("--handlers", action="store_true", help="handlers in processes instead of agents")
    parser.add_argument("--keep", action="store_true", help="leave the folder of a failed run")
    options = parser.parse_args()
    began, seed, failed = time.monotonic(), options.seed, []
    while True:
        run = ChaosRun(
            seed=seed,
            place=options.place,
            nodes=options.nodes,
            min_nodes=options.min_nodes,
            bursts=options.bursts,
            ttl=options.ttl,
            doorbell=not options.no_doorbell,
            handlers=options.handlers,
        )
        result = run_chaos(run, say=lambda text: print(f"    {text}", flush=True), keep=options.keep)
        print(result.summary(), flush=True)
        if result.complaints:
            failed.append(seed)
            print(result.report, flush=True)
        seed += 1
        if options.minutes is None or time.monotonic() - began > 60 * options.minutes:
            break
    if failed:
        print(f"failed: seeds {failed}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
