"""At an attempt's end: what it tells against its nodes is kept, and whom the next one does without is decided."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hpc_elastic.attempt import AttemptInfo
from hpc_elastic.clock import Clock
from hpc_elastic.events import EventLog
from hpc_elastic.launch.bad_nodes import NextNodes, checked, keep_evidence, next_nodes
from hpc_elastic.launch.last_files import LastFiles
from hpc_elastic.launch.site import Site
from hpc_elastic.node_records import load_record, save_record
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.run_spec import RunSpec

if TYPE_CHECKING:
    from hpc_elastic.report.history import RunHistory

logger = logging.getLogger(__name__)


def judge_nodes(
    paths: RunPaths,
    spec: RunSpec,
    site: Site,
    attempt: AttemptInfo,
    history: RunHistory,
    events: EventLog,
    *,
    clock: Clock,
    disk: LastFiles,
    asks_slurm: bool,
) -> NextNodes:
    """Keep what the attempt tells against nodes, and decide whom the next one does without. Never raises.

    `asks_slurm`: whether there is a next one, whose list of excluded nodes is to be made.
    """
    if attempt.cluster == "local":
        return NextNodes()  # they are all this machine
    from hpc_elastic.report.node_evidence import node_evidence

    try:
        seen = node_evidence(history, attempt=attempt.number)
        now_ns = clock.time_ns()
        record = disk.do(
            lambda: keep_evidence(
                paths, spec, seen, attempt=attempt.number, cluster=site.cluster_name, now_ns=now_ns, env=os.environ
            ),
            None,
        )
        if record is None:
            return NextNodes()
        eligible = None
        if asks_slurm and (record.excluded or next_nodes(record, spec, None, now_ns=now_ns).bad):
            eligible = site.eligible_nodes()
        nodes = checked(next_nodes(record, spec, eligible, now_ns=now_ns), site, paths, eligible)
        if eligible is not None and nodes.exclusion.nodes != record.excluded:
            # Before Slurm has the list: a node on it that is not known as ours would count as the user's for ever.
            kept = replace(load_record(paths.nodes_json), excluded=nodes.exclusion.nodes, saved_ns=now_ns)
            disk.do(lambda: save_record(paths.nodes_json, kept), None)
        if nodes.bad and eligible is not None:
            why = {one.node: one.why for one in nodes.bad}
            events.write(
                "nodes_judged",
                excluded=list(nodes.exclusion.nodes),
                reason="; ".join(f"{name}: {why[name]}" for name in nodes.exclusion.nodes) or "none can be left out",
                spared=[{"node": name, "reason": reason} for name, reason in nodes.exclusion.spared],
            )
        return nodes
    except Exception as error:
        logger.exception("bad nodes can't be told from good ones: %s", error)
        return NextNodes()
