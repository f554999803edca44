"""Take the figures of docs/benchmarks.md, ours and torchrun's, on this machine.

::

    python -m tests.bench.run                   all but goodput, some fifteen minutes
    python -m tests.bench.run --quick           whether it runs at all, some three minutes
    python -m tests.bench.run --parts goodput   40 minutes: only where it is named, or in short with --quick
    python -m tests.bench.run --update-docs     put the tables into docs/benchmarks.md

Prints Markdown. A missed goal is printed, not failed; the exit code is 1 only where a part could not be measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib import import_module

from tests.bench.systems import ROOT, TookTooLong
from tests.bench.table import number_table

DOCUMENT = ROOT / "docs" / "benchmarks.md"
PARTS = {
    "beside_torchrun": "4 nodes × 1 worker",
    "agent": "an agent",
    "heartbeat": "a worker's heartbeat",
    "output": "the output of 8 workers, 30 MB each",
    "checkpoints": "a checkpoint of 4 nodes: straight to the server, and through the nodes",
    "evidence": "CPU for the evidence of",
    "report": "a report, CPU and memory",
    "hangs": "dumps of 1,024 ranks",
    "warm_start": "`--start-method forkserver`",
    "stop_everywhere": "a worker's death → that of the last worker on 7 other nodes",
    "inprocess": "the in-process restart group",
    "scale": "nodes, simulated",
    "goodput": "goodput below the bound, under the same failures",
}
"""Module, which the marks around its table name → the table's heading."""
NEED_TORCH = ("beside_torchrun", "hangs", "warm_start", "inprocess", "goodput")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args(argv)
    code = 0
    for part in options.parts or [part for part in PARTS if options.quick or part != "goodput"]:
        if part in NEED_TORCH and importlib.util.find_spec("torch") is None:
            print(f"{part} needs torch", file=sys.stderr)
            continue
        print(f"… {part}", file=sys.stderr, flush=True)
        where = f"{time.strftime('%Y-%m-%d', time.gmtime())}, {len(os.sched_getaffinity(0))} cores, load "
        where += f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
        try:
            numbers = import_module(f"tests.bench.{part}").measure(quick=options.quick)
        except (AssertionError, TookTooLong) as error:  # what should have happened did not
            print(f"trouble: {part}: {error}", file=sys.stderr)
            code = 1
            continue
        text = f"{where}\n\n{number_table(PARTS[part], numbers)}" if numbers else ""
        print(text)
        if options.update_docs and text:
            _update(part, text)
    return code


def _update(part: str, text: str) -> None:
    begin, end = f"<!-- bench {part}: begin -->", f"<!-- bench {part}: end -->"
    head, has_begin, rest = DOCUMENT.read_text().partition(begin)
    _, has_end, tail = rest.partition(end)
    if not has_begin or not has_end:  # the scale of the rendezvous is kept as it was measured, beside a comparison
        return
    DOCUMENT.write_text(f"{head}{begin}\n{text}{end}{tail}")


if __name__ == "__main__":
    sys.exit(main())
