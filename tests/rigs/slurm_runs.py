"""Runs submitted to a rig as a user would, and what became of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hpc_elastic.agent.identity import CHECKPOINT_PREFIX
from tests.rigs import lockstep
from tests.rigs.event_pairs import read_events
from tests.rigs.folded_run import printed
from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_cluster.processes import CROWDED

TAG = "HPC_ELASTIC_TAG"
SHORT = ("-t", "10", "--nproc-per-node", "1")
"""Ten minutes, and one worker on each node."""
ALL_COME = ("--rdzv-conf", "last_call_timeout=300")
"""Where a test needs all nodes of a range, or the first ones, in the first round: none is left out for being late."""


class SlurmRuns:
    """One test's folder on the rig's shared filesystem, owned by alice, and the runs submitted from there."""

    user = "alice"

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.folder = Path(mkdtemp(prefix="case-", dir=cluster.shared))
        self.folder.chmod(0o755)
        uid = int(cluster.run(["id", "-u"], cwd="/").stdout)
        gid = int(cluster.run(["id", "-g"], cwd="/").stdout)
        os.chown(self.folder, uid, gid)

    def script(self, text: str, name: str = "train.py") -> str:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o644)
        return name

    def trainer(self) -> str:
        """The lock-step trainer (`tests.rigs.lockstep`), which trains until `Run.say_end`."""
        return self.script(Path(lockstep.__file__).read_text())

    def hpc_elastic(
        self,
        *arguments: str,
        timeout: float = 90 * CROWDED,
        user: str = user,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(["hpc-elastic", *arguments], user=user, cwd=self.folder, timeout=timeout, env=env)

    def submit(self, *arguments: str) -> Run:
        done = self.hpc_elastic("submit", *arguments, timeout=60 * CROWDED)
        assert done.returncode == 0, done.stderr
        return self._run_of(done)

    def submit_and_follow(self, *arguments: str, timeout: float = 120) -> Run:
        """To the run's end, through requeues; `timeout` on a machine that has the time."""
        timeout *= CROWDED
        return self._run_of(self.hpc_elastic("submit", "--follow", *arguments, timeout=timeout))

    def follow_file(self, name: str, *, timeout: float = 120) -> Run:
        """A shell script of the user's that submits one run and follows it."""
        done = self.cluster.run(["bash", name], cwd=self.folder, timeout=timeout * CROWDED)
        return self._run_of(done)

    def newest(self) -> Run:
        """The run that another process is just submitting from here, the first one in this folder."""
        deadline = time.monotonic() + CROWDED * 90
        while True:
            for path in (self.folder / "runs").glob("*/attempt-*/attempt.json"):
                facts = json.loads(path.read_text())
                return Run(self, job=facts["job_id"], root=path.parents[1], done=None)
            assert time.monotonic() < deadline, f"no run in {self.folder}"
            time.sleep(0.05)

    def _run_of(self, done: subprocess.CompletedProcess[str]) -> Run:
        facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[:2])
        root = done.stdout.splitlines()[1].removeprefix("run directory").strip()
        return Run(self, job=facts["job"], root=Path(root), done=done)


