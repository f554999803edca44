"""Called by torch at the end of ``import torch``, so that a run knows of a worker what its script need not report.

The package's entry point in ``torch.backends`` names it (torch 2.5 and newer; TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns
that off). Outside of a worker of a run nothing happens. No failure in here reaches the script. Torch's rendezvous is
looked at as the worker begins it: the agents' store, a port of the script's own, an old file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

STORE_VARIABLE = "HPC_ELASTIC_AGENT_STORE"
"""The run's id, and the address and port that the agents gave."""
NOTE = "hpc_elastic: rendezvous: "
"""A line of stderr that begins so explains a failure in ``init_process_group``."""
_USES_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def watch_rendezvous() -> None:
    """Have torch (2.4 to 2.13) look first; a fork server, which imports torch for all workers, does not."""
    if os.environ.get(STORE_VARIABLE):
        handlers: dict[str, Any] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
        for scheme in handlers.keys() & {"env", "tcp", "file"}:
            handlers[scheme] = partial(_call, handlers[scheme])


def _call(handler: Callable[..., Any], url: str, *args: Any, **kwargs: Any) -> Any:
    try:
        note = look_at_rendezvous(url)
        if note:
            print(f"{NOTE}{note}", file=sys.stderr, flush=True)
    except Exception:
        pass  # a strange URL or address: torch says so
    return handler(url, *args, **kwargs)


def look_at_rendezvous(url: str, env: MutableMapping[str, str] = os.environ, age: float | None = None) -> str:
    """Say what the script has changed or an earlier round has left; empty: nothing. `age`: seconds of this process.

    Where the port is not the agents', the variable by which torch (2.13) connects all ranks to a store that nobody
    serves there is removed: rank 0 serves it then. So it is for the ranks of a launcher in a worker (deepspeed's).
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        found = os.stat(parts.path) if os.path.exists(parts.path) else None
        before = time.time() - found.st_mtime - (_age() if age is None else age) if found else 0
        if not found or not found.st_size or before <= 0:
            return ""
        return f"an earlier round or run left the file {parts.path} ({before:.0f} s older than this process)"
    run_id, given, port = env.get(STORE_VARIABLE, "").rsplit(" ", 2)
    if run_id != env.get("TORCHELASTIC_RUN_ID"):
        return ""
    by_url = parts.scheme == "tcp"
    host = parts.hostname if by_url else env.get("MASTER_ADDR", given)
    now = str(parts.port) if by_url else env.get("MASTER_PORT", port)
    if not host or now in ("", "None") or (host.lower(), now) == (given.lower(), port):
        return ""
    if now != port:  # ours at another address may be the same store, by another name of its node
        env.pop(_USES_STORE, None)
    what = f"init_method to {url.partition('?')[0]}" if by_url else f"MASTER_ADDR/MASTER_PORT itself, to {host}:{now}"
    return f"the script set {what}; the run's are {given}:{port}"


def _age() -> float:
    with open("/proc/self/stat", "rb") as file:
        started = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def start() -> None:
    """Called by torch, and by a worker that is forked with torch imported. Never raises."""
    from hpc_elastic.worker_api import flight_recorder, heartbeat  # agents read the names above alone

    record = partial(flight_recorder.start, heartbeat.note_collectives)
    for begin in (watch_rendezvous, record, heartbeat.count_optimizer_steps):
        try:
            begin()
        except Exception:
            pass  # its folder is gone, or a torch without the hook: the run does without
