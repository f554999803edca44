"""Who a process of a run is: an agent, by its options, environment and run directory; and its rendezvous session.

The session is a supervisor's, too: its address, notifier, store and participant.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from hpc_elastic.base import codec
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.host_facts import LOOPBACK, candidate_addresses
from hpc_elastic.base.loop import is_refusal, repeat
from hpc_elastic.errors import HpcElasticError, UnreadableFileError, UsageError
from hpc_elastic.rendezvous.coordination import RendezvousSession, open_session
from hpc_elastic.rendezvous.membership import NodeInfo, RoundLog
from hpc_elastic.rendezvous.proposals import DecideRestart
from hpc_elastic.rendezvous.schedule import Lease
from hpc_elastic.rendezvous.state import Status, new_uid
from hpc_elastic.run.paths import AttemptInfo, AttemptPaths, RunPaths, load_attempt
from hpc_elastic.run.progress import NodeHeartbeats
from hpc_elastic.run.spec import RendezvousSettings, RunSpec, load_run_spec, settings_from_conf
from hpc_elastic.store.file_store import FileStore, Store, StoreFullError
from hpc_elastic.store.notifier import Notifier, open_notifier
from hpc_elastic.workers.spawn import Inherited
from hpc_elastic.workers.tree import JOB_VARIABLE, TAG_VARIABLE, Tag, node_key


def rendezvous_settings(spec: RunSpec, attempt: AttemptInfo) -> RendezvousSettings:
    launched = len(attempt.nodes)
    base = RendezvousSettings(
        timeout=RendezvousSettings().timeout + (spec.setup_timeout if spec.setup else 0.0),  # a node joins after it
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        expected_nodes=launched,
        segment=spec.segment,
        grow=spec.grow,
    )
    return settings_from_conf(spec.rdzv_conf, base)


def session_addresses(attempt: AttemptInfo, host: str) -> tuple[str, ...]:
    return (LOOPBACK,) if attempt.cluster == "local" else tuple(candidate_addresses(host))


def open_session_notifier(
    spec: RunSpec, attempt: AttemptInfo, *, secret: bytes, uid: str, addresses: tuple[str, ...]
) -> Notifier | None:
    bind_to = LOOPBACK if attempt.cluster == "local" else "0.0.0.0"
    return open_notifier(secret=secret, run_uid=spec.uid, uid=uid, host=bind_to, addresses=addresses)


def prepare_session(
    *,
    spec: RunSpec,
    attempt: AttemptInfo,
    store: Path,
    secret: bytes,
    uid: str,
    node: int,
    host: str,
    local_world_size: int,
    decide_restart: DecideRestart,
    clock: Clock,
    lease: Lease | None = None,
) -> RendezvousSession:
    """Bind the notifier and put the rest together. Touches no file: the coordination's thread does, once it is started.

    `node` may be `OBSERVER_NODE`; `secret` is used where there is a notifier, `lease` where there are workers.
    """
    settings = rendezvous_settings(spec, attempt)
    addresses = session_addresses(attempt, host)
    notifier = None
    if settings.doorbell:
        notifier = open_session_notifier(spec, attempt, secret=secret, uid=uid, addresses=addresses)
    return open_session(
        NodeInfo(
            uid=uid,
            node=node,
            host=host,
            local_world_size=local_world_size,
            addresses=addresses,
            spare=node >= spec.max_nodes,
        ),
        notifier,
        run_id=spec.run_id,
        open_store=lambda: FileStore(store, clock=clock),
        settings=settings,
        decide_restart=decide_restart,
        clock=clock,
        lease=lease,
    )


START_NUMBER_SECONDS = 120.0


def claim_start_number(open_store: Callable[[], Store], node: int, *, clock: Clock) -> int:
    """Later agents supersede earlier ones by it: a node can come back with another time than it had."""
    folder = f"start/{node:05d}"
    mine = os.urandom(8).hex()
    least = 1

    def claim() -> int:
        nonlocal least
        store = open_store()
        number = max([least, *(int(name) + 1 for name in store.list(folder) if name.isdecimal())])
        try:
            if store.put_if_absent(f"{folder}/{number}", mine):
                return number
        except StoreFullError:
            return number  # not written down: a later start has the same one, and goes by its clock
        least = number + 1  # a cache hid the last one
        raise FileExistsError(f"{folder}/{number}")

    return repeat(claim, again=lambda error: isinstance(error, OSError), within=START_NUMBER_SECONDS, clock=clock)


def local_world_size(asked: str, env: Mapping[str, str], *, devices: Path = Path("/dev")) -> int:
    """``auto``: the GPUs that Slurm gave (or CUDA_VISIBLE_DEVICES names), else 1. ``gpu``: the same, and where neither
    limits them, all that this machine has. Raises `UsageError`.
    """
    if asked.isdecimal():
        if int(asked) < 1:
            raise UsageError(f"--nproc-per-node {asked}: give at least 1")
        return int(asked)
    if asked == "cpu":
        return len(os.sched_getaffinity(0))
    if asked not in ("auto", "gpu"):
        raise UsageError(f"--nproc-per-node {asked}: give a number, auto, gpu or cpu")
    from hpc_elastic.slurm.job_environment import (  # a number was given to most agents
        JobEnvironment,
        device_count,
        in_job,
    )

    visible = env.get("CUDA_VISIBLE_DEVICES")
    if in_job(env):
        gpus = JobEnvironment.from_env(env).gpus
        lacking = "this node has no GPU of the job's; ask for some with --gpus-per-node"
    elif visible is None and asked == "gpu":
        gpus = len(list(devices.glob("nvidia[0-9]*")))
        lacking = f"no NVIDIA GPU was found ({devices}/nvidia*); give the number of workers"
    else:
        gpus = device_count(visible or "")
        lacking = f"CUDA_VISIBLE_DEVICES={visible!r} names no GPU; unset it, or give the number of workers"
    if asked == "gpu" and gpus == 0:
        raise UsageError(f"--nproc-per-node gpu: {lacking}")
    return max(1, gpus)


READ_AGAIN_SECONDS = 120.0

CHECKPOINT_PREFIX = "hpc-elastic-checkpoints."

T = TypeVar("T")


class AgentOptions(Struct, frozen=True, kw_only=True):
    run_dir: str
    attempt: int
    node: int | None
    launcher_pid: int | None


def parse_options(argv: Sequence[str]) -> AgentOptions:
    """Read the options, which launchers of this package alone give (users start agents with ``agent SCRIPT``)."""
    given = dict(zip(argv[::2], argv[1::2], strict=False))
    numbers = {name: value for name, value in given.items() if name != "--run-dir"}
    least = {"--run-dir", "--attempt"}
    is_complete = least <= given.keys() <= least | {"--node", "--launcher-pid"}
    if not is_complete or 2 * len(given) != len(argv) or not all(value.isdecimal() for value in numbers.values()):
        raise UsageError(
            f"agent {' '.join(argv)}: give --run-dir DIR --attempt N, and where there is no SLURMD_NODENAME --node K"
        )
    return AgentOptions(
        run_dir=given["--run-dir"],
        attempt=int(given["--attempt"]),
        node=int(given["--node"]) if "--node" in given else None,
        launcher_pid=int(given["--launcher-pid"]) if "--launcher-pid" in given else None,
    )


class RunDirectoryRefusedError(HpcElasticError):
    template = "{host}: the filesystem refuses the run directory: {why}"


def patiently(action: Callable[[], T], clock: Clock) -> T:
    """Again where the filesystem of the run directory refuses. Raises `RunDirectoryRefusedError` in the end."""

    def may_pass(error: BaseException) -> bool:
        return error.may_pass if isinstance(error, UnreadableFileError) else is_refusal(error)

    try:
        return repeat(action, again=may_pass, within=READ_AGAIN_SECONDS, clock=clock)
    except (UnreadableFileError, OSError) as error:
        if not may_pass(error):
            raise
        raise RunDirectoryRefusedError(host=os.uname().nodename, why=error) from None


def _load(paths: RunPaths, number: int, clock: Clock) -> tuple[RunSpec, AttemptInfo]:
    try:
        return patiently(
            lambda: (load_run_spec(paths.run_json), load_attempt(paths.attempt(number).attempt_json)), clock
        )
    except UnreadableFileError as error:
        raise UsageError(
            f"{os.uname().nodename}: the run directory can't be read from this node: {error}; "
            "it must lie on a filesystem that all nodes share (--runs-dir)"
        ) from None


def _node_index(attempt: AttemptInfo, given: int | None, env: dict[str, str]) -> int:
    if given is not None:
        if not 0 <= given < len(attempt.nodes):
            raise UsageError(f"--node {given}: this attempt has nodes 0 to {len(attempt.nodes) - 1}")
        return given
    name = env.get("SLURMD_NODENAME", "")
    if name not in attempt.nodes:
        raise UsageError(
            f"SLURMD_NODENAME={name!r} is none of this attempt's nodes ({', '.join(attempt.nodes)}); "
            "give --node, or start the agent with srun in the job's allocation"
        )
    return attempt.nodes.index(name)


class AgentIdentity(Struct, frozen=True, kw_only=True):
    spec: RunSpec
    attempt: AttemptInfo
    run: RunPaths
    paths: AttemptPaths
    node: int
    host: str
    uid: str
    tag: Tag
    env: dict[str, str]
    inherited: Inherited
    furthest_before: int

    @property
    def short_uid(self) -> str:
        return self.uid[-21:]

    @property
    def checkpoint_folder(self) -> Path | None:
        if not self.spec.checkpoint_dir:
            return None
        name = f"{CHECKPOINT_PREFIX}{self.spec.uid}.{self.tag.node_key}.{self.short_uid}"
        return Path(self.spec.checkpoint_local.folder) / name

    def takes_part(self, clock: Clock) -> bool:
        """The workers of this agent's round are to run, by the log as the server has it. It may hang."""
        store = FileStore(self.paths.store, clock=clock)
        store.invalidate("log")
        record = RoundLog(store, self.spec.run_id).latest()
        return record is not None and record.status is Status.FINAL and record.member(self.uid) is not None

    def command_environment(self, base: Mapping[str, str]) -> dict[str, str]:
        return {
            **base,
            TAG_VARIABLE: str(self.tag),
            "HPC_ELASTIC_RUN_DIR": str(self.run.root),
            "HPC_ELASTIC_ATTEMPT": str(self.attempt.number),
            "HPC_ELASTIC_NODE": str(self.node),
            "HPC_ELASTIC_HOST": self.host,
        }

    @classmethod
    def read(cls, options: AgentOptions, inherited: Inherited, clock: Clock) -> AgentIdentity:
        run = RunPaths(Path(options.run_dir))
        paths = run.attempt(options.attempt)
        env = dict(os.environ)
        spec, attempt = _load(run, options.attempt, clock)
        node = _node_index(attempt, options.node, env)
        host = attempt.nodes[node]
        if paths.records.exists():
            raise UsageError(f"{host}: run {spec.run_id} is over: attempt {options.attempt} takes no more nodes")
        try:
            start = claim_start_number(lambda: FileStore(paths.store, clock=clock), node, clock=clock)
        except OSError as error:
            raise RunDirectoryRefusedError(host=host, why=error) from None
        uid = new_uid(node, host, clock, start=start)
        before = options.attempt and codec.load(run.attempt(options.attempt - 1).heartbeats(node), NodeHeartbeats)
        steps = [rank.step for rank in before.ranks] if isinstance(before, NodeHeartbeats) else []
        return cls(
            spec=spec,
            attempt=attempt,
            run=run,
            paths=paths,
            node=node,
            host=host,
            uid=uid,
            tag=Tag(
                run_uid=spec.uid,
                node_key=node_key(attempt.cluster, node),
                agent_uid=uid,
                jobs=frozenset((*filter(None, [env.get(JOB_VARIABLE)]), *attempt.slurm_job_ids)),
            ),
            env=env,
            inherited=inherited,
            furthest_before=max((step for step in steps if step is not None), default=-1),
        )
