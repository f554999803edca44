"""Where a round's workers meet: the address and port that the node of group rank 0 tells the others."""

from __future__ import annotations

from collections.abc import Callable

from hpc_elastic.addresses import choose_master_address
from hpc_elastic.agent.address_filter import Guard
from hpc_elastic.agent.context import AgentContext
from hpc_elastic.agent.rendezvous_session import rendezvous_settings
from hpc_elastic.file_thread import FilesystemHangsError
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.store.doorbell import Doorbell

FIND_TORCH_SECONDS = 60.0


def open_master(context: AgentContext, record: RoundRecord, is_ending: Callable[[], bool]) -> str:
    """Bind the TCPStore's port on this node: on the loopback where no other node is in the round.

    Args:
        context: The agent's.
        record: The round's.
        is_ending: Whether this node is to end: then nothing is waited for.

    Returns:
        ``address port 1|0``, the last for whether we serve it.

    Raises:
        StoreBindError: there is no listening there.
    """
    is_alone = len(record.members) == 1
    host = choose_master_address(
        given=context.spec.master_addr,
        reached=list(context.doorbell.reached) if context.doorbell and not is_alone else (),
        candidates=() if is_alone else context.info.addresses,
    )
    try:
        serves = context.files.do(context.torch_available, within=FIND_TORCH_SECONDS, unless=is_ending)
    except FilesystemHangsError:
        serves = False  # then rank 0 does
    guarded = serves and rendezvous_settings(context.spec, context.attempt).member_filter
    address, port = context.store_server.bind(host, context.spec.master_port, guarded=guarded)
    return f"{address} {port} {int(serves)}"


def admit_members(guard: Guard, record: RoundRecord, participant: Participant, doorbell: Doorbell | None) -> None:
    """Let the nodes of the round `record` reach a port. In the coordination's thread: it may read files.

    Args:
        guard: The port's.
        record: The round's.
        participant: Knows what nodes say of themselves.
        doorbell: Knows from where they were heard.

    Raises:
        OSError: the filesystem refuses.
    """
    addresses = participant.member_addresses([member.uid for member in record.members])
    senders = doorbell.senders if doorbell is not None else frozenset()
    guard.admit(None if addresses is None else addresses | senders)
