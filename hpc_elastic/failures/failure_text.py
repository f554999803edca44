"""What a dying process printed of its failure, as it is understood: exceptions, their chain and their frames."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from hpc_elastic.base.text import cut_end
from hpc_elastic.failures.summary import summary_line

TEXT_LIMIT = 64 << 10
"""Characters of a traceback that are kept: its first eighth and its end."""
MESSAGE_LIMIT = 16 << 10
CAUSE_LIMIT = 400


class TextKind(str, Enum):
    """What wrote the text."""

    PYTHON = "python"
    FATAL = "faulthandler"
    CPP = "c++"
    LINES = "lines"
    """The last lines, which speak of an error."""
    LAST_LINE = "last line"
    """The last line, whatever it says."""


class Frame(Struct, frozen=True, kw_only=True):
    """One line of a stack."""

    file: str
    line: int
    function: str


class RaisedException(Struct, frozen=True, kw_only=True):
    """One exception of a chain."""

    exception_type: str
    """As printed, ``torch.distributed.DistNetworkError``; empty for a line that stands for an exception."""
    message: str = ""
    """Without the type."""
    frames: tuple[Frame, ...] = ()
    """Outermost call first; of an exception that another one followed, from the function that caught it on."""
    source: str = ""
    """The innermost frame's line of code; empty where it was not printed."""
    caller: str = ""
    """The line of code of the frame around it."""
    while_handling: bool = False
    """Whether the next exception of the chain was raised while this one was handled, and not from it."""
    rank: int | None = None
    """The global rank that raised it, where another rank reports it."""
    is_quoted: bool = False
    """Whether it stands in the next one's message, as that of a loader's worker does."""

    @property
    def headline(self) -> str:
        """``KeyError: 'x'``."""
        text = ": ".join(part for part in (self.exception_type, self.message) if part)
        return cut_end(text.split("\n", 1)[0], CAUSE_LIMIT)


class FailureText(Struct, frozen=True, kw_only=True):
    """One failure, as its process described it."""

    kind: TextKind
    text: str
    """As printed, without colours and rank prefixes; at most `TEXT_LIMIT` characters."""
    exception_type: str
    """As printed (``torch.distributed.DistNetworkError``); for C++ the type's name; for a fatal error empty."""
    message: str
    """Without the type; may have several lines."""
    frames: tuple[Frame, ...] = ()
    """Outermost call first, of the exception that ended the process."""
    source: str = ""
    """The innermost frame's line of code; empty where it was not printed."""
    caller: str = ""
    """The line of code of the frame around it."""
    earlier: tuple[RaisedException, ...] = ()
    """The exceptions that it was raised from or while handling, nearest first; those that its message quotes too."""
    is_prefixed: bool = False
    """Whether torch's hook printed it, which does so for what nothing caught."""
    lines_after: int = 0
    """Lines that were printed after it."""
    span: tuple[int, int] = (0, 0)
    """Its first line and one past its last in `clean_text` of what it was found in; (0, 0) where it is not known."""

    exception_at: int = 0
    """The line with the exception's type, counted as `span`: others' output may have been taken for its message."""

    @property
    def causes(self) -> tuple[str, ...]:
        """``KeyError: 'x'``: `earlier`, in short; without what the message quotes."""
        return tuple(raised.headline for raised in self.earlier if not raised.is_quoted)

    @property
    def chain(self) -> tuple[RaisedException, ...]:
        """All its exceptions, the last one first; empty where none is known."""
        if not self.exception_type:
            return ()
        last = RaisedException(
            exception_type=self.exception_type,
            message=self.message,
            frames=self.frames,
            source=self.source,
            caller=self.caller,
        )
        return (last, *self.earlier)

    @property
    def headline(self) -> str:
        """``Type: message``, one line."""
        if not self.exception_type:
            return summary_line(self.message)
        return summary_line(f"{self.exception_type}: {self.message}") if self.message.strip() else self.exception_type
