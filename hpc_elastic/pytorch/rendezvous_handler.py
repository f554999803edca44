"""torch's own agent over a shared folder: ``torchrun --rdzv-backend hpcfs --rdzv-endpoint /shared/dir --rdzv-id x``.

Registered through the entry point ``torchrun.handlers``. Each round has a ``TCPStore`` of its own for the workers,
served by the agent of rank 0, and a `FileSystemStore` of its own for the agents, which survives any of them.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
import torch.distributed.elastic.rendezvous as torch_rendezvous
from torch.distributed.elastic.rendezvous.api import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)

from hpc_elastic.agent.store_server import listen_for
from hpc_elastic.base.host_facts import choose_master_address
from hpc_elastic.errors import UsageError
from hpc_elastic.pytorch.file_system_store import FileSystemStore
from hpc_elastic.rendezvous import state
from hpc_elastic.rendezvous.handler import FileRendezvousHandler
from hpc_elastic.rendezvous.handler_config import HandlerConfig, config_from_keys, on_this_node

T = TypeVar("T")

logger = logging.getLogger(__name__)

_OF_OTHER_BACKENDS = frozenset(
    {
        *("join_timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"),
        *("is_host", "store_type", "read_timeout", "rank"),
        *("protocol", "cacert", "cert", "key", "ca_cert", "ssl_cert", "ssl_cert_key", "etcd_prefix"),
    }
)
"""Settings of torch 2.13's c10d, etcd, etcd-v2 and static."""


def get_handler() -> Callable[[RendezvousParameters], TorchRendezvousHandler]:
    return create_handler


def create_handler(params: RendezvousParameters) -> TorchRendezvousHandler:
    """A handler for torchrun's options. ValueError: one line that names the value, as torch's own backends say."""
    try:
        config = config_from_parameters(params, os.environ)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return TorchRendezvousHandler(config, local_address=params.local_addr)


def config_from_parameters(params: RendezvousParameters, environ: Mapping[str, str]) -> HandlerConfig:
    """Settings that mean something to torch's own backends alone are ignored, as these ignore each other's: an existing
    line needs another backend's name and endpoint, and nothing else.
    """
    conf = {key: str(value) for key, value in params.config.items() if key not in _OF_OTHER_BACKENDS}
    if ignored := sorted(_OF_OTHER_BACKENDS.intersection(params.config)):
        logger.warning("--rdzv-conf %s: not a setting of the backend hpcfs; ignored", ", ".join(ignored))
    config = config_from_keys(
        params.endpoint,
        params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        conf=conf,
    )
    return on_this_node(config, environ, address=params.local_addr or "")


class TorchRendezvousHandler(torch_rendezvous.RendezvousHandler):  # type: ignore[misc, unused-ignore]
    def __init__(self, config: HandlerConfig, *, local_address: str | None = None) -> None:
        self._local_address = local_address
        self._addresses = config.addresses
        self._timeout = timedelta(seconds=config.settings.timeout)
        self._server: dist.TCPStore | None = None
        self._handler = FileRendezvousHandler(config, open_master=self._open_master)

    def get_backend(self) -> str:
        return self._handler.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def next_rendezvous(self) -> RendezvousInfo:
        # An agent that a signal ends calls no shutdown(): without this, the others would wait for its heartbeat.
        atexit.unregister(self._handler.withdraw)
        atexit.register(self._handler.withdraw)
        found = _as_torch(self._handler.next_rendezvous)
        if found.rank != 0:
            self._server = None  # of a former round, whose workers have ended
        address, _, port = found.master.rpartition(":")
        return RendezvousInfo(
            FileSystemStore(found.directory, timeout=self._timeout, folder=found.folder),
            found.rank,
            found.world_size,
            RendezvousStoreInfo(address, int(port)),
        )

    def is_closed(self) -> bool:
        return _as_torch(self._handler.is_closed)

    def set_closed(self) -> None:
        _as_torch(self._handler.set_closed)

    def num_nodes_waiting(self) -> int:
        """Return 1 when the round is over. Nodes that wait although the round is full don't count: torch's agent would
        restart its workers for them forever.
        """
        return int(_as_torch(self._handler.round_is_over))

    def shutdown(self) -> bool:
        atexit.unregister(self._handler.withdraw)
        # torch calls this in a `finally`: with an error on its way, the workers did not end well.
        return self._handler.shutdown(workers_done=sys.exc_info()[0] is None)

    def _open_master(self) -> str:
        self._server = None  # the former round's
        address = choose_master_address(
            given=self._local_address, reached=self._handler.reached_addresses(), candidates=self._addresses
        )
        listener, own = listen_for(address)
        port = listener.getsockname()[1]
        self._server = dist.TCPStore(
            own, port, None, True, self._timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return f"{address}:{self._server.port}"


_TORCH_ERRORS = (  # the first that fits
    (state.RendezvousClosedError, torch_rendezvous.RendezvousClosedError),
    (state.FilesystemTimeoutError, torch_rendezvous.RendezvousConnectionError),
    (state.RendezvousTimeoutError, torch_rendezvous.RendezvousTimeoutError),
    (state.RendezvousStateError, RendezvousStateError),
    (state.RendezvousError, torch_rendezvous.RendezvousError),
)


def _as_torch(call: Callable[[], T]) -> T:
    try:
        return call()
    except state.RendezvousError as error:
        raise next(theirs for ours, theirs in _TORCH_ERRORS if isinstance(error, ours))(str(error)) from error
