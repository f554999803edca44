"""The marks in the environment by which a run's processes are known on a node.

- ``HPC_ELASTIC_TAG=<run uid>:<node key>:<agent uid>`` in every worker and all that it starts: which incarnation of
  which node's agent of which run they belong to.
- ``HPC_ELASTIC_NODE_TAG=<run uid>:<node key>`` in the agent itself, put there by its launcher, so that a later
  incarnation finds an earlier one that is stopped or stuck.

What counts is the environment that a process was *started* with (``/proc/<pid>/environ``). A worker that submits
another job hands its tags on to it, so a tag counts only in the run's own Slurm jobs. Slurm itself sets SLURM_JOB_ID in
everything that it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from hpc_elastic.workers.tree import Environ

JOB_VARIABLE = "SLURM_JOB_ID"
TAG_VARIABLE = "HPC_ELASTIC_TAG"
NODE_TAG_VARIABLE = "HPC_ELASTIC_NODE_TAG"


class Tag(Struct, frozen=True, kw_only=True):
    """One incarnation of one node's agent in one run. Distinct runs have distinct uids, so their tags never match."""

    run_uid: str
    node_key: str
    agent_uid: str
    jobs: frozenset[str] = frozenset()
    """SLURM_JOB_ID of this agent and of the run's earlier attempts; a requeued job keeps it. Empty outside Slurm."""

    def __post_init__(self) -> None:
        for name in ("run_uid", "node_key", "agent_uid"):
            value = getattr(self, name)
            if not value or not value.isascii() or not value.isprintable() or ":" in value or "=" in value:
                raise ValueError(
                    f"{name}={value!r} cannot be part of a tag: printable ASCII without ':' and '=', please"
                )

    @property
    def node(self) -> str:
        """The value of `NODE_TAG_VARIABLE`: the same for every incarnation."""
        return f"{self.run_uid}:{self.node_key}"

    def __str__(self) -> str:
        """The value of `TAG_VARIABLE`."""
        return f"{self.node}:{self.agent_uid}"

    def is_in_own_job(self, environ: Environ, cgroup_job: Callable[[], str | None]) -> bool:
        """Whether a process belongs to a job of this run; where the run is no job's, to no job at all.

        Args:
            environ: The process' own.
            cgroup_job: Looks up the job of its cgroup, for a process that has dropped SLURM_JOB_ID. Where there
                is none either, the process counts as another's.
        """
        job = environ.get(JOB_VARIABLE)
        if not self.jobs:
            return not job
        return (job or cgroup_job()) in self.jobs

    def is_own_worker(self, environ: Environ, cgroup_job: Callable[[], str | None]) -> bool:
        """Whether this very agent started the process, or what started it. Arguments as of `is_in_own_job`."""
        return environ.get(TAG_VARIABLE) == str(self) and self.is_in_own_job(environ, cgroup_job)

    def is_of_other_incarnation(self, worker_tag: str) -> bool:
        """Whether `worker_tag` marks a worker of this run's agents on this node, but not of this very agent."""
        return worker_tag.startswith(self.node + ":") and worker_tag != str(self)


def node_key(cluster: str, node: int) -> str:
    """Where the tags of one run's agents on one host differ: a cluster's host has one agent, a local run many."""
    return str(node) if cluster == "local" else "host"
