"""Modules that a fork must not share with the others, and modules that may be: a worker sees what a fresh one sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.start_methods import Starter, finish
from tests.rigs.waiting import until

_C_THREAD = """
import ctypes
libc = ctypes.CDLL(None)
thread = ctypes.c_ulong()
libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.pause, ctypes.c_void_p), None)
"""
_DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(5)
    os._exit(0)
os.wait()
"""

UNFIT = {
    "threads": ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "a thread"),
    "listens": ("import socket\nLISTENER = socket.socket()", "opens a socket"),
    "keeps_a_file": ("FILE = open('/dev/zero')", "opens /dev/zero"),
    "begins_a_process": ("import subprocess\nCHILD = subprocess.Popen(['sleep', '60'])", "starts a process"),
    "asks_for_a_rank": ("from os import environ\nIS_SET = 'LOCAL_RANK' in environ", "reads LOCAL_RANK"),
    "crashes": ("import os\nos.kill(os.getpid(), 11)", "ended with SIGSEGV while it imported crashes"),
    "is_killed": ("import os\nos.kill(os.getpid(), 9)", "ended with SIGKILL while it imported is_killed"),
    "hangs": ("import time\ntime.sleep(60)", "the import of hangs has taken 3 s"),
    "raises": ("raise ValueError('no')", "its import fails: ValueError: no"),
    "exits": ("import sys\nsys.exit(1)", "its import fails: SystemExit: 1"),
    "lacks": ("import no_such_module", "its import fails: ModuleNotFoundError: No module named 'no_such_module'"),
    "leaves": ("import os\nos._exit(0)", "ended with exit code 0 while it imported leaves"),
    "getenv": ("import os\nRANK = os.getenv('LOCAL_RANK')", "it reads LOCAL_RANK"),
    "getenv_with_default": ("from os import getenv\nRANK = int(getenv('RANK', 0))", "it reads RANK"),
    "bytes": ("import os\nRANK = os.environb.get(b'RANK')", "it reads RANK"),
    "copies": ("import os\nENV = dict(os.environ)\ndef rank():\n    return ENV['RANK']", "keeps a copy of the environ"),
    "copies_deep": (
        "import os\nclass A:\n    def __init__(self):\n        self.env = {'all': [os.environ.copy()]}\nS = A()",
        "it keeps a copy of the environment",
    ),
    "items": ("import os\nENV = {**os.environ}", "it keeps a copy of the environment"),
    "cached": (
        "import functools, os\n@functools.lru_cache\ndef rank():\n    return os.environ.get('RANK')\nrank()",
        "it reads RANK",
    ),
    "sets": ("import os\nos.environ['RANK'] = '0'", "it sets RANK"),
    "defaults": ("import os\nos.environ.setdefault('LOCAL_RANK', '0')", "reads LOCAL_RANK|sets LOCAL_RANK"),
    "removes": ("import os\nos.environ.pop('RANK', None)", "it reads RANK"),
    "replaces": ("import os\nos.environ = dict(os.environ)", "it replaces os.environ"),
    "c_thread": (_C_THREAD, "it starts a thread"),
    "leaks_a_pipe": ("import os\nENDS = os.pipe()", "it opens pipe:"),
    "reopens": ("import os\nos.dup2(os.open('/dev/zero', 0), 0)", "it opens /dev/zero"),
    "closes": ("import os\nos.close(0)", "it closes the descriptor 0"),
    "event_loop": ("import asyncio\nLOOP = asyncio.new_event_loop()", "it opens "),
    "seeds": ("import random\nrandom.seed(7)", "Python's random number generator"),
    "seeds_numpy": ("import numpy\nnumpy.random.seed(7)", "it seeds numpy's"),
    "forks_on": ("import os\nos.fork()", "it starts a process"),
    "forks_and_waits_for_none": ("import os\nif not os.fork():\n    os._exit(0)", "it starts a process"),
    "daemon": (_DAEMON, "it starts a process"),
    "daemonises": (
        "import os\nif os.fork():\n    os._exit(0)\nos.setsid()",
        "ended with exit code 0 while it imported",
    ),
    "executes": (
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'open(\"ran\", \"w\")'])",
        "it executes another program",
    ),
    "executes_by_name": ("import os\nos.execlp('touch', 'touch', 'ran')", "it executes another program"),
    "goes_away": ("import os\nos.chdir('/')", "it changes the working directory"),
    "umask": ("import os\nos.umask(0)", "it changes the umask"),
    "blocks": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})",
        "blocks or unblocks signals",
    ),
    "unblocks": ("import signal\nsignal.pthread_sigmask(signal.SIG_SETMASK, ())", "blocks or unblocks signals"),
    "alarm": ("import signal\nsignal.alarm(600)", "it sets a timer"),
    "timer": ("import signal\nsignal.setitimer(signal.ITIMER_PROF, 600)", "it sets a timer"),
    "tracker": ("from multiprocessing import resource_tracker as t\nt.ensure_running()", "it opens |starts a process"),
    "shared_memory": (
        "from multiprocessing.shared_memory import SharedMemory\nM = SharedMemory(create=True, size=10)",
        "it opens |starts a process",
    ),
    "shared_value": ("import multiprocessing\nV = multiprocessing.Value('i', 0)", "it "),
    "shared_lock": ("import multiprocessing\nL = multiprocessing.Lock()", "it makes a lock that processes share"),
    "shared_map": ("import mmap\nM = mmap.mmap(-1, 4096)", "it maps memory that processes share"),
    "temporary_folder": ("import tempfile\nD = tempfile.TemporaryDirectory()", "it makes a temporary file or folder"),
    "temporary_name": ("import tempfile\nF = tempfile.mkdtemp()", "it makes a temporary file or folder"),
    "pid": ("import os\nMY_PID = os.getpid()", "it asks for the process id"),
    "pid_in_a_name": ("from os import getpid\nLOG = f'/tmp/{getpid()}.log'", "it asks for the process id"),
    "run_id": ("import uuid\nRUN = str(uuid.uuid4())", "it draws random bytes"),
    "secret": ("import secrets\nKEY = secrets.token_hex()", "it draws random bytes"),
}


