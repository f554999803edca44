"""What is printed around an exception: quotes, what was logged before, noise after it; signals of the process' own."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, TORCH, Case

GROUP = "printed around it"
_LOG = "import logging\nlogging.basicConfig()\n"
_SLEEP = "time.sleep(60)\n"


def _logged(name: str, hidden: str, end: str, *says: str) -> Case:
    """Rank 1 logs what `hidden` raises, and ends otherwise."""
    script = (
        f"{ENVIRON}{_LOG}{MEET}def work():\n    {hidden}\ndef main():\n    done = False\n    try:\n        work()\n"
        f'    except Exception:\n        logging.exception("work")\n    {end}\nif rank == 1:\n    main()\n{_SLEEP}'
    )
    return Case(name, GROUP, script, ranks=(1,), says=says)


def _signalled(name: str, number: str, said: str, *, not_says: tuple[str, ...] = ()) -> Case:
    """A thread of rank 2 says why, and sends its process a signal."""
    script = (
        f"{ENVIRON}import signal, threading\n{MEET}def guard():\n    time.sleep(0.5)\n"
        f"    print({said!r}, file=sys.stderr, flush=True)\n    os.kill(os.getpid(), signal.{number})\n"
        f"if rank == 2:\n    threading.Thread(target=guard, daemon=True).start()\n{_SLEEP}"
    )
    return Case(name, GROUP, script, ranks=(2,), says=(said,), not_says=not_says)


def _noise(name: str, noise: str) -> Case:
    """Rank 3 prints much at its exit, and crashes there."""
    script = (
        f"{ENVIRON}import atexit\n{MEET}def bye():\n    for n in range(80):\n        print({noise}, file=sys.stderr)\n"
        '    print("Aborted in shut_down", file=sys.stderr, flush=True)\n    os.abort()\n'
        f'if rank == 3:\n    atexit.register(bye)\n    raise KeyError("feature_17")\n{_SLEEP}'
    )
    return Case(name, GROUP, script, ranks=(3,), says=("KeyError: 'feature_17'",))


CASES = (
    Case(
        "spawned-without-a-group-in-the-parent",
        GROUP,
        TORCH
        + """\
import torch.multiprocessing as mp
def main_worker(index):
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    dist.barrier()
    if rank == 1:
        raise ValueError("shard 17 has no labels")
    dist.all_reduce(torch.ones(4))
if __name__ == "__main__":
    mp.spawn(main_worker, nprocs=1)
""",
        ranks=(1,),
        says=("shard 17 has no labels",),
    ),
    _logged(
        "index-error-then-giving-up", "return [1][7]", 'raise RuntimeError("giving up")', "list index out of range"
    ),
    _logged(
        "out-of-memory-then-a-bare-assertion",
        'raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")',
        "assert done",
        "CUDA out of memory",
    ),
    _noise("table-before-an-abort-at-exit", 'f"layer.{n}      {n * 7} ms"'),
    _noise("logs-before-an-abort-at-exit", 'f"[W1123 04:37:58.{n:03d} socket.cpp:{n}] close"'),
    _signalled("own-sigterm", "SIGTERM", "the feature store is inconsistent, ending rank 2", not_says=("Slurm",)),
    Case(
        "receives-from-a-rank-that-sleeps",
        GROUP,
        GLOO
        + """\
steps = dist.new_group(timeout=timedelta(seconds=15))
dist.barrier(steps)
if rank == 0:
    dist.recv(torch.ones(1), src=3, group=steps)
elif rank == 3:
    time.sleep(100)
else:
    dist.barrier(steps)
""",
        ranks=(3,),
        unknown_is_right=True,
    ),
    Case(
        "handled-by-all-ranks-then-one-hangs",
        GROUP,
        GLOO
        + """\
import traceback
try:
    import no_such_kernels
except ImportError:
    traceback.print_exc()
for step in range(3):
    dist.all_reduce(torch.ones(2))
if rank == 2:
    time.sleep(100)
dist.all_reduce(torch.ones(2))
""",
        ranks=(2,),
        options=("--hangs", "act:8"),
        unknown_is_right=True,
        not_says=("no_such_kernels",),
    ),
    Case(
        "one-rank-alone-in-a-collective",
        GROUP,
        GLOO
        + """\
if rank == 1:
    dist.all_reduce(torch.ones(2))
time.sleep(100)
""",
        ranks=(1,),
        options=("--hangs", "act:8"),
        unknown_is_right=True,
    ),
)
