"""What the batch side asks of Slurm, and how it takes the answers; which nodes of an allocation a run gets."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import hpc_elastic
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.batch import run_of_this_job
from hpc_elastic.launch.requeue import EligibleNodes, NextAttempt, RequeueWay
from hpc_elastic.launch.run_directory import create_run
from hpc_elastic.launch.site import Allocation, JobCondition
from hpc_elastic.launch.slurm_site import NodeClaims, NodeWish, SlurmSite, choose_nodes, open_claims
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import ContainerImage, EntryKind, Entrypoint, Runtime
from hpc_elastic.slurm.client import PartitionNodes
from hpc_elastic.slurm.commands import JobId, SlurmError, SlurmMissingError, SlurmPermissionError, SlurmUnavailableError
from hpc_elastic.slurm.job_state import JobState
from tests.rigs.fake_clock import FakeClock
from tests.rigs.specs import make_spec

ENV = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "n1",
    "SLURM_RESTART_COUNT": "1",
}
SCRIPT = Path("/runs/r/job.sbatch")
SPEC = make_spec(run_id="r")
MISSING = SlurmMissingError(what="asking", why="scontrol is not on PATH")
UNAVAILABLE = SlurmUnavailableError(what="asking", why="Unable to contact slurm controller")
RUNNING = JobState(job_id="7", state="RUNNING", reason="", requeue=True, partition="main")


class Client:
    """Answers with what a test put there: a value, or an error to raise."""

    def __init__(self, *, state: Any = RUNNING, job_requeue: bool = True, **answers: Any) -> None:
        config = SimpleNamespace(kill_wait=5, version=(22, 5, 8), job_requeue=job_requeue, has_epilog=False)
        self.answers = {"job_state": state, "config": config, "would_run": None, "allow_requeue": None, **answers}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append(name)
            answer = self.answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments, **keywords) if callable(answer) else answer

        return call


def site(client: Client, *, script: Path | None = SCRIPT, env: dict[str, str] = ENV) -> SlurmSite:
    return SlurmSite(
        env,
        client=client,  # type: ignore[arg-type]
        clock=FakeClock(),
        umask=0o22,
        script=script,
    )


@pytest.mark.parametrize(
    ("state", "condition"),
    [
        (JobState(job_id="7", state="COMPLETING", reason="TimeLimit", restarts=1), JobCondition.TIME_LIMIT),
        # This attempt began after one restart.
        (JobState(job_id="7", state="COMPLETING", reason="", restarts=2), JobCondition.REQUEUED),
        (UNAVAILABLE, JobCondition.SILENT),
    ],
)
def test_what_slurm_says_is_asked_in_a_hurry(state: Any, condition: JobCondition) -> None:
    assert site(Client(state=state)).ask(near=0.0).condition is condition


@pytest.mark.parametrize(
    ("line", "env", "extra"),
    [
        ("#SBATCH --clusters=alpha,beta", {}, ("--clusters=beta",)),
        ("#SBATCH -N2 -M alpha,beta", {}, ("--clusters=beta",)),
        ("# -M alpha", {}, ()),
        ("", {"SBATCH_CLUSTERS": "all"}, ("--clusters=beta",)),
    ],
)
def test_a_further_job_stays_on_the_cluster_of_the_one_before(
    line: str, env: dict[str, str], extra: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *ignored: None)
    script = tmp_path / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{line}\ntrue\n")
    asked: list[tuple[str, ...]] = []
    client = Client(state=FORBIDDEN, would_run=lambda script, extra=(): asked.append(tuple(extra)))
    slurm = site(client, script=script, env={**ENV, **env, "SLURM_CLUSTER_NAME": "beta"})
    assert slurm.facts(SPEC).requeue_way == RequeueWay.CHAIN
    slurm.why_not_without(RunPaths(tmp_path), ["n3"])
    client.answers.update(dependents=(), submit=lambda script, extra=(): asked.append(tuple(extra)) or JobId("8"))
    slurm.requeue(NextAttempt(way=RequeueWay.CHAIN))
    submitted = ("--dependency=afterany:7", "--begin=now", *extra)
    assert asked == [extra, (*extra, "--exclude=n3"), submitted]


def test_pyxis_is_given_to_the_step_of_the_agents_with_what_their_python_needs() -> None:
    def extra(runtime: Runtime) -> list[str]:
        spec = make_spec(
            run_id="r", cwd="/home/u", container_image=ContainerImage(runtime=runtime, image="t"), srun_args=("--mine",)
        )
        attempt = replace(site(Client()).facts(SPEC), nodes=("n1", "n2"))
        launcher = site(Client()).launcher(spec, RunPaths(Path("/runs/r")), attempt)
        return list(launcher.extra)

    first, mounts, *_, last = extra(Runtime.PYXIS)
    assert (first, last) == ("--container-image=t", "--mine")
    mounted = [mount.partition(":")[0] for mount in mounts.partition("=")[2].split(",")]
    assert "/runs/r" in mounted
    for needed in (sys.prefix, sys.base_prefix, hpc_elastic.__file__):
        assert any(needed.startswith(folder) for folder in mounted)
    assert extra(Runtime.PODMAN) == ["--mine"]


NO_COMMANDS = SlurmMissingError(what="scontrol show job", why="scontrol is not on PATH: no Slurm here", argv=())


@pytest.mark.parametrize(
    ("answers", "armed", "reason"),
    [
        ({}, True, ""),
        ({"state": UNAVAILABLE, "config": UNAVAILABLE}, True, "not verified: Slurm does not answer.*"),
        # As in a container without Slurm's commands: it can't be asked, and will not requeue.
        ({"state": NO_COMMANDS, "config": NO_COMMANDS}, False, "scontrol is not on PATH: no Slurm here"),
    ],
    ids=["a requeue", "a controller that is down at the start disarms nothing", "without scontrol no requeue comes"],
)
def test_what_is_armed_is_looked_up(answers: dict[str, Any], armed: bool, reason: str) -> None:
    facts = site(Client(**answers)).facts(SPEC)
    assert facts.requeue_armed is armed
    assert facts.requeue_way == (RequeueWay.REQUEUE if armed else "none")
    assert re.fullmatch(reason, facts.requeue_reason)


LIMIT = (
    "QOSMaxSubmitJobPerUserLimit; allocation failure: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)
FORBIDDEN = JobState(job_id="7", state="RUNNING", reason="", requeue=False)


def test_a_follow_on_job_is_tried_out_before_it_is_promised() -> None:
    client = Client(state=FORBIDDEN)
    facts = site(client).facts(SPEC)
    assert (facts.requeue_way, "would_run" in client.calls) == (RequeueWay.CHAIN, True)
    facts = site(Client(state=FORBIDDEN, would_run="jobs can't be submitted from compute nodes")).facts(SPEC)
    assert not facts.requeue_armed
    assert "jobs can't be submitted from compute nodes" in facts.requeue_reason
    facts = site(Client(state=FORBIDDEN, would_run=LIMIT)).facts(SPEC)
    assert facts.requeue_way == RequeueWay.CHAIN, (
        "this script was taken once: at this job's end there may be room again"
    )
    assert LIMIT in facts.requeue_reason
    facts = site(Client(state=FORBIDDEN, would_run=UNAVAILABLE)).facts(SPEC)
    assert (facts.requeue_armed, "not verified" in facts.requeue_reason) == (True, True)


def test_an_own_script_on_a_site_that_does_not_requeue_by_itself_is_allowed_to() -> None:
    client = Client(state=FORBIDDEN, job_requeue=False)
    facts = site(client, script=None).facts(SPEC)
    assert (facts.requeue_way, "allow_requeue" in client.calls) == (RequeueWay.REQUEUE, True)
    refused = SlurmPermissionError(what="setting Requeue=1", why="Access/permission denied")
    facts = site(Client(state=FORBIDDEN, job_requeue=False, allow_requeue=refused), script=None).facts(SPEC)
    assert not facts.requeue_armed
    assert "Access/permission denied" in facts.requeue_reason


def partitions(*names: Sequence[str]) -> tuple[PartitionNodes, ...]:
    return tuple(
        PartitionNodes(
            name=f"p{index}",
            default=False,
            names=frozenset(hosts),
            usable_names=frozenset(hosts[1:]),
        )
        for index, hosts in enumerate(names)
    )


def test_the_nodes_that_a_job_may_get() -> None:
    state = JobState(job_id="7", state="RUNNING", reason="", excluded=("n4",), required=("n1",), partition="a,b")
    assert site(Client(state=state, partitions=partitions(("n1", "n2"), ("n3", "n4")))).eligible_nodes() == (
        EligibleNodes(
            known=frozenset({"n1", "n2", "n3", "n4"}),
            usable=frozenset({"n2", "n4"}),
            required=frozenset({"n1"}),
            excluded=("n4",),
        )
    )
    assert site(Client(partitions=UNAVAILABLE)).eligible_nodes() is None
    assert site(Client(state=None)).eligible_nodes() is None


def test_whether_another_job_runs() -> None:
    other = JobState(job_id="8", state="RUNNING", reason="")
    for answer, runs in (((other,), True), ((), False), (UNAVAILABLE, False)):
        assert site(Client(queue_states=answer)).is_running("8") is runs


@pytest.mark.parametrize(
    ("script", "answer", "why"),
    [
        (SCRIPT, lambda script, extra=(): "not available" if extra else None, "not available"),
        (SCRIPT, None, None),
        (SCRIPT, SlurmError(what="x", why="y"), None),
        (None, "not asked", None),
        # A user who has as many jobs as may be submitted, or a rule of the site's own, is refused with any list.
        (SCRIPT, lambda script, extra=(): LIMIT, None),
        (SCRIPT, lambda script, extra=(): "not available" if extra else LIMIT, "not available"),
    ],
)
def test_why_a_run_could_not_do_without_nodes(script: Path | None, answer: Any, why: str | None) -> None:
    assert site(Client(would_run=answer), script=script).why_not_without(None, ["n3"]) == why  # type: ignore[arg-type]


def test_a_run_and_its_job_must_both_be_an_array_or_neither(tmp_path: Path) -> None:
    entry = Entrypoint(kind=EntryKind.SCRIPT, target="train.py")
    spec = make_spec(run_id="r", name="r", created_ns=1, entrypoint=entry)
    one, array = (
        create_run(replace(spec, run_id=name, array=text), tmp_path).paths for name, text in (("a", ""), ("b", "0-3"))
    )
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert run_of_this_job(one.root, {}) == one.root
    assert run_of_this_job(array.root, task) == array.root / "task-3"
    with pytest.raises(UsageError, match="is an array of runs"):
        run_of_this_job(array.root, {})
    with pytest.raises(UsageError, match="this job is task 3 of an array: all tasks would write to it"):
        run_of_this_job(one.root, task)


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (replace(RUNNING, restarts=1, nodes=("n1", "n2")), Allocation.HELD),
        (replace(RUNNING, restarts=1), Allocation.HELD),
        (replace(RUNNING, restarts=1, nodes=("n2",)), Allocation.LOST),
        (replace(RUNNING, restarts=2, nodes=("n1", "n2")), Allocation.LOST),
        (replace(RUNNING, restarts=1, state="COMPLETING", nodes=("n1",)), Allocation.HELD),
        (replace(RUNNING, restarts=1, state="PENDING"), Allocation.LOST),
        (replace(RUNNING, restarts=1, state="CANCELLED"), Allocation.HELD),
        (None, Allocation.HELD),
        (UNAVAILABLE, Allocation.UNKNOWN),
        (MISSING, Allocation.HELD),  # no node can ask: the end is not to wait half a minute for another's answer
    ],
)
def test_whether_this_node_still_belongs_to_the_job(state: Any, found: Allocation) -> None:
    assert site(Client(state=state)).allocation() is found


@pytest.mark.parametrize(("restarts", "nodes", "cancels"), [(2, ("n3",), False), (1, ("n1", "n2"), True)])
def test_a_job_that_was_requeued_meanwhile_is_not_cancelled(
    restarts: int, nodes: tuple[str, ...], cancels: bool
) -> None:
    """It has the same id, and is the next attempt's."""
    client = Client(state=replace(RUNNING, restarts=restarts, nodes=nodes), cancel=None)
    site(client).end_job()
    assert ("cancel" in client.calls) is cancels


