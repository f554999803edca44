"""The run that was asked for: the contents of run.json, written once by `submit` or `run`, read by everything else.

With it the image that workers run in (the names of the ``--container-*`` options are those of Pyxis; ``--container``
itself is sbatch's own, for OCI bundles); preload.json: the modules that the run's fork servers import; and the numbers
of the run's rendezvous, the same on every node.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.files import Unreadable
from hpc_elastic.errors import UnreadableFileError, UsageError
from hpc_elastic.run.log_pieces import DEFAULT_PIECES, PieceLimit
from hpc_elastic.run.option_values import (
    DEFAULT_LIMITS,
    BadNodeSettings,
    Check,
    CheckpointRoom,
    GrowPolicy,
    MetricsTarget,
    NumaBinding,
    RankRanges,
    RequeueChoice,
    RestartWith,
    SectionTimeouts,
    StartMethod,
    StreamChoice,
    number_of,
)
from hpc_elastic.run.progress import HangSettings, OnSlowRank


class Runtime(str, Enum):
    CHARLIECLOUD = "charliecloud"
    APPTAINER = "apptainer"
    SINGULARITY = "singularity"
    PODMAN = "podman"
    ENROOT = "enroot"
    PYXIS = "pyxis"
    """Part of srun: the agents are inside too."""

    @property
    def program(self) -> str:
        return {Runtime.CHARLIECLOUD: "ch-run", Runtime.PYXIS: "srun"}.get(self, self.value)


class ContainerImage(Struct, frozen=True, kw_only=True):
    runtime: Runtime
    image: str
    """The runtime's notation: a path, a URI, or a name in its store."""

    def __str__(self) -> str:
        return f"{self.runtime.value}:{self.image}"


class ContainerMount(Struct, frozen=True, kw_only=True):
    source: str
    target: str
    read_only: bool = False


class Container(Struct, frozen=True, kw_only=True):
    image: ContainerImage
    mounts: tuple[ContainerMount, ...] = ()
    workdir: str = ""
    """The workers' folder inside; empty: where the run was started."""
    env: tuple[str, ...] = ()
    """Variables that keep the host's value, whatever the image says."""
    args: tuple[str, ...] = ()


def parse_container_image(text: str, option: str) -> ContainerImage:
    name, colon, image = text.partition(":")
    names = [runtime.value for runtime in Runtime]
    if colon and name in names:
        if not image:
            raise UsageError(f"{option} {text}: the image is missing; give {name}:IMAGE")
        return ContainerImage(runtime=Runtime(name), image=image)
    from shutil import which  # agents read run.json, and never come here

    candidates = _runtimes_for(text)
    installed = [runtime for runtime in candidates if which(runtime.program)]
    if len(candidates) == 1 or installed:
        return ContainerImage(runtime=(installed or candidates)[0], image=text)
    programs = " and ".join(runtime.program for runtime in candidates)
    raise UsageError(
        f"{option} {text}: its runtime can't be guessed, {programs} are not in PATH; "
        f"give RUNTIME:{text} with one of {', '.join(names)}"
    )


def _runtimes_for(image: str) -> tuple[Runtime, ...]:
    if image.endswith(".sif") or image.startswith(("docker://", "library://", "oras://", "shub://")):
        return Runtime.APPTAINER, Runtime.SINGULARITY
    if image.endswith((".sqsh", ".squashfs", ".sqfs")):
        return Runtime.ENROOT, Runtime.CHARLIECLOUD
    if image.startswith(("/", ".", "~")):
        return Runtime.CHARLIECLOUD, Runtime.APPTAINER, Runtime.SINGULARITY
    return Runtime.PODMAN, Runtime.CHARLIECLOUD


