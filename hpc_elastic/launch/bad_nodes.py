"""Evidence against nodes, and the next attempt's list of excluded nodes."""

from __future__ import annotations

import logging
from collections.abc import Collection

from msgspec import Struct, field

from hpc_elastic.launch.site import EligibleNodes, Site
from hpc_elastic.run.node_score import (
    Evidence,
    Exclusion,
    NodeRecord,
    NodeScore,
    choose_excluded,
    load_record,
    save_record,
    score_nodes,
)
from hpc_elastic.run.option_values import Scope
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import RunSpec

logger = logging.getLogger(__name__)


class NextNodes(Struct, frozen=True, kw_only=True):
    bad: tuple[NodeScore, ...] = ()
    exclusion: Exclusion = field(default_factory=Exclusion)
    excluded: tuple[str, ...] | None = None
    """The job's whole list, the user's own included; None: unchanged."""


def nodes_needed(spec: RunSpec) -> int:
    """The nodes that Slurm must have for the job to start: a fixed number includes the spares."""
    return spec.min_nodes if spec.min_nodes < spec.max_nodes else spec.max_nodes + spec.spares


def keep_evidence(paths: RunPaths, seen: Collection[Evidence], *, now_ns: int) -> NodeRecord:
    """Add the attempt's evidence to nodes.json. Returns all that counts for this run. Raises OSError."""
    record = load_record(paths.nodes_json)
    if record.problem:
        logger.warning("%s %s: its records of nodes are lost", paths.nodes_json, record.problem)
    evidence = tuple(dict.fromkeys((*record.evidence, *seen)))
    record = NodeRecord(evidence=evidence, excluded=record.excluded, saved_ns=now_ns)
    if seen:
        save_record(paths.nodes_json, record)
    return record


def next_nodes(record: NodeRecord, spec: RunSpec, eligible: EligibleNodes | None, *, now_ns: int) -> NextNodes:
    """Decide which nodes the next attempt does without. `eligible` is None where unknown: nothing is changed then."""
    settings = spec.bad_nodes
    if settings.scope is Scope.OFF:
        return NextNodes()
    bad = tuple(one for one in score_nodes(record.evidence, now_ns=now_ns, hours=settings.hours) if one.is_bad)
    if eligible is None or not eligible.known:
        return NextNodes(bad=bad)
    users = set(eligible.excluded) - set(record.excluded)
    exclusion = choose_excluded(
        bad,
        known=eligible.known,
        usable=eligible.usable - users,
        need=nodes_needed(spec),
        required=eligible.required,
        share=settings.share,
    )
    wanted = tuple(sorted(users | set(exclusion.nodes)))
    return NextNodes(bad=bad, exclusion=exclusion, excluded=None if set(wanted) == set(eligible.excluded) else wanted)


def checked(nodes: NextNodes, site: Site, paths: RunPaths, eligible: EligibleNodes | None) -> NextNodes:
    """The same, unless Slurm says that the job could never begin like that (for its constraints, say)."""
    if eligible is None or not nodes.exclusion.nodes or not nodes.excluded:
        return nodes
    why = site.why_not_without(paths, nodes.excluded)
    if why is None:
        return nodes
    spared = tuple((name, f"Slurm would have no nodes for the job: {why}") for name in nodes.exclusion.nodes)
    users = tuple(sorted(set(nodes.excluded) - set(nodes.exclusion.nodes)))
    return NextNodes(
        bad=nodes.bad,
        exclusion=Exclusion(spared=(*nodes.exclusion.spared, *spared)),
        excluded=None if set(users) == set(eligible.excluded) else users,
    )
