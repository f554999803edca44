"""Output of real processes: all of it in the files, what is shown in the job log, and no worker held up."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.agent_stand_in import run_stand_in

_LOGS = """
from hpc_elastic.output import job_log, log_files, pump as logs
from hpc_elastic.run.option_values import Std
WHERE = Path(os.environ["WHERE"])

def rss(key):
    return int(open("/proc/self/status").read().partition(key + ":")[2].split()[0])

class Sink:
    '''A job log whose reader may be stuck.'''
    def __init__(self, reads=True):
        self.read_fd, self.write_fd = os.pipe()
        self.text = bytearray()
        self.go = threading.Event()
        if reads:
            self.go.set()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
    def _read(self):
        self.go.wait()
        while chunk := os.read(self.read_fd, 1 << 20):
            self.text += chunk
    def end(self):
        os.close(self.write_fd)
        self.thread.join(20)
        return self.text.decode("utf-8", "backslashreplace")

sink = Sink(reads="STUCK" not in os.environ)
log = job_log.JobLog(sink.write_fd)
pump = logs.LogPump(host="n01", clock=clock, job_log=log)

def run(code, rank=0, shown=Std.ALL, wait=True, stdout=None):
    worker = start(code)
    folder = WHERE / "round-000" / f"rank-{rank:05d}"
    stdout = stdout or folder / "stdout.log"
    pump.add(rank=rank, worker=worker, stdout=stdout, stderr=folder / "stderr.log", shown=shown)
    if wait:
        until(worker.poll, 60)
        assert pump.drained(worker.pid, 60), "drained"
        worker.release()
    return worker

def finished():
    done = pump.close(10)
    lost = pump.take_losses()
    streams = lost.streams if lost else ()
    losses = [(one.rank, one.stream, one.not_in_file, one.not_in_job_log) for one in streams]
    facts = dict(closed=done, losses=losses, why=lost.reason if lost else "", logged=log.close(10), text=sink.end())
    return dict(facts, stats=dict(
        read=pump.read, file_written=pump.files.written, file_lost=pump.files.lost,
        job_log_written=log.written, job_log_dropped=log.dropped, open_streams=len(pump._streams)))
"""


Play = Callable[..., dict[str, Any]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Run code as an agent whose pump writes below `tmp_path`; what it reported."""
    return lambda code, **environ: run_stand_in(_LOGS + code, env={"WHERE": str(tmp_path), **environ})


def _rank(where: Path, rank: int) -> Path:
    return where / "round-000" / f"rank-{rank:05d}"


def test_lines_carry_host_and_rank_and_files_are_private_and_whole(tmp_path: Path) -> None:
    where = tmp_path / "attempt"
    where.mkdir(mode=0o700)
    facts = run_stand_in(
        _LOGS
        + """
run("print('one'); print('two', file=sys.stderr)", rank=3)
run("print('hidden'); print('shown', file=sys.stderr)", rank=4, shown=Std.ERR)
run("sys.stdout.write('no end')", rank=5)
run("os.write(1, bytes(range(256)))", rank=6, shown=Std.OUT)
run("print('quiet')", rank=7, shown=Std.NONE)
log.write_line("the agent's own")
report(**finished())
""",
        env={"WHERE": str(where)},
        prefix=["sh", "-c", 'umask 000; exec "$@"', "sh"],
    )
    lines = facts["text"].split("\n")
    assert "[n01:3] one" in lines
    assert "[n01:3] two" in lines
    assert "[n01:4] shown" in lines
    assert "[n01:5] no end" in lines
    assert "the agent's own" in lines
    assert "hidden" not in facts["text"]
    assert "quiet" not in facts["text"]
    assert (_rank(where, 3) / "stdout.log").read_text() == "one\n"
    assert (_rank(where, 3) / "stderr.log").read_text() == "two\n"
    assert (_rank(where, 4) / "stdout.log").read_text() == "hidden\n"
    assert (_rank(where, 6) / "stdout.log").read_bytes() == bytes(range(256))
    assert not (_rank(where, 6) / "stderr.log").exists(), "it printed nothing there"
    assert facts["closed"]
    assert facts["logged"]
    for path in where.rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    size = sum(path.stat().st_size for path in where.rglob("*.log"))
    assert facts["stats"]["read"] == facts["stats"]["file_written"] == size
    assert facts["stats"]["file_lost"] == facts["stats"]["job_log_dropped"] == facts["stats"]["open_streams"] == 0


