"""``--gpus``: a total, asked for by node."""

from __future__ import annotations

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options
from hpc_elastic.options.table import Parsed, parse


def read(*argv: str) -> Parsed:
    return parse([*argv, "train.py"], job_options.OPTIONS, refused={})


@pytest.mark.parametrize(
    ("argv", "nodes", "each"),
    [
        (("--gpus", "8"), (4, 4), "2"),
        (("-G", "a100:8"), (2, 2), "a100:4"),
        (("--gpus", "6", "--spares", "1"), (2, 2), "2"),
    ],
)
def test_a_total_of_gpus_is_asked_for_by_node(argv: tuple[str, ...], nodes: tuple[int, int], each: str) -> None:
    options = job_options.sbatch_options(read(*argv), nodes=nodes, job_name="x", grace=60)
    assert options.gpus_per_node == each


@pytest.mark.parametrize(
    ("argv", "nodes"),
    [
        (("--gpus", "8"), (2, 4)),
        (("--gpus", "7"), (2, 2)),
        (("--gpus", "a100:2,v100:2"), (2, 2)),
        (("--gpus", "0"), (1, 1)),
        (("--gpus", "4", "--gpus-per-node", "2"), (2, 2)),
    ],
)
def test_a_total_that_can_not_be_the_same_everywhere(argv: tuple[str, ...], nodes: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"^--gpus "):
        job_options.sbatch_options(read(*argv), nodes=nodes, job_name="x", grace=60)
