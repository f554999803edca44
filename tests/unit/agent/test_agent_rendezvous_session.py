"""What an agent and the supervisor need to take part in the rendezvous."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.agent.rendezvous_session import prepare_session
from hpc_elastic.rendezvous.coordination import RendezvousSession
from hpc_elastic.rendezvous.participant import OBSERVER_NODE
from hpc_elastic.run.attempt import AttemptInfo
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec
from tests.rigs.fake_clock import FakeClock


def meet(tmp_path: Path, node: int, **conf: str) -> RendezvousSession:
    entrypoint = Entrypoint(kind=EntryKind.SCRIPT, target="train.py")
    spec = RunSpec(
        run_id="r",
        uid="ab" * 16,
        name="n",
        created_ns=0,
        entrypoint=entrypoint,
        cwd="/",
        cluster="local",
        rdzv_conf=conf,
    )
    attempt = AttemptInfo(number=0, cluster="local", nodes=("n1", "n2"), batch_host="n1", started_ns=0)
    return prepare_session(
        spec=spec,
        attempt=attempt,
        store=tmp_path / "store",
        secret=b"s" * 32,
        uid="00000-n1-0000000000000001-abcd",
        node=node,
        host="n1",
        local_world_size=2 if node >= 0 else 0,
        decide_restart=lambda *_: pytest.fail("asked before anything has failed"),
        clock=FakeClock(),
    )


@pytest.mark.parametrize("node", [0, OBSERVER_NODE])
def test_the_address_that_peers_read_is_the_notifiers(tmp_path: Path, node: int) -> None:
    session = meet(tmp_path, node)
    assert session.notifier is not None
    assert (session.info.node, session.info.port) == (node, session.notifier.port)
    assert session.info.addresses == ("127.0.0.1",)


def test_without_a_notifier_no_port_is_told(tmp_path: Path) -> None:
    session = meet(tmp_path, 0, doorbell="off")
    assert session.notifier is None
    assert session.info.port == 0


def test_nodes_beyond_max_are_spares(tmp_path: Path) -> None:
    assert [meet(tmp_path, node).info.spare for node in (OBSERVER_NODE, 0, 1)] == [False, False, True]


def test_no_file_is_touched_before_the_thread_runs(tmp_path: Path) -> None:
    meet(tmp_path / "a mount that hangs", 0)
    assert list(tmp_path.iterdir()) == []
