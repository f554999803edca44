"""Workers as they are really started, and how their ends are learnt."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.agent_stand_in import run_stand_in

_LOOK_AT_YOURSELF = r"""
look = '''
import json, resource
def status(key):
    return [l for l in open("/proc/self/status") if l.startswith(key)][0].split()[1]
import ctypes
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death))
umask = os.umask(0)
print(json.dumps(dict(
    sid=os.getsid(0), pgid=os.getpgid(0), pid=os.getpid(), umask=umask,
    core=resource.getrlimit(resource.RLIMIT_CORE)[0], files=resource.getrlimit(resource.RLIMIT_NOFILE),
    ignored=int(status("SigIgn"), 16), blocked=int(status("SigBlk"), 16), death=death.value,
    fds=sorted(int(n) for n in os.listdir("/proc/self/fd")), stdin=os.readlink("/proc/self/fd/0"),
    cwd=os.getcwd(), given=os.environ.get("GIVEN"),
)), flush=True)
'''
"""


def test_worker_gets_the_users_settings_and_nothing_of_the_agents(tmp_path: Path) -> None:
    code = (
        _LOOK_AT_YOURSELF
        + """
os.dup2(os.open("/dev/null", os.O_RDONLY), 50, inheritable=True)  # as srun may hand one down
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
worker = start(look, cwd=sys.argv[1] if len(sys.argv) > 1 else os.environ["WHERE"], GIVEN="a b=ü\\n$x")
seen = json.loads(read_line(worker.stdout_fd))
own = dict(umask=os.umask(0o77), core=resource.getrlimit(resource.RLIMIT_CORE)[0], sid=os.getsid(0),
           files=resource.getrlimit(resource.RLIMIT_NOFILE),
           ignored=[s.name for s in signal.valid_signals() if isinstance(s, signal.Signals) and
                    signal.getsignal(s) is signal.SIG_IGN],
           inherited=inherited.umask)
