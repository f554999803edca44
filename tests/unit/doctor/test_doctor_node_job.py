"""The doctor's own run as the options ask for it, the bounds of its probes, and what they measured, judged."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.health import RoomFacts
from hpc_elastic.base import codec
from hpc_elastic.cli.preflight import DOCTOR_TAKEN, ProbeJob, plan_job
from hpc_elastic.doctor import node_job
from hpc_elastic.doctor.checks import DoctorFinding, Severity, fold, ok, problem
from hpc_elastic.doctor.host import FileFacts, JobMemoryFacts, NoticeFacts, ProbeSettings
from hpc_elastic.doctor.node_job import ProbedNode, collect, judge_nodes, open_site, probe_node
from hpc_elastic.options.run_request import ALL_OPTIONS
from hpc_elastic.options.table import parse
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import Runtime

OK, WARNING, PROBLEM = Severity.OK, Severity.WARNING, Severity.PROBLEM

ROOM = RoomFacts(path="/some/where", free=100 << 30)
ROOMS = dict.fromkeys(("runs", "home", "tmp", "shm"), ROOM)
FILES = FileFacts(rooms=ROOMS, filesystem="nfs4", store_seconds=0.02, created=False)
MEMORY = JobMemoryFacts(limit="the cgroup's limit of 2 GB", counts_oom_kills=True)
NOTICE = NoticeFacts(seconds=0.4)
NODES = ("n1", "n2")


def facts(**changes: Any) -> dict[str, ProbedNode]:
    """Of two nodes; what changes does so on the second."""
    both = {
        node: ProbedNode(node=node, rank=rank, files=replace(FILES, created=not rank), memory=MEMORY, notice=NOTICE)
        for rank, node in enumerate(NODES)
    }
    for name, value in changes.items():
        setattr(both["n2"], name, value)
    return both


def files(**changes: Any) -> dict[str, ProbedNode]:
    return facts(files=replace(FILES, **changes))


def room(name: str, **changes: Any) -> dict[str, ProbedNode]:
    return files(rooms={**ROOMS, name: replace(ROOM, **changes)})


def judged(found: dict[str, ProbedNode], nodes: tuple[str, ...] = NODES, **more: Any) -> list[DoctorFinding]:
    return judge_nodes(nodes, found, **more)


def of(found: list[DoctorFinding], check: str) -> list[DoctorFinding]:
    return [finding for finding in found if finding.check == check]


def test_nodes_without_problems_have_none_and_each_check_is_one_line() -> None:
    found = judged(facts())
    assert {finding.level for finding in found} == {OK}
    names = [finding.check for finding in found]
    assert len(names) == len(set(names)) == 9
    (store,) = of(found, "nodes.store")
    assert store.found == "n[1-2]: within 0.1 s all nodes have read what each wrote (nfs4)"


@pytest.mark.parametrize(
    ("check", "changed", "level", "words"),
    [
        ("nodes.runs", room("runs", error="Disk quota exceeded"), PROBLEM, "Disk quota exceeded"),
        ("nodes.runs", room("runs", free=1 << 20), WARNING, "1 MiB free"),
        ("nodes.home", room("home", error="Read-only file system"), PROBLEM, "Read-only file system"),
        ("nodes.tmp", room("tmp", free=1 << 20), WARNING, "1 MiB free"),
        ("nodes.shm", room("shm", free=64 << 20), WARNING, "64 MiB free"),
        ("nodes.create", files(created=True), PROBLEM, "of 2 nodes that created one name at once, 2 did"),
        ("nodes.store", files(store_seconds=None), PROBLEM, "not seen within a minute"),
        ("nodes.store", files(store_seconds=6.5), WARNING, "within 6.5 s all nodes"),
        ("nodes.memory", facts(memory=replace(MEMORY, limit="")), WARNING, "no limit"),
        ("nodes.memory", facts(memory=replace(MEMORY, counts_oom_kills=False)), WARNING, "not counted"),
        ("nodes.signals", facts(notice=NoticeFacts()), PROBLEM, "did not reach the workers"),
        ("nodes.signals", facts(notice=NoticeFacts(error="Access denied")), PROBLEM, "Access denied"),
        ("nodes.job", facts(unfinished="files"), PROBLEM, "stopped while it probed files"),
        ("nodes.probes", facts(failed={"network": "OSError: no"}), PROBLEM, "network: OSError: no"),
    ],
)
def test_each_fact_in_its_other_outcome(
    check: str, changed: dict[str, ProbedNode], level: Severity, words: str
) -> None:
    found = of(judged(changed), check)
    (one,) = [finding for finding in found if words in finding.found]
    assert one.level is level
    if level is not OK:
        assert one.means
        assert one.way_out
        if check != "nodes.create":
            assert one.found.startswith("n2: "), "the node that has it is named, and no other"
            assert all(other.found.startswith("n1: ") for other in found if other is not one)


def test_nodes_that_wrote_nothing_are_named_with_why_the_job_ended() -> None:
    some = facts()
    del some["n2"]
    (lost,) = of(judged(some, why="failed: node n2 could not run the agent"), "nodes.job")
    assert lost.level is PROBLEM
    assert lost.found == "n2: wrote nothing: failed: node n2 could not run the agent"
    (never,) = judged({}, (), why="PartitionTimeLimit: ask for less time")
    assert never.found == "it did not run on any node: PartitionTimeLimit: ask for less time"


def test_a_part_that_is_missing_is_left_out_of_its_checks() -> None:
    assert of(judged(facts(files=None)), "nodes.tmp")[0].found.startswith("n1: ")
    here = {"node0": ProbedNode(node="node0", files=replace(FILES, created=True))}
    names = {finding.check for finding in judged(here, ("node0",))}
    assert not names & {"nodes.create", "nodes.store", "nodes.memory", "nodes.signals"}


def test_findings_of_many_nodes_are_folded_by_what_they_mean() -> None:
    found = [(f"n{number}", ok("x", f"{number} ms")) for number in range(1, 6)]
    bad = problem("x", "no answer", "a run fails", "ask")
    folded = fold([*found, ("n6", bad), ("n7", bad)])
    assert [finding.found for finding in folded] == ["n[1-5]: 1 ms, 2 ms and 3 more", "n[6-7]: no answer"]
    assert folded[1] == replace(bad, found=folded[1].found)


def plan(folder: Path, *argv: str, cluster: str = "slurm", env: dict[str, str] | None = None) -> ProbeJob:
    options = [option for option in ALL_OPTIONS if option.dest in DOCTOR_TAKEN | {"nodes"}]
    parsed = parse([*argv, f"--chdir={folder}"], options, refused={})
    return plan_job(parsed, cluster=cluster, env=env or {})


def test_it_is_a_short_run_of_one_probe_on_each_node_that_is_never_repeated(tmp_path: Path) -> None:
    assert {option.dest for option in ALL_OPTIONS} >= DOCTOR_TAKEN
    job = plan(
        tmp_path, "--nodes=4", "-p", "gpu", "--gpus-per-node=8", "--setup=module load cuda", "--python=/opt/python"
    )
    assert job.slurm is not None
    spec, options = job.spec, job.slurm.options
    assert (options.nodes, options.partition, options.gpus_per_node, options.time) == ("4", "gpu", "8", "20")
    assert (spec.min_nodes, spec.max_nodes, spec.nproc_per_node, spec.spares) == (1, 4, "1", 0)
    assert (spec.max_restarts, spec.max_requeues, spec.requeue, spec.health_checks) == (0, 0, False, {})
    assert (spec.setup, job.settings.python) == ("module load cuda", "/opt/python")
    assert sys.executable in spec.entrypoint.argv()
    assert spec.entrypoint.argv()[-2:] == [str(job.paths.root / "doctor"), codec.dumps(job.settings)]
    assert job.runs_dir == tmp_path / "runs" / "doctor"
    assert job.slurm.spec == spec
    by_user, by_site = plan(tmp_path, "-t", "5"), plan(tmp_path, env={"SBATCH_TIMELIMIT": "3"})
    assert [asked.slurm and asked.slurm.options.time for asked in (by_user, by_site)] == ["5", None]


def test_probes_run_on_the_host_and_know_the_workers_container(tmp_path: Path) -> None:
    job = plan(tmp_path, "--nodes=2", "--container-image=podman:torch", "--container-env=TOKEN")
    assert job.spec.container is None
    assert job.settings.container is not None
    assert (job.settings.container.image.runtime, job.settings.container.env) == (Runtime.PODMAN, ("TOKEN",))


def test_a_job_that_has_not_begun_has_no_nodes(tmp_path: Path) -> None:
    assert collect(RunPaths(tmp_path)) == ((), {}, "")
    (tmp_path / "attempt-000").mkdir()
    assert "attempt.json" in collect(RunPaths(tmp_path))[2]


def test_a_probe_that_fails_or_hangs_is_a_fact_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "HPC_ELASTIC_ATTEMPT": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    released = threading.Event()

    def fail(site: object) -> None:
        raise OSError(5, "Input/output error")

    parts = {"files": (fail, 10.0), "memory": (lambda site: released.wait(), 0.05), "notice": (lambda site: None, 10.0)}
    monkeypatch.setattr(node_job, "PARTS", parts)
    try:
        facts = probe_node(open_site(tmp_path / "doctor", codec.dumps(ProbeSettings(python="python3")), env))
    finally:
        released.set()
    assert facts.failed == {"files": "OSError: [Errno 5] Input/output error", "memory": "no end after 0.05 s"}
    assert facts.unfinished == ""
    assert codec.load(tmp_path / "doctor" / "node0.node.json", ProbedNode) == facts
