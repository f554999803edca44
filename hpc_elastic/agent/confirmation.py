"""A node's answer to a frozen round: it confirms, and the node of group rank 0 has the TCPStore's port open before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpc_elastic.agent.rendezvous_session import rendezvous_settings
from hpc_elastic.agent.store_server import StoreBindError
from hpc_elastic.base.file_executor import FilesystemHangsError
from hpc_elastic.base.host_facts import choose_master_address
from hpc_elastic.base.outcome import Outcome
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.state import RoundRecord

if TYPE_CHECKING:
    from hpc_elastic.agent.context import AgentContext

logger = logging.getLogger(__name__)

FIND_TORCH_SECONDS = 60.0


def confirm_round(context: AgentContext, record: RoundRecord, *, is_ending: Callable[[], bool]) -> None:
    """Agree to the frozen round `record`, or close the run where the port can't be opened."""
    master, guard = "", None
    if record.members[0].uid == context.info.uid:
        try:
            master = _open_master(context, record, is_ending)
        except StoreBindError as error:
            reason = str(error)
            logger.error("%s", reason)
            context.coordination.ask(lambda participant: participant.to_all.close(Outcome.FAILED, reason))
            return
        guard = context.store_server.guard  # this round's, whenever `confirm` is carried out

    def confirm(participant: Participant) -> None:  # in the coordination's thread: it may read files
        if guard is not None:
            addresses = participant.member_addresses([member.uid for member in record.members])
            senders = context.notifier.senders if context.notifier is not None else frozenset()
            guard.admit(None if addresses is None else addresses | senders)
        participant.claims.confirm(record.round, master)

    context.coordination.ask(confirm)


def _open_master(context: AgentContext, record: RoundRecord, is_ending: Callable[[], bool]) -> str:
    """Bind the TCPStore's port on this node: on the loopback where no other node is in the round.

    Returns:
        ``address port 1|0``, the last for whether this agent serves it; else rank 0 does.

    Raises:
        StoreBindError: the port can't be listened on.
    """
    is_alone = len(record.members) == 1
    host = choose_master_address(
        given=context.spec.master_addr,
        reached=list(context.notifier.reached) if context.notifier and not is_alone else (),
        candidates=() if is_alone else context.info.addresses,
    )
    try:
        serves = context.files.do(context.torch_available, within=FIND_TORCH_SECONDS, unless=is_ending)
    except FilesystemHangsError:
        serves = False
    guarded = serves and rendezvous_settings(context.spec, context.attempt).member_filter
    address, port = context.store_server.bind(host, context.spec.master_port, guarded=guarded)
    return f"{address} {port} {int(serves)}"
