"""A process' place in the run's rendezvous, agent or supervisor: its address, notifier, store and participant."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.host_facts import LOOPBACK, candidate_addresses
from hpc_elastic.base.loop import repeat
from hpc_elastic.errors import UsageError
from hpc_elastic.options.rendezvous_settings import RendezvousSettings, settings_from_conf
from hpc_elastic.rendezvous.coordination import RendezvousSession, open_session
from hpc_elastic.rendezvous.lease import Lease
from hpc_elastic.rendezvous.peers import NodeInfo
from hpc_elastic.rendezvous.restart import DecideRestart
from hpc_elastic.run.paths import AttemptInfo
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.store.file_store import FileStore, Store, StoreFullError
from hpc_elastic.store.notifier import Notifier, open_notifier


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
    from hpc_elastic.slurm.job_environment import JobEnvironment, in_job  # a number was given to most agents
    from hpc_elastic.slurm.notation import device_count

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