def test_one_gigabyte_without_a_newline_in_bounded_memory(tmp_path: Path, play: Play) -> None:
    facts = play("""
log = job_log.JobLog(os.open("/dev/null", os.O_WRONLY))
pump = logs.LogPump(host="n01", clock=clock, job_log=log)
before = rss("VmHWM")
worker = run("block = bytes([255]) + b'x' * 99_999\\nfor _ in range(10_000): os.write(1, block)")
grown = rss("VmHWM") - before
report(code=worker.exit_status.exitcode, grown=grown, hwm=rss("VmHWM"), **finished())
""")
    log = _rank(tmp_path, 0) / "stdout.log"
    size = log.stat().st_size
    log.unlink()
    assert size == 1_000_000_000
    assert facts["code"] == 0
    assert facts["stats"]["file_lost"] == 0
    assert facts["stats"]["job_log_written"] + facts["stats"]["job_log_dropped"] > 1_000_000_000
    assert facts["grown"] < 12_000, "KiB"
    assert facts["hwm"] < 30_000


def test_stuck_job_log_holds_up_neither_worker_nor_file(tmp_path: Path, play: Play) -> None:
    facts = play(
        """
before = rss("VmHWM")
code = "line = b'y' * 99 + b'\\\\n'\\nfor _ in range(2000): os.write(1, line * 1000)"
began = time.monotonic()
workers = [run(code, rank=0, wait=False), run("print('a traceback', file=sys.stderr)", rank=1)]
until(workers[0].poll, 60)
drained = pump.drained(workers[0].pid, 30)
seconds = time.monotonic() - began
grown = rss("VmHWM") - before
sink.go.set()
facts = finished()
report(drained=drained, grown=grown, seconds=seconds, **facts)
""",
        STUCK="1",
    )
    assert facts["drained"]
    assert facts["seconds"] < 20
    assert (_rank(tmp_path, 0) / "stdout.log").stat().st_size == 200_000_000
    assert facts["grown"] < 14_000, "KiB, for 200 MB that had nowhere to go"
    lines = facts["text"].splitlines()
    assert "[n01:1] a traceback" in lines, "one rank's flood must not cost another's lines"
    notices = [line for line in lines if "bytes dropped: the job log could not keep up" in line]
    assert all(line.startswith("[n01:0] [… ") for line in notices)
    said = sum(int(line.split()[2]) for line in notices)
    assert said == facts["stats"]["job_log_dropped"] > 150_000_000
    shown = sum(line.startswith("[n01:0] yyyy") for line in lines)
    assert shown * 100 + said == 200_000_000, "every byte is shown or counted"
    assert {len(line) for line in lines if line.startswith("[n01:0] yyyy")} == {107}, "no line is cut"


def test_job_log_that_never_recovers_doesn_t_keep_the_agent(tmp_path: Path, play: Play) -> None:
    facts = play(
        """
run("print('z' * 300_000)")
log.write_line("never read")
began = time.monotonic()
closed = pump.close(5)
logged = log.close(0.3)
seconds = time.monotonic() - began
report(closed=closed, logged=logged, seconds=seconds, dropped=log.dropped)
""",
        STUCK="1",
    )
    assert facts["closed"], "the files don't wait for the job log"
    assert not facts["logged"]
    assert facts["seconds"] < 4.5, "the files have 5 s"
    assert facts["dropped"] > 200_000
    assert (_rank(tmp_path, 0) / "stdout.log").stat().st_size == 300_001


