"""Where a round's workers meet: the address and port that the node of group rank 0 tells the others."""

from __future__ import annotations

from collections.abc import Callable

from hpc_elastic.addresses import choose_master_address
from hpc_elastic.agent.context import AgentContext
from hpc_elastic.file_thread import FilesystemHangsError

FIND_TORCH_SECONDS = 60.0


def open_master(context: AgentContext, is_ending: Callable[[], bool]) -> str:
    """Bind the TCPStore's port on this node.

    Args:
        context: The agent's.
        is_ending: Whether this node is to end: then nothing is waited for.

    Returns:
        ``address port 1|0``, the last for whether we serve it.

    Raises:
        StoreBindError: there is no listening there.
    """
    host = choose_master_address(
        given=context.spec.master_addr,
        reached=list(context.doorbell.reached) if context.doorbell else (),
        candidates=context.info.addresses,
    )
    try:
        serves = context.files.do(context.torch_available, within=FIND_TORCH_SECONDS, unless=is_ending)
    except FilesystemHangsError:
        serves = False  # then rank 0 does
    address, port = context.store_server.bind(host, context.spec.master_port)
    return f"{address} {port} {int(serves)}"
