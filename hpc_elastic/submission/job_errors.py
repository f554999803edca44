"""What a job's `result` raises, in submitit's classes; and the worker's exception as its cause."""

from __future__ import annotations

from typing import Any

from submitit.core.utils import FailedJobError, UncompletedJobError

from hpc_elastic.errors import HpcElasticError


class _FactsError(Exception):
    """submitit's errors take a text; these take facts, and pickle with them and with their cause."""

    template = "{message}"

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        super().__init__(self.template.format(**facts))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.facts, getattr(self, "__cause__", None))


def _rebuild(error_type: Any, facts: dict[str, Any], cause: BaseException | None) -> Any:
    error = error_type(**facts)
    error.__cause__ = cause
    return error


class ElasticJobFailedError(_FactsError, FailedJobError):  # type: ignore[misc]
    """The job's function failed: the text is the report's verdict, the cause what the function raised, where it did."""

    template = "job {job_id} failed\n{report}"


class ElasticJobUncompletedError(_FactsError, UncompletedJobError):  # type: ignore[misc]
    """The job ended without a result: cancelled, out of time, never begun."""

    template = "job {job_id} has no result: {why}\n{report}"


class WorkerTracebackError(HpcElasticError):
    """The text of an exception that was raised in a worker, as the cause of its copy here."""

    template = "\n{traceback}"


class WorkerRaisedError(HpcElasticError):
    """In place of a worker's exception of which no copy can be made here."""

    template = "{type}: {message}"


def as_cause(error: BaseException | None, head: dict[str, Any]) -> BaseException:
    """A worker's exception, with the traceback that it had there.

    Args:
        error: The copy; None where there can be none.
        head: Of the file that it came in.
    """
    facts = {name: str(head.get(name, "")) for name in ("type", "message")}
    found = error if error is not None else WorkerRaisedError(**facts)
    found.__cause__ = WorkerTracebackError(traceback=str(head.get("traceback", "")).rstrip())
    return found
