"""A worker that is a fork of the fork server sees of itself what a fresh interpreter sees.

What differs is named in docs/how-to/warm-start.md: the modules that are loaded already, the secret of `hash()`, which
all workers of a server share, objects that the garbage collector holds for permanent, and /proc/<pid>/environ.
"""

from __future__ import annotations

import json
import signal
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.rigs.pythons import pythons
from tests.rigs.start_methods import Starter, finish

LOOK = r"""
import ctypes, faulthandler, fcntl, gc, inspect, json, locale, os, resource, signal, subprocess, sys, threading
import time, warnings, __main__
status = dict(line.rstrip("\n").split(":\t", 1) for line in open("/proc/self/status") if ":\t" in line)
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death))
umask = os.umask(0); os.umask(umask)
spec = __main__.__spec__
children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read()
print(json.dumps(dict(
    argv=sys.argv, orig_argv=getattr(sys, "orig_argv", None), path=sys.path, flags=str(sys.flags),
    executable=sys.executable,
    prefix=[sys.prefix, sys.base_prefix, sys.exec_prefix], xoptions=sys._xoptions, warnoptions=sys.warnoptions,
    main=sorted(set(vars(__main__)) - {"status", "death", "umask", "spec", "children"}), name=__name__,
    file=globals().get("__file__"),
    package=__package__, spec=spec and [spec.name, spec.origin], loader=type(__main__.__loader__).__name__,
    doc=__doc__, cached=globals().get("__cached__"),
    frames=[frame.filename for frame in inspect.stack()],
    meta_path=[getattr(one, "__name__", type(one).__name__) for one in sys.meta_path],
    hooks=[sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace()],
    environ={k: v for k, v in os.environ.items()}, raw=os.getenv("RANK"),
    echoed=os.fsdecode(subprocess.run("env | sort | grep -av '^_='", shell=True, stdout=subprocess.PIPE).stdout),
    cwd=os.getcwd(), umask=umask, nice=os.nice(0), affinity=sorted(os.sched_getaffinity(0)),
    limits=[resource.getrlimit(n) for n in range(15)],
    dispositions={s.name: str(signal.getsignal(s)) for s in signal.Signals},
    status={key: status[key] for key in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd", "Threads", "TracerPid",
            "NoNewPrivs", "Seccomp", "Name", "Umask")},
    cmdline=open("/proc/self/cmdline").read(), exe=os.readlink("/proc/self/exe"),
    fds={n: os.path.basename(os.readlink(f"/proc/self/fd/{n}")).split(":")[0] for n in (0, 1, 2)},
    more_fds=[n for n in os.listdir("/proc/self/fd") if int(n) > 3],
    leads=[os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()], parent=os.getppid(), death=death.value,
    threads=[threading.active_count(), threading.current_thread() is threading.main_thread(),
             threading.main_thread().ident == threading.get_ident(), threading.main_thread().native_id == os.getpid()],
    children=children,
    faulthandler=faulthandler.is_enabled(), gc=[gc.isenabled(), gc.get_threshold()],
    streams=[[s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), s.seekable(), s.name, s.mode,
              s.newlines, type(s.buffer).__name__] for s in (sys.stdin, sys.stdout, sys.stderr)],
    same=[sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    encodings=[sys.getfilesystemencoding(), locale.getpreferredencoding()], filters=len(warnings.filters),
    recursion=sys.getrecursionlimit(), switch=sys.getswitchinterval(), timer=signal.getitimer(signal.ITIMER_REAL),
    sites=[name in sys.modules for name in ("sitecustomize", "usercustomize")], opened=os.open(os.devnull, 0),
    flags_of_fds=[(fcntl.fcntl(n, fcntl.F_GETFL), fcntl.fcntl(n, fcntl.F_GETFD)) for n in (0, 1, 2)],
    cpu=time.process_time() < 9,
    bytecode=sys.dont_write_bytecode, interactive=hasattr(sys, "ps1"), read=sys.stdin.read(),
)))
"""


