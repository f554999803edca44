"""``--grow`` and ``--spares``: what reaches run.json and Slurm, and what is refused by name."""

from __future__ import annotations

import pytest

from hpc_elastic.cli.run import nodes_of
from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options, worker_options
from hpc_elastic.options.table import Parsed, parse

TABLE = (*worker_options.OPTIONS, *job_options.OPTIONS)


def read(*argv: str) -> Parsed:
    return parse(argv, TABLE, refused=worker_options.REFUSED)


@pytest.mark.parametrize(
    ("nodes", "spares", "asked"),
    [
        ((4, 4), 0, "4"),
        ((4, 4), 2, "6"),  # whoever asks for spares of a fixed number wants to have them
        ((2, 4), 0, "2-4"),
        ((2, 4), 2, "2-6"),  # but where less than MAX will do, nobody waits for one
        ((1, 1), 1, "2"),
    ],
)
def test_slurm_is_asked_for_the_spares_too(nodes: tuple[int, int], spares: int, asked: str) -> None:
    assert job_options.allocated_nodes(nodes, spares) == asked
    parsed = read("--spares", str(spares))
    assert job_options.sbatch_options(parsed, nodes=nodes, job_name="j", grace=9).nodes == asked


@pytest.mark.parametrize(
    ("argv", "allocated", "workers"),
    [
        ((), 4, (4, 4)),
        (("--spares=1",), 4, (3, 3)),
        (("--nodes=2", "--spares=1"), 4, (2, 2)),
        (("--nodes=2-9", "--spares=1"), 4, (2, 4)),
    ],
)
def test_in_an_allocation_spares_are_what_is_beyond_max(
    argv: tuple[str, ...], allocated: int, workers: tuple[int, int]
) -> None:
    assert nodes_of(read(*argv), allocated, what="allocation") == workers


def test_an_allocation_of_spares_alone() -> None:
    with pytest.raises(UsageError, match="--spares 2: this allocation has 2 nodes"):
        nodes_of(read("--spares=2"), 2, what="allocation")


@pytest.mark.parametrize(
    ("argv", "nodes", "segment"),
    [((), (3, 5), 1), (("--segment", "4"), (4, 16), 4), (("--segment=2", "--spares=4"), (2, 2), 2)],
)
def test_segments(argv: tuple[str, ...], nodes: tuple[int, int], segment: int) -> None:
    assert job_options.segment_nodes(read(*argv), nodes) == segment


@pytest.mark.parametrize(
    ("argv", "nodes", "words"),
    [
        (("--segment=0",), (4, 4), "--segment 0: give a number of nodes, 1 or more"),
        (("--segment=x",), (4, 4), "--segment x: give a number"),
        (("--segment=4",), (4, 6), "--segment 4: --nodes 6 is not a multiple of it"),
        (("--segment=4",), (2, 8), "--segment 4: --nodes 2 is not a multiple of it"),
        (("--segment=4", "--spares=1"), (4, 4), "--segment 4: --spares 1 is not a multiple of it"),
    ],
)
def test_parts_of_segments_are_refused(argv: tuple[str, ...], nodes: tuple[int, int], words: str) -> None:
    with pytest.raises(UsageError) as found:
        job_options.segment_nodes(read(*argv), nodes)
    assert str(found.value).startswith(words)
