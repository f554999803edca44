"""What stands in a JSON file that anybody may have written: values of the type that is wanted, or none."""

from __future__ import annotations

from hpc_elastic.run.attempt import is_job_id

_TEXT_LIMIT = 4000


def integer(value: object) -> int | None:
    """The whole number that `value` is; None: it is none."""
    return value if type(value) is int else None


def whole_numbers(value: object) -> list[int]:
    """Those of a list."""
    return [n for n in value if type(n) is int] if isinstance(value, list) else []


def integer_or(value: int | None, default: int) -> int:
    """`value`, or `default` where there is none."""
    return default if value is None else value


def seconds_of(value: object) -> float:
    """A duration; 0 for what is none."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e9 else 0.0


def text_of(value: object) -> str:
    """Any value as a text of bounded length; nothing is an empty one."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= _TEXT_LIMIT else text[:_TEXT_LIMIT]


def job_id_of(value: object) -> str:
    """A Slurm job's id; what is none is an empty one."""
    return value if isinstance(value, str) and is_job_id(value) else ""


def names_of(value: object) -> tuple[str, ...]:
    """The texts of a list."""
    return tuple(name for name in value if isinstance(name, str)) if isinstance(value, list) else ()
