"""Which nodes a submission does without, by what earlier jobs saw, and how a person looks at that and clears it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.cli.submit_nodes import exclude_arguments
from hpc_elastic.node_records import NodeRecord, account_evidence, load_record, remember, save_record
from hpc_elastic.node_score import Evidence, EvidenceKind
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.run_spec import EntryKind, Entrypoint, RunSpec
from hpc_elastic.slurm.cluster_facts import PartitionNodes
from hpc_elastic.slurm.errors import SlurmUnavailableError
from hpc_elastic.slurm.sbatch import SbatchOptions
from tests.unit.reading.test_reading_run_status import RUN_ID, Run

NOW = 1_800_000_000 * 10**9
NAMES = frozenset({"n1", "n2", "n3", "n4", "n5", "n6"})
SPEC = RunSpec(
    run_id="r",
    uid="0" * 32,
    name="x",
    created_ns=0,
    entrypoint=Entrypoint(kind=EntryKind.SCRIPT, target="train.py"),
    cwd="/",
    min_nodes=2,
    max_nodes=4,
    bad_nodes="jobs",
)
UNAVAILABLE = SlurmUnavailableError(what="asking", why="Unable to contact slurm controller")


class Client:
    def __init__(self, *, why: str | None = None, error: Exception | None = None) -> None:
        self.why, self.error = why, error
        self.tried: list[list[str]] = []

    def config(self) -> Any:
        if self.error:
            raise self.error
        return SimpleNamespace(cluster="c")

    def partitions(self, names: str | None) -> tuple[PartitionNodes, ...]:
        found = PartitionNodes(name="main", default=True, total=6, usable=6, names=NAMES, usable_names=NAMES)
        other = PartitionNodes(
            name="x", default=False, total=1, usable=1, names=frozenset({"x1"}), usable_names=frozenset({"x1"})
        )
        return (found,) if names == "main" else (found, other)

    def would_run(self, script: str, *, extra: list[str]) -> str | None:
        self.tried.append([script, *extra])
        return self.why


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An account that remembers that n3 was lost, and x1 of another partition."""
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    monkeypatch.setenv("XDG_STATE_HOME", state["XDG_STATE_HOME"])
    seen = [
        Evidence(node=name, kind=EvidenceKind.LOST, at_ns=NOW, why=f"node {name} was lost") for name in ("n3", "x1")
    ]
    assert remember(seen, cluster="c", run_id="r", attempt=0, now_ns=NOW, env=state) is None
    return state


def ask(
    tmp_path: Path,
    env: dict[str, str],
    *,
    client: Client | None = None,
    spec: RunSpec = SPEC,
    **options: Any,
) -> list[str]:
    paths = RunPaths(tmp_path)
    given: Any = client or Client()
    return exclude_arguments(given, paths, spec, SbatchOptions(**options), env, now_ns=NOW + 1)


def test_a_bad_node_of_the_partition_is_left_out(
    tmp_path: Path, env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    client = Client()
    assert ask(tmp_path, env, client=client) == ["--exclude=n3"]
    assert client.tried == [[str(tmp_path / "job.sbatch"), "--exclude=n3"]]
    assert "n3 is left out: node n3 was lost\n" in capsys.readouterr().err
    assert load_record(RunPaths(tmp_path).nodes_json).excluded == ("n3",)


def test_the_users_own_list_is_kept(tmp_path: Path, env: dict[str, str]) -> None:
    assert ask(tmp_path, env, exclude="n[5-6]") == ["--exclude=n[3,5-6]"]
    assert ask(tmp_path, env, extra=("--exclude=n6",)) == ["--exclude=n[3,6]"]
    assert ask(tmp_path, {**env, "SBATCH_EXCLUDE": "n1"}) == ["--exclude=n[1,3]"]
    assert load_record(RunPaths(tmp_path).nodes_json).excluded == ("n3",), "the others are not ours"


def test_nothing_is_left_out(tmp_path: Path, env: dict[str, str]) -> None:
    assert ask(tmp_path, env, spec=replace(SPEC, bad_nodes="run")) == []
    assert ask(tmp_path, env, spec=replace(SPEC, bad_nodes="off")) == []
    assert ask(tmp_path, env, spec=replace(SPEC, bad_nodes="jobs,share=0.1")) == []
    assert ask(tmp_path, env, spec=replace(SPEC, min_nodes=6, max_nodes=6)) == []
    assert ask(tmp_path, env, nodelist="n[1-3]") == []
    assert ask(tmp_path, env, exclude="/home/ann/bad-nodes.txt") == []
    assert ask(tmp_path, env, extra=("--clusters=d",)) == []
    assert ask(tmp_path, {**env, "SLURM_CLUSTER_NAME": "d"}) == []
    assert ask(tmp_path, {"XDG_STATE_HOME": str(tmp_path / "empty")}) == []
    assert ask(tmp_path, env, client=Client(error=UNAVAILABLE)) == []
    assert not RunPaths(tmp_path).nodes_json.exists()


def test_what_slurm_could_not_run_is_not_asked_for(
    tmp_path: Path, env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    why = "Requested node configuration is not available"
    assert ask(tmp_path, env, client=Client(why=why)) == []
    assert f"n3 would be left out, but then the job could not run: {why}" in capsys.readouterr().err
    assert not RunPaths(tmp_path).nodes_json.exists()


def test_an_account_shows_and_forgets_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    monkeypatch.setenv("XDG_STATE_HOME", state["XDG_STATE_HOME"])
    assert main(["list", "--bad-nodes"]) == 0
    assert "nothing is known against any node" in capsys.readouterr().err
    now = time.time_ns()
    seen = [
        Evidence(node="n3", kind=EvidenceKind.LOST, at_ns=now, why="node n3\x1b[31m was lost"),
        Evidence(node="n4", kind=EvidenceKind.FIRST_FAILURE, at_ns=now, why="rank 3 failed first"),
    ]
    assert remember(seen, cluster="c", run_id="r", attempt=0, now_ns=now, env=state) is None
    assert main(["list", "--bad-nodes"]) == 0
    bad, fair = capsys.readouterr().out.splitlines()
    assert bad.split()[:3] == ["n3", "bad", "1.00"]
    assert "\x1b" not in bad
    assert fair.split()[:3] == ["n4", "fair", "0.50"]
    assert main(["list", "--forget-nodes", "n[3,9]"]) == 0
    assert capsys.readouterr().out == "1 thing forgotten\n"
    assert [item.node for item in account_evidence(state)] == ["n4"]
    for wrong in ("", "n[3", "None assigned"):
        assert main(["list", "--forget-nodes", wrong]) == 2
        assert "--forget-nodes" in capsys.readouterr().err
    assert main(["list", "--forget-nodes", "all"]) == 0
    assert account_evidence(state) == ()


def test_a_run_shows_and_forgets_what_it_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    lost = Evidence(node="n3", kind=EvidenceKind.LOST, at_ns=1)
    save_record(run.paths.nodes_json, NodeRecord(evidence=(lost,), excluded=("n3",)))
    arguments = ["status", RUN_ID, "--runs-dir", str(tmp_path), "--no-slurm"]
    assert main(arguments) == 0
    assert "left out : n3" in capsys.readouterr().out
    assert main([*arguments, "--forget-nodes", "n3"]) == 0
    assert load_record(run.paths.nodes_json) == NodeRecord(excluded=("n3",)), "a requeue lets it in again"
