"""The same failure on all workers of some nodes and on none elsewhere: a fact about the node, or the user's mistake."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpc_elastic.failures.classify import (
    MOMENT_SECONDS,
    NodeFailures,
    apart_in_round,
    may_be_of_node,
    moment_after,
    nodes_apart,
    sum_up_node,
)
from hpc_elastic.failures.worker_failure import WorkerFailure
from tests.rigs.run_builder import GLOO, make_failure

MISSING = "ModuleNotFoundError: No module named 'flash_attn'"
WORKERS = {0: 2, 1: 2, 2: 2, 3: 2}


def failures(
    *ranks: int, exception: str = MISSING, waited: float = MOMENT_SECONDS, exitcode: int = 1
) -> list[WorkerFailure]:
    """Of nodes with two workers each."""
    return [
        replace(
            make_failure(rank, at=1 + rank / 100, exception=exception, per_node=2, exitcode=exitcode), waited=waited
        )
        for rank in ranks
    ]


def lost_peer(rank: int) -> WorkerFailure:
    return make_failure(rank, at=1.2, exception=f"RuntimeError: {GLOO.format(rank=2)}", per_node=2)


@pytest.mark.parametrize(
    ("what", "found", "apart"),
    [
        ("one node", failures(2, 3), (1,)),
        ("two of four nodes", failures(2, 3, 6, 7), (1, 3)),
        ("all nodes", failures(*range(8)), ()),
        ("three of four nodes", failures(*range(6)), ()),
        ("one of a node's two workers", failures(2), ()),
        ("one rank elsewhere too", failures(2, 3, 4), ()),
        ("the others had no time", failures(2, 3, waited=0.1), ()),
        ("the others had no time, but were further", [*failures(2, 3, waited=0.0), *map(lost_peer, (0, 4, 6))], (1,)),
        ("one node's workers may not have come so far", [*failures(2, 3, waited=0.0), *map(lost_peer, (0, 4))], ()),
        ("an error that follows from no node", failures(2, 3, exception="ValueError: bad batch"), ()),
        ("a syntax error", failures(2, 3, exception="SyntaxError: invalid syntax"), ()),
        ("nothing", [], ()),
    ],
)
def test_which_nodes_are_apart(what: str, found: list[WorkerFailure], apart: tuple[int, ...]) -> None:
    assert apart_in_round(found, WORKERS) == apart, what


def test_one_node_alone_is_contrasted_with_nothing() -> None:
    assert apart_in_round(failures(0, 1), {0: 2}) == ()


def test_a_file_of_each_rank_is_one_failure() -> None:
    found = [
        replace(
            make_failure(
                rank, at=1.0, exception=f"FileNotFoundError: [Errno 2] No such file: '/data/{rank}'", per_node=2
            ),
            waited=1.0,
        )
        for rank in (2, 3)
    ]
    assert apart_in_round(found, WORKERS) == (1,)


def test_two_different_things_that_are_missing_on_two_nodes_are_two_facts() -> None:
    other = failures(6, 7, exception="FileNotFoundError: [Errno 2] No such file or directory: '/opt/data/vocab.txt'")
    assert apart_in_round([*failures(2, 3), *other], WORKERS) == (1, 3)


def test_a_worker_that_was_stopped_shows_nothing() -> None:
    stopped = replace(failures(3)[0], stopped_by_agent=True)
    assert sum_up_node([*failures(2), stopped], node=1, workers=2).alike == 1


@pytest.mark.parametrize(
    ("failure", "may_be"),
    [
        (failures(2)[0], True),
        (failures(2, exception="PermissionError: [Errno 13] Permission denied: '/scratch/x'")[0], True),
        (failures(2, exception="OSError: libcudart.so.12: cannot open shared object file: No such file")[0], True),
        (failures(2, exception="ImportError: /lib64/libc.so.6: version `GLIBC_2.34' not found")[0], True),
        (failures(2, exception="RuntimeError: No CUDA GPUs are available")[0], True),
        (make_failure(2, at=1, exitcode=127, stderr_tail="train.sh: line 3: nvidia-smi: command not found"), True),
        (make_failure(2, at=1, exitcode=2, stderr_tail="python: can't open file '/local/train.py': [Errno 2]"), True),
        (make_failure(2, at=1, exitcode=3, stderr_tail="no data for today"), False),
        (make_failure(2, at=1, exitcode=-9), False),
        (failures(2, exception="KeyError: 'tset'")[0], False),
        (lost_peer(2), False),
    ],
)
def test_what_a_node_may_lack(failure: WorkerFailure, may_be: bool) -> None:
    assert may_be_of_node(failure) is may_be


def test_the_order_of_nodes_does_not_matter() -> None:
    nodes = [
        NodeFailures(node=3, workers=1),
        NodeFailures(node=1, workers=1, alike=1, fingerprint="F", waited=1.0),
        NodeFailures(node=0, workers=1),
    ]
    assert nodes_apart(nodes) == nodes_apart(nodes[::-1]) == (1,)


@pytest.mark.parametrize(("age", "moment"), [(0.2, 1.0), (3.0, 3.0), (5.0, 5.0), (50.0, 5.0), (3600.0, 1.0)])
def test_the_moment_is_as_long_as_the_start_took_on_a_busy_machine(age: float, moment: float) -> None:
    assert moment_after(age) == moment
