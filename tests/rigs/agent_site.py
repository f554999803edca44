"""What the parts of an agent share, for tests: everything that is not given is inert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpc_elastic.agent.heartbeat_watch import HeartbeatWatch
from hpc_elastic.agent.heartbeats import HeartbeatFolder
from hpc_elastic.agent.identity import AgentIdentity
from hpc_elastic.agent.part import AgentSite, GroupSite, Part
from hpc_elastic.run.option_values import SectionTimeouts
from hpc_elastic.run.paths import AttemptInfo, AttemptPaths, RunPaths
from hpc_elastic.run.progress import HangSettings
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.workers.spawn import Inherited
from hpc_elastic.workers.tree import Tag
from tests.rigs.fake_clock import FakeClock

FILES: Any = SimpleNamespace(stuck_for=lambda: 0.0, do=lambda job, **_: job(), post=lambda job: None)


def silent_watch(clock: Any) -> HeartbeatWatch:
    """A watch without a folder: no worker is judged."""
    return HeartbeatWatch(
        folder=HeartbeatFolder(None), timeouts=SectionTimeouts(), clock=clock, files=FILES, lease=None
    )


def hang_site(folder: Path, names: Sequence[str], *, clock: Any, files: Any) -> Any:
    """As much of a site as a `HangDetector` of node 0 needs."""
    spec, attempt = SimpleNamespace(hangs=HangSettings()), SimpleNamespace(nodes=names)
    return SimpleNamespace(
        me=SimpleNamespace(spec=spec, attempt=attempt, node=0, paths=SimpleNamespace(suspicions=folder)),
        clock=clock,
        files=files,
        watch=silent_watch(clock),
        events=SimpleNamespace(write=lambda event: None),
    )


def make_site(
    *, spec: RunSpec, attempt: AttemptInfo, info: Any, run_dir: Path = Path("/run"), **shared: Any
) -> AgentSite:
    """`shared`: fields of `AgentSite`."""
    run = RunPaths(run_dir)
    me = AgentIdentity(
        spec=spec,
        attempt=attempt,
        run=run,
        paths=run.attempt(attempt.number),
        node=info.node,
        host=info.host,
        uid=info.uid,
        tag=Tag(run_uid=spec.uid, node_key="n", agent_uid=info.uid),
        env={},
        inherited=Inherited(umask=0o22, core_limit=(0, 0), subreaper=True),
        furthest_before=-1,
    )
    clock = shared.get("clock") or FakeClock()
    given: dict[str, Any] = {
        "environ": {},
        "clock": clock,
        "files": FILES,
        "pump": SimpleNamespace(take_losses=lambda: None),
        "notifier": None,
        "watch": silent_watch(clock),
        "store_server": Part(),
    }
    return AgentSite(me=me, info=info, **{**given, **shared})


def make_group_site(attempt: Path, **changes: Any) -> GroupSite:
    """Of node 0's workers in round 0, the first of the run."""
    inert = SimpleNamespace()
    facts: dict[str, Any] = {"host": "n0", "node": 0, "round": 0, "layout": SimpleNamespace(first_rank=0)}
    facts |= {"clock": FakeClock(), "files": FILES, "pump": inert, "watch": inert}
    return GroupSite(attempt=AttemptPaths(attempt), **{**facts, **changes})
