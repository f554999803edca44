"""What the ring raises. All of it pickles."""

from __future__ import annotations


class RestartError(Exception):
    """The base of what ends a rank's part in the wrapped call."""


class RestartAbort(BaseException):
    """Raised by a hook (`hpc_elastic.inprocess.initialize.RetryController`, say) or by the function: no more restarts.

    Under ``hpc-elastic`` the process then ends, and the agent's restart budget decides what is next.
    """


class HealthCheckError(RestartError):
    """The health check after a fault failed; its ``__cause__`` is what the check raised. The others go on alone."""


class InternalError(RestartError):
    """The ring itself can't go on: its store is gone, say."""


class TimeoutError(RestartError):
    """A hook took longer than it was given."""
