"""Makes a worker dump torch's flight recorder when its agent asks for it, and as it dies of an exception.

NCCL's process group does so by itself; gloo's does not. Where the worker's steps are not known, the collectives that
the recorder shows as complete are reported as its progress.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

VARIABLE = "HPC_ELASTIC_FLIGHT_RECORDER"
"""The rank's files begin with this; unset: there are none."""
ASK, DUMP, PONG = ".ask", ".json", ".alive"
"""``PREFIX.<pid>.ask`` is a pipe: a byte asks for a dump, which comes as ``PREFIX.<pid>.json``."""
PING = b"?"
"""This byte asks for ``PREFIX.<pid>.alive`` alone, an empty file."""
WHEN, ARRIVALS = b"t", ".when"
"""This byte asks for ``PREFIX.<pid>.when``: when the last collectives were entered, and the seconds that this took."""
MOST_CALLS = 128
"""The newest of each process group are reported."""
MOST_GROUPS = 16
_LOOK_MS = 200
_OLD_NAMES = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
}
"""Variables that torch before 2.9 read; newer ones warn of them."""


def start(note_collectives: Callable[..., bool]) -> None:
    """`note_collectives` is `heartbeat.note_collectives`: the agent imports this module, and not that one."""
    prefix = os.environ.get(VARIABLE)
    if not prefix:
        return
    major, minor = sys.modules["torch"].__version__.split(".")[:2]
    if (int(major), int(minor)) < (2, 9):
        for old, new in _OLD_NAMES.items():
            if new in os.environ:
                os.environ.setdefault(old, os.environ[new])
    own = f"{prefix}.{os.getpid()}"
    os.mkfifo(own + ASK, 0o600)
    fd = os.open(own + ASK, os.O_RDWR | os.O_CLOEXEC)  # with a writer of its own it never reads an end
    args = (fd, own, collectives := _Collectives(note_collectives))
    threading.Thread(target=_listen, args=args, name="hpc-elastic-flight-recorder", daemon=True).start()
    atexit.register(_at_exit, own, os.getpid(), collectives)


def _listen(fd: int, own: str, collectives: _Collectives) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        if not poll.poll(_LOOK_MS if collectives.note() else None):
            continue
        asked = os.read(fd, 64)
        try:
            os.close(os.open(own + PONG, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError:
            pass  # its folder is gone
        if WHEN in asked:
            _write_arrivals(own)
        if asked.strip(PING + WHEN):
            _dump(own)


class _Collectives:
    def __init__(self, report: Callable[..., bool]) -> None:
        self._report = report
        self._done = self._seen = 0
        self._is_over = False

    def note(self, *, is_final: bool = False) -> bool:
        """Returns whether another look may be of use. Never raises."""
        if self._is_over:
            return False
        self._is_over = is_final
        try:
            seen = sum(map(_completed, ("_dump_fr_trace_json", "_dump_nccl_trace_json")))
            # Less than before: groups were destroyed, and others have come.
            self._done, self._seen = self._done + seen - self._seen * (seen >= self._seen), seen
            return self._report(self._done, is_final=is_final)
        except Exception:
            return False  # no distributed torch, or an older one


def _completed(dump: str) -> int:
    """The recorder without its entries takes 12 µs (torch 2.13): gloo's and NCCL's have one each."""
    read = getattr(sys.modules["torch"]._C._distributed_c10d, dump, None)
    if read is None:
        return 0
    groups = json.loads(read(False)).get("pg_status", {}).values()
    return sum(max(0, int(group["last_completed_collective"])) for group in groups)


def _at_exit(own: str, pid: int, collectives: _Collectives) -> None:
    if os.getpid() != pid:
        return
    collectives.note(is_final=True)
    if getattr(sys, "last_value", None) is not None:
        _dump(own)


def _write_arrivals(own: str) -> None:
    try:
        began = time.thread_time()
        c10d: Any = sys.modules["torch"]._C._distributed_c10d
        groups: dict[str, Any] = {}
        for backend, dump in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
            if (read := getattr(c10d, dump, None)) is not None:
                groups |= {f"{backend} {name}": group for name, group in read_arrivals(read(True)).items()}
        _write(own, ARRIVALS, json.dumps({"groups": groups, "seconds": time.thread_time() - began}).encode())
    except Exception:
        pass


def read_arrivals(dump: str | bytes) -> dict[str, dict[str, Any]]:
    """Process group → ``members``; ``transfers``, the names of its sends and receives, or ``[""]`` where only their
    number shows (gloo); ``first``, the number of the first collective; ``kinds``, name and size of each kind of call;
    ``calls``, the kind of each; ``entered_ns`` of each, by the wall clock; and ``took_us`` on the GPU, empty where NCCL
    does not measure it (TORCH_NCCL_ENABLE_TIMING). Torch 2.6 to 2.13.
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


def _dump(own: str) -> None:
    try:
        c10d: Any = sys.modules["torch"]._C._distributed_c10d
        raw = c10d._dump_fr_trace_json()
        _write(own, DUMP, raw if isinstance(raw, bytes) else raw.encode())
    except Exception:
        pass  # no distributed torch, an older one, a full disk: as if there were no recorder


def _write(own: str, ending: str, raw: bytes) -> None:
    with open(os.open(f"{own}.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(raw)
    os.replace(f"{own}.part", own + ending)
