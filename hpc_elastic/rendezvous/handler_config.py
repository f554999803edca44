"""Configuration of a rendezvous handler: where to meet, with how many, for how long to wait; as keys or a URL. And the
place itself, the run's folder in a shared directory, from which earlier epochs are removed.

``<directory>[/<prefix>]/<name of the run>/epoch-000001`` is a store. Another job opens ``epoch-000002`` of a closed id;
an agent that slept may still look at the old one, so it is watched for a while before it is removed.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock, Staleness
from hpc_elastic.base.files import make_private_dir, why_replaceable
from hpc_elastic.errors import UnsafePathError, UsageError
from hpc_elastic.rendezvous.membership import RoundLog
from hpc_elastic.rendezvous.state import RendezvousError, RendezvousStateError, RoundRecord, Status
from hpc_elastic.run.spec import RendezvousSettings, settings_from_conf
from hpc_elastic.store.file_store import FileStore


class HandlerConfig(Struct, frozen=True, kw_only=True):
    """One node's configuration; `directory`, `run_id` and the numbers are the same on every node."""

    directory: str
    """Absolute, on a filesystem that all nodes share, there already."""
    run_id: str
    min_nodes: int
    max_nodes: int
    settings: RendezvousSettings = field(default_factory=RendezvousSettings)
    """Their node counts are not read."""
    prefix: str = ""
    job: str = ""
    """The same for all nodes of one start of the job: Slurm's job and restart number; empty where that is not known.
    Another one begins a new run of an id that is closed."""
    reopen: bool = False
    """A closed id begins a new run here, also for a node that is only late."""
    node: int | None = None
    """This node's place in the scheduler's order, of which no two agents have the same; None: in order of arrival."""
    host: str = "localhost"
    addresses: tuple[str, ...] = ()
    """Addresses by which other nodes reach this one's notifier; empty: files alone."""


def config_from_keys(
    directory: str, run_id: str, *, min_nodes: int, max_nodes: int, conf: Mapping[str, str], source: str = "--rdzv-conf"
) -> HandlerConfig:
    """Check and combine ``key=value`` pairs; `source` is how the user gave them, for messages."""
    if not run_id:
        raise UsageError("the run id is empty: give one that all nodes share, as with --rdzv-id")
    if not os.path.isabs(directory):
        raise UsageError(
            f"rendezvous directory {directory!r}: give an absolute path on a filesystem that all nodes share"
        )
    if not os.path.isdir(directory):
        raise UsageError(
            f"rendezvous directory {directory} is not there: create it on a filesystem that all nodes share"
        )
    if not 1 <= min_nodes <= max_nodes:
        raise UsageError(f"min {min_nodes} and max {max_nodes} nodes: give 1 <= min <= max")
    keys = dict(conf)
    prefix, reopen = keys.pop("prefix", ""), keys.pop("reopen", "off")
    if reopen not in ("on", "off"):
        raise UsageError(f"{source} reopen={reopen}: give on or off")
    try:
        settings = settings_from_conf(keys, RendezvousSettings())
    except UsageError as error:
        raise UsageError(str(error).replace("--rdzv-conf", source)) from None
    return HandlerConfig(
        directory=directory,
        run_id=run_id,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        settings=settings,
        prefix=prefix,
        reopen=reopen == "on",
    )


def on_this_node(config: HandlerConfig, environ: Mapping[str, str], *, address: str = "") -> HandlerConfig:
    """Add what this host and Slurm's environment say: name, addresses, node order, which start of the job this is.

    `address` is the user's, by which other nodes reach this one; empty: found out.
    """
    import socket  # not at every agent's start

    from hpc_elastic.base.host_facts import LOOPBACK, candidate_addresses

    host = socket.gethostname()
    task, job = environ.get("SLURM_PROCID", ""), environ.get("SLURM_JOB_ID", "")
    return replace(
        config,
        host=host,
        addresses=(address,) if address else tuple(candidate_addresses(host)) or (LOOPBACK,),
        node=int(task) if task.isdecimal() and int(task) < 10_000 else None,
        job=f"{job}.{environ.get('SLURM_RESTART_COUNT', '0')}.{environ.get('SLURM_STEP_ID', '')}" if job else "",
    )