def test_job_log_whose_reader_is_gone(play: Play) -> None:
    facts = play("""
broken_r, broken_w = os.pipe()
os.close(broken_r)
broken = job_log.JobLog(broken_w)
for _ in range(3):
    broken.write_line("hello")
closed = broken.close(5)
report(closed=closed, dropped=broken.dropped)
""")
    assert facts == {"closed": False, "dropped": 18}


def test_full_disk_costs_the_worker_nothing_and_is_said_once(play: Play) -> None:
    facts = play("""
worker = run("for i in range(2000): os.write(1, b'0123456789' * 1000)", stdout=Path("/dev/full"), shown=Std.NONE)
report(code=worker.exit_status.exitcode, **finished())
""")
    assert facts["code"] == 0
    assert facts["stats"]["file_lost"] == 20_000_000
    assert facts["text"].splitlines() == [
        "[n01] /dev/full: No space left on device; the workers run on, and what they print is lost until it can be"
        " written again",
        "[n01] 20000000 bytes of the workers' output are not in their files: rank 0 stdout 20000000"
        " (No space left on device)",
    ]
    assert facts["losses"] == [[0, "stdout", 20_000_000, 0]]


def test_disk_that_has_room_again_is_used_again(tmp_path: Path, play: Play) -> None:
    facts = play("""
really_write, full = os.write, threading.Event()
def write(fd, data):
    if full.is_set() and os.readlink(f"/proc/self/fd/{fd}").endswith("stdout.log"):
        raise OSError(28, "No space left on device")
    return really_write(fd, data)
log_files.os = type("Os", (), {**{k: staticmethod(v) if callable(v) else v for k, v in vars(os).items()},
                               "write": staticmethod(write)})
log_files._RETRY_S = 0.0
worker = run("for text in sys.stdin or ():\\n pass\\nprint('first', flush=True); signal.sigwait([signal.SIGUSR1])\\n"
             "print('second', flush=True); signal.sigwait([signal.SIGUSR1]); print('third')"
             .replace("for text", "signal.pthread_sigmask(0, [signal.SIGUSR1])\\nfor text"), wait=False)
file = WHERE / "round-000" / "rank-00000" / "stdout.log"
until(lambda: file.exists() and file.read_text() == "first\\n")
full.set()
os.kill(worker.pid, signal.SIGUSR1)
until(lambda: pump.files.lost == 7)
full.clear()
os.kill(worker.pid, signal.SIGUSR1)
until(worker.poll)
drained = pump.drained(worker.pid, 10)
worker.release()
report(drained=drained, **finished())
""")
    assert facts["drained"]
    assert (_rank(tmp_path, 0) / "stdout.log").read_text() == (
        "first\n\n[… 7 bytes lost here: No space left on device]\nthird\n"
    )
    assert "[n01:0] second" in facts["text"], "the job log shows what the file lacks"


def test_descendant_that_holds_the_pipe(play: Play) -> None:
    facts = play("""
worker = start("print('mine', flush=True)\\nif os.fork() == 0: time.sleep(600)")
pump.add(rank=0, worker=worker, stdout=WHERE / "round-000/rank-00000/stdout.log",
         stderr=WHERE / "round-000/rank-00000/stderr.log", shown=Std.ALL)
until(worker.poll)
before = pump.drained(worker.pid, 0.05)
file = (WHERE / "round-000/rank-00000/stdout.log")
until(lambda: file.exists() and file.read_text() == "mine\\n")
stop_now([worker], clock=clock)
report(before=before, after=pump.drained(worker.pid, 10), unknown=pump.drained(worker.pid, 0), **finished())
""")
    assert not facts["before"]
    assert facts["after"]
    assert facts["unknown"]
    assert facts["closed"]


