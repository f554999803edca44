"""Exceptions that a stop itself provokes, in a worker that the agent ended: they are the cause of nothing.

A handler of SIGTERM may raise, as Lightning's does; what then unwinds may fail again; the worker's own children get the
agent's signal too, and their ends are reported as failures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_elastic.failures.failure_text import RaisedException

_TYPE = (
    r"(?:SystemExit|KeyboardInterrupt|GeneratorExit|CancelledError)\Z"
    r"|.*(?:SIGTERM|SIGINT|Signal|Preempt|Terminat|GracefulExit|GracefulShutdown|ShutdownRequest|Interrupt)"
)
_TEXT = (
    r"\bSIG(?:TERM|INT|HUP|KILL)\b|\bsignal (?:15|2|9)\b|is killed by signal: (?:Terminated|Killed|Interrupt|Hangup)"
    r"|(?:exit(?:ed)?(?: with)?(?: status| code)?|exitcode) -?(?:15|9|143|137)\b"
)
_HANDLER = r"(?i)handl|signal|sigterm|\bon_|term|stop|shutdown|preempt|interrupt|quit|exit"


def is_stop_noise(chain: Sequence[RaisedException]) -> bool:
    """Whether the first exception of a chain, in a worker that the agent ended, came of that.

    Args:
        chain: The last one first.
    """
    if not chain:
        return False
    first = chain[-1]
    name = first.exception_type.rsplit(".", 1)[-1]
    return re.match(_TYPE, name) is not None or re.search(_TEXT, first.message) is not None or _is_in_handler(first)


def _is_in_handler(raised: RaisedException) -> bool:
    """Whether a function that Python called by itself raised it: the line that seems to call it does not name it."""
    if len(raised.frames) < 2 or not raised.caller:
        return False
    function = raised.frames[-1].function
    return re.search(_HANDLER, function) is not None and function not in raised.caller
