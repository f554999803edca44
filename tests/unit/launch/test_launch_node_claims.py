"""Which nodes of an allocation a run gets, and that two runs of one allocation stay apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.launch.slurm_site import NodeClaims, NodeWish, choose_nodes, open_claims
from tests.rigs.fake_clock import FakeClock

NODES = ("n1", "n2", "n3", "n4")
TAKEN = {"n1": "run a", "n2": "run a"}


@pytest.mark.parametrize(
    ("wish", "taken", "chosen"),
    [
        (NodeWish(), {}, NODES),
        (NodeWish(least=2, most=2), {}, ("n1", "n2")),
        (NodeWish(least=2, most=3), {}, ("n1", "n2", "n3")),
        (NodeWish(least=2, most=9), {}, NODES),
        (NodeWish(listed=("n4", "n3")), {}, ("n3", "n4")),
        (NodeWish(listed=("n4",), least=2, most=2), {}, ("n1", "n4")),
        (NodeWish(excluded=("n1", "n9")), {}, ("n2", "n3", "n4")),
        (NodeWish(excluded=("n1",), least=2, most=2), {}, ("n2", "n3")),
        (NodeWish(least=2, most=2), TAKEN, ("n3", "n4")),
        (NodeWish(least=2, most=4), TAKEN, ("n3", "n4")),
        (NodeWish(least=1, most=3), TAKEN, ("n3", "n4")),
        (NodeWish(listed=("n4",)), TAKEN, ("n4",)),
        (NodeWish(excluded=("n1", "n2")), TAKEN, ("n3", "n4")),
        (NodeWish(least=9, most=9), {}, NODES),  # that there are too few is said elsewhere
    ],
)
def test_the_nodes_that_a_run_gets(wish: NodeWish, taken: dict[str, str], chosen: tuple[str, ...]) -> None:
    assert choose_nodes(NODES, wish, taken) == chosen


@pytest.mark.parametrize(
    ("wish", "taken", "said"),
    [
        (NodeWish(listed=("n3", "n7", "n8")), {}, "n[7-8] not in this allocation, which has n[1-4]"),
        (NodeWish(listed=("n3", "n4"), excluded=("n4",)), {}, "--nodelist and --exclude both name n4"),
        (NodeWish(excluded=NODES), {}, "this allocation has no other node"),
        (
            NodeWish(listed=("n3", "n4"), least=1, most=1),
            {},
            "--nodelist names 2 nodes, and --nodes with the spares is 1",
        ),
        (NodeWish(), TAKEN, "n[1-2] of this allocation in use by run a; give --nodelist n[3-4] for the others"),
        (NodeWish(), dict.fromkeys(NODES, "run a"), "in use by run a; wait for its end"),
        (NodeWish(listed=("n2", "n3")), TAKEN, "--nodelist: n2 of this allocation in use by run a"),
        (NodeWish(least=3, most=3), TAKEN, "2 of this allocation's 4 nodes are free: n[1-2] of this allocation in use"),
    ],
)
def test_what_is_refused_names_the_nodes(wish: NodeWish, taken: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_nodes(NODES, wish, taken)
    assert said in str(caught.value)


def two_of(folder: Path) -> tuple[NodeClaims, NodeClaims]:
    first, second = (opened(folder / "not-there", folder) for _ in range(2))
    return first, second


def opened(*bases: Path, job: str = "7", restarts: int = 0, at: float = 0.0) -> NodeClaims:
    return open_claims(job, restarts, iter(bases), clock=FakeClock(at))


def claim(claims: NodeClaims, wish: NodeWish) -> Sequence[str]:
    return claims.claim(NODES, wish)


def test_two_runs_of_an_allocation_stay_apart(tmp_path: Path) -> None:
    first, second = two_of(tmp_path)
    assert claim(first, NodeWish(least=2, most=2)) == ("n1", "n2")
    first.sign("run a")
    with pytest.raises(UsageError, match=r"n\[1-2\] of this allocation in use by run a"):
        claim(second, NodeWish())
    assert second.held == {}
    assert claim(second, NodeWish(least=2, most=2)) == ("n3", "n4")
    with pytest.raises(UsageError, match="in use by run a, another run; wait"):
        claim(two_of(tmp_path)[0], NodeWish())
    # It ends with its holder, and with what the holder started.
    kept = {node: os.dup(fd) for node, fd in first.held.items()}
    for fd in first.held.values():
        os.close(fd)
    with pytest.raises(UsageError, match="n1 of this allocation in use by run a"):
        claim(two_of(tmp_path)[0], NodeWish(listed=("n1",)))
    for fd in kept.values():
        os.close(fd)
    assert claim(two_of(tmp_path)[0], NodeWish(listed=("n1",))) == ("n1",)


def test_another_job_is_another_allocation(tmp_path: Path) -> None:
    assert claim(two_of(tmp_path)[0], NodeWish()) == NODES
    assert claim(opened(tmp_path, job="8"), NodeWish()) == NODES
    assert claim(opened(tmp_path, restarts=1), NodeWish()) == NODES


def test_where_no_folder_can_be_written_runs_are_not_kept_apart(tmp_path: Path) -> None:
    claims = opened(tmp_path / "not-there")
    assert claim(claims, NodeWish(least=2, most=2)) == ("n1", "n2")
    assert claims.held == {}


def test_what_other_weeks_left_is_removed_unless_it_is_held(tmp_path: Path) -> None:
    held, left = opened(tmp_path, job="8"), opened(tmp_path, job="9")
    assert claim(held, NodeWish()) == claim(left, NodeWish()) == NODES
    for fd in left.held.values():
        os.close(fd)
    assert held.folder is not None
    assert left.folder is not None
    week = 7 * 86400
    opened(tmp_path, at=left.folder.stat().st_mtime + week - 60)
    assert left.folder.exists()
    opened(tmp_path, at=left.folder.stat().st_mtime + week + 60)
    assert not left.folder.exists()
    assert held.folder.exists()


def test_a_folder_that_can_not_be_written_stops_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    claims = opened(tmp_path)
    assert claims.folder is not None
    claims.folder.rmdir()
    claims.folder.touch()
    assert claim(claims, NodeWish(least=2, most=2)) == ("n1", "n2")
    assert "runs of this allocation are not kept apart" in caplog.text