NODES = ("n1", "n2", "n3", "n4")
TAKEN = {"n1": "run a", "n2": "run a"}


@pytest.mark.parametrize(
    ("wish", "taken", "chosen"),
    [
        (NodeWish(), {}, NODES),
        (NodeWish(least=2, most=2), {}, ("n1", "n2")),
        (NodeWish(least=2, most=3), {}, ("n1", "n2", "n3")),
        (NodeWish(least=2, most=9), {}, NODES),
        (NodeWish(listed=("n4", "n3")), {}, ("n3", "n4")),
        (NodeWish(listed=("n4",), least=2, most=2), {}, ("n1", "n4")),
        (NodeWish(excluded=("n1", "n9")), {}, ("n2", "n3", "n4")),
        (NodeWish(excluded=("n1",), least=2, most=2), {}, ("n2", "n3")),
        (NodeWish(least=2, most=2), TAKEN, ("n3", "n4")),
        (NodeWish(least=2, most=4), TAKEN, ("n3", "n4")),
        (NodeWish(least=1, most=3), TAKEN, ("n3", "n4")),
        (NodeWish(listed=("n4",)), TAKEN, ("n4",)),
        (NodeWish(excluded=("n1", "n2")), TAKEN, ("n3", "n4")),
        (NodeWish(least=9, most=9), {}, NODES),  # that there are too few is said elsewhere
    ],
)
def test_the_nodes_that_a_run_gets(wish: NodeWish, taken: dict[str, str], chosen: tuple[str, ...]) -> None:
    assert choose_nodes(NODES, wish, taken) == chosen


