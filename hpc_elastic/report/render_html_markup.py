"""HTML that can't be broken out of: text becomes markup in `element` alone, and there it is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hpc_elastic.failures.traceback_text import clean_text
from hpc_elastic.report.render_text_words import DECEPTIVE

_VOID = frozenset({"meta", "input", "wbr"})
_EMPTY = frozenset({"path", "use"})


class Markup(str):
    """HTML source, made by this module's functions."""

    __slots__ = ()


def text(value: str) -> Markup:
    """Somebody's words as HTML, for content and for attributes alike."""
    shown = DECEPTIVE.sub("\ufffd", clean_text(value)).encode("utf-8", "replace").decode("utf-8")
    return Markup(escape(shown, quote=True))


def element(name: str, /, *content: str, **attributes: str | bool | None) -> Markup:
    """One element.

    Args:
        name: The tag's name.
        content: Markup is taken as it is, any other text is escaped.
        attributes: ``_`` stands for ``-``, a ``_`` at the end is left out (``class_``); True: without a value; False,
            None: not there.
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value is True else f' {key}="{_source(str(value))}"')
    if name in _EMPTY:  # SVG's
        return Markup("".join([*parts, "/>"]))
    parts.append(">")
    if name in _VOID:
        return Markup("".join(parts))
    parts += [_source(piece) for piece in content]
    parts.append(f"</{name}>")
    return Markup("".join(parts))


def table_head(*columns: str, numbers: Sequence[str] = ()) -> Markup:
    """A table's first row; `numbers` are the columns that are flush right."""
    cells = (element("th", name, scope="col", class_="n" if name in numbers else None) for name in columns)
    return element("tr", *cells)


def join(*pieces: str) -> Markup:
    """One after the other."""
    return Markup("".join(_source(piece) for piece in pieces))


def _source(piece: str) -> str:
    return piece if isinstance(piece, Markup) else text(piece)
