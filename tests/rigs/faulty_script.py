"""Runs a training script unchanged, and kills one rank of its first round at a moment that is always the same.

::

    python faulty_script.py RANK NAME COUNT SCRIPT [ARGUMENTS...]

Rank RANK gets a SIGKILL just before it moves a file whose path contains NAME into place for the COUNTth time: the worst
moment, since all of a checkpoint is written and nothing says so yet. No clock is involved. Not imported by tests: it
is what a worker executes, so it stands on nothing but Python.
"""

import os
import runpy
import signal
import sys


def main() -> None:
    rank, name, count, script = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    sys.argv = sys.argv[4:]
    sys.path[0] = os.path.dirname(script)
    moved = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal moved
        if event == "os.rename" and name in os.fsdecode(arguments[1]):  # type: ignore[arg-type]
            moved += 1
            if moved == count:
                os.kill(os.getpid(), signal.SIGKILL)

    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["HPC_ELASTIC_ATTEMPT"] == "0"
    if first and os.environ["RANK"] == rank:
        sys.addaudithook(watch)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