report(seen=seen, own=own, worker=worker.pid, subreaper=inherited.subreaper)
"""
    )
    script = "trap '' USR2; umask 027; ulimit -H -c unlimited && ulimit -S -c 12345; ulimit -S -n 200; exec \"$@\""
    facts = run_stand_in(code, prefix=["bash", "-c", script, "bash"], env={"WHERE": str(tmp_path)})
    seen, own = facts["seen"], facts["own"]
    assert "SIGUSR2" in own["ignored"], "the rig must hand down an ignored USR2 for this test to mean anything"
    assert own["umask"] == 0o077
    assert own["core"] == 0
    assert facts["subreaper"]
    assert seen["sid"] == seen["pgid"] == seen["pid"] == facts["worker"] != own["sid"]
    assert seen["umask"] == 0o027
    assert seen["core"] == 12345 * 1024
    assert own["files"][0] == own["files"][1] > 200
    assert seen["files"] == [200, own["files"][1]]
    # Python itself ignores SIGPIPE and SIGXFSZ, as every Python program does.
    assert seen["ignored"] & ~((1 << 12) | (1 << 24)) == 0
    assert seen["blocked"] == 0
    assert seen["death"] == 9
    assert seen["fds"] == [0, 1, 2, 3], "3 is the listing itself"
    assert seen["stdin"] == "/dev/null"
    assert seen["cwd"] == str(tmp_path)
    assert seen["given"] == "a b=ü\n$x"


def test_exit_codes_signals_and_core_dumps(tmp_path: Path) -> None:
    code = """
    def end(code, cwd="/"):
        worker = start(code, cwd=cwd)
        select.select([worker.pidfd], [], [], 20)
        first = until(worker.poll)
        assert worker.poll() is first
        assert tree.look_at(worker.pid).state == "Z", "the zombie keeps the pid until it is released"
        assert worker.release() == first and tree.look_at(worker.pid) is None
        return first.exitcode, first.core_dumped
    where = os.environ["WHERE"]
    plain = [end("sys.exit(3)"), end("pass"), end("os.kill(os.getpid(), 9)"), end("os.abort()", where)]
    inherited = spawn.Inherited(umask=0o22, core_limit=(1 << 30, resource.RLIM_INFINITY), subreaper=True)
    report(plain=plain, dumped=end("os.abort()", where), files=os.listdir(where))
    """
    script = 'ulimit -c 0 -S; exec "$@"'
    facts = run_stand_in(code, prefix=["bash", "-c", script, "bash"], env={"WHERE": str(tmp_path)})
    assert facts["plain"] == [[3, False], [0, False], [-9, False], [-6, False]]
    if Path("/proc/sys/kernel/core_pattern").read_text().strip() in ("core", "core.%p"):
        assert facts["dumped"] == [-6, True]
        assert facts["files"]


@pytest.mark.parametrize(
    ("argv", "cwd", "words"),
    [
        (["no-such-command-here"], "{tmp}", ["no-such-command-here", "PATH"]),
        (["./missing.py"], "{tmp}", ["./missing.py", "no such file", "{tmp}"]),
        (["{tmp}/plain.txt"], "{tmp}", ["plain.txt", "chmod +x"]),
        (["{tmp}/bad_interpreter"], "{tmp}", ["bad_interpreter", "interpreter"]),
        (["{tmp}/no_shebang"], "{tmp}", ["no_shebang", "not a program"]),
        (["true"], "{tmp}/gone", ["working directory", "{tmp}/gone"]),
        (["true", "LONG"], "{tmp}", ["true", "longer"]),
    ],
)
def test_command_that_cannot_start_is_named(tmp_path: Path, argv: list[str], cwd: str, words: list[str]) -> None:
    (tmp_path / "plain.txt").write_text("#!/bin/sh\n")
    for name, text in (("bad_interpreter", "#!/no/such/interpreter\n"), ("no_shebang", "echo hello\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    code = f"""
    before = sorted(os.listdir("/proc/self/fd"))
    argv = [a.replace("LONG", "x" * 300_000) for a in {[a.format(tmp=tmp_path) for a in argv]!r}]
    try:
        spawn.start_worker(argv=argv, env=dict(os.environ),
                           cwd={cwd.format(tmp=tmp_path)!r}, inherited=inherited, clock=clock)
    except spawn.WorkerStartError as error:
        report(text=str(error)[:1000], errno=error.errno, children=tree.children(os.getpid()),
               leaked=sorted(os.listdir("/proc/self/fd")) != before)
    """
    facts = run_stand_in(code)
    for word in words:
        assert word.format(tmp=tmp_path) in facts["text"]
    assert "\n" not in facts["text"]
    assert facts["errno"]
    assert facts["children"] == []
    assert not facts["leaked"]


def test_running_out_of_descriptors_is_an_error_and_leaks_none() -> None:
    facts = run_stand_in(
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
        workers = []
        try:
            while True:
                workers.append(start("time.sleep(600)"))
        except spawn.WorkerStartError as error:
            text = str(error)
        held = len(os.listdir("/proc/self/fd")) - 1
        result = stop_now(workers, clock=clock)
        report(text=text, workers=len(workers), held=held, left=len(result.left), children=tree.children(os.getpid()),
               after=len(os.listdir("/proc/self/fd")) - 1)
        """
    )
    assert "open files: an agent may have 30 (ulimit -Hn)" in facts["text"]
    assert facts["workers"] >= 7
    assert facts["held"] == 4 + 3 * facts["workers"], "the failed start gave everything back (one is the spare one)"
    assert facts["after"] == 4
    assert facts["left"] == 0
    assert facts["children"] == []


def test_who_has_no_descriptor_left_still_sees_and_ends_all() -> None:
    """A look into /proc that fails for want of a descriptor must not read as "nobody is there"."""
    facts = run_stand_in(
        """
        from hpc_elastic.workers.linux import SPARE
        workers = [start(DAEMON) for _ in range(2)]
        daemons = [int(read_line(worker.stdout_fd)) for worker in workers]
        until(lambda: len(tree.children(os.getpid())) == 4)  # a daemon may print before its parent has ended
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        hoard = []
        def take_all():
            try:
                while True:
                    hoard.append(os.dup(0))
            except OSError:
                pass
        take_all()
        seen = len(tree.children(os.getpid())), len(tree.descendants(os.getpid()))
        os.close(SPARE._fd); SPARE._fd = -1
        take_all()
        try:
            blind = str(tree.children(os.getpid()))
        except OSError as error:
            blind = error.strerror
        os.close(hoard.pop())
        SPARE.hold()
        result = stop_now(workers, clock=clock)
        report(seen=seen, blind=blind, left=len(result.left), killed=result.killed,
               alive=[is_alive(pid) for pid in daemons])
        """
    )
    assert facts["seen"] == [4, 6], "with what is ended and not waited for"
    assert facts["blind"] == "Too many open files"
    assert facts["left"] == 0
    assert facts["killed"] >= 4
    assert facts["alive"] == [False, False]


def test_worker_is_refused_outside_the_main_thread() -> None:
    facts = run_stand_in(
        """
        seen = []
        def attempt():
            try:
                start("pass")
            except RuntimeError as error:
                seen.append(str(error))
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        report(seen=seen)
        """
    )
    assert "main thread" in facts["seen"][0]


