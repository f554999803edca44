"""Called by torch at the end of ``import torch``, so that a run knows of a worker what its script need not report.

The package's entry point in ``torch.backends`` names it (torch 2.5 and newer; TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns
that off). Outside of a worker of a run nothing happens. No failure in here reaches the script.
"""

from __future__ import annotations

from functools import partial

from hpc_elastic.worker_api import agent_store, flight_recorder, heartbeat


def start() -> None:
    """Called by torch, and by a worker that is forked with torch imported. Never raises."""
    record = partial(flight_recorder.start, heartbeat.note_collectives)
    for begin in (agent_store.watch, record, heartbeat.count_optimizer_steps):
        try:
            begin()
        except Exception:
            pass  # its folder is gone, or a torch without the hook: the run does without