@pytest.mark.parametrize("how", ["script", "relative", "link", "module", "package", "folder", "zip"])
def test_a_fork_sees_what_a_fresh_interpreter_sees(how: str, tmp_path: Path) -> None:
    package = tmp_path / "pkg" / "sub"
    package.mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "near.py").write_text("HERE = 1\n")
    (package / "look.py").write_text("from .near import HERE\n" + LOOK)
    (package / "__main__.py").write_text("from .near import HERE\n" + LOOK)
    (package / "plain.py").write_text("'''said'''\nimport near\n" + LOOK)
    (tmp_path / "link.py").symlink_to(package / "plain.py")
    app = tmp_path / "app"
    app.mkdir()
    (app / "__main__.py").write_text(LOOK)
    if how == "zip":
        import zipfile

        with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
            archive.writestr("__main__.py", LOOK)
    argv = {
        "script": [str(package / "plain.py")],
        "relative": ["pkg/sub/plain.py"],
        "link": ["link.py"],
        "module": ["-m", "pkg.sub.look"],
        "package": ["-m", "pkg.sub"],
        "folder": ["app"],
        "zip": ["app.pyz"],
    }[how]
    arguments = ["--lr", "0.1", "a b", "ünï", "", "line\nbreak", "-u"]
    environ = {"MINE": "x\ny", "PYTHONPATH": f"{tmp_path / 'libs'}:/nowhere"}
    with Starter(tmp_path, [*argv, *arguments], environ=environ) as starter:
        starter.ready()
        fresh, forked = starter.both(RANK="3", WORLD_SIZE="8", MINE="changed")
    assert (forked.status.exitcode, forked.stderr) == (fresh.status.exitcode, fresh.stderr) == (0, "")
    seen, expected = json.loads(forked.stdout), json.loads(fresh.stdout)
    assert seen == expected
    assert expected["environ"]["MINE"] == "changed"


ENDS = {
    "__del__": "class A:\n    def __del__(self):\n        print('deleted', sys.path != [])\na = A()",
    "__del__ in a cycle": "class A:\n    def __del__(self):\n        print('deleted')\na = A(); a.a = a",
    "a generator": "def g():\n    try:\n        yield\n    finally:\n        print('closed')\nx = g(); next(x)",
    "a file that is not closed": "import tempfile; open(tempfile.mkstemp(dir='.')[1], 'w').write('x')",
    "weakref.finalize": "import weakref\nclass A: pass\na = A(); weakref.finalize(a, print, 'finalised')",
    "exits with 256 more": "sys.exit(256 + 7)",
    "exits below 0": "sys.exit(-1)",
    "exits with an object": "sys.exit({'a': 1})",
    "a thread that exits": "import threading; t = threading.Thread(target=sys.exit); t.start(); t.join(); print('on')",
    "a daemon thread": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "output is gone": "os.close(1); print('x')",
    "an alarm": "import signal; signal.alarm(1); signal.pause()",
    "interrupted by a signal": "import time; os.kill(os.getpid(), 2); time.sleep(9)",
    "a breakpoint": "breakpoint()",
    "a note": "e = ValueError('x'); e.args += ('more',); e.__notes__ = ['noted']; raise e",
    "unraisable": "class A:\n    def __del__(self):\n        raise ValueError('del')\na = A(); del a",
    "abort with a thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); os.abort()",
    "runs itself again": "if sys.argv[1:]:\n    print(os.environ['RANK'])\nelse:\n"
    "    os.execv(sys.executable, [sys.executable, '-u', *sys.argv, 'again'])",
    "a Python of its own": "import subprocess\nprint(subprocess.run([sys.executable, '-c',\n"
    "    'import os, sys; print(sys.path, sorted(os.environ))'], capture_output=True, text=True))",
    "a pool of its own": "from concurrent.futures import ProcessPoolExecutor\n"
    "with ProcessPoolExecutor(2) as pool:\n    print(list(pool.map(abs, range(3))))",
    "asyncio": "import asyncio\nasync def main():\n"
    "    p = await asyncio.create_subprocess_exec('echo', 'hi', stdout=-1)\n    print(await p.communicate())\n"
    "asyncio.run(main())",
    "a signal that is waited for": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    "os.kill(os.getpid(), signal.SIGUSR1); print(signal.sigwait([signal.SIGUSR1]))",
    "a name of its own": "open('/proc/self/comm', 'w').write('mine'); print(open('/proc/self/comm').read())",
    "shared memory": "from multiprocessing.shared_memory import SharedMemory\nm = SharedMemory(create=True, size=8)\n"
    "m.buf[0] = 1; print(m.buf[0]); m.close(); m.unlink()",
    "logging": "import logging; logging.basicConfig(level='INFO'); logging.info('said')",
    "standard input is not to be written": "os.write(0, b'x')",
    "returns": "print('out'); sys.stderr.write('err')",
    "exits with a code": "sys.exit(3)",
    "exits with a text": "sys.exit('why')",
    "exits at once": "os._exit(9)",
    "raises": "def f():\n    raise ValueError('ünï')\nf()",
    "raises with a cause": "try:\n    1/0\nexcept Exception as e:\n    raise RuntimeError('x') from e",
    "raises a group of its own hook": "sys.excepthook = lambda *a: print('hook', a[0].__name__); raise KeyError(1)",
    "a hook that fails": "sys.excepthook = lambda *a: 1/0\nraise KeyError(1)",
    "interrupted": "raise KeyboardInterrupt",
    "syntax": "eval('(')",
    "atexit": "import atexit; atexit.register(print, 'last'); print('first'); sys.exit(4)",
    "atexit that fails": "import atexit; atexit.register(lambda: 1/0); print('first')",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "abort": "os.abort()",
    "killed": "os.kill(os.getpid(), 9)",
    "broken pipe": "r, w = os.pipe(); os.close(r); os.write(w, b'x')",
    "stdin": "input()",
    "an import that fails": "import no_such_module",
    "a thread that raises": "from threading import Thread; t = Thread(target=lambda: 1/0); t.start(); t.join()",
    "a thread that goes on": "import threading; threading.Timer(0.1, lambda: print('t')).start()",
    "a child waited for": "import subprocess; print(subprocess.run(['sh', '-c', 'echo child; exit 5']).returncode)",
    "no child but its own": "try:\n    os.waitpid(-1, 0)\nexcept ChildProcessError as e:\n    print(e)",
    "fork of its own": "p = os.fork()\nif not p: os._exit(7)\nprint(os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]))",
    "warnings": "import warnings; warnings.warn('careful'); warnings.warn('old', DeprecationWarning)",
    "recursion": "def f(n):\n    return f(n + 1)\ntry:\n    f(0)\nexcept RecursionError as e:\n    print(e)",
    "resource warning": "open('/dev/null')",
    "stacks": "import faulthandler; faulthandler.dump_traceback(file=sys.stdout)",
    "current stack": "import traceback; traceback.print_stack(file=sys.stdout)",
}
NORMAL = "import os, re, sys\n"
PRELOAD = ("json", "logging", "asyncio", "concurrent.futures.process")
OF_EACH_PYTHON = ("a note", "raises a group of its own hook", "interrupted", "atexit that fails", "segfault", "stacks")
"""Endings that Python itself writes about, whose text and frames differ from one version to another."""