def config_from_url(url: str, environ: Mapping[str, str] | None = None) -> HandlerConfig:
    """Read ``fs:///shared/dir/<run id>?min_workers=1&max_workers=3&timeout=600``, and add `on_this_node`.

    The run id is the last component (a slash in it as ``%2F``). Raises UsageError: one line that names the value.
    """
    from urllib.parse import parse_qsl, unquote, urlsplit  # not at every agent's start

    parts = urlsplit(url)
    if parts.scheme != "fs" or parts.netloc or parts.fragment:
        raise UsageError(f"rendezvous URL {url!r}: the form is fs:///shared/dir/<run id>?min_workers=1&max_workers=3")
    path, _, run_id = parts.path.rpartition("/")
    conf = dict(parse_qsl(parts.query, keep_blank_values=True))
    least = _count(conf, "min_workers", "1")
    most = _count(conf, "max_workers", str(least))
    config = config_from_keys(
        unquote(path), unquote(run_id), min_nodes=least, max_nodes=most, conf=conf, source="rendezvous URL"
    )
    return on_this_node(config, os.environ if environ is None else environ)


def _count(conf: dict[str, str], key: str, default: str) -> int:
    text = conf.pop(key, default)
    if not text.isdecimal() or not 0 < int(text) < 10**6:
        raise UsageError(f"rendezvous URL: {key}={text}: give a number of nodes")
    return int(text)


def participant_settings(config: HandlerConfig) -> RendezvousSettings:
    return replace(
        config.settings,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        expected_nodes=config.max_nodes,
        # Members that hang while they end their workers are left behind before those that wait give up.
        timeout=0.8 * config.settings.timeout,
        give_up=False,
    )


logger = logging.getLogger(__name__)

CLOSED_SECONDS = 3600.0
"""Seconds without any change after which a closed epoch is removed."""
ABANDONED_SECONDS = 7200.0
"""The same for one that was never closed: every agent's heartbeat has stopped."""
KEPT_EPOCHS = 3
"""Number of followers after which a closed epoch is waited for no longer than this: jobs may be short."""
OUTLIVED_SECONDS = 60.0
WATCH_SECONDS = 20.0
REMOVALS_PER_SECOND = 50.0

_STORE_FOLDERS = ("node", "hb", "bye", "gone", "place", "end", "round", "kv", "extra", "epoch", "log")
"""A store's folders, in the order in which they go: its log shows for certain what it was."""


def why_remove(*, closed: bool, followers: int, unchanged: float) -> str | None:
    """None: it has to stay. `unchanged`: seconds for which neither its log nor any heartbeat in it has changed."""
    if followers < 1:
        return None
    if closed and unchanged >= CLOSED_SECONDS:
        return "closed"
    if closed and followers >= KEPT_EPOCHS and unchanged >= OUTLIVED_SECONDS:
        return f"closed, and {followers} have followed it"
    return "abandoned" if unchanged >= ABANDONED_SECONDS else None


def remove_epoch(path: str, *, clock: Clock, stop: threading.Event) -> bool:
    """Returns whether all is gone. What is not ours, ``.nfsXXXX`` (a file that a process has open) and so the folders
    that hold them stay."""
    try:
        info = os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENOENT
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        return False
    for folder in _STORE_FOLDERS:
        with suppress(OSError):  # it is missing, or a link
            for _, folders, files, fd in os.fwalk(os.path.join(path, folder), topdown=False):
                for name in (*files, *folders):
                    _remove(name, fd, clock, stop)
            os.rmdir(os.path.join(path, folder))
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in os.listdir(top):
            if name.startswith("."):  # of a process that was killed in a `FileStore.invalidate`
                _remove(name, top, clock, stop)
    finally:
        os.close(top)
    try:
        os.rmdir(path)
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


def _remove(name: str, parent: int, clock: Clock, stop: threading.Event) -> None:
    if stop.is_set() or name.startswith(".nfs"):
        return
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            os.rmdir(name, dir_fd=parent)
        elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            clock.wait(stop, 1 / REMOVALS_PER_SECOND)
            os.unlink(name, dir_fd=parent)
    except OSError:
        pass  # another process was quicker, or it stays for another time


_EPOCH = "epoch-"


def safe_name(text: str) -> str:
    """Any text as one path component, ``jobs_42.`` and its digest: readable, and different for different texts."""
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in text[:48])
    return f"{readable}.{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


