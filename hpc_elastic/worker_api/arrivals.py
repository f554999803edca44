"""When this process entered its last collectives, from torch's flight recorder, small enough to be compared often."""

from __future__ import annotations

import json
from typing import Any

MOST_CALLS = 128
"""Of each process group, the newest."""
MOST_GROUPS = 16


def read_arrivals(dump: str | bytes) -> dict[str, dict[str, Any]]:
    """Read a dump of the recorder, of gloo or NCCL, in the JSON of torch 2.6 to 2.13.

    Returns:
        Process group → ``members``, its ranks as torch writes them; ``transfers``, the names of its sends and receives,
        or ``[""]`` where only their number shows (gloo); ``first``, the number of the first collective; ``kinds``, name
        and size of each kind of call; ``calls``, the kind of each; ``entered_ns`` of each, by the wall clock; and
        ``took_us`` of each on the GPU, empty where NCCL does not measure it (TORCH_NCCL_ENABLE_TIMING).
    """
    held = json.loads(dump)
    ranks = {str(one["name"]): str(one["ranks"]) for one in held.get("pg_config", {}).values()}
    groups: dict[str, dict[str, Any]] = {}
    uncounted: dict[str, set[int]] = {}
    for entry in reversed(held["entries"]):
        name, call = entry["process_group"][0], entry["profiling_name"]
        if name not in groups:
            if len(groups) == MOST_GROUPS:
                continue
            groups[name] = {"members": ranks.get(name, ""), "transfers": [], "first": -1}
            groups[name] |= {"kinds": [], "calls": [], "entered_ns": [], "took_us": []}
        group = groups[name]
        if entry["is_p2p"]:
            if call not in group["transfers"]:
                group["transfers"].append(call)
            continue
        number = entry["collective_seq_id"]
        # Of entries with one number, which are put together, the newest is read.
        if len(group["calls"]) == MOST_CALLS or group["first"] not in (-1, number + 1):
            continue
        uncounted.setdefault(name, set()).add(entry["op_id"] - number)
        kind = f"{call} {entry['input_sizes']}"
        if kind not in group["kinds"]:
            group["kinds"].append(kind)
        group["first"] = number
        group["calls"].append(group["kinds"].index(kind))
        group["entered_ns"].append(entry["time_created_ns"])
        group["took_us"].append(round(1000 * entry.get("duration_ms", -1)))
    for name, group in groups.items():
        for values in (group["calls"], group["entered_ns"], group["took_us"]):
            values.reverse()
        running = next((n for n, took in enumerate(reversed(group["took_us"])) if took >= 0), 0)
        for values in (group["calls"], group["entered_ns"], group["took_us"]):
            del values[len(values) - running :]
        if any(took < 0 for took in group["took_us"]):
            group["took_us"] = []
        if not group["transfers"] and len(uncounted.get(name, ())) > 1:
            group["transfers"] = [""]  # gloo records no send or receive, but counts them
    return groups
