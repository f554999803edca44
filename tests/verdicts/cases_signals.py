"""Signals: crashes of the process's own, and kills from outside."""

from __future__ import annotations

import os
import signal

from tests.rigs.local_run import LocalRun
from tests.verdicts.case import ENVIRON, GLOO, MEET, Case, pid_of

GROUP = "signals"
_PID = 'open(f"pid-{rank}", "w").write(str(os.getpid()))\n'
_PEERS = "for step in range(100_000):\n    dist.all_reduce(torch.ones(2))\n    time.sleep(0.01)\n"
_SLEEP = "time.sleep(60)\n"


def _kill(rank: int, number: signal.Signals) -> Case:
    """A rank that gets a signal from outside, its peers in collectives."""

    def act(run: LocalRun) -> None:
        for other in range(4):
            pid_of(run, other)
        os.kill(pid_of(run, rank), number)

    says = ("KeyboardInterrupt", "SIGINT") if number is signal.SIGINT else (number.name,)
    name = f"{number.name.lower()}-from-outside"
    return Case(name, GROUP, GLOO + _PID + _PEERS, (rank,), says, act=act)


def _own(name: str, rank: int, lines: str, *says: str) -> Case:
    """A rank that ends by a signal of its own making; no torch."""
    body = "".join(f"    {line}\n" for line in lines.splitlines())
    return Case(name, GROUP, f"{ENVIRON}import ctypes, signal\n{MEET}if rank == {rank}:\n{body}{_SLEEP}", (rank,), says)


CASES = (
    _kill(3, signal.SIGKILL),
    _kill(1, signal.SIGTERM),
    _kill(2, signal.SIGINT),
    _kill(0, signal.SIGUSR1),
    Case(
        "null-pointer-among-peers",
        GROUP,
        GLOO
        + """\
import ctypes
if rank == 1:
    ctypes.string_at(0)
"""
        + _PEERS,
        ranks=(1,),
        says=("SIGSEGV", "Segmentation fault"),
    ),
    _own(
        "null-pointer-with-faulthandler",
        2,
        """\
import faulthandler
faulthandler.enable()
def fused_rope():
    ctypes.memset(16, 0, 8)
fused_rope()""",
        "fused_rope",
    ),
    _own(
        "map-past-the-end",
        0,
        """\
import mmap
with open("index.bin", "wb+") as file:
    file.truncate(1 << 16)
    view = mmap.mmap(file.fileno(), 1 << 16)
    file.truncate(0)
    print(view[1 << 15])""",
        "SIGBUS",
        "Bus error",
    ),
    _own("illegal-instruction", 1, "signal.raise_signal(signal.SIGILL)", "SIGILL", "Illegal instruction"),
    _own("silent-abort", 3, "os.abort()", "SIGABRT"),
    _own(
        "interrupt-main",
        2,
        """\
import _thread, threading
def watch():
    print("watchdog: no progress for 2 s at step 31, giving up", file=sys.stderr)
    _thread.interrupt_main()
threading.Timer(0.3, watch).start()
while True:
    time.sleep(0.1)  # a long sleep would go on to its end""",
        "no progress for 2 s at step 31",
    ),
    _own("alarm-without-a-handler", 2, "signal.alarm(1)", "SIGALRM", "Alarm clock"),
    _own(
        "processor-time-used-up",
        1,
        """\
import resource
resource.setrlimit(resource.RLIMIT_CPU, (1, 9))
while True:
    pass""",
        "SIGXCPU",
        "CPU time limit",
    ),
    _own(
        "file-size-limit",
        3,
        """\
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
open("trace.json", "wb").write(b"0" * 9999)""",
        "File too large",
    ),
    _own(
        "broken-pipe-kills",
        1,
        """\
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
reader, writer = os.pipe()
os.close(reader)
os.write(writer, b"frame")""",
        "SIGPIPE",
    ),
    _own(
        "child-kills-its-parent",
        2,
        """\
import subprocess
subprocess.run(["sh", "-c", "echo 'memory guard: rss 91 GB over 90 GB, killing' >&2; kill -9 $PPID"])""",
        "SIGKILL",
        "memory guard: rss 91 GB",
    ),
    _own(
        "faulthandler-timeout",
        3,
        """\
import faulthandler
faulthandler.dump_traceback_later(1, exit=True)
def load_index():
    time.sleep(30)
load_index()""",
        "load_index",
        "Timeout (0:00:01)!",
    ),
)
