"""Which nodes a submission may have: whether they are enough, and whom it does without by what earlier jobs saw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.errors import UsageError
from hpc_elastic.launch.submit_job import Submission, bad_nodes, check_node_count, eligible_partitions, users_excluded
from hpc_elastic.options.run_request import SlurmJob
from hpc_elastic.options.sbatch import SbatchOptions
from hpc_elastic.run.node_records import remember
from hpc_elastic.run.node_score import Evidence, EvidenceKind
from hpc_elastic.run.option_values import parse_bad_nodes
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.slurm.cluster_facts import PartitionNodes
from hpc_elastic.slurm.errors import SlurmUnavailableError
from tests.rigs.specs import make_spec

NOW = 1_800_000_000 * 10**9
NAMES = frozenset({"n1", "n2", "n3", "n4", "n5", "n6"})
MAIN = PartitionNodes(name="main", default=True, total=6, usable=6, names=NAMES, usable_names=NAMES)
OTHER = PartitionNodes(
    name="x", default=False, total=1, usable=1, names=frozenset({"x1"}), usable_names=frozenset({"x1"})
)
SPEC = make_spec(run_id="r", min_nodes=2, max_nodes=4, bad_nodes=parse_bad_nodes("jobs"))
UNAVAILABLE = SlurmUnavailableError(what="asking", why="Unable to contact slurm controller")


class Client:
    def __init__(self, *, why: str | None = None, error: Exception | None = None) -> None:
        self.why, self.error = why, error
        self.tried: list[list[str]] = []
        self.asked: list[str | None] = []

    def config(self) -> Any:
        if self.error:
            raise self.error
        return SimpleNamespace(cluster="c")

    def partitions(self, names: str | None) -> tuple[PartitionNodes, ...]:
        self.asked.append(names)
        if self.error:
            raise self.error
        return (MAIN,) if names == "main" else (MAIN, OTHER)

    def would_run(self, script: str, *, extra: Sequence[str] = ()) -> str | None:
        if not extra:
            return None
        self.tried.append([script, *extra])
        return self.why


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An account that remembers that n3 was lost, and x1 of another partition."""
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    seen = [
        Evidence(node=name, kind=EvidenceKind.LOST, at_ns=NOW, why=f"node {name} was lost") for name in ("n3", "x1")
    ]
    assert remember(seen, cluster="c", run_id="r", attempt=0, now_ns=NOW, env=state) is None
    return state


def left_out(
    env: dict[str, str],
    *,
    client: Client | None = None,
    spec: RunSpec = SPEC,
    told: list[str] | None = None,
    **given: Any,
) -> tuple[str, ...]:
    """As a submission does it."""
    found: Any = client or Client()
    options = SbatchOptions(**given)
    users = users_excluded(options, env)
    if users is None:
        return ()
    submission = Submission(job=SlurmJob(spec=spec, options=options), runs_dir=Path("/runs"))
    partitions = eligible_partitions(found, options, env)
    return bad_nodes(submission, found, partitions, users, env, NOW + 1, [].append if told is None else told.append)


def test_a_bad_node_of_the_partition_is_left_out(env: dict[str, str]) -> None:
    client, told = Client(), list[str]()
    assert left_out(env, client=client, told=told) == ("n3",)
    assert client.tried == [["/runs/r/job.sbatch", "--exclude=n3"]]
    assert told == ["n3 is left out: node n3 was lost"]
    assert client.asked == [None], "Slurm was asked once"


def test_the_users_own_list_is_theirs(env: dict[str, str]) -> None:
    for given, environment in (
        ({"exclude": "n[5-6]"}, {}),
        ({"extra": ("--exclude=n5,n6",)}, {}),
        ({}, {"SBATCH_EXCLUDE": "n[5,6]"}),
    ):
        client = Client()
        assert left_out({**env, **environment}, client=client, **given) == ("n3",), "the others are not ours"  # type: ignore[arg-type]
        assert client.tried == [["/runs/r/job.sbatch", "--exclude=n[3,5-6]"]]
    assert left_out(env, exclude="n3") == (), "theirs, which no requeue of ours may let in again"


def test_nothing_is_left_out(env: dict[str, str]) -> None:
    assert left_out(env, spec=replace(SPEC, bad_nodes=parse_bad_nodes("run"))) == ()
    assert left_out(env, spec=replace(SPEC, bad_nodes=parse_bad_nodes("off"))) == ()
    assert left_out(env, exclude="/home/ann/bad-nodes.txt") == ()
    assert left_out(env, extra=("--clusters=d",)) == ()
    assert left_out({**env, "SBATCH_CLUSTERS": "d"}) == ()
    assert left_out({**env, "SLURM_CLUSTER_NAME": "d"}) == ()
    assert left_out({"XDG_STATE_HOME": "/nowhere"}) == ()
    assert left_out(env, client=Client(error=UNAVAILABLE)) == ()


@pytest.mark.parametrize(
    ("spec", "nodelist", "why"),
    [
        (replace(SPEC, bad_nodes=parse_bad_nodes("jobs,share=0.1")), None, "0 of 6 nodes are left out already"),
        (replace(SPEC, min_nodes=6, max_nodes=6), None, "fewer than the 6 nodes that the run needs would be left"),
        (SPEC, "n[1-3]", "the job asks for it by name"),
    ],
)
def test_whoever_can_not_be_spared_is_named(env: dict[str, str], spec: RunSpec, nodelist: str | None, why: str) -> None:
    told: list[str] = []
    assert left_out(env, spec=spec, nodelist=nodelist, told=told) == ()
    assert told == [f"n3 is bad (node n3 was lost), and not left out: {why}"]


def test_what_slurm_could_not_run_is_not_asked_for(env: dict[str, str]) -> None:
    why, told = "Requested node configuration is not available", list[str]()
    assert left_out(env, client=Client(why=why), told=told) == ()
    assert told == [f"n3 would be left out, but then the job could not run: {why}"]


# -- whether they are enough


def remark(
    nodes: str, *users: str, spares: int = 0, partitions: tuple[PartitionNodes, ...] = (MAIN, OTHER)
) -> str | None:
    job = SlurmJob(
        spec=replace(SPEC, spares=spares), options=SbatchOptions(nodes=nodes), asked_nodes=f"--nodes {nodes}"
    )
    return check_node_count(job, partitions, users)


def test_as_many_nodes_as_there_are() -> None:
    assert remark("6") is None
    assert remark("2-9") is None, "the least is enough"
    assert remark("4", "n1", "n2", "n9") is None
    assert remark("99", partitions=()) is None, "nobody knows"
    down = replace(MAIN, usable=4, usable_names=NAMES - {"n1", "n2"})
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