class Run:
    def __init__(self, runs: SlurmRuns, *, job: str, root: Path, done: subprocess.CompletedProcess[str] | None) -> None:
        self.runs = runs
        self.job = job
        self.root = root
        self.done = done

    @property
    def log(self) -> str:
        try:
            return (self.root / "job.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def wait_log(self, condition: Callable[[str], bool], *, timeout: float = 90) -> str:
        timeout *= CROWDED
        deadline = time.monotonic() + timeout
        while not condition(text := self.log):
            assert time.monotonic() < deadline, f"the job log is not as wanted after {timeout} s:\n{text}"
            time.sleep(0.05)
        return text

    def wait_end(self, *, timeout: float = 90) -> str:
        return self.runs.cluster.wait_job(self.job, timeout=timeout)

    def report(self, attempt: int = 0) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.root / f"attempt-{attempt:03d}" / "report.json").read_text())
        return value

    def result(self, attempt: int = 0) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.root / f"attempt-{attempt:03d}" / "result.json").read_text())
        return value

    def events(self, attempt: int = 0) -> list[dict[str, Any]]:
        return list(read_events(self.root / f"attempt-{attempt:03d}" / "events"))

    def training(self, attempt: int = 0) -> tuple[int, dict[str, list[int]]]:
        """The newest round in which workers were started: its index, and their ranks by node.

        No ranks while a member has not started its own: fewer than the round has are no other round.
        """
        started = [event for event in self.events(attempt) if event["event"] == "workers_started"]
        newest = max((event["round"] for event in started), default=-1)
        hosts = {event["host"] for event in started if event["round"] == newest}
        joined = [e for e in self.events(attempt) if e["event"] == "round_final" and e["round"] == newest]
        ranks = {e["host"]: e["ranks"] for e in joined if e["host"] in hosts}
        is_complete = len(ranks) == max((e["group_world_size"] for e in joined), default=0)
        return newest, ranks if is_complete else {}

    def wait_training(
        self, nodes: Collection[str], *, after: int = -1, attempt: int = 0, timeout: float = 90
    ) -> tuple[int, dict[str, list[int]]]:
        """Wait until workers run on exactly these nodes, in a later round than `after`; see `training`.

        The job log would not do: who loses the batch host writes no more into it.
        """
        timeout *= CROWDED
        deadline = time.monotonic() + timeout
        while True:
            newest, ranks = self.training(attempt)
            if newest > after and set(ranks) == set(nodes):
                return newest, ranks
            assert time.monotonic() < deadline, (
                f"after {timeout} s workers run in round {newest} as {ranks}:\n{self.log}"
            )
            time.sleep(0.1)

    def say_end(self) -> None:
        """To workers that wait for the file ``end`` in the test's folder."""
        (self.runs.folder / "end").touch()

    def wait_steps(self, ranks: int, *, beyond: int = 0) -> None:
        """Wait until so many ranks of the lock-step trainer are five steps further than `beyond`."""
        self.wait_log(lambda log: log.count(f"] step {beyond + 5} at") >= ranks)

    def check_training(self, attempt: int = 0) -> None:
        """That the lock-step trainer ended with the state that so many steps lead to, on all ranks that wrote it."""
        texts = printed(self.root / f"attempt-{attempt:03d}")
        found = {line for text in texts for line in re.findall(r"final: step=(\d+) state=(\d+)", text)}
        assert len(found) == 1, f"{found}\n{self.log}"
        steps, state = map(int, *found)
        assert state == lockstep.expected(steps)

    def check_losses(self, *hosts: str) -> None:
        """That these nodes, or their agents, are the only causes in attempt 0, each once, and cost no restart."""
        assert {event["restarts_used"] for event in self.events() if event["event"] == "round_final"} == {0}
        rounds = next(part["rounds"] for part in self.report()["attempts"] if part["number"] == 0)
        assert sorted(loss["host"] for part in rounds for loss in part["lost_nodes"]) == sorted(hosts), rounds
        assert {part["verdict"]["cause"] for part in rounds if part["verdict"] is not None} <= {"node", "none"}, rounds

    def check_in_time(self, index: int, lost_at: float, what: str) -> None:
        """That round `index` was opened so soon after a loss; print when its workers were started.

        Within 10 s on a machine that has the time; a crowded one is as much slower as its agents took to start. How
        long workers take to end and to start is the machine's alone.
        """
        took = self.seconds_to_train(index, lost_at)
        opened = min(e["t"] / 1e9 for e in self.events() if e["event"] == "round_opened" and e["round"] == index)
        begun = min(event["t"] for event in self.events() if event["event"] == "attempt_started") / 1e9
        start = self.seconds_to_train(0, begun)
        print(f"{what}: workers run again after {took:.1f} s (the start took {start:.1f} s)")
        assert opened - lost_at <= 10.0 + 5 * start

    def seconds_to_train(self, round_index: int, since: float) -> float:
        """From `since` (this machine's time) until the last workers of a round were started."""
        times = [e["t"] / 1e9 for e in self.events() if e["event"] == "workers_started" and e["round"] == round_index]
        return max(times) - since

    def uid(self) -> str:
        value: str = json.loads((self.root / "run.json").read_text())["uid"]
        return value

    def kill_agent(self, node: str) -> None:
        """SIGKILL to the agent on `node` alone: not to its guardian, a fork of it with the same command line, nor to
        the srun on the batch host, which names the agent's command too."""
        cluster = self.runs.cluster
        agent = re.compile(r"\A\S*python\S* (?:-P )?-c .*hpc_elastic.* agent ")
        pids = [pid for pid, command in cluster.node_pids(node, user=self.runs.user) if agent.search(command)]
        assert pids, f"no agent on {node}"
        cluster.kill_process(node, min(pids), 9)

    def left_on_nodes(self) -> list[str]:
        """Processes of the run's user that are still there, on any node."""
        cluster = self.runs.cluster
        return [
            f"{node}: {pid} {command}"
            for node in cluster.node_names
            for pid, command in cluster.node_pids(node, user=self.runs.user)
        ]

    def checkpoints_on_nodes(self, nodes: Collection[str] | None = None) -> list[str]:
        """What is left of checkpoints in the memory of `nodes`, or of all nodes."""
        cluster = self.runs.cluster
        found = []
        for node in cluster.node_names if nodes is None else nodes:
            listed = cluster.run(["ls", "-A", "/dev/shm"], user="root", node=node, cwd="/", check=True).stdout.split()
            found += [f"{node}: {name}" for name in listed if name.startswith(CHECKPOINT_PREFIX)]
        return found
