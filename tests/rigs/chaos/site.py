"""The batch host of a chaotic run: the real supervisor, whose launcher starts each agent on the node's own mount.

``python -m tests.rigs.chaos.site CONFIG``, where CONFIG is the JSON file that `clusters.AgentCluster` writes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.host_facts import own_command
from hpc_elastic.launch import agents
from hpc_elastic.launch.agents import AgentEnd
from hpc_elastic.launch.local import LocalLauncher
from hpc_elastic.launch.run_attempt import load_run, log_to_stdout, run_attempt
from hpc_elastic.launch.site import Site, attempt_facts
from hpc_elastic.run.paths import AttemptInfo, RunPaths
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.workers.linux import SignalQueue
from hpc_elastic.workers.tree import NODE_TAG_VARIABLE, node_key
from tests.rigs.chaos.clocks import with_clock


class ChaosLauncher(LocalLauncher):
    """A node that was lost for good gets no agent any more, as when srun finds it down."""

    def __init__(self, stage: Path, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._stage = stage

    def relaunch(self, node: int) -> None:
        if (self._stage / f"down-{node}").exists():
            self._failed.append(AgentEnd(node=node, code=None, detail="the node is down", started=False))
        else:
            super().relaunch(node)


class ChaosSite(Site):
    """Nodes that see the shared folder each by a path of its own, each with a wall clock of its own."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._stage = Path(config["stage"])
        self._runs: list[str] = config["runs"]

    def facts(self, spec: RunSpec) -> AttemptInfo:
        names = tuple(f"n{node}" for node in range(len(self._runs)))
        return attempt_facts(cluster="local", nodes=names, requeue_reason="no requeue here")

    def launcher(self, spec: RunSpec, paths: RunPaths, attempt: AttemptInfo) -> ChaosLauncher:
        def environment(node: int) -> dict[str, str]:
            mark = {NODE_TAG_VARIABLE: f"{spec.uid}:{node_key('local', node)}"}
            return {**with_clock(os.environ, self._stage, node), **mark}

        def command(node: int) -> list[str]:
            run_dir = f"{self._runs[node]}/{paths.root.name}"
            place = ("--run-dir", run_dir, "--attempt", str(attempt.number), "--node", str(node))
            return own_command("agent", *place, "--launcher-pid", str(os.getpid()))

        starts = [(command(node), environment(node)) for node in range(len(self._runs))]
        return ChaosLauncher(self._stage, starts, umask=0o022)


def main() -> int:
    config = json.loads(Path(sys.argv[1]).read_text())
    os.umask(0o077)
    agents.RELAUNCHES_PER_NODE = config["relaunches"]
    signals = SignalQueue([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD])
    log_to_stdout()
    paths, spec = load_run(Path(config["run_dir"]))
    return run_attempt(paths, spec, ChaosSite(config), clock=SystemClock(), signals=signals).exit_code


if __name__ == "__main__":
    sys.exit(main())