def check_ends(folder: Path, names: Iterable[str], *, python: str = sys.executable, preload: Sequence[str]) -> None:
    """One server for all endings: a script is read when its worker begins."""
    differs = {}
    script = folder / "train.py"
    script.write_text("")
    with Starter(folder, ["train.py"], python=python, preload=preload) as starter:
        starter.ready()
        for name in names:
            script.write_text(NORMAL + ENDS[name] + "\n")
            ends = starter.both(RANK="0")
            fresh, forked = ((end.status.exitcode, _normal(end.stdout), _normal(end.stderr)) for end in ends)
            if forked != fresh:
                differs[name] = (forked, fresh)
    assert differs == {}


def test_a_fork_ends_as_a_fresh_interpreter_does(tmp_path: Path) -> None:
    check_ends(tmp_path, ENDS, preload=PRELOAD)


@pytest.mark.parametrize("names", [OF_EACH_PYTHON, pytest.param(tuple(ENDS), marks=pytest.mark.slow)], ids=len)
def test_every_python_is_started_alike_by_both_methods(tmp_path: Path, names: tuple[str, ...]) -> None:
    """The workers' interpreter need not be the agent's."""
    for python in set(pythons().values()) - {sys.executable}:
        with Starter(tmp_path, script=NORMAL + LOOK + "\n", python=python) as starter:
            starter.ready()
            fresh, forked = starter.both(RANK="0")
            assert json.loads(forked.stdout) == json.loads(fresh.stdout), python
        check_ends(tmp_path, names, python=python, preload=("json",))


