"""Configuration of a rendezvous handler: where to meet, with how many, for how long to wait; as keys or a URL."""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.errors import UsageError
from hpc_elastic.options.rendezvous_settings import RendezvousSettings, settings_from_conf


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
