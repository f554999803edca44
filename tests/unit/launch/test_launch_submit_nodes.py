"""Which nodes a submission may have, and whether they are enough."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.errors import UsageError
from hpc_elastic.launch.submit_job import check_node_count, eligible_partitions, users_excluded
from hpc_elastic.options.run_request import SlurmJob
from hpc_elastic.options.sbatch import SbatchOptions
from hpc_elastic.slurm.client import PartitionNodes
from hpc_elastic.slurm.commands import SlurmUnavailableError
from tests.rigs.specs import make_spec

NAMES = frozenset({"n1", "n2", "n3", "n4", "n5", "n6"})
MAIN = PartitionNodes(name="main", default=True, names=NAMES, usable_names=NAMES)
OTHER = PartitionNodes(name="x", default=False, names=frozenset({"x1"}), usable_names=frozenset({"x1"}))
SPEC = make_spec(run_id="r", min_nodes=2, max_nodes=4)
UNAVAILABLE = SlurmUnavailableError(what="asking", why="Unable to contact slurm controller")


class Client:
    def __init__(self, *, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[str | None] = []

    def partitions(self, names: str | None) -> tuple[PartitionNodes, ...]:
        self.asked.append(names)
        if self.error:
            raise self.error
        return (MAIN,) if names == "main" else (MAIN, OTHER)


@pytest.mark.parametrize(
    ("options", "env"),
    [
        ({"exclude": "n[5-6]"}, {"SBATCH_EXCLUDE": "n1"}),
        ({"extra": ("--exclude=n5,n6",), "exclude": "n1"}, {}),
        ({}, {"SBATCH_EXCLUDE": "n[5,6]"}),
    ],
)
def test_the_users_own_list(options: dict[str, Any], env: dict[str, str]) -> None:
    assert users_excluded(SbatchOptions(**options), env) == {"n5", "n6"}
    assert users_excluded(SbatchOptions(exclude="/home/ann/bad-nodes.txt"), {}) == frozenset()


def remark(
    nodes: str, *users: str, spares: int = 0, partitions: tuple[PartitionNodes, ...] = (MAIN, OTHER)
) -> str | None:
    job = SlurmJob(
        spec=replace(SPEC, spares=spares), options=SbatchOptions(nodes=nodes), asked_nodes=f"--nodes {nodes}"
    )
    return check_node_count(job, partitions, frozenset(users))


def test_as_many_nodes_as_there_are() -> None:
    assert remark("6") is None
    assert remark("2-9") is None, "the least is enough"
    assert remark("4", "n1", "n2", "n9") is None
    assert remark("99", partitions=()) is None, "nobody knows"
    down = replace(MAIN, usable_names=NAMES - {"n1", "n2"})
    assert remark("4", partitions=(down,)) is None
    assert remark("5", partitions=(down,)) == "only 4 of the 6 nodes of partition main are up now"
    some = remark("4", "n6", partitions=(down,))
    assert some == "only 3 of the 5 nodes of partition main that are not excluded are up now"


@pytest.mark.parametrize(
    ("nodes", "users", "spares", "says"),
    [
        ("7", (), 0, "--nodes 7: partition main has 6 nodes; the job would never start"),
        ("7-9", (), 0, "--nodes 7-9: partition main has 6 nodes;"),
        ("7", (), 1, "--nodes 7 and 1 spare: partition main has 6 nodes;"),
        (
            "5",
            ("n1", "n2", "n9"),
            0,
            "--nodes 5: partition main has 6 nodes, 2 of them excluded; the job would never start",
        ),
    ],
)
def test_more_nodes_than_there_are(nodes: str, users: tuple[str, ...], spares: int, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        remark(nodes, *users, spares=spares)
    assert str(caught.value).startswith(says)


def test_only_partitions_that_the_job_may_run_in_count() -> None:
    client: Any = Client()
    assert eligible_partitions(client, SbatchOptions(), {}) == (MAIN,)
    assert eligible_partitions(client, SbatchOptions(partition="x"), {}) == (OTHER,)
    assert eligible_partitions(client, SbatchOptions(), {"SBATCH_PARTITION": "x,main"}) == (MAIN, OTHER)
    assert client.asked == [None, "x", "x,main"]
    assert eligible_partitions(client, SbatchOptions(extra=("-Mother",)), {}) == ()
    down: Any = Client(error=UNAVAILABLE)
    assert eligible_partitions(down, SbatchOptions(), {}) == (), "sbatch will say it better"