def _normal(text: str) -> str:
    import re

    lines = [line for line in text.rstrip().splitlines() if not line.startswith("Extension modules:")]
    return re.sub(r"0x[0-9a-f]+", "0x", "\n".join(lines)).rstrip()


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTHONOPTIMIZE": "2"},
        {"PYTHONUTF8": "1", "LANG": "C"},
        {"PYTHONIOENCODING": "latin-1:replace"},
        {"PYTHONSAFEPATH": "1"},
        {"PYTHONHASHSEED": "7"},
        {"PYTHONTRACEMALLOC": "3", "PYTHONMALLOC": "debug"},
        {"PYTHONINSPECT": "1", "PYTHONBREAKPOINT": "0", "PYTHONFAULTHANDLER": ""},
        {"PYTHONPATH": "", "LC_ALL": "C"},
        {"PYTHONPATH": ":relative:/nowhere:", "EMPTY": "", "ÜN": "ï", "BYTES": "\udcff"},
        {f"VARIABLE_{number}": "y" * 50 for number in range(2000)} | {"BIG": "x" * 100_000},
    ],
    ids=lambda environ: next(iter(environ)),
)
def test_what_the_environment_asks_of_an_interpreter_holds_for_a_fork(environ: dict[str, str], tmp_path: Path) -> None:
    more = "\nprint(hash('a') if 'PYTHONHASHSEED' in os.environ else '', __debug__)\n"
    with Starter(tmp_path, script=LOOK + more, environ=environ) as starter:
        starter.ready()
        fresh, forked = starter.both(RANK="3", LATER="z" * 90_000)
    assert (forked.status.exitcode, forked.stderr) == (fresh.status.exitcode, fresh.stderr) == (0, "")
    (seen, own), (expected, others) = (each.stdout.splitlines() for each in (forked, fresh))
    assert json.loads(seen) == json.loads(expected)
    assert own == others


def test_a_module_that_came_after_the_import_is_found(tmp_path: Path) -> None:
    """Its folder looks as it did, as on a filesystem whose times are coarse or late."""
    import os

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "__init__.py").write_text("import importlib.util; importlib.util.find_spec('mine.late')")
    (tmp_path / "train.py").write_text("import mine.late; print('found')")
    before = os.stat(mine)
    with Starter(tmp_path, preload=("mine",)) as starter:
        starter.ready()
        (mine / "late.py").write_text("")
        os.utime(mine, ns=(before.st_atime_ns, before.st_mtime_ns))
        fresh, forked = starter.both()
    assert fresh.stdout == forked.stdout == "found\n"


def test_a_signal_meets_the_scripts_own_handler(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import signal, sys, time
        def save(number, frame):
            print("saved at", signal.Signals(number).name); sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready")
        time.sleep(60)
        """)
    )
    with Starter(tmp_path) as starter:
        starter.ready()
        for worker in (starter.spawn(), starter.fork()):
            seen = finish(worker, send=signal.SIGTERM, at="ready\n")
            assert (seen.status.exitcode, seen.stdout) == (0, "ready\nsaved at SIGTERM\n")
        (tmp_path / "train.py").write_text("import time; print('ready'); time.sleep(60)")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            ends = [finish(worker, send=number, at="ready\n") for worker in (starter.spawn(), starter.fork())]
            assert ends[0].status.exitcode == ends[1].status.exitcode == -number


def test_multiprocessing_of_its_own_works_by_every_method(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import multiprocessing as mp, os, sys
        def work(n):
            return n * n, os.environ["RANK"]
        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                with mp.get_context(method).Pool(2) as pool:
                    print(method, pool.map(work, [1, 2, 3]), flush=True)
        """)
    )
    with Starter(
        tmp_path, ["train.py"], preload=("json", "multiprocessing.process", "multiprocessing.pool")
    ) as starter:
        starter.ready()
        fresh, forked = starter.both(RANK="5")
    assert forked.stdout == fresh.stdout
    assert forked.stdout.count("(9, '5')") == 3
    assert forked.status.exitcode == 0


def test_the_worker_is_the_agents_child_and_its_imports_are_there(tmp_path: Path) -> None:
    import os

    (tmp_path / "train.py").write_text("import os, sys; print(os.getppid(), 'decimal' in sys.modules)\n")
    with Starter(tmp_path, preload=("decimal",)) as starter:
        starter.ready()
        seen = finish(starter.fork())
        assert Path(f"/proc/{starter.server.pid}/comm").read_text() == "fork-server\n", "a tool counts no worker more"
    assert seen.stdout == f"{os.getpid()} True\n"
    assert sys.flags  # the same interpreter