VARIANTS = {
    *("getenv_with_default", "bytes", "copies_deep", "items", "defaults", "removes", "seeds_numpy", "daemonises"),
    *("forks_and_waits_for_none", "executes_by_name", "unblocks", "timer", "shared_memory", "shared_value"),
    *("temporary_name", "pid_in_a_name", "secret"),
}
"""Seen by the same means as the entry before or after each: in the long tier."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in VARIANTS)) for name in UNFIT])
def test_a_module_whose_import_is_more_than_code_is_left_out(name: str, tmp_path: Path) -> None:
    text, reasons = UNFIT[name]
    (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "good.py").write_text("")
    (tmp_path / "train.py").write_text(f"import sys; print('good' in sys.modules, '{name}' in sys.modules)")
    with Starter(tmp_path, preload=(name, "good"), import_seconds=3.0) as starter:
        starter.ready()
        assert finish(starter.fork(RANK="1")).stdout == "True False\n"
        found = starter.server.preload.left_out[name]
        assert any(reason in found for reason in reasons.split("|")), found
        left = next(one for one in starter.events if one.subject in ("preload_left_out", "fork_server_ended"))
        assert found == left.reason
    assert not (tmp_path / "ran").exists()
    until(lambda: not _sleepers(), "the end of what the import has started")


def _sleepers() -> list[str]:
    """Children of this process that go on."""
    import os

    pid = os.getpid()
    names = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for name in names:
        try:
            os.waitpid(int(name), os.WNOHANG)
        except ChildProcessError:
            continue
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


SHARED = {
    "lazy": "import os\ndef look():\n    return os.environ['RANK'], os.getenv('LOCAL_RANK')",
    "lazy_by_reference": "from os import environ\ndef look():\n    return dict(environ)['RANK'], list(environ)",
    "copies_for_a_child": (
        "import os, subprocess\nsubprocess.run(['true'], env={**os.environ, 'A': '1'})\n"
        "def look():\n    return 'A' in os.environ, '_PRELOADED' in os.environ"
    ),
    "filters": (
        "import os\nMINE = {k: v for k, v in os.environ.items() if k.startswith('MINE')}\ndef look():\n    return MINE"
    ),
    "thread_that_ends": (
        "import threading\nt = threading.Thread(target=int)\nt.start()\nt.join()\n"
        "def look():\n    return threading.active_count(), t.is_alive()"
    ),
    "says_goodbye": "import atexit\natexit.register(print, 'at exit')\ndef look():\n    return 'registered'",
    "finalizer": (
        "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, print, 'finalized')\ndef look():\n    return 1"
    ),
    "handlers": (
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: print('handled'))\n"
        "def look():\n    os.kill(os.getpid(), signal.SIGTERM)\n    return signal.getsignal(signal.SIGINT)"
    ),
    "ignores_children": (
        "import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "def look():\n    return signal.getsignal(signal.SIGCHLD)"
    ),
    "reaps_children": (
        "import os, signal\n"
        "def reap(*_):\n    try:\n        os.waitpid(-1, os.WNOHANG)\n    except ChildProcessError: pass\n"
        "signal.signal(signal.SIGCHLD, reap)\ndef look():\n    return callable(signal.getsignal(signal.SIGCHLD))"
    ),
    "excepthook": (
        "import sys\nsys.excepthook = lambda kind, *_: print('hook', kind.__name__)\n"
        "def look():\n    raise ValueError('x')"
    ),
    "limits": (
        "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (100, 500))\nos.nice(1)\n"
        "def look():\n    return resource.getrlimit(resource.RLIMIT_NOFILE), os.nice(0)"
    ),
    "sets_another_variable": "import os\nos.environ['MINE'] = 'set'\ndef look():\n    return os.environ['MINE']",
    "seeded_of_its_own": (
        "import random, numpy\nR, G = random.Random(7), numpy.random.default_rng(7)\n"
        "def look():\n    return R.random(), float(G.random())"
    ),
    "forks_a_child_that_ends": (
        "import os\npid = os.fork()\nif not pid:\n    os._exit(3)\n_, status = os.waitpid(pid, 0)\ndel pid\n"
        "def look():\n    return status"
    ),
    "pool_that_is_closed": (
        "from concurrent.futures import ThreadPoolExecutor as E\nwith E(2) as e:\n    N = list(e.map(abs, [-1, -2]))\n"
        "def look():\n    with E(2) as e:\n        return N, list(e.map(abs, [-3, -4]))"
    ),
    "rounds_back": "import os\nhere = os.getcwd()\nos.chdir('/')\nos.chdir(here)\ndef look():\n    return os.getcwd()",
}


@pytest.mark.parametrize("name", SHARED)
def test_a_module_that_is_shared_is_as_in_a_fresh_interpreter(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(SHARED[name])
    (tmp_path / "train.py").write_text(
        f"import sys\nwas = '{name}' in sys.modules\nimport {name}\nprint({name}.look())\nprint('loaded', was)"
    )
    with Starter(tmp_path, preload=(name,), environ={"MINE": "given"}) as starter:
        starter.ready()
        assert not starter.server.preload.left_out
        fresh, forked = starter.both(RANK="3", LOCAL_RANK="1")
    assert "loaded True" in forked.stdout or name == "excepthook"
    assert forked.stdout.replace("loaded True", "loaded False") == fresh.stdout
    assert (forked.stderr, forked.status.exitcode) == (fresh.stderr, fresh.status.exitcode)


def test_generators_without_a_seed_differ_between_workers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import random, numpy\nR, G, S = random.Random(), numpy.random.default_rng(), numpy.random.RandomState()\n"
    )
    (tmp_path / "train.py").write_text(
        "import random, secrets, tempfile, uuid, mine, numpy, multiprocessing\n"
        "print(mine.R.random(), mine.G.random(), mine.S.rand(), random.random(), numpy.random.rand(), uuid.uuid4(),\n"
        "      secrets.token_hex(4), next(tempfile._get_candidate_names()), numpy.random.default_rng().random(),\n"
        "      bytes(multiprocessing.current_process().authkey).hex())\n"
    )
    preload = ("mine", "random", "numpy", "tempfile", "multiprocessing.process")
    with Starter(tmp_path, preload=preload) as starter:
        starter.ready()
        assert not starter.server.preload.left_out
        drawn = [finish(starter.fork()).stdout.split() for _ in range(3)]
    assert [len(set(column)) for column in zip(*drawn, strict=True)] == [3] * 10


@pytest.mark.torch
@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.manual_seed(7)",
        pytest.param("import torch\ntorch.set_num_threads(2)", marks=pytest.mark.slow),
    ],
)
def test_a_module_that_seeds_torch_is_left_out(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "train.py").write_text(
        "import sys, torch; was = 'mine' in sys.modules; import mine\n"
        "print(torch.get_num_threads(), torch.rand(1).item() if 'seed' in open('mine.py').read() else 0)\nprint(was)"
    )
    with Starter(tmp_path, preload=("json", "mine")) as starter:
        starter.ready()
        fresh, forked = starter.both()
        left_out = starter.server.preload.left_out
    assert ("it seeds torch's" in left_out.get("mine", "")) == ("seed" in text)
    assert forked.stdout.split()[:2] == fresh.stdout.split()[:2]
