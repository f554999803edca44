"""The marks in the environment by which a run's processes are known on a node.

- ``HPC_ELASTIC_TAG=<run uid>:<node key>:<agent uid>`` in every worker and all that it starts: which incarnation of
  which node's agent of which run they belong to.
- ``HPC_ELASTIC_NODE_TAG=<run uid>:<node key>`` in the agent itself, put there by whoever starts it, so that a later
  incarnation finds an earlier one that is stopped or stuck.

What counts is the environment that a process was *started* with (``/proc/<pid>/environ``).
"""

from __future__ import annotations

from hpc_elastic.light_dataclasses import dataclass

TAG_VARIABLE = "HPC_ELASTIC_TAG"
NODE_TAG_VARIABLE = "HPC_ELASTIC_NODE_TAG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """One incarnation of one node's agent in one run. Distinct runs have distinct uids, so their tags never match."""

    run_uid: str
    node_key: str
    agent_uid: str

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

    def is_of_other_incarnation(self, worker_tag: str) -> bool:
        """Whether `worker_tag` marks a worker of this run's agents on this node, but not of this very agent."""
        return worker_tag.startswith(self.node + ":") and worker_tag != str(self)
