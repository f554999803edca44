"""A short name for "the same failure again": equal across ranks, rounds, hosts and restarts.

It leaves out what changes between two occurrences of one bug: addresses, numbers, pids, ports, ranks, line numbers and
the folders of paths. ``ValueError:3f2a90c1d4e5``, ``signal:SIGSEGV``, ``exit:3``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_elastic.base.digests import sha1
from hpc_elastic.failures.failure_text import Frame
from hpc_elastic.failures.summary import summary_line

_FRAMES = 3
_MESSAGE_LIMIT = 500
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # Order matters: a path before its digits, hexadecimal before decimal. A file that an error of the system names may
    # be each rank's own; where it is tried is in the frames.
    (re.compile(r"(\[Errno \d+\][^:']{0,80}: )'[^'\n]{1,300}'"), r"\1'#'"),
    (re.compile(r"(?<![\w.])(?:/[^\s/'\":,;()\[\]]+)+/([^\s/'\":,;()\[\]]*)"), r"\1"),
    (re.compile(r"\b0[xX][0-9a-fA-F]+\b"), "#"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "#"),
    (re.compile(r"\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b"), "#"),
    (re.compile(r"\btmp[a-z0-9_]{6,}\b"), "tmp#"),
    (re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"), "#"),
    (re.compile(r"#(?:[\s.,:x-]*#)+"), "#"),
    (re.compile(r"\s+"), " "),
)
# `record` itself is in the stack of a recorded failure only: without this, the same failure would get two names.
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/lib(?:64)?/python\d|\A<frozen |\A<string>\Z"
    r"|/hpc_elastic/(?:failures|inprocess|submission|worker_api)/\w+\.py\Z"
    # A torch that was built in place has no site-packages in its paths.
    r"|/torch/(?:_\w+|autograd|cuda|distributed|fx|jit|nn|optim|utils)/|/torch/(?:_\w+|functional|serialization)\.py\Z"
)


def normalise_message(message: str) -> str:
    """The message without what changes from one occurrence to the next; at most 500 characters."""
    text = message[: 4 * _MESSAGE_LIMIT]
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.strip()[:_MESSAGE_LIMIT]


def user_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames that are not of Python's library or an installed package, in their order."""
    return tuple(frame for frame in frames if not _LIBRARY.search(frame.file))


def fingerprint(
    *,
    exception_type: str = "",
    message: str = "",
    frames: Sequence[Frame] = (),
    exitcode: int = 1,
    signal: str = "",
    is_said: bool = False,
) -> str:
    """Name a failure.

    Args:
        exception_type: With or without its module; empty where no exception is known.
        message: The exception's text, without the type.
        frames: Outermost call first.
        exitcode: As subprocess gives it: negative for a signal.
        signal: The signal's name; empty where there was none.
        is_said: Whether `message` is, without an exception, why the process ended.

    Returns:
        A word without blanks, the same for two occurrences of one failure.
    """
    if not exception_type:
        end = f"signal:{signal}" if signal else f"exit:{exitcode}"
        if not is_said:
            return end
        return f"{end}:{sha1(normalise_message(summary_line(message)).encode('utf-8', 'replace')).hex()[:12]}"
    name = exception_type.rsplit(".", 1)[-1].rsplit("::", 1)[-1]
    mine = user_frames(frames)
    # A recorded traceback starts below the module's own frame.
    inner = tuple(frame for frame in mine if frame.function != "<module>")
    chosen = (inner or mine or tuple(frames))[-_FRAMES:]
    where = "|".join(f"{frame.file.rsplit('/', 1)[-1]}:{frame.function}" for frame in chosen)
    # What follows that line may be what another part of the program printed after the exception: a run's name, a time.
    digest = sha1(f"{name}\n{normalise_message(summary_line(message))}\n{where}".encode("utf-8", "replace"))
    return f"{re.sub(r'[^A-Za-z0-9_]', '_', name)[:60]}:{digest.hex()[:12]}"
