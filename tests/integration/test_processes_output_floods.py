"""8 workers that print as fast as they can, while what should take it is slow, full, hung or not read.

Rates are held against a plain ``cat`` on the same machine at the same time: how fast it is is not ours to promise.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_processes_logs import _LOGS
from tests.rigs.agent_stand_in import run_stand_in

WORKERS = 8
BYTES = 12_000_000
"""What each prints."""
MEMORY_KIB = 4096 + 2048 + 2 * WORKERS * 64 + 5 * 1024
"""As docs/reference/files.md says, and some for threads, code and what the allocator keeps."""
STUCK_SECONDS = 3.0
"""What patience with a job log that nobody reads may come to: 0.5 s, and a turn of each stream."""

_PRINTS = """
block, left, longest = (BLOCK)[:65536], TOTAL, 0.0
while left > 0:
    began = time.monotonic()
    left -= os.write(1, block[:left])
    longest = max(longest, time.monotonic() - began)
"""
_TELLS = "open(os.environ['WHERE'] + f'/longest-{os.getpid()}', 'w').write(str(longest))"
_LINES = "b'loss 0.123 ' * 9 + b'\\n'"

_FLOOD = """
rank_file = lambda rank: WHERE / "round-000" / f"rank-{rank:05d}" / "stdout.log"
before = rss("VmHWM")
began = time.monotonic()
workers = [run(CODE, rank=rank, wait=False, shown=SHOWN) for rank in range(8)]
for worker in workers:
    until(worker.poll, 100)
seconds = time.monotonic() - began
grown = rss("VmHWM") - before
"""
_END = """
drained = all(pump.drained(worker.pid, 20) for worker in workers)
sink.go.set()
facts = finished()
in_files = [rank_file(rank).stat().st_size for rank in range(8)]
report(codes=[w.exit_status.exitcode for w in workers], seconds=seconds, grown=grown, drained=drained,
       in_files=in_files, **dict(facts, text=facts["text"] if len(facts["text"]) < 1_000_000 else ""))
"""


def _code(block: str, *, tells: bool = True) -> str:
    text = _PRINTS.replace("BLOCK", f"({block}) * 2000").replace("TOTAL", str(BYTES))
    return text + (_TELLS if tells else "")


def _flood(where: Path, block: str, *, before: str = "", end: str = _END, shown: str = "Std.OUT", **env: str) -> Any:
    program = _LOGS + before + _FLOOD.replace("CODE", repr(_code(block))).replace("SHOWN", shown) + end
    return run_stand_in(program, env={"WHERE": str(where), **env})


def _longest(where: Path) -> float:
    """The longest that one print of any worker took, seconds."""
    texts = [path.read_text() for path in where.glob("longest-*")]
    assert len(texts) == WORKERS
    return max(map(float, texts))


@pytest.fixture(scope="module")
def plain() -> float:
    """Seconds that the same workers take with a ``cat`` each."""
    began = time.monotonic()
    code = "import os, time\n" + _code(_LINES, tells=False)
    command = f'{sys.executable} -S -c "$0" | cat > /dev/null'
    started = [subprocess.Popen(["sh", "-c", command, code]) for _ in range(WORKERS)]
    assert [process.wait(100) for process in started] == [0] * WORKERS
    return time.monotonic() - began


@pytest.mark.parametrize("block", [_LINES, "bytes([0xff, 0xc3, 0, 0x1b]) * 25"], ids=["lines", "no text, no line ends"])
def test_all_of_it_is_in_the_files(tmp_path: Path, plain: float, block: str) -> None:
    into_nothing = """
log = job_log.JobLog(os.open("/dev/null", os.O_WRONLY))
pump = logs.LogPump(host="n01", clock=clock, job_log=log)
"""
    facts = _flood(tmp_path, block, before=into_nothing)
    assert facts["codes"] == [0] * WORKERS
    assert facts["in_files"] == [BYTES] * WORKERS
    assert facts["stats"]["file_lost"] == 0
    assert facts["grown"] < MEMORY_KIB
    assert facts["seconds"] < 10 * plain + STUCK_SECONDS
    dropped = facts["stats"]["job_log_dropped"]
    assert sum(loss[3] for loss in facts["losses"]) == dropped, (
        "what the job log could not keep up with is told by rank"
    )


def test_a_disk_that_hangs_holds_workers_up_once_and_not_for_each_print(tmp_path: Path, plain: float) -> None:
    """Full pipes play the files; their writes come back when somebody reads."""
    hung = """
logs.DISK_PATIENCE_S = 1.0
pump = logs.LogPump(host="n01", clock=clock, job_log=log)
really_open = log_files._open_for_append
pipe = os.pipe()
os.set_blocking(pipe[1], False)
try:
    while True:
        os.write(pipe[1], b"x" * 4096)
except BlockingIOError:
    os.set_blocking(pipe[1], True)
log_files._open_for_append = lambda path: os.dup(pipe[1]) if path.name == "stdout.log" else really_open(path)
"""
    # The workers' last words wait behind what hangs: they are read when it answers again.
    end = """
lost_then = pump.files.lost
answers = threading.Thread(target=lambda: all(os.read(pipe[0], 1 << 20) for _ in iter(int, 1)), daemon=True)
answers.start()
drained = all(pump.drained(worker.pid, 20) for worker in workers)
facts = finished()
report(codes=[w.exit_status.exitcode for w in workers], seconds=seconds, grown=grown, drained=drained,
       lost_then=lost_then, **facts)
os._exit(0)
"""
    facts = _flood(tmp_path, _LINES, before=hung, end=end, shown="Std.NONE")
    assert facts["codes"] == [0] * WORKERS
    assert facts["drained"], "it goes on when the disk answers"
    assert facts["grown"] < MEMORY_KIB
    assert facts["lost_then"] > BYTES * WORKERS // 2
    assert facts["seconds"] < 10 * plain + 1.0 + 0.5 + STUCK_SECONDS
    assert _longest(tmp_path) < 1.0 + 0.5 + STUCK_SECONDS + plain
    assert sum(loss[2] for loss in facts["losses"]) == facts["stats"]["file_lost"]
    assert facts["stats"]["file_lost"] + facts["stats"]["file_written"] == facts["stats"]["read"]
    assert {loss[0] for loss in facts["losses"]} == set(range(WORKERS))
    first, last = facts["text"].splitlines()
    assert "the disk hangs; the workers run on" in first
    assert f"{facts['stats']['file_lost']} bytes of the workers' output are not in their files" in last


def test_a_flood_of_eight_leaves_room_for_the_ninth_s_traceback(tmp_path: Path) -> None:
    facts = run_stand_in(
        _LOGS
        + """
floods = [log.source(f"[n01:{rank}] ") for rank in range(8)]
for source in floods * 20:
    log.write(source, b"y" * 65535 + b"\\n")
quiet = log.source("[n01:8] ")
until(lambda: log._pending >= 2 << 20)
had_room = log.write(quiet, b"Traceback (most recent call last):\\n" + b"  File\\n" * 100)
dropped = log.dropped
for _ in range(100):
    log.write(quiet, b"z" * 9999 + b"\\n")
report(had_room=had_room, flooded=dropped, quiet=quiet.dropped, pending=log._pending)
sink.go.set()
os._exit(0)
""",
        env={"WHERE": str(tmp_path), "STUCK": "1"},
    )
    assert facts["had_room"]
    assert facts["flooded"] > 0
    assert facts["quiet"] > 900_000, "the reserve is no way around the bound"
    assert facts["pending"] < (2 << 20) + (256 << 10)
