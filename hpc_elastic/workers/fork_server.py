"""The fork server: a Python interpreter that has imported what the workers need, and of which each worker is a fork.

Run by the workers' interpreter, which may lack this package: this file needs the standard library alone. The agent puts
a copy of it as ``sitecustomize.py`` into a node-local folder, and that folder into PYTHONPATH; so it runs inside the
start of an interpreter, before its script, and waits there. A worker is a fork that returns from here: the interpreter
goes on with its start, with the command line, ``__main__``, exit code and tracebacks of a fresh one.

A script must never run in the server's place: the first stage runs ``-u -c pass``, so that an interpreter which leaves
this file out ends at once; the second executes the same interpreter with the workers' command line.

Each worker is forked twice, so that the agent, which reaps orphans, has its pidfd and exact exit status. It waits at
its gate until the agent lets it go: one that the agent has given up ends there.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import importlib
import importlib.util
import json
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING or __name__ != "sitecustomize":
    from hpc_elastic.workers.import_watch import ImportWatch, WatchedEnviron, wait_for
else:  # a copy of it lies beside this one's
    from hpc_elastic_import_watch import ImportWatch, WatchedEnviron, wait_for

CONFIG = "HPC_ELASTIC_FORK_SERVER"
MESSAGE_LIMIT = 200_000
"""Bytes of one message; a socket takes 212992 by default."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_NAME = b"fork-server"
"""Beside its command line, which is the workers'."""
_BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends TERM to every process of a step. Blocked, not ignored: the dispositions stay a fresh start's."""
_WHEN_TORCH_IS_IMPORTED = "hpc_elastic.worker_api.torch_import"
"""Its `start` is called at the end of ``import torch``, and does nothing in the server, which is no worker."""
_NAMES_BYTES = 1 << 20
_FIRST_LOOK_S, _LONGEST_LOOK_S = 1.0, 30.0
_REPARENT_S = 0.0005


class _Recorder:
    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._pid, self._end = memory, os.getpid(), 4

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        line = name.encode("utf-8", "replace") + b"\n"
        if os.getpid() == self._pid and self._end + len(line) <= _NAMES_BYTES:
            self._memory[self._end : self._end + len(line)] = line
            self._end += len(line)
            self._memory[:4] = struct.pack("=I", self._end)


def main(config: dict[str, Any]) -> bool:
    """Serve until the agent has gone. Returns in a worker alone: whether it has a sitecustomize of its own."""
    if config["stage"] == 1:
        _execute(config)
    libc = ctypes.CDLL(None, use_errno=True)
    _end_with_parent(libc, config["agent"])
    with open("/proc/self/comm", "rb") as file:
        config["name"] = file.read().strip()
    libc.prctl(_PR_SET_NAME, _NAME, 0, 0, 0)
    for fd in (1, 2):  # pipes until here, as a worker's are: a file object finds out once whether it can seek
        os.dup2(config["log"], fd)
    os.close(config["log"])
    os.set_inheritable(config["fd"], False)
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    # The first one registered, so the last one called: what is frozen is not finalised at a worker's end, and __main__
    # with all that its objects' __del__ and its generators' finally would do there is.
    atexit.register(gc.unfreeze)
    server = PreloadServer(socket.socket(fileno=config["fd"]), config, libc)
    has_own = _forget_this_file(config, server.watch)
    if not server.run():
        os._exit(0)
    return has_own


def _execute(config: dict[str, Any]) -> NoReturn:
    given = list(getattr(sys, "orig_argv", [config["argv"][0], "-u", "-c", "pass"]))
    if given[-3:] != ["-u", "-c", "pass"]:
        print(f"fork server: started as {given}", file=sys.stderr)
        os._exit(3)
    os.environ[CONFIG] = json.dumps({**config, "stage": 2})
    os.chdir(config["cwd"])
    os.umask(config["umask"])
    for name, limits in config["limits"].items():
        resource.setrlimit(getattr(resource, name), tuple(limits))
    os.execv(sys.executable, given[:-3] + config["argv"][1:])


def _end_with_parent(libc: Any, agent: int) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != agent:
        os._exit(0)