def parse_container_mounts(text: str, option: str) -> tuple[ContainerMount, ...]:
    """Read ``SRC[:DST[:ro]],...``."""
    mounts = []
    for part in map(str.strip, text.split(",")):
        source, *rest = part.split(":")
        target = rest[0] if rest and rest[0] else source
        mode = rest[1] if len(rest) > 1 else "rw"
        if not os.path.isabs(source) or not os.path.isabs(target) or len(rest) > 2 or mode not in ("ro", "rw"):
            raise UsageError(
                f"{option} {text}: {part!r} is not of the form SRC[:DST[:ro]] with absolute paths, as in /data:/data:ro"
            )
        mounts.append(ContainerMount(source=source, target=target, read_only=mode == "ro"))
    return tuple(mounts)


def parse_container_workdir(text: str, option: str) -> str:
    if not os.path.isabs(text):
        raise UsageError(f"{option} {text}: give an absolute path inside the container")
    return text


def parse_container_env(text: str, option: str) -> tuple[str, ...]:
    names = tuple(word.strip() for word in text.split(","))
    if bad := [name for name in names if not name.replace("_", "a").isalnum() or name[:1].isdigit()]:
        raise UsageError(
            f"{option} {text}: {bad[0]!r} is no name of a variable; give names, as in PATH,LD_LIBRARY_PATH"
        )
    return names


AUTO = "auto"
"""Value of ``--preload``: torch, and the imports that workers are seen to make of it and of the script's libraries."""


class UnreadableRunError(UnreadableFileError):
    """run.json is missing, torn, or of a version that this program does not know."""


class EntryKind(str, Enum):
    SCRIPT = "script"  # python target args…
    MODULE = "module"  # python -m target args…
    COMMAND = "command"  # target args… (torchrun's --no-python)


class Entrypoint(Struct, frozen=True, kw_only=True):
    kind: EntryKind
    target: str
    args: tuple[str, ...] = ()
    python: str = "python3"
    """Interpreter for SCRIPT and MODULE; also the one that hosts the TCPStore."""

    def argv(self) -> list[str]:
        """The worker's argument list. ``-u`` shows a printed line also when the worker dies next."""
        if self.kind is EntryKind.COMMAND:
            return [self.target, *self.args]
        if self.kind is EntryKind.MODULE:
            return [self.python, "-u", "-m", self.target, *self.args]
        return [self.python, "-u", self.target, *self.args]

    def __str__(self) -> str:
        return shlex.join(self.argv())


