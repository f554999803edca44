"""Says which store the agents serve, so that the ranks of a launcher in a worker do not take theirs for it."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

STORE_VARIABLE = "HPC_ELASTIC_AGENT_STORE"
"""The run's id, and the port for which the agents have set `_USES_STORE`."""
_USES_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def drop_other_store(env: MutableMapping[str, str] = os.environ) -> None:
    """Have rank 0 serve the store where a launcher in a worker (deepspeed's) gave its ranks another port than ours.

    Those ranks inherit the variable by which torch (2.13) connects all of them to a store that nobody serves there.
    torchrun, which serves one, sets that variable itself, and the run's id.
    """
    given = env.get(STORE_VARIABLE)
    if not given:
        return  # a fork server, which imports torch for all workers, reads nothing that differs between them
    run_id, _, ours = given.rpartition(" ")
    port = env.get("MASTER_PORT", ours)
    # Our port at another address may be the same store, by another name of its node.
    if env.get(_USES_STORE) == "True" and run_id == env.get("TORCHELASTIC_RUN_ID") and port not in ("", ours):
        del env[_USES_STORE]
        line = f"no agent serves a store at port {port} (the run's port is {ours}): {_USES_STORE} is removed"
        print(f"hpc_elastic: {line}", file=sys.stderr, flush=True)
