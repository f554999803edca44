"""Regular expressions that are compiled when they are first used, a tenth of a millisecond each: an agent knows many,
and needs few of them before its workers run."""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast


def pattern(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """What `re.compile` gives, to all who use its methods. (`re`'s own functions take no such thing.)

    Raises:
        re.error: `text` is wrong; at the first use.
    """
    return cast("re.Pattern[AnyStr]", _Lazy(text, flags))


class _Lazy:
    def __init__(self, text: str | bytes, flags: int) -> None:
        self._text, self._flags = text, flags

    def __getattr__(self, name: str) -> Any:
        """For what is not there yet: from then on it is."""
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(re.compile(self._text, self._flags), name)
        setattr(self, name, value)
        return value