class RunSpec(Struct, frozen=True, kw_only=True):
    """One run. Times in seconds. Immutable: what changes lives in the attempts."""

    run_id: str
    """Unique, sortable and readable: ``20261121-053000-train-9f3c``; also the run directory's name."""
    uid: str
    """32 random hex digits: tags this run's processes, so that no other run's are ever touched."""
    name: str
    created_ns: int
    entrypoint: Entrypoint
    cwd: str
    """The workers' working directory: where `submit` was called."""
    cluster: str = "slurm"
    """``slurm`` or ``local``."""
    min_nodes: int = 1
    max_nodes: int = 1
    spares: int = 0
    """Ready nodes beyond `max_nodes` that take a lost one's place."""
    segment: int = 1
    """Neighbours in Slurm's order that are in the run only together."""
    grow: GrowPolicy = GrowPolicy.CHECKPOINT
    nproc_per_node: str = "auto"
    """A number, ``auto`` (the node's GPUs as Slurm gave them, else 1), ``gpu`` or ``cpu``."""
    role: str = "default"
    max_restarts: int = 3
    """Rounds per attempt that may follow a worker's failure, wherever it happened."""
    restart_policy: RestartWith = RestartWith.PROCESSES
    start_method: StartMethod = StartMethod.SPAWN
    preload: tuple[str, ...] = (AUTO,)
    max_requeues: int = 3
    max_same_failures: int = 2
    """Number of equal fingerprints without progress between that show a bug in the script; 0: never."""
    restart_window: float | None = None
    """Workers that ran this long have the whole of `max_restarts` again; None: time does not refill it."""
    section_timeouts: SectionTimeouts = field(default_factory=SectionTimeouts)
    hangs: HangSettings = field(default_factory=HangSettings)
    slow_ranks: OnSlowRank = OnSlowRank.OBSERVE
    health_checks: Mapping[Check, float] = field(default_factory=lambda: dict(DEFAULT_LIMITS))
    health_check: tuple[str, ...] = ()
    health_check_timeout: float = 30.0
    checkpoint_dir: str = ""
    checkpoint_local: CheckpointRoom = field(default_factory=CheckpointRoom)
    checkpoint_keep: int = 2
    checkpoint_bandwidth: int = 500 << 20
    """Bytes per second of each node."""
    checkpoint_replicas: int = 0
    metrics: MetricsTarget | None = None
    monitor_interval: float = 30.0
    """The fallback's poll interval; watching is by events."""
    virtual_local_rank: bool = False
    """Each worker has LOCAL_RANK 0 and sees its own GPU alone."""
    wandb: bool = False
    """Each rank's W&B run continues through restarts and requeues."""
    numa_binding: NumaBinding | None = None
    """The CPUs of each worker; None: all that the job has on its node."""
    shutdown_timeout: float = 30.0
    """Time from SIGTERM to SIGKILL when workers are stopped."""
    redirects: StreamChoice = field(default_factory=StreamChoice)
    tee: StreamChoice = field(default_factory=StreamChoice)
    """The job log shows all by default; files are always written."""
    local_ranks_filter: tuple[int, ...] | None = None
    """Only these local ranks reach the job log; None: all."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    """Lines in the job log that contain one of these go to their own file, too."""
    duplicate_stderr_filters: tuple[str, ...] = ()
    job_log_ranks: RankRanges | None = None
    """Only these global ranks do; None: all."""
    log_max_size: int | None = None
    """Bytes at which a worker's output file is rotated; None: never."""
    log_max_files: int = DEFAULT_PIECES
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_conf: Mapping[str, float | bool] = field(default_factory=dict)
    requeue: bool = True
    requeue_with: RequeueChoice = RequeueChoice.AUTO
    bad_nodes: BadNodeSettings = field(default_factory=BadNodeSettings)
    signal_grace: int = 120
    """Seconds before the time limit at which the notice signal is asked for."""
    preemption_signal: str = ""
    """The signal by which workers learn that the job will end, such as ``SIGUSR1``; empty: none."""
    signals_to_handle: tuple[str, ...] = ()
    """Further signals, such as ``SIGUSR1``, that announce the job's end to supervisor and agents, as SIGUSR2 does."""
    array: str = ""
    """``0-7%2``: an array of runs, one for each task, in its own folder; empty: a single run."""
    container_image: ContainerImage | None = None
    """The workers' image; None: on the host. See `container`, which has the four that follow too."""
    container_mounts: tuple[ContainerMount, ...] = ()
    container_workdir: str = ""
    container_env: tuple[str, ...] = ()
    container_args: tuple[str, ...] = ()
    setup: str = ""
    setup_timeout: float = 300.0
    worker_prefix: tuple[str, ...] = ()
    after: str = ""
    hook_timeout: float = 600.0
    notify: str = ""
    sbatch_args: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()

    @property
    def container(self) -> Container | None:
        if self.container_image is None:
            return None
        return Container(**{name: getattr(self, f"container_{name}") for name in Container.__struct_fields__})

    @property
    def flush_seconds(self) -> float:
        """Most seconds for the last checkpoint to be copied once the workers have ended, where nothing ends the job."""
        return 600.0 if self.checkpoint_dir else 0.0

    @property
    def command(self) -> str:
        """The workers' command and image, for a reader."""
        prefix = f"{shlex.join(self.worker_prefix)} " if self.worker_prefix else ""
        return f"{prefix}{self.entrypoint}{f' in {self.container_image}' if self.container_image is not None else ''}"

    @property
    def around(self) -> str:
        """The user's own commands around the workers, for a reader; only the host of a URL."""
        host = "/".join(self.notify.split("/")[:3]) if "://" in self.notify else self.notify
        commands = {"--setup": self.setup, "--after": self.after, "--notify": host}
        return "; ".join(f"{name} {shlex.quote(text)}" for name, text in commands.items() if text)

    @property
    def host_python(self) -> str:
        """The interpreter of the processes that an agent starts beside the workers, such as the TCPStore's."""
        return self.entrypoint.python if self.container_image is None else sys.executable

    @property
    def log_limit(self) -> PieceLimit | None:
        return PieceLimit(size=self.log_max_size, count=self.log_max_files) if self.log_max_size else None

    def save(self, path: Path, *, durable: bool = True) -> None:
        codec.save(path, self, durable=durable)