@pytest.mark.parametrize(
    ("wish", "taken", "said"),
    [
        (NodeWish(listed=("n3", "n7", "n8")), {}, "n[7-8] not in this allocation, which has n[1-4]"),
        (NodeWish(listed=("n3", "n4"), excluded=("n4",)), {}, "--nodelist and --exclude both name n4"),
        (NodeWish(excluded=NODES), {}, "this allocation has no other node"),
        (
            NodeWish(listed=("n3", "n4"), least=1, most=1),
            {},
            "--nodelist names 2 nodes, and --nodes with the spares is 1",
        ),
        (NodeWish(), TAKEN, "n[1-2] of this allocation in use by run a; give --nodelist n[3-4] for the others"),
        (NodeWish(), dict.fromkeys(NODES, "run a"), "in use by run a; wait for its end"),
        (NodeWish(listed=("n2", "n3")), TAKEN, "--nodelist: n2 of this allocation in use by run a"),
        (NodeWish(least=3, most=3), TAKEN, "2 of this allocation's 4 nodes are free: n[1-2] of this allocation in use"),
    ],
)
def test_what_is_refused_names_the_nodes(wish: NodeWish, taken: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_nodes(NODES, wish, taken)
    assert said in str(caught.value)


def two_of(folder: Path) -> tuple[NodeClaims, NodeClaims]:
    first, second = (opened(folder / "not-there", folder) for _ in range(2))
    return first, second


def opened(*bases: Path, job: str = "7", restarts: int = 0, at: float = 0.0) -> NodeClaims:
    return open_claims(job, restarts, iter(bases), clock=FakeClock(at))


def claim(claims: NodeClaims, wish: NodeWish) -> Sequence[str]:
    return claims.claim(NODES, wish)


def test_two_runs_of_an_allocation_stay_apart(tmp_path: Path) -> None:
    first, second = two_of(tmp_path)
    assert claim(first, NodeWish(least=2, most=2)) == ("n1", "n2")
    first.sign("run a")
    with pytest.raises(UsageError, match=r"n\[1-2\] of this allocation in use by run a"):
        claim(second, NodeWish())
    assert second.held == {}
    assert claim(second, NodeWish(least=2, most=2)) == ("n3", "n4")
    with pytest.raises(UsageError, match="in use by run a, another run; wait"):
        claim(two_of(tmp_path)[0], NodeWish())
    # It ends with its holder, and with what the holder started.
    kept = {node: os.dup(fd) for node, fd in first.held.items()}
    for fd in first.held.values():
        os.close(fd)
    with pytest.raises(UsageError, match="n1 of this allocation in use by run a"):
        claim(two_of(tmp_path)[0], NodeWish(listed=("n1",)))
    for fd in kept.values():
        os.close(fd)
    assert claim(two_of(tmp_path)[0], NodeWish(listed=("n1",))) == ("n1",)


def test_another_job_is_another_allocation(tmp_path: Path) -> None:
    assert claim(two_of(tmp_path)[0], NodeWish()) == NODES
    assert claim(opened(tmp_path, job="8"), NodeWish()) == NODES
    assert claim(opened(tmp_path, restarts=1), NodeWish()) == NODES


def test_where_no_folder_can_be_written_runs_are_not_kept_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    claims = opened(tmp_path / "not-there")
    assert claim(claims, NodeWish(least=2, most=2)) == ("n1", "n2")
    assert claims.held == {}
    claims = opened(tmp_path)
    assert claims.folder is not None
    claims.folder.rmdir()
    claims.folder.touch()
    assert claim(claims, NodeWish(least=2, most=2)) == ("n1", "n2")
    assert "runs of this allocation are not kept apart" in caplog.text


def test_what_other_weeks_left_is_removed_unless_it_is_held(tmp_path: Path) -> None:
    held, left = opened(tmp_path, job="8"), opened(tmp_path, job="9")
    assert claim(held, NodeWish()) == claim(left, NodeWish()) == NODES
    for fd in left.held.values():
        os.close(fd)
    assert held.folder is not None
    assert left.folder is not None
    week = 7 * 86400
    opened(tmp_path, at=left.folder.stat().st_mtime + week - 60)
    assert left.folder.exists()
    opened(tmp_path, at=left.folder.stat().st_mtime + week + 60)
    assert not left.folder.exists()
    assert held.folder.exists()