def _forget_this_file(config: dict[str, Any], watch: ImportWatch) -> bool:
    """Leave no trace in the environment and in sys.path, and run the site's own sitecustomize. Returns: it has one."""
    folder = os.path.dirname(os.path.abspath(__file__))
    os.environ.pop(CONFIG, None)
    if config["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = config["pythonpath"]
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    sys.path_importer_cache.pop(folder, None)
    for name in (ImportWatch.__module__, __name__):
        sys.modules.pop(name, None)
    try:
        with watch.during(__name__):
            importlib.import_module(__name__)
    except ImportError as error:
        if error.name != __name__:
            sys.excepthook(*sys.exc_info())
    except Exception:
        sys.excepthook(*sys.exc_info())
    return __name__ in sys.modules


class PreloadServer:
    def __init__(self, control: socket.socket, config: dict[str, Any], libc: Any) -> None:
        self._control = control
        self._config = config
        self._libc = libc
        self._queue: list[str] = []
        self._watched: set[str] = set()
        self._left_out: set[str] = set()
        self._imported: list[str] = []
        self._failed: dict[str, str] = {}
        self._given: set[str] = set()
        """Not learned from a worker, which has tried the same import."""
        self._missing: set[str] = set()
        self._files: dict[str, tuple[int, int] | None] = {}
        self._is_auto = False
        self._roots: list[str] = []
        """Named by the script's top-level imports."""
        self._memory: mmap.mmap | None = None
        self._noted = 0
        self._look, self._due = _FIRST_LOOK_S, 0.0
        self.watch = ImportWatch(self._watched, libc)
        self._is_announced = False

    def run(self) -> bool:
        """Answer the agent, and import between its messages. True: in a worker; False: the agent has gone."""
        self._control.setblocking(False)
        self._send({"is": "hello"})
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            wait = 0.0 if self._queue else None
            if wait is None and self._memory is not None:
                wait = max(0.0, self._due - time.monotonic())
            if poll.poll(None if wait is None else wait * 1000):
                message, fds = self._receive()
                if message is None:
                    return False
                if self._handle(message, fds):
                    return True
            elif self._queue:
                if not self._import_next(self._queue.pop(0)):
                    return False
                if not self._queue:
                    self._settle()
            else:
                self._learn()

    def _receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        fds = array.array("i")
        try:
            raw, ancillary, _, _ = self._control.recvmsg(
                MESSAGE_LIMIT, socket.CMSG_SPACE(4 * fds.itemsize), getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            )
        except OSError:
            return None, []
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return (json.loads(raw), list(fds)) if raw else (None, [])

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the agent has gone, or does not read: the next receive finds out
            self._control.send(json.dumps(message).encode())

    def _handle(self, message: dict[str, Any], fds: list[int]) -> bool:
        if message["do"] == "import":
            self._watched |= set(message.get("watched", ()))
            self._left_out |= set(message.get("left_out", ()))
            self._given |= set(message.get("given", ()))
            self._is_auto = self._is_auto or bool(message.get("auto"))
            self._roots += message.get("roots", ())
            if not self._imported and (why := self.watch.fault(is_thorough=False)):
                self._send({"is": "unfit", "module": "", "why": f"sitecustomize can't be shared: {why}"})
                return False
            self._queue += [name for name in message["modules"] if name not in self._left_out]
            if not self._queue:
                self._settle()
            return False
        why = self._why_not(message)
        if not why:
            is_learning = bool(message.get("learn")) and self._is_auto
            if is_learning:
                self._memory, self._noted = mmap.mmap(-1, _NAMES_BYTES), 4
                self.watch.accept_mappings()
                self._look, self._due = _FIRST_LOOK_S, time.monotonic() + _FIRST_LOOK_S
            try:
                if self._fork(message, fds, is_learning=is_learning):
                    return True
            except OSError as error:
                why = f"fork: {error.strerror}"
        if why:
            _tell(fds[2], {"why": why})
        for fd in fds:
            os.close(fd)
        return False

    def _why_not(self, message: dict[str, Any]) -> str:
        for path, known in self._files.items():
            if _state_of(path) != known:
                self._send({"is": "stale", "path": path})
                return f"{path} has changed since it was imported"
        reads = WatchedEnviron.reads
        for name, value in [*message["set"].items(), *((name, None) for name in message["unset"])]:
            if name in reads and os.environ.get(name) != value:
                return f"{reads[name]} reads {name} when it is imported, which differs for this worker"
        return ""

    def _fork(self, message: dict[str, Any], fds: list[int], *, is_learning: bool) -> bool:
        child = os.fork()
        if child:
            wait_for(child)
            return False
        between = os.getpid()
        try:
            if os.fork():
                os._exit(0)
        except OSError as error:
            _tell(fds[2], {"why": f"fork: {error.strerror}"})
            os._exit(1)
        try:
            self._become_worker(message, fds, between, is_learning=is_learning)
        except BaseException as error:
            _tell(fds[2], {"why": repr(error)})
            os._exit(127)
        return True

    def _become_worker(self, message: dict[str, Any], fds: list[int], between: int, *, is_learning: bool) -> None:
        os.setsid()
        while os.getppid() == between:
            time.sleep(_REPARENT_S)
        _end_with_parent(self._libc, self._config["agent"])
        self._libc.prctl(_PR_SET_NAME, self._config["name"], 0, 0, 0)
        self._control.close()
        stdout, stderr, gate = fds
        stdin = os.open(os.devnull, os.O_RDONLY)  # not the server's, whose flags all workers would share
        for number, fd in enumerate((stdin, stdout, stderr)):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(self._config["cwd"])
        for name in message["unset"]:
            os.environ.pop(name, None)
        os.environ.update(message["set"])
        importlib.invalidate_caches()  # files may be new
        self.watch.renew_seeds()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        with socket.socket(fileno=gate) as channel:
            channel.send(json.dumps({"pid": os.getpid()}).encode())
            if channel.recv(1) != b"g":
                os._exit(0)  # the agent has given this worker up, and maybe started another in its place
        if _WHEN_TORCH_IS_IMPORTED in sys.modules:
            sys.modules[_WHEN_TORCH_IS_IMPORTED].start()
        if is_learning and self._memory is not None:
            sys.meta_path.insert(0, _Recorder(self._memory))

    def _import_next(self, name: str) -> bool:
        if name in sys.modules:
            return True
        self._is_announced = False
        self._send({"is": "importing", "module": name})
        self._import(name)
        is_thorough = name in self._given or not name.startswith("torch.")
        why = self.watch.fault(is_thorough=is_thorough) or self._failed.get(name, "")
        if why == self._failed.get(name) and (name not in self._given or name in self._missing):
            return True  # a worker's own try fails the same way
        if not why:
            return True
        self._send({"is": "unfit", "module": name, "why": why})
        return False

    def _import(self, name: str) -> None:
        # Where a worker looks: beside its script, or in its working directory.
        sys.path.insert(0, self._config["folder"])
        thresholds = gc.get_threshold()
        gc.set_threshold(0)  # an import makes little garbage, and looking for it costs torch's a quarter of its time
        try:
            with self.watch.during(name):
                importlib.import_module(name)
            self._imported.append(name)
        except BaseException as error:
            # A part of it may have been carried out, and would be a second time in a worker: torch's can't be.
            self._failed[name] = f"its import fails: {type(error).__name__}: {error}"[:200]
            if isinstance(error, ModuleNotFoundError) and error.name == name:
                self._missing.add(name)
        finally:
            if gc.get_threshold()[0] == 0:  # else the module has set others
                gc.set_threshold(*thresholds)
            if self._config["folder"] in sys.path:
                sys.path.remove(self._config["folder"])

    def _settle(self) -> None:
        self._files = {path: _state_of(path) for path in _files_to_watch(self._imported)}
        gc.collect()
        gc.freeze()
        self._send(
            {
                "is": "ready",
                "modules": len(sys.modules),
                "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "failed": self._failed,
                "imported": self._imported[:100],
                "reads": WatchedEnviron.reads,
            }
        )

    def _learn(self) -> None:
        assert self._memory is not None
        (end,) = struct.unpack("=I", self._memory[:4])
        is_quiet, self._noted = end == self._noted, end
        if end <= 4 or not is_quiet:
            self._due = time.monotonic() + _FIRST_LOOK_S
            return
        names = self._memory[4:end].decode("utf-8", "replace").splitlines()
        roots = {"torch", *(root for root in self._roots if _is_installed(_place_of(root)))}
        wanted = [name for name in dict.fromkeys(names) if name.partition(".")[0] in roots]
        fresh = [n for n in wanted if n not in sys.modules and n not in self._failed and n not in self._left_out]
        self._look = _FIRST_LOOK_S if fresh else min(_LONGEST_LOOK_S, self._look * 1.5)
        self._due = time.monotonic() + self._look
        if fresh:
            for start in range(0, len(fresh), 1000):
                self._send({"is": "learned", "modules": fresh[start : start + 1000]})
            self._queue += fresh


def _tell(gate: int, message: dict[str, Any]) -> None:
    with suppress(OSError):
        os.write(gate, json.dumps(message).encode())


def _state_of(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _files_to_watch(entries: Iterable[str]) -> list[str]:
    """Each module's file; of an installed library the package's own alone. A user's lie anywhere else, in the
    interpreter's prefix too (``python -m venv .`` in a project, /usr/src in an image).
    """
    standard = os.path.dirname(os.path.realpath(os.__file__)) + os.sep
    tops = {name.partition(".")[0] for name in entries}
    found = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            is_own = not _is_installed(path) and not os.path.realpath(path).startswith(standard)
            if is_own or name in tops:
                found.append(path)
    return found


def _place_of(root: str) -> str:
    if path := getattr(sys.modules.get(root), "__file__", None):
        return str(path)
    try:
        return getattr(importlib.util.find_spec(root), "origin", None) or ""
    except (ImportError, ValueError):
        return ""


def _is_installed(path: str) -> bool:
    return "site-packages" in path or "dist-packages" in path


def _begin() -> None:
    """Runs in an interpreter's start, which goes on after any exception: with the script, too. Raises ImportError in a
    worker that has no sitecustomize: `site` passes over it, and no module is left."""
    try:
        has_own = main(json.loads(os.environ[CONFIG]))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(3)
    if not has_own:
        raise ImportError("nothing but the fork server", name=__name__)


if __name__ == "sitecustomize" and CONFIG in os.environ:
    _begin()