class RunFolder:
    """The epochs of one run id. Methods read the filesystem and may raise OSError."""

    def __init__(self, config: HandlerConfig, clock: Clock) -> None:
        self._config = config
        self._prefix = safe_name(config.prefix) if config.prefix else ""
        self._clock = clock

    @property
    def path(self) -> str:
        return os.path.join(self._config.directory, self._prefix, safe_name(self._config.run_id))

    def epoch_path(self, epoch: int) -> str:
        return os.path.join(self.path, f"{_EPOCH}{epoch:06d}")

    def epoch_name(self, epoch: int) -> str:
        """The same on every node, by whatever path each of them sees the directory."""
        return "/".join(part for part in (self._prefix, safe_name(self._config.run_id), f"{_EPOCH}{epoch:06d}") if part)

    def current_epoch(self) -> int:
        """The newest. A closed one stays closed for late nodes: another job, or a node that asks, begins the next."""
        newest = max(self.epochs(), default=0)
        if newest == 0:
            return 1
        record = self.latest(newest)
        if record is None or record.status is not Status.CLOSED:
            return newest
        is_other_job = bool(self._config.job) and self.open(newest).get("epoch/job") != self._config.job
        return newest + 1 if self._config.reopen or is_other_job else newest

    def latest(self, epoch: int) -> RoundRecord | None:
        if epoch not in self.epochs():
            return None
        return RoundLog(self.open(epoch), self._config.run_id).latest()

    def open(self, epoch: int) -> FileStore:
        """The store of `epoch`, created where it is not there. UnsafePathError: another user could replace it."""
        at = Path(self._config.directory)
        try:
            problem = why_replaceable(at, option="--rdzv-endpoint")
        except FileNotFoundError:
            why = f"the rendezvous folder {at} is gone; create it again, or give another one"
            raise RendezvousError(message=f"rendezvous of run {self._config.run_id!r}: {why}") from None
        if problem is not None:
            raise UnsafePathError(f"the rendezvous folder {at} {problem}")
        for part in (self._prefix, safe_name(self._config.run_id)):
            if part:
                at = at / part
                make_private_dir(at)
        return FileStore(Path(self.epoch_path(epoch)), clock=self._clock)

    def enter(self, epoch: int) -> FileStore:
        store = self.open(epoch)
        if self._config.job:
            store.put_if_absent("epoch/job", self._config.job)
        return store

    def state(self, epoch: int) -> tuple[bool, object]:
        """Return whether an epoch is closed, and what changes when something happens in it."""
        # Looked at only: a folder that another process is removing must not be made anew.
        if not os.path.isdir(self.epoch_path(epoch)):
            return False, None
        store = self.open(epoch)
        try:
            record = RoundLog(store, self._config.run_id).latest()
        except RendezvousStateError:
            record = None  # a later program's: it counts as one that was never closed
        beats = {uid: store.version(f"hb/{uid}") for uid in store.list("hb")}
        is_closed = record is not None and record.status is Status.CLOSED
        return is_closed, (record.number if record is not None else 0, beats)

    def epochs(self) -> list[int]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return [int(n[len(_EPOCH) :]) for n in names if n.startswith(_EPOCH) and n[len(_EPOCH) :].isdecimal()]


class EpochSweep:
    """`run` is for a thread of its own, which may wait for a dead mount as long as it likes."""

    def __init__(self, folder: RunFolder, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._ages: Staleness[int] = Staleness(longest_gap=4 * WATCH_SECONDS)
        self._tried: set[int] = set()

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                if not self.step(stop):
                    return
            except OSError as error:
                logger.debug("earlier epochs are left for later: %s", error)
            self._clock.wait(stop, WATCH_SECONDS)

    def step(self, stop: threading.Event) -> bool:
        """Look once, and remove what may go. Returns whether an earlier epoch is left. OSError: a passing fault."""
        epochs = sorted(self._folder.epochs())
        states = {epoch: self._folder.state(epoch) for epoch in epochs[:-1]}
        unchanged = self._ages.observe_all(
            {epoch: state for epoch, (_, state) in states.items()}, self._clock.monotonic()
        )
        for position, epoch in enumerate(epochs[:-1]):
            followers = len(epochs) - 1 - position
            why = why_remove(closed=states[epoch][0], followers=followers, unchanged=unchanged[epoch])
            if why is None or epoch in self._tried:
                continue
            self._tried.add(epoch)  # what is in use now is left to the next user
            path = self._folder.epoch_path(epoch)
            gone = remove_epoch(path, clock=self._clock, stop=stop)
            logger.info("removed %s (%s)%s", path, why, "" if gone else ", but for what is in use")
        return len(set(epochs[:-1]) - self._tried) > 0