def test_waiting_partial_lines_and_progress_bars_are_shown(tmp_path: Path, play: Play) -> None:
    facts = play("""
worker = run('''
sys.stdout.write("loading model ...")
sys.stdout.flush()
for step in range(101):
    os.write(2, b"\\\\r\\\\x1b[Kstep %3d%%" % step)
    if step == 50: time.sleep(1.5)
os.write(2, b"\\\\n")
time.sleep(600)
''', wait=False)
until(lambda: b"loading" in sink.text and b"100%" in sink.text)
stop_now([worker], clock=clock)
report(**finished())
""")
    lines = facts["text"].splitlines()
    assert "[n01:0] loading model ..." in lines
    bars = [line for line in lines if "step" in line]
    assert bars[-1] == "[n01:0] step 100%"
    assert "[n01:0] step  50%" in bars
    assert len(bars) <= 4
    assert (_rank(tmp_path, 0) / "stderr.log").read_bytes().count(b"\r") == 101


def test_a_traceback_is_held_until_it_is_known_what_it_is_worth(tmp_path: Path, play: Play) -> None:
    """The agent shows that of a worker that ended; one that was only logged is shown soon, and the rest after it."""
    facts = play("""
logs._HELD_S = 0.3
raises = "print('before', file=sys.stderr); raise ValueError('bad %s')"
shown = run(raises % "batch", rank=1)
dropped = run(raises % "peer", rank=2)
logged = run("import traceback\\ntry: 1 / 0\\nexcept Exception: traceback.print_exc()\\n"
             "print('after', file=sys.stderr); time.sleep(600)", rank=3, wait=False)
until(lambda: b"after" in sink.text)
before = sink.text.decode()
held = pump.take_held(shown.pid)
held.show(held.text)
assert pump.take_held(dropped.pid) and pump.take_held(logged.pid) is None
unasked = run(raises % "end", rank=4)
stop_now([logged], clock=clock)
report(before=before, **finished())
""")
    assert "[n01:1] before\n" in facts["before"]
    assert "batch" not in facts["before"]
    assert "[n01:3] ZeroDivisionError: division by zero\n[n01:3] after\n" in facts["before"]
    assert facts["text"].count("[n01:1] ValueError: bad batch\n") == 1
    assert "bad peer" not in facts["text"]
    assert "bad peer" in (_rank(tmp_path, 2) / "stderr.log").read_text()
    assert "[n01:4] ValueError: bad end\n" in facts["text"], "what no one asked for, at the end"


def test_planted_files_are_not_written_through(tmp_path: Path) -> None:
    folder = _rank(tmp_path / "attempt", 0)
    (tmp_path / "attempt").mkdir(mode=0o700)
    folder.parent.mkdir(mode=0o700)
    folder.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "stdout.log").symlink_to(victim)
    os.mkfifo(folder / "stderr.log")
    facts = run_stand_in(
        _LOGS
        + """
worker = run("print('one'); print('two', file=sys.stderr)")
report(code=worker.exit_status.exitcode, **finished())
""",
        env={"WHERE": str(tmp_path / "attempt")},
    )
    assert facts["code"] == 0
    assert facts["stats"]["file_lost"] == 8
    assert victim.read_text() == "precious"


def test_rounds_leave_no_descriptor_and_a_sleeping_pump_does_nothing(play: Play) -> None:
    facts = play("""
def one(rank):
    run("print('x')", rank=rank)
    return len(os.listdir("/proc/self/fd")), threading.active_count()
def switches():
    return sum(int(open(f"/proc/self/task/{t}/status").read().partition("voluntary_ctxt_switches:")[2].split()[0])
               for t in os.listdir("/proc/self/task") if int(t) != os.getpid())
one(0)
first, *_, last = [one(rank % 5) for rank in range(30)]
worker = run("print('x', flush=True); time.sleep(600)", wait=False)
until(lambda: pump.read == 64)
for _ in range(10):  # until what was there to do is done: a second comes that is silent
    before = switches()
    time.sleep(1)
    idle = switches() - before
    if idle <= 2:
        break
stop_now([worker], clock=clock)
facts = finished()
report(first=first, last=last, idle=idle, after=threading.active_count(), outputs=len(pump._outputs),
       sources=len(log._sources))
""")
    assert facts["first"] == facts["last"]
    assert facts["idle"] <= 2
    assert facts["after"] == 1
    assert facts["outputs"] == 0
    assert facts["sources"] == 1, "the agent's own"
