"""What nodes measured, judged in both outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.doctor.file_probe import FileFacts
from hpc_elastic.doctor.findings import Finding, Level, ok, problem
from hpc_elastic.doctor.host_checks import Folders, Room
from hpc_elastic.doctor.job_probe import JobFacts, NoticeFacts
from hpc_elastic.doctor.node_checks import fold, judge_nodes
from hpc_elastic.doctor.node_facts import NodeFacts, load_facts, save_facts

ROOM = Room(path="/shared/runs", free=100 << 30)
FOLDERS = Folders(home=ROOM, tmp=replace(ROOM, path="/tmp"), shm=ROOM)
SEEN: Mapping[str, float | None] = {"new": 0.0, "renamed": 0.1, "listed": 0.0, "rewritten": 0.0}
FILES = FileFacts(
    runs=ROOM, folders=FOLDERS, filesystem="nfs4",
    store_seconds=0.02, created=False, late=SEEN, writer="n2",
)  # fmt: skip
JOB = JobFacts(cpus=8, job_cpus=8, host_cpus=64, limit="the cgroup's limit of 2 GB", counts_oom_kills=True)
NOTICE = NoticeFacts(seconds=0.4)
NODES = ("n1", "n2")
QUOTA = "Disk quotas for user ann (uid 7):\n     Filesystem blocks quota limit grace files quota limit grace\n"
LUSTRE = " /lustre  120 0 1000 -  96 100 110 -\n"


def facts(**changes: Any) -> dict[str, NodeFacts]:
    """Of two nodes; what changes does so on the second."""
    both = {
        node: NodeFacts(node=node, rank=rank, files=replace(FILES, created=not rank), slurm=JOB, notice=NOTICE)
        for rank, node in enumerate(NODES)
    }
    for name, value in changes.items():
        setattr(both["n2"], name, value)
    return both


def files(**changes: Any) -> dict[str, NodeFacts]:
    return facts(files=replace(FILES, **changes))


def folders(**changes: Any) -> dict[str, NodeFacts]:
    return files(folders=replace(FOLDERS, **changes))


def of(found: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in found if finding.check == check]


def test_nodes_without_problems_have_none_and_each_check_is_one_line() -> None:
    found = judge_nodes(facts(), NODES)
    assert {finding.level for finding in found} == {Level.OK}
    names = [finding.check for finding in found]
    assert len(names) == len(set(names)) == 17
    (store,) = of(found, "nodes.store")
    assert store.found == "n[1-2]: within 0.1 s all nodes have read what each wrote (nfs4)"


@pytest.mark.parametrize(
    ("check", "changed", "level", "words"),
    [
        ("nodes.runs", files(runs=replace(ROOM, error="Disk quota exceeded")), Level.PROBLEM, "Disk quota exceeded"),
        ("nodes.runs", files(runs=replace(ROOM, free=1 << 20)), Level.WARNING, "1 MiB free"),
        ("nodes.home", folders(home=replace(ROOM, is_writable=False)), Level.PROBLEM, "not writable"),
        ("nodes.tmp", folders(tmp=replace(ROOM, free=1 << 20)), Level.WARNING, "1 MiB free"),
        ("nodes.shm", folders(shm=replace(ROOM, free=64 << 20)), Level.WARNING, "64 MiB free"),
        ("nodes.socket-path", folders(tmp=replace(ROOM, path="/l" + 80 * "x")), Level.PROBLEM, "82 characters"),
        ("nodes.umask", folders(umask=0o777), Level.PROBLEM, "0777"),
        ("nodes.quota", files(quotas=QUOTA + "n:/home 96* 95 100 6days 10 0 0\n"), Level.WARNING, "96 of 95 KiB"),
        ("nodes.quota", files(quotas=LUSTRE), Level.WARNING, "/lustre: 96 of 100 files used"),
        ("nodes.quota", files(quotas=LUSTRE.replace("96", "90")), Level.OK, "room in 1 quotas"),
        ("nodes.create", files(created=True), Level.PROBLEM, "2 of 2 nodes could create the same name"),
        ("nodes.store", files(store_seconds=None), Level.PROBLEM, "not seen within a minute"),
        ("nodes.store", files(store_seconds=6.5), Level.WARNING, "6.5 s until all nodes"),
        ("nodes.new", files(late={**SEEN, "new": 2.9}), Level.WARNING, "up to 3 s late (cached)"),
        ("nodes.renamed", files(late={**SEEN, "renamed": None}), Level.WARNING, "not within 70 s"),
        ("nodes.listed", files(late={**SEEN, "listed": 30.0}), Level.WARNING, "30 s late"),
        ("nodes.rewritten", files(late={**SEEN, "rewritten": 3.0}), Level.WARNING, "3 s late"),
        ("nodes.cpus", facts(slurm=replace(JOB, cpus=1)), Level.PROBLEM, "1 of the job's 8 CPUs"),
        ("nodes.cpus", facts(slurm=replace(JOB, cpus=1, job_cpus=1)), Level.WARNING, "1 of the node's 64 CPUs"),
        ("nodes.memory", facts(slurm=replace(JOB, limit="")), Level.WARNING, "no limit"),
        ("nodes.memory", facts(slurm=replace(JOB, counts_oom_kills=False)), Level.WARNING, "not counted"),
        ("nodes.memory", facts(slurm=replace(JOB, oom_kill_seen=False)), Level.WARNING, "was not killed"),
        ("nodes.memory", facts(slurm=replace(JOB, oom_kill_seen=True)), Level.OK, "was killed, and counted"),
        ("nodes.signals", facts(notice=NoticeFacts()), Level.PROBLEM, "did not reach the workers"),
        ("nodes.signals", facts(notice=NoticeFacts(error="Access denied")), Level.PROBLEM, "Access denied"),
        ("nodes.job", facts(unfinished="files"), Level.PROBLEM, "stopped while it probed files"),
        ("nodes.probes", facts(failed={"network": "OSError: no"}), Level.PROBLEM, "network: OSError: no"),
    ],
)
def test_each_fact_in_its_other_outcome(check: str, changed: dict[str, NodeFacts], level: Level, words: str) -> None:
    found = of(judge_nodes(changed, NODES), check)
    (one,) = [finding for finding in found if words in finding.found]
    assert one.level is level
    if level is not Level.OK:
        assert one.means
        assert one.way_out
        if check != "nodes.create":
            assert one.found.startswith("n2: "), "the node that has it is named, and no other"
            assert all(other.found.startswith("n1: ") for other in found if other is not one)


def test_a_lost_signal_says_what_is_left() -> None:
    (found,) = [
        finding for finding in of(judge_nodes(facts(notice=NoticeFacts()), NODES, kill_wait=30.0), "nodes.signals")
        if finding.level is Level.PROBLEM
    ]  # fmt: skip
    assert "no time for a last checkpoint but the 30 s of KillWait" in found.means


def test_nodes_that_wrote_nothing_are_named_with_why_the_job_ended() -> None:
    some = facts()
    del some["n2"]
    (lost,) = of(judge_nodes(some, NODES, ended="failed: node n2 could not run the agent"), "nodes.job")
    assert lost.level is Level.PROBLEM
    assert lost.found == "nothing came from n2: failed: node n2 could not run the agent"
    (never,) = judge_nodes({}, (), ended="PartitionTimeLimit: ask for less time")
    assert never.found == "nothing came from any node: PartitionTimeLimit: ask for less time"


def test_a_part_that_is_missing_is_left_out_of_its_checks() -> None:
    assert of(judge_nodes(facts(files=None), NODES), "nodes.store")[0].found.startswith("n1: ")
    here = {"node0": NodeFacts(node="node0", files=replace(FILES, created=True, late={}))}
    names = {finding.check for finding in judge_nodes(here, ("node0",))}
    assert not names & {"nodes.create", "nodes.store", "nodes.new", "nodes.cpus", "nodes.signals"}


def test_findings_of_many_nodes_are_folded_by_what_they_mean() -> None:
    found = [(f"n{number}", ok("x", f"{number} ms")) for number in range(1, 6)]
    bad = problem("x", "no answer", "a run fails", "ask")
    folded = fold([*found, ("n6", bad), ("n7", bad)])
    assert [finding.found for finding in folded] == ["n[1-5]: 1 ms, 2 ms and 3 more", "n[6-7]: no answer"]
    assert folded[1] == replace(bad, found=folded[1].found)


def test_facts_are_read_as_they_were_written_and_torn_ones_are_none(tmp_path: Path) -> None:
    written = facts(failed={"network": "no"})
    for each in written.values():
        save_facts(tmp_path, each)
    assert load_facts(tmp_path, [*NODES, "n3"]) == written
    (tmp_path / "n1.node.json").write_text("{torn")
    assert list(load_facts(tmp_path, NODES)) == ["n2"]