def load_run_spec(path: Path) -> RunSpec:
    found = codec.load(path, RunSpec)
    if isinstance(found, Unreadable):
        raise UnreadableRunError(path=str(path), why=found, errno=found.errno)
    return found


def decode_bad_nodes(value: object) -> BadNodeSettings:
    """The ``bad_nodes`` of a run.json; the default for another version's value."""
    try:
        return codec.from_json(BadNodeSettings, value)
    except codec.UnreadableRecordError:
        return BadNodeSettings()


def new_run_id(name: str, *, now: float | None = None) -> str:
    """Make a run id: UTC time, the name's letters and digits, four random hex digits."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name).strip("-")[:40] or "run"
    return f"{stamp}-{readable}-{os.urandom(2).hex()}"


class Preload(Struct, frozen=True, kw_only=True):
    modules: tuple[str, ...]
    """Given by the user; torch for ``auto``."""
    learned: tuple[str, ...] = ()
    """Imports that workers of earlier rounds were seen to make."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Module → why it can't be shared."""
    is_auto: bool = False

    def without(self, module: str, why: str) -> Preload:
        return replace(self, left_out={**self.left_out, module: why})

    def with_learned(self, modules: Sequence[str]) -> Preload:
        return replace(self, learned=tuple(dict.fromkeys((*self.learned, *modules))))

    def merged(self, other: Preload) -> Preload:
        learned = self.with_learned(other.learned)
        return replace(learned, left_out={**other.left_out, **self.left_out})

    @property
    def wanted(self) -> list[str]:
        return [name for name in dict.fromkeys((*self.modules, *self.learned)) if name not in self.left_out]

    def save(self, path: Path) -> None:
        codec.save(path, self, durable=False)


def load_preload(path: Path) -> Preload | None:
    kept = codec.load(path, Preload)
    return None if isinstance(kept, Unreadable) else kept


def preload_for(modules: Sequence[str], path: Path) -> Preload:
    """The modules of ``--preload MODULES``, with those that preload.json keeps from earlier attempts."""
    is_auto = AUTO in modules
    names = tuple("torch" if name == AUTO else name for name in modules)
    kept = load_preload(path)
    if not is_auto or kept is None:
        return Preload(modules=names, is_auto=is_auto)
    return replace(kept, modules=names, is_auto=True)


