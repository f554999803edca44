"""Watches what an import does to its process that a worker would not get with a fork, or would share with the others.

A part of the fork server, which runs where this package may be missing: the standard library alone. Each entry of the
preload is imported in `ImportWatch.during`; `ImportWatch.fault` then says why the process can't be forked any more.
What a fork keeps as an import would leave it (signal handlers, atexit, limits, priorities, excepthooks) is no fault.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

_OWN = "HPC_ELASTIC_"
_PR_SET_CHILD_SUBREAPER = 36
_THREADS_END_S = 0.2
_LEAST_RANDOM_SEED = 1 << 32
"""torch 2.13 seeds itself with 64 random bits; a seed that a person gives is smaller."""
_LEAST_ENTROPY_BITS = 64
"""numpy's own entropy has 128 bits; a seed that a person gives has fewer."""
_COPY = "_PRELOADED"


class WatchedEnviron(os._Environ):  # type: ignore[type-arg]  # of the standard library
    """`os.environ` while modules are imported: notes which variables are read or set, by which entry of the preload."""

    reads: ClassVar[dict[str, str]] = {}
    entry: ClassVar[str] = ""
    written: ClassVar[set[str]] = set()
    in_copies: ClassVar[str] = "".join(("of one", " import"))
    """The value of a variable that only an iteration shows: a reference to it is a copy of the environment."""
    _yielded: ClassVar[object] = None

    def __getitem__(self, key: Any) -> Any:
        if key == _COPY:
            return WatchedEnviron.in_copies
        if key != WatchedEnviron._yielded:
            self._note(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        """A copy of all is no reading of each: whether the copy is kept is seen by `in_copies`."""
        try:
            for key in super().__iter__():
                WatchedEnviron._yielded = key
                yield key
            if self is os.environ:
                yield _COPY
        finally:
            WatchedEnviron._yielded = None

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._note(key, is_written=True)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._note(key, is_written=True)

    def _note(self, key: object, *, is_written: bool = False) -> None:
        # Bytes are asked of the text's mapping by subprocess; they are no names there.
        name = os.fsdecode(key) if isinstance(key, bytes) and self is getattr(os, "environb", None) else key
        if not isinstance(name, str) or not self.entry or (name.startswith(_OWN) and _is_asked_by_this_package()):
            return
        self.reads.setdefault(name, self.entry)
        if is_written:
            self.written.add(name)


def _is_asked_by_this_package() -> bool:
    """This package reads it again in a worker."""
    frame: types.FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("hpc_elastic")


class ImportWatch:
    def __init__(self, watched: set[str], libc: Any) -> None:
        """`watched`: variables that differ between workers, or between rounds; may grow."""
        self._watched = watched
        self._libc = libc
        self._getpid = os.getpid
        self._pid = os.getpid()
        self._environ = os.environ
        self._descriptors = _descriptors()
        self._process = _process_state()
        self._random = random.getstate()
        self._shared = _shared_mappings()
        self._copies = sys.getrefcount(WatchedEnviron.in_copies)
        self._scanned: set[str] = set(sys.modules)
        self._noted: list[str] = []
        self._generators: weakref.WeakSet[random.Random] = weakref.WeakSet()
        self._bit_generators: list[Any] = []

    @contextmanager
    def during(self, entry: str) -> Iterator[None]:
        """Import `entry` within. Does not return in a process that the import has forked."""
        environments = [self._environ, os.environb] if os.supports_bytes_environ else [self._environ]
        before, WatchedEnviron.entry = self._environ.__class__, entry
        for each in environments:
            each.__class__ = WatchedEnviron
        undo = [self._replace(*place) for place in self._places()]
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # a daemon that it leaves becomes this process's child
        try:
            yield
        finally:
            if self._getpid() != self._pid:
                os._exit(0)
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            for each_undo in undo:
                each_undo()
            for each in environments:
                each.__class__ = before
            WatchedEnviron.entry = ""

    def _places(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        urandom, sanitize, seed = os.urandom, getattr(tempfile, "_sanitize_params", None), random.Random.seed
        watch = self

        def draw(count: int) -> bytes:
            if watch._is_running and _is_asked_by_the_user():
                watch._noted.append("it draws random bytes, which would be the same in all workers")
            return urandom(count)

        def ask_for_pid() -> int:
            if watch._is_running and _is_asked_by_the_user():
                watch._noted.append("it asks for the process id, which a worker's is not")
            return watch._getpid()

        def name_file(*args: Any) -> Any:
            if watch._is_running:
                watch._noted.append("it makes a temporary file or folder")
            assert sanitize is not None
            return sanitize(*args)

        def seed_one(self: random.Random, a: Any = None, *args: Any, **kwargs: Any) -> None:
            seed(self, a, *args, **kwargs)
            if watch._is_running and not isinstance(self, random.SystemRandom):
                (watch._generators.add if a is None else watch._generators.discard)(self)

        places: list[tuple[Any, str, Callable[..., Any]]] = [
            (os, "urandom", draw),
            (os, "getpid", ask_for_pid),
            (random, "_urandom", draw),
            (random.Random, "seed", seed_one),
            (os, "execv", self._refusing(os.execv)),
            (os, "execve", self._refusing(os.execve)),
        ]
        return [*places, (tempfile, "_sanitize_params", name_file)] if sanitize is not None else places

    @property
    def _is_running(self) -> bool:
        return bool(WatchedEnviron.entry) and self._getpid() == self._pid

    def _refusing(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any) -> Any:
            if self._is_running:
                self._noted.append("it executes another program in this process's place")
                raise ImportError("no other program can be executed while modules are preloaded")
            return execute(*args)

        return refuse

    def _replace(self, where: Any, name: str, new: Callable[..., Any]) -> Callable[[], None]:
        old = getattr(where, name)
        setattr(where, name, new)

        def undo() -> None:
            if getattr(where, name) is new:
                setattr(where, name, old)

        return undo

    def fault(self, *, is_thorough: bool) -> str:
        """Say why this process can't be forked any more; "": it can. `is_thorough`: for shared memory, too, 1 ms."""
        self._look_at_globals()
        if _thread_count() > 1 and not _threads_end_at_fork():
            return "it starts a thread"
        if why := self._look_at_descriptors():
            return why
        if _has_children():
            return "it starts a process"
        if getattr(sys.modules.get("torch.cuda"), "_initialized", False):
            return "it initialises CUDA"
        changed = (f"it {what}" for what, value in _process_state().items() if self._process[what] != value)
        if why := self._look_at_environment() or next(changed, "") or self._look_at_seeds():
            return why
        registry = getattr(sys.modules.get("multiprocessing.util"), "_afterfork_registry", {})
        if any(kind.__name__ == "SemLock" for each in list(registry.values()) for kind in type(each).__mro__):
            return "it makes a lock that processes share"
        if is_thorough and (new := [name for where, name in _shared_mappings().items() if where not in self._shared]):
            return f"it maps memory that processes share: {new[0]}"
        return self._noted[0] if self._noted else ""

    def accept_mappings(self) -> None:
        self._shared = _shared_mappings()

    def _look_at_descriptors(self) -> str:
        found = _descriptors()
        if opened := [target for fd, target in found.items() if self._descriptors.get(fd) != target]:
            what = "a socket" if opened[0].startswith("socket:") else opened[0]
            return f"it opens {what}" + (", and so uses the GPU" if "/nvidia" in opened[0] else "")
        closed = sorted(self._descriptors.keys() - found.keys())
        return f"it closes the descriptor {closed[0]}" if closed else ""

    def _look_at_environment(self) -> str:
        if os.environ is not self._environ:
            return "it replaces os.environ"
        if written := sorted(self._watched & WatchedEnviron.written):
            return f"it sets {', '.join(written)}, which differ between workers"
        if read := sorted(self._watched & WatchedEnviron.reads.keys()):
            return f"it reads {', '.join(read)}, which differ between workers"
        if sys.getrefcount(WatchedEnviron.in_copies) > self._copies:
            gc.collect()
        if sys.getrefcount(WatchedEnviron.in_copies) > self._copies:
            return "it keeps a copy of the environment, which differs between workers"
        return ""

    def _look_at_seeds(self) -> str:
        if random.getstate() != self._random:
            return "it uses or seeds Python's random number generator"
        generator = getattr(getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None), "_bit_generator", None)
        if generator is not None and getattr(generator, "seed_seq", generator) is None:
            return "it seeds numpy's random number generator"
        generator = getattr(sys.modules.get("torch"), "default_generator", None)
        if generator is not None and 0 <= generator.initial_seed() < _LEAST_RANDOM_SEED:
            return "it seeds torch's random number generator"
        return ""

    def _look_at_globals(self) -> None:
        """New modules hold ids of this process alone, or generators with a seed of their own."""
        for name in [name for name in list(sys.modules) if name not in self._scanned]:
            self._scanned.add(name)
            module = sys.modules.get(name)
            for key, value in list(vars(module).items()) if isinstance(module, types.ModuleType) else ():
                kind = type(value)
                home = str(getattr(kind, "__module__", ""))
                if kind is int and value == self._pid and "pid" in key.lower():
                    self._noted.append(f"it keeps the process id, as {name}.{key}")
                elif home == "uuid" and getattr(value, "version", None) == 4:
                    self._noted.append(f"it keeps a random id, as {name}.{key}")
                elif home.startswith("numpy.random") and name != "numpy.random.mtrand":
                    bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
                    entropy = getattr(getattr(bits, "seed_seq", None), "entropy", None)
                    if isinstance(entropy, int) and entropy.bit_length() > _LEAST_ENTROPY_BITS:
                        self._bit_generators.append(bits)

    def renew_seeds(self) -> None:
        """Seed what a fresh interpreter seeds from the system's entropy. `random` does so at a fork by itself."""
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        generator = getattr(sys.modules.get("torch"), "default_generator", None)
        if generator is not None:
            generator.seed()  # the CPU's; CUDA's has a fixed seed
        if "multiprocessing.process" in sys.modules:
            process = sys.modules["multiprocessing.process"]
            process.current_process().authkey = os.urandom(32)
        for own in self._generators:
            own.seed()
        for bits in self._bit_generators:
            bits.state = type(bits)().state


def _process_state() -> dict[str, object]:
    """A change of it would be lost, or come too early; by the words for the change."""
    umask = os.umask(0o077)
    os.umask(umask)
    kinds = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    return {
        "changes the working directory": os.getcwd(),
        "changes the umask": umask,
        "blocks or unblocks signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "sets a timer": [signal.getitimer(kind)[0] > 0 for kind in kinds],
    }


def wait_for(child: int) -> None:
    """Reap `child`; a module may have SIGCHLD ignored, or reap by itself."""
    with suppress(ChildProcessError):
        os.waitpid(child, 0)


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def _threads_end_at_fork() -> bool:
    """A fork's own handlers end all threads but this one, as OpenBLAS' do; the first use starts them again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "multi-threaded, fork may deadlock": the child ends at once
        child = os.fork()
    if child == 0:
        os._exit(0)
    wait_for(child)
    deadline = time.monotonic() + _THREADS_END_S
    while _thread_count() > 1:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)
    return True


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that listed the folder
    return found


def _has_children() -> bool:
    pid = os.getpid()
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return bool(file.read().strip())
    except OSError:
        return False  # a kernel without this file


def _shared_mappings() -> dict[str, str]:
    with open("/proc/self/maps") as file:
        parts = [line.split(maxsplit=5) for line in file if "s " in line]
    return {part[0]: part[5].strip() for part in parts if part[1][1] == "w" and part[1][3] == "s"}


def _is_asked_by_the_user() -> bool:
    """The code that asks, the standard library's aside, is no installed library's."""
    frame: types.FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code.co_name == "getrandbits" and "numpy.random" in sys.modules:
        return False  # numpy's compiled code, which no frame shows: its generators get another seed in a worker
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith("<frozen importlib"):
            return False  # the standard library, when it is imported itself
        if "site-packages" in path or "dist-packages" in path:
            return False
        if not path.startswith(("<frozen", os.path.dirname(os.__file__))):
            return True
        frame = frame.f_back
    return False
