"""How fast the in-process ring restarts a function: from an exception on one rank to the last rank's next start.

::

    python -m tests.bench.inprocess [--ranks 4] [--restarts 20]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.rigs.inprocess_ranks import run_jobs


def measure(*, ranks: int, restarts: int) -> dict[str, float]:
    """Median and worst of the restarts, in seconds; what the largest process grew by after the first tenth, in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        (job,) = run_jobs(Path(folder), f"restart_times:{ranks}:restarts={restarts}:deadline={60 + restarts}")
    assert all(ending.exit_code == 0 for ending in job.ranks), job.output
    each = [max(times) for times in zip(*(result["seconds"] for result in job.results), strict=True)]
    sizes = [result["sizes"] for result in job.results]
    return {
        "median": statistics.median(each),
        "worst": max(each),
        "growth_mib": max(after[0] - before[0] for before, after in sizes),
        "growth_threads": max(after[1] - before[1] for before, after in sizes),
        "growth_descriptors": max(after[2] - before[2] for before, after in sizes),
    }


def described(*, ranks: int, restarts: int) -> str:
    """The same, in one line."""
    found = measure(ranks=ranks, restarts=restarts)
    return (
        f"in-process ring, {ranks} ranks, {restarts} restarts: median {found['median'] * 1000:.0f} ms, "
        f"worst {found['worst'] * 1000:.0f} ms; growth: {found['growth_mib']:.1f} MiB, "
        f"{found['growth_threads']:g} threads, {found['growth_descriptors']:g} descriptors"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--restarts", type=int, default=20)
    options = parser.parse_args()
    print(described(ranks=options.ranks, restarts=options.restarts))


if __name__ == "__main__":
    main()