class RendezvousSettings(Struct, frozen=True, kw_only=True):
    """Seconds, unless it says otherwise."""

    min_nodes: int = 1
    max_nodes: int = 1
    expected_nodes: int = 1
    """How many agents were launched: no node waits for one that does not exist."""
    segment: int = 1
    """Nodes of which only all are any use (``--segment``): neighbours in Slurm's order; `min_nodes` and `max_nodes` are
    multiples of it."""
    timeout: float = 600.0
    """Runs from the start of waiting to a final round."""
    last_call_timeout: float = 30.0
    """Wait for nodes that were launched and never seen, once MIN nodes are here."""
    grow: GrowPolicy = GrowPolicy.NOW
    """When a healthy round that is smaller than MAX is ended to take a node in that waits."""
    grow_patience: float = 300.0
    """After so long without a checkpoint that the script reports, CHECKPOINT waits for none."""
    give_up: bool = True
    """Close the run for all where too few nodes are left; off: each one waits out its own timeout."""
    heartbeat_interval: float = 4.0
    heartbeat_ttl: float = 20.0
    """Without a change for so long, a node counts as lost. Above three times what the filesystem takes to show one."""
    poll_interval: float = 1.0
    """The fallback's, where no notification comes through."""
    operations_per_second: float = 150.0
    """Limit of all nodes together on the file server while workers run: `poll_intervals` derives longer intervals
    from it where there are many nodes. At 8192 nodes three times as much."""
    doorbell: bool = True
    """Off: the files alone, slower."""
    member_filter: bool = True
    """The workers' TCPStore serves the addresses of the round's nodes alone."""
    beat_interval: float = 1.0
    """Between two datagrams that say "alive"."""
    beat_silence: float = 3.0
    """After so long without one, a node whose datagrams came before is asked through the files whether it lives."""
    suspect_answer: float = 4.0
    """How long it may take to rewrite its heartbeat then. Above what the filesystem takes to show a change."""

    @property
    def silence_until_lost(self) -> float:
        """Seconds without a sign of life after which the others may go on without a node, at the earliest."""
        if not self.doorbell:
            return self.heartbeat_ttl
        return min(self.heartbeat_ttl, self.beat_silence + self.suspect_answer)


_NOT_GIVEN = ("min_nodes", "max_nodes", "expected_nodes", "segment", "grow", "give_up")
_KEYS = tuple(name for name in RendezvousSettings.__struct_fields__ if name not in _NOT_GIVEN)


def parse_rdzv_conf(text: str, option: str) -> dict[str, float | bool]:
    """Read ``timeout=900,doorbell=off``: fields of `RendezvousSettings`, whose values fit each other."""
    conf: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not (equals and key and value):
            raise UsageError(f"{option} {text}: {item!r} is not of the form key=value")
        conf[key.strip()] = value.strip()
    values = rdzv_values(conf, option)
    settings_from_conf(values, RendezvousSettings())
    return values


def rdzv_values(conf: Mapping[str, str | float | bool], option: str = "--rdzv-conf") -> dict[str, float | bool]:
    values: dict[str, float | bool] = {}
    for key, text in conf.items():
        if key not in _KEYS:
            raise UsageError(f"{option}: unknown key {key!r}; it knows {', '.join(sorted(_KEYS))}")
        if not isinstance(text, str):
            values[key] = text
        elif isinstance(getattr(RendezvousSettings(), key), bool):
            if text.lower() not in ("on", "off", "true", "false", "1", "0"):
                raise UsageError(f"{option} {key}={text}: give on or off")
            values[key] = text.lower() in ("on", "true", "1")
        else:
            number = number_of(text)
            if not 0 < number < 1e7:
                way_out = "not a number of seconds" if math.isnan(number) else "give a positive number of seconds"
                raise UsageError(f"{option} {key}={text}: {way_out}")
            values[key] = number
    return values


def settings_from_conf(conf: Mapping[str, str | float | bool], base: RendezvousSettings) -> RendezvousSettings:
    """Apply ``--rdzv-conf``; raises UsageError for an unknown key, or for values that do not fit each other."""
    changes = rdzv_values(conf)
    changed = replace(base, **changes)
    if "heartbeat_ttl" in changes and "heartbeat_interval" not in changes:
        changed = replace(changed, heartbeat_interval=changed.heartbeat_ttl / 5)
    if "suspect_answer" not in changes:  # the node that is asked has to look first
        changed = replace(changed, suspect_answer=max(changed.suspect_answer, 4 * changed.poll_interval))
    if "beat_silence" not in changes:
        changed = replace(changed, beat_silence=max(changed.beat_silence, 3 * changed.beat_interval))
    for longer, shorter in (
        ("heartbeat_ttl", "heartbeat_interval"),
        ("suspect_answer", "poll_interval"),
        ("beat_silence", "beat_interval"),
    ):
        least, given = 2 * getattr(changed, shorter), getattr(changed, longer)
        if given < least:
            raise UsageError(f"--rdzv-conf {longer}={given:g} must be at least twice {shorter}={least / 2:g}")
    return changed
