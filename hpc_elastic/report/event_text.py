"""One readable line for each event: what happened, where, and why. Pure.

An event that this version does not know, or whose fields are not as they should be, is shown with its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpc_elastic.base.text import clean_text, plural, ranks_text

_HEAD = ("v", "t", "n", "host", "node", "role", "event")
_LONGEST_VALUE = 200
Fields = Mapping[str, Any]


def describe_event(event: Fields) -> str:
    """What happened, and why, in one line without control characters."""
    sentence = _SENTENCES.get(str(event.get("event")))
    text = ""
    if sentence is not None:
        try:
            text = sentence(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            pass
    if not text:
        left = {key: value for key, value in event.items() if key not in (*_HEAD, "reason")}
        text = " ".join(f"{key}={_short(value)}" for key, value in left.items())
    reason = event.get("reason")
    if isinstance(reason, str) and reason and reason not in text:
        text = f"{text}: {reason}" if text else reason
    return clean_text(text).replace("\n", " ").replace("\t", " ")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."


def _ranks(value: object) -> str:
    ranks = [rank for rank in value if isinstance(rank, int)] if isinstance(value, list) else []
    return ranks_text(ranks)


def _code(value: object) -> str:
    return f"signal {-value}" if isinstance(value, int) and value < 0 else f"exit code {value}"


def _bytes_lost(e: Fields) -> str:
    streams = e["streams"]
    ranks = sorted({one["rank"] for one in streams if isinstance(one, dict) and isinstance(one.get("rank"), int)})
    whose = f" of {ranks_text(ranks)}" if ranks else ""
    return f"{e['not_in_files']} bytes{whose} are in no file, {e['not_in_job_log']} not in the job log"


def _requeue(e: Fields) -> str:
    return {"requeue": "the job is requeued", "end": "the job ends"}[e["action"]]


def _armed(e: Fields) -> str:
    nodes = e["nodes"]
    job = f", job {e['job_id']}" if e.get("job_id") else ""
    armed = "requeue armed" if e["requeue_armed"] else f"requeue not armed: {e.get('requeue_reason') or 'no reason'}"
    return f"attempt {e['attempt']}{job}, {plural(len(nodes), 'node')}; {armed}"


def _round(e: Fields) -> str:
    return f"round {e['round']}"


def _name(e: Fields, key: str = "host", other: str = "node") -> str:
    return str(e.get(key) or f"node {e[other]}")


def _silence(e: Fields) -> str:
    return "" if e.get("reason") else f": no sign of it for {float(e['age']):.1f} s"


def _restarts(e: Fields) -> str:
    return f"{e['restarts_used']} of {e['max_restarts']} restarts used"


_SENTENCES: dict[str, Callable[[Fields], str]] = {
    "attempt_started": _armed,
    "agents_launched": lambda e: f"{plural(e['nodes'], 'agent')} launched",
    "agent_ended": lambda e: (
        f"the agent on {e['name']} ended, exit code {e['code']}"
        + (f" ({e['detail']})" if e.get("detail") not in ("", None, f"exit code {e['code']}") else "")
        if "name" in e
        else f"ended, exit code {e['code']}"
    ),
    "agent_relaunched": lambda e: f"the agent on {e['name']} is started again",
    "node_given_up": lambda e: f"{e['name']} is given up ({str(e['cause']).replace('_', ' ')})",
    "notice": lambda e: f"{e['signal']}: somebody asks for the end",
    "signal_heard": lambda e: f"{_round(e)}: the supervisor is asked what a signal means",
    "signal_decided": lambda e: (
        f"{e['meaning']}, heard by the {e['heard_by']}; the job {e['slurm']}: "
        + (f"the workers may save, it ends in {e['seconds']:.0f} s" if e["saves"] else "everything ends now")
    ),
    "notice_given": lambda e: f"{_round(e)}: the job is about to end; workers have {e['seconds']:.0f} s to save",
    "step_agreed": lambda e: _round(e),
    "verdict": lambda e: str(e["outcome"]).replace("_", " "),
    "requeue_decision": _requeue,
    "nodes_differ": lambda e: f"Slurm and the run {'disagree' if e['taken'] or e['kept'] else 'agree'} about the nodes",
    "nodes_judged": lambda e: (
        (f"the next attempt does without {', '.join(e['excluded'])}" if e["excluded"] else "bad nodes stay")
        + "".join(f"; {one['node']} stays: {one['reason']}" for one in e.get("spared") or ())
    ),
    "requeued": lambda e: "the next attempt is queued",
    "attempt_ended": lambda e: f"{str(e['outcome']).replace('_', ' ')}, exit code {e['exit_code']}",
    "agent_started": lambda e: f"pid {e['pid']}, version {e['version']}",
    "round_final": lambda e: (
        f"{_round(e)}: {_ranks(e['ranks'])} of {e['world_size']}, node {e['group_rank']} of {e['group_world_size']}, "
        f"master {e['master']}, {_restarts(e)}"
    ),
    "workers_started": lambda e: f"{_round(e)}: {plural(len(e['pids']), 'worker')} started",
    "worker_failed": lambda e: (
        f"{_round(e)}: rank {e['rank']} failed, {_code(e['exitcode'])} ({str(e['failure_class']).replace('_', ' ')}): "
        f"{e['message']}"
    ),
    "hang": lambda e: f"{_round(e)}: no sign of life for {e['limit']} s",
    "stacks_taken": lambda e: (
        f"{_round(e)}: stacks of {_ranks([rank for group in e['groups'] for rank in group['ranks']])} taken"
        + (f", none of {_ranks(e['silent'])}" if e["silent"] else "")
    ),
    "workers_stopping": lambda e: f"{_round(e)}: workers are being stopped",
    "workers_stopped": lambda e: (
        f"{_round(e)}: workers stopped in {float(e['seconds']):.1f} s"
        + (f", {e['killed']} by SIGKILL" if e.get("killed") else "")
        + (f", left: {', '.join(map(str, e['left']))}" if e.get("left") else "")
    ),
    "workers_succeeded": lambda e: f"{_round(e)}: all workers here ended with 0",
    "agent_failed": lambda e: f"the agent itself failed: {e['error']} at {e['where']}",
    "end_taken_over": lambda e: f"this node finishes the attempt, for agent {e['by']}",
    "attempt_superseded": lambda e: (
        f"attempt {e['superseded']} was superseded"
        + (f"; it has ended on {', '.join(e['ended'])}" if e["ended"] else "")
        + (f"; not heard of: {', '.join(e['silent'])}" if e["silent"] else "")
    ),
    "output_lost": _bytes_lost,
    "filesystem_refused": lambda e: (
        f"the shared filesystem refused for {float(e['seconds']):.0f} s{'' if e['over'] else ', to the end'}: "
        f"{e['error']}" + (f" ({e['path']})" if e.get("path") else "")
    ),
    "link_lost": lambda e: (
        f"the network link to {_name(e)} was lost for {float(e['seconds']):.0f} s{'' if e['over'] else ', to the end'}"
    ),
    "events_dropped": lambda e: f"{e['count']} events lost: the disk was full",
    "platform_failure": lambda e: f"{_round(e)}: something of hpc-elastic itself failed",
    "spare_lost": lambda e: f"{_name(e)}, which waited for a place, had died{_silence(e)}",
    "ring_restarted": lambda e: (
        f"{_round(e)}: the function starts again in its processes (iteration {e['iteration']}, "
        f"{float(e['seconds']):.2f} s after the fault, {e['active_world_size']} of {e['world_size']} ranks active)"
    ),
    "ring_left": lambda e: f"{_round(e)}: rank {e['rank']} leaves the in-process restart group",
    "ring_gave_up": lambda e: f"{_round(e)}: the in-process restart group gives up on rank {e['rank']}",
    "worker_replaced": lambda e: (
        f"{_round(e)}: a fresh process ({e['pid']}) takes the place of rank {e['rank']}; the others stay"
    ),
    "replacement_refused": lambda e: f"{_round(e)}: all workers are to start again",
    "health_check_failed": lambda e: f"this node leaves the run ({', '.join(e['checks'])})",
    "health_warning": lambda e: f"{e['check']}",
    "round_opened": lambda e: f"{_round(e)} opened",
    "round_frozen": lambda e: f"{_round(e)}: {plural(len(e['nodes']), 'node')} are in",
    "round_confirmed": lambda e: f"{_round(e)} confirmed by all",
    "node_lost": lambda e: f"{_name(e)} is taken out of {_round(e)}{_silence(e)}",
    "node_left": lambda e: f"{_name(e)} left",
    "node_missing": lambda e: f"{_round(e)} begins without node {e['node']}",
    "node_replaced": lambda e: (
        f"{_round(e)}: {_name(e)} took the place of {_name(e, 'replaces_host', 'replaces_node')} "
        f"(node {e['group_rank']} of the round)"
    ),
    "nodes_waiting": lambda e: f"{_round(e)}: nodes wait",
    "nodes_asked": lambda e: f"{_round(e)}: nodes are asked whether they live",
    "coordinator_changed": lambda e: f"{_round(e)}: this node coordinates now",
    "clock_offset": lambda e: (
        f"this node's clock since its boot is {e['offset_ns'] / 1e6:.3f} ms ahead of node {e['reference']}'s, "
        f"give or take {e['bound_ns'] / 1e6:.3f} ms"
    ),
    "restart_decision": lambda e: f"{_round(e)}: {e['action']}, {_restarts(e)}",
    "closed": lambda e: f"the run is closed in {_round(e)}: {str(e['outcome']).replace('_', ' ')}",
}
"""Event → what happened; the field `reason` is put behind it."""

KNOWN_EVENTS = frozenset(_SENTENCES)
