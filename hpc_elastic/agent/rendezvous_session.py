"""A process' place in the run's rendezvous, agent or supervisor: its address, doorbell, store and participant."""

from __future__ import annotations

import random
from pathlib import Path

from hpc_elastic.addresses import LOOPBACK, candidate_addresses
from hpc_elastic.attempt import AttemptInfo
from hpc_elastic.clock import Clock
from hpc_elastic.light_dataclasses import dataclass
from hpc_elastic.rendezvous.coordination import Coordination
from hpc_elastic.rendezvous.growth import GrowPolicy
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.restart_decision import DecideRestart
from hpc_elastic.rendezvous.settings import RendezvousSettings, settings_from_conf
from hpc_elastic.rendezvous.state import NodeInfo
from hpc_elastic.run_spec import RunSpec
from hpc_elastic.store.doorbell import Doorbell, open_doorbell
from hpc_elastic.store.file_store import FileStore


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousSession:
    """One process's parts of the rendezvous, put together."""

    info: NodeInfo
    doorbell: Doorbell | None
    """None: polling alone."""
    coordination: Coordination
    """Not started yet."""


def rendezvous_settings(spec: RunSpec, attempt: AttemptInfo) -> RendezvousSettings:
    """The same on every node, and for the supervisor."""
    launched = len(attempt.nodes)
    base = RendezvousSettings(
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        expected_nodes=launched,
        segment=spec.segment,
        grow=GrowPolicy(spec.grow),
    )
    return settings_from_conf(spec.rdzv_conf, base)


def session_addresses(attempt: AttemptInfo, host: str) -> tuple[str, ...]:
    """The addresses by which the attempt's other nodes may reach this host, the likeliest first."""
    return (LOOPBACK,) if attempt.cluster == "local" else tuple(candidate_addresses(host))


def open_session_doorbell(
    spec: RunSpec, attempt: AttemptInfo, *, secret: bytes, uid: str, addresses: tuple[str, ...]
) -> Doorbell | None:
    """This process' doorbell in the attempt, or None where there can be none. Arguments as of `prepare_session`."""
    bind_to = LOOPBACK if attempt.cluster == "local" else "0.0.0.0"
    return open_doorbell(secret=secret, run_uid=spec.uid, uid=uid, host=bind_to, addresses=addresses)


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
) -> RendezvousSession:
    """Bind the doorbell and put the rest together. Touches no file: the coordination's thread does, once it is started.

    Args:
        spec: What was asked for.
        attempt: The attempt's facts.
        store: The store's folder.
        secret: The run's; used where there is a doorbell.
        uid: This process' own.
        node: Its index, or `OBSERVER_NODE`.
        host: Its name.
        local_world_size: Workers that it brings.
        decide_restart: Asked about failures where it coordinates.
        clock: For all times.
    """
    settings = rendezvous_settings(spec, attempt)
    addresses = session_addresses(attempt, host)
    doorbell = None
    if settings.doorbell:
        doorbell = open_session_doorbell(spec, attempt, secret=secret, uid=uid, addresses=addresses)
    info = NodeInfo(
        uid=uid,
        node=node,
        host=host,
        local_world_size=local_world_size,
        addresses=addresses,
        port=doorbell.port if doorbell else 0,
        spare=node >= spec.max_nodes,
    )

    def make_participant(coordination: Coordination) -> Participant:
        return Participant(
            run_id=spec.run_id,
            store=FileStore(store, clock=clock),
            info=info,
            settings=settings,
            decide_restart=decide_restart,
            clock=clock,
            rng=random.Random(),
            listener=coordination,
            bell=doorbell,
        )

    coordination = Coordination(
        make_participant,
        doorbell=doorbell,
        clock=clock,
        longest_backoff=settings.heartbeat_interval,
        beat_interval=settings.beat_interval,
    )
    return RendezvousSession(info=info, doorbell=doorbell, coordination=coordination)
