"""What is remembered of nodes: written whole, read whatever is there, forgotten when told."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from hpc_elastic.run import node_records
from hpc_elastic.run.index import account_folder
from hpc_elastic.run.node_records import (
    MOST_EVIDENCE,
    NodeRecord,
    account_evidence,
    forget,
    forget_in,
    load_record,
    remember,
    save_record,
)
from hpc_elastic.run.node_score import Evidence, EvidenceKind
from hpc_elastic.run.option_values import MOST_HOURS

NOW = 1_800_000_000 * 10**9
LOST = Evidence(node="n3", kind=EvidenceKind.LOST, at_ns=NOW, why="node n3 was lost", run_id="r", attempt=0, round=1)
UNFIT = Evidence(node="n4", kind=EvidenceKind.UNHEALTHY, at_ns=NOW - 5, why="/tmp is full")


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    record = NodeRecord(evidence=(UNFIT, LOST), excluded=("n3",), saved_ns=NOW)
    save_record(path, record)
    assert load_record(path) == record
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_one_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert load_record(tmp_path / "nodes.json") == NodeRecord()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "unreadable"),
        ("{", "unreadable"),
        ("[]", "holds a list"),
        ('{"version": 2}', "format version 2"),
        ('{"version": 1}', ""),
        ('{"version": 1, "evidence": 7, "excluded": "n1", "saved_ns": "x"}', ""),
        ('{"version": 1, "evidence": [7, {}, {"kind": "cursed", "node": "n1"}, {"kind": "lost"}]}', ""),
        ('{"version": 1, "evidence": [{"kind": "lost", "node": "n1", "at_ns": "soon"}]}', ""),
        ('{"version": 1, "evidence": [{"kind": "lost", "node": ["n1"], "at_ns": 1}], "excluded": [1]}', ""),
    ],
)
def test_what_can_not_be_read_counts_for_nothing(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text)
    record = load_record(path)
    assert (record.evidence, record.excluded) == ((), ())
    assert problem in record.problem
    assert bool(problem) is bool(record.problem)


def test_a_record_keeps_the_latest(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    many = [Evidence(node="n1", kind=EvidenceKind.LOST, at_ns=index) for index in range(MOST_EVIDENCE + 10)]
    save_record(path, NodeRecord(evidence=tuple(many)))
    assert [item.at_ns for item in load_record(path).evidence] == list(range(10, MOST_EVIDENCE + 10))


def keep(env: dict[str, str], *evidence: Evidence, cluster: str = "c", run: str = "r", now: int = NOW) -> None:
    assert remember(evidence, cluster=cluster, run_id=run, attempt=0, now_ns=now, env=env) is None


def test_an_account_remembers_all_its_jobs_by_cluster(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert account_evidence(env) == ()
    keep(env, LOST)
    keep(env, UNFIT, cluster="d", run="../s")
    assert set(account_evidence(env)) == {LOST, UNFIT}
    assert account_evidence(env, cluster="c") == (LOST,)
    folder = account_folder("nodes", env)
    assert folder == tmp_path / "state" / "hpc_elastic" / "nodes"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / f"{NOW}-torn.json").write_text("{")
    (folder / "readme.json").write_text(json.dumps({"version": 1, "evidence": [{"node": "x"}]}))
    assert account_evidence(env, cluster="c") == (LOST,)


def test_what_is_too_old_for_any_setting_is_removed(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    keep(env, LOST, now=NOW - int((MOST_HOURS + 1) * 3600e9))
    keep(env, UNFIT)
    assert account_evidence(env) == (UNFIT,)


def test_an_account_without_a_home_is_told(tmp_path: Path) -> None:
    problem = remember([LOST], cluster="", run_id="r", attempt=0, now_ns=NOW, env={})
    assert problem == "neither XDG_STATE_HOME nor HOME is set"
    (tmp_path / "hpc_elastic").write_text("in the way")
    assert remember([LOST], cluster="", run_id="r", attempt=0, now_ns=NOW, env={"XDG_STATE_HOME": str(tmp_path)})


def test_nodes_are_forgotten(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    keep(env, LOST, UNFIT)
    keep(env, LOST, run="s", now=NOW + 1)
    assert forget(env, ["n3"]) == 2
    assert account_evidence(env) == (UNFIT,)
    assert forget(env, ["n3"]) == 0
    assert forget(env, None) == 1
    assert account_evidence(env) == ()
    assert list((tmp_path / "hpc_elastic" / "nodes").iterdir()) == []


def test_a_run_forgets_and_keeps_what_else_it_knows(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    assert forget_in(path, None) == 0
    save_record(path, NodeRecord(evidence=(LOST, UNFIT), excluded=("n3",), saved_ns=NOW))
    assert forget_in(path, ["n3"]) == 1
    assert load_record(path) == NodeRecord(evidence=(UNFIT,), excluded=("n3",), saved_ns=NOW)


def test_what_another_process_removes_first_is_gone_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of other hosts, which the lock does not keep away, drop old files while we forget or drop them."""
    env = {"XDG_STATE_HOME": str(tmp_path)}
    folder = tmp_path / "hpc_elastic/nodes"
    read = node_records.read_json

    def read_and_lose(path: Path, *, limit: int) -> object:
        value = read(path, limit=limit)
        path.unlink()
        return value

    keep(env, LOST)
    with monkeypatch.context() as patched:
        patched.setattr(node_records, "read_json", read_and_lose)
        assert forget(env, None) == 1
    old = NOW - int((MOST_HOURS + 1) * 3600e9)
    for run in ("a", "b"):
        keep(env, LOST, run=run, now=old)
    with monkeypatch.context() as patched:
        listed = sorted(name.name for name in folder.iterdir())
        patched.setattr(node_records, "_names", lambda _: [f"{old}-gone.json", *listed])
        keep(env, UNFIT)
    assert account_evidence(env) == (UNFIT,)