def test_threads_of_the_agent_don_t_disturb_a_start() -> None:
    facts = run_stand_in(
        """
        done = threading.Event()
        def busy():
            while not done.is_set():
                os.stat("/"); bytearray(100_000); json.dumps({"a": [1] * 50})
        threads = [threading.Thread(target=busy) for _ in range(4)]
        for thread in threads:
            thread.start()
        codes = []
        for _ in range(20):
            worker = start("sys.exit(7)")
            codes.append(until(worker.poll).exitcode)
            worker.release()
        done.set()
        report(codes=codes)
        """
    )
    assert facts["codes"] == [7] * 20


def test_orphans_are_reaped_and_no_status_is_stolen() -> None:
    facts = run_stand_in(
        """
        helper = subprocess.Popen(["sh", "-c", "exit 5"])
        store_host = subprocess.Popen(["sh", "-c", "exit 6"], start_new_session=True)
        worker = start("if os.fork() == 0: os.setsid(); print(os.getpid(), flush=True); time.sleep(0.2); os._exit(0)")
        orphan = int(read_line(worker.stdout_fd))
        until(lambda: worker.poll())
        until(lambda: tree.look_at(orphan).state == "Z" and tree.look_at(orphan).ppid == os.getpid())
        until(lambda: all(tree.look_at(p.pid).state == "Z" for p in (helper, store_host)))
        reaped = spawn.reap_orphans({worker.pid, store_host.pid})
        report(right=reaped == [orphan], again=spawn.reap_orphans({worker.pid, store_host.pid}),
               helper=helper.wait(), store_host=store_host.wait(), worker=worker.release().exitcode)
        """
    )
    assert facts == {"right": True, "again": [], "helper": 5, "store_host": 6, "worker": 0}


def test_status_taken_by_somebody_else_is_no_success() -> None:
    facts = run_stand_in(
        """
        worker = start("pass")
        os.waitpid(worker.pid, 0)
        status = worker.poll()
        worker.release()
        report(lost=status.lost, exitcode=status.exitcode)
        """
    )
    assert facts == {"lost": True, "exitcode": 255}


def test_200_starts_and_stops_leave_nothing() -> None:
    facts = run_stand_in(
        """
        def count():
            status = open("/proc/self/status").read()
            return dict(fds=len(os.listdir("/proc/self/fd")), threads=threading.active_count(),
                        children=len(tree.children(os.getpid())),
                        rss=int(status.partition("VmRSS:")[2].split()[0]))
        def cycle():
            worker = spawn.start_worker(argv=["sleep", "600"], env=dict(os.environ), cwd="/", inherited=inherited,
                                        clock=clock)
            stopper = stop.GroupStopper([worker], grace=10, clock=clock)
            stopper.begin()
            return finish(stopper).exits[worker.pid].exitcode
        for _ in range(10):
            cycle()
        before = count()
        codes = {cycle() for _ in range(200)}
        report(before=before, after=count(), codes=list(codes))
        """
    )
    before, after = facts["before"], facts["after"]
    assert facts["codes"] == [-15]
    assert after["rss"] - before["rss"] < 500
    assert {**after, "rss": 0} == {**before, "rss": 0}


_HEARS = """
import os, signal, subprocess, sys
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.workers.linux import SignalQueue, relay_signal, signals_unblocked

def blocked():
    with signals_unblocked():
        done = subprocess.run(["grep", "SigBlk", "/proc/self/status"], capture_output=True, text=True)
    return int(done.stdout.split()[1], 16)

def next_signal(signals):
    assert wait_readable([signals], 30)
    assert signals.holds(set(signal.Signals)) and wait_readable([signals], 0), "it is there until it is taken"
    (number,) = signals.take()
    return number

signals = SignalQueue([signal.SIGTERM, signal.SIGUSR2])
signals.hear_as(signal.SIGUSR2, ["SIGUSR1"])
print("ready", flush=True)
front = next_signal(signals)
print(front.name, signals.sender(front), flush=True)
child = os.fork()
if child == 0:
    number = next_signal(SignalQueue([signal.SIGTERM]))
    os._exit(0)
relay_signal(child, signal.SIGTERM, sender=signals.sender_pid(front))
print(os.waitpid(child, 0)[1], blocked(), flush=True)
"""


@pytest.mark.parametrize(("sent", "heard"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR2")])
def test_a_signal_is_heard_with_its_sender_and_no_program_inherits_the_mask(sent: signal.Signals, heard: str) -> None:
    with subprocess.Popen([sys.executable, "-c", _HEARS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(sent)
        name = Path("/proc/self/comm").read_text().strip()
        user = pwd.getpwuid(os.geteuid()).pw_name
        assert process.stdout.readline() == f"{heard} from pid {os.getpid()} ({name}, user {user})\n"
        assert process.stdout.readline() == "0 0\n"
