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


VOCABULARY = "FileNotFoundError: [Errno 2] No such file or directory: '/opt/data/vocab.txt'"
OWN_FILE = "FileNotFoundError: [Errno 2] No such file: '/data/{}'"


@pytest.mark.parametrize(
    ("found", "apart"),
    [
        pytest.param(failures(2, 3), (1,), id="one node"),
        pytest.param(failures(2, 3, 6, 7), (1, 3), id="two of four nodes"),
        pytest.param(
            [*failures(2, 3), *failures(6, 7, exception=VOCABULARY)], (1, 3), id="each of two by a fact of its own"
        ),
        pytest.param(
            [each for rank in (2, 3) for each in failures(rank, exception=OWN_FILE.format(rank))],
            (1,),
            id="a file of each rank",
        ),
        pytest.param(failures(*range(8)), (), id="all nodes"),
        pytest.param(failures(*range(6)), (), id="three of four nodes"),
        pytest.param(failures(2), (), id="one of a node's two workers"),
        pytest.param(
            [*failures(2), replace(failures(3)[0], stopped_by_agent=True)], (), id="one of its two was stopped"
        ),
        pytest.param(failures(2, 3, 4), (), id="one rank elsewhere too"),
        pytest.param(failures(2, 3, waited=0.1), (), id="the others had no time"),
        pytest.param(
            [*failures(2, 3, waited=0.0), *map(lost_peer, (0, 4, 6))],
            (1,),
            id="the others had no time, but were further",
        ),
        pytest.param(
            [*failures(2, 3, waited=0.0), *map(lost_peer, (0, 4))], (), id="one node's workers may not have come so far"
        ),
        pytest.param(failures(2, 3, exception="ValueError: bad batch"), (), id="an error that follows from no node"),
        pytest.param(failures(2, 3, exception="SyntaxError: invalid syntax"), (), id="a syntax error"),
        pytest.param([], (), id="nothing"),
    ],
)
def test_which_nodes_are_apart(found: list[WorkerFailure], apart: tuple[int, ...]) -> None:
    assert apart_in_round(found, WORKERS) == apart_in_round(found[::-1], WORKERS) == apart
    assert apart_in_round(failures(0, 1), {0: 2}) == (), "one node alone is contrasted with nothing"
    one = NodeFailures(node=1, workers=1, alike=1, fingerprint="F", waited=1.0)
    assert nodes_apart([NodeFailures(node=3, workers=1), one, NodeFailures(node=0, workers=1)]) == (1,)


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


@pytest.mark.parametrize(("age", "moment"), [(0.2, 1.0), (3.0, 3.0), (5.0, 5.0), (50.0, 5.0), (3600.0, 1.0)])
def test_the_moment_is_as_long_as_the_start_took_on_a_busy_machine(age: float, moment: float) -> None:
    assert moment_after(age) == moment
