"""`hpc_elastic.lazy_pattern`: patterns that cost nothing before they are used."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

import hpc_elastic
from hpc_elastic import lazy_pattern
from hpc_elastic.lazy_pattern import pattern


def test_it_is_compiled_once_and_at_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    real = re.compile
    monkeypatch.setattr(re, "compile", lambda *given: compiled.append(given) or real(*given))
    number = pattern(r"a(\d+)", re.IGNORECASE)
    assert compiled == []
    assert [number.findall(text) for text in ("A1 a2", "")] == [["1", "2"], []]
    assert compiled == [(r"a(\d+)", re.IGNORECASE)]


def test_it_does_what_the_compiled_one_does() -> None:
    lazy, real = pattern(rb"(?P<one>.)\n", re.DOTALL), re.compile(rb"(?P<one>.)\n", re.DOTALL)
    text = b"a\nb\n\n"
    assert [m.span() for m in lazy.finditer(text)] == [m.span() for m in real.finditer(text)]
    assert lazy.sub(rb"\1", text) == real.sub(rb"\1", text)
    assert lazy.pattern == real.pattern
    assert lazy.groupindex == real.groupindex
    with pytest.raises(AttributeError):
        lazy.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_a_wrong_one_says_so_when_it_is_used() -> None:
    with pytest.raises(re.error):
        pattern("(").match("")


def test_all_that_are_used_are_right() -> None:
    """What `re.compile` would have said at the import."""
    lazy = lazy_pattern._Lazy
    found = 0
    for module in pkgutil.walk_packages(hpc_elastic.__path__, "hpc_elastic."):
        if module.name.partition(".")[2].startswith(("workers", "output", "run", "agent.metrics", "slurm", "base")):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, lazy):
                    found += 1
                    assert value.groups >= 0
    assert found > 10
