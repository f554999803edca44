"""What an agent imports once its workers run: it takes as long as half of its start, and nobody waits for it then.

And not when it is needed: the mount that holds this package may hang by then, or a newer version lie there.
"""

from __future__ import annotations

from importlib import import_module

MODULES = (
    "subprocess",
    "hpc_elastic.failures.evidence",
    "hpc_elastic.failures.own_failure",
    "hpc_elastic.failures.process_state",
    "hpc_elastic.failures.stacks",
    "hpc_elastic.agent.hang_evidence",
    "hpc_elastic.agent.hang_stop",
)


def import_what_failures_need() -> None:
    """Import them. For a thread that may be held up by files."""
    for module in MODULES:
        import_module(module)
