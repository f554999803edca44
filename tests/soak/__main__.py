"""Minutes of random faults on a real training run on a real Slurm.

::

    python -m tests.soak --minutes 30 --seed 7
    python -m tests.soak --seed 7 --list 40              what it would do
    python -m tests.soak --kinds kill-worker,kill-srun --minutes 5
    python -m tests.soak --minutes 5 --checkpoints 1     checkpoints go through the nodes, with one replica
    python -m tests.soak --minutes 30 --update-docs      and put its table into docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from tests.rigs.slurm_cluster import SlurmCluster, caches_of, missing_prerequisites
from tests.rigs.slurm_cluster.services import slurm_version
from tests.soak.checkpoints import KINDS
from tests.soak.faults import parse_kinds, plan
from tests.soak.soak import EXTRA_LINES, SLURM_CONF, Size, Soak, SoakResult
from tests.soak.table import table, update

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Disturb a real run on a real Slurm.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=5, help="of the rig (default: 5)")
    parser.add_argument("--kinds", help="only these kinds of fault, by their names, with commas between")
    parser.add_argument("--checkpoints", type=int, choices=(0, 1), help="save through the nodes, with so many replicas")
    parser.add_argument("--list", type=int, metavar="N", help="print the first N faults of the seed, and do nothing")
    parser.add_argument("--fs", choices=("plain", "emulated"), default="plain")
    parser.add_argument("--keep", type=Path, help="copy the run's directory into this folder at the end")
    parser.add_argument("--update-docs", action="store_true", help=f"put the table into {PAGE.name}")
    options = parser.parse_args(argv)
    through_nodes = options.checkpoints is not None
    kinds = KINDS if through_nodes and not options.kinds else parse_kinds(options.kinds or "all")
    if options.list:
        print(*islice(plan(options.seed, kinds), options.list), sep="\n")
        return 0
    for reason in missing_prerequisites():
        print(f"the soak can't run here: {reason}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_emulated = options.fs == "emulated" or through_nodes  # whose disk can be full
    fs = caches_of(3.0) if is_emulated else None
    with SlurmCluster(options.nodes, cred_expire=5, settings=SLURM_CONF, extra_lines=EXTRA_LINES, fs=fs) as cluster:
        soak = Soak(
            cluster,
            size=Size(replicas=options.checkpoints),
            say=lambda text: print(text, flush=True),
            keep=options.keep,
        )
        try:
            result = soak.soak(plan(options.seed, kinds), seconds=60 * options.minutes)
        finally:
            if options.keep is not None:
                shutil.copytree(soak.run.root, options.keep / soak.run.root.name, symlinks=True)
    print(f"\n{table(result.injections)}\n\n{summary(result)}")
    for text in result.complaints:
        print(f"WRONG: {text}")
    if options.update_docs:
        slurm = "{}.{:02}".format(*slurm_version())
        head = (
            f"{time.strftime('%Y-%m-%d')}, seed {options.seed}, {options.nodes} nodes on {os.cpu_count()} cores, "
            f"Slurm {slurm}, shared filesystem {options.fs}: {summary(result)}"
        )
        update(PAGE, f"{head}\n\n{table(result.injections)}")
    return 1 if result.complaints else 0


def summary(result: SoakResult) -> str:
    return (
        f"{len(result.injections)} faults in {result.seconds / 60:.1f} minutes, {result.attempts} attempts, "
        f"{result.rounds} rounds, {result.steps} steps; {result.comparison.compared} losses compared, "
        f"{'WRONG' if result.comparison.divergence else 'right'}, "
        f"{len(result.complaints)} things wrong."
    )


if __name__ == "__main__":
    sys.exit(main())
