"""Errors: their text comes from their facts, and every one of the package pickles."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import string

import pytest

import hpc_elastic
from hpc_elastic.errors import HpcElasticError, IllegalTransitionError, UnsafePathError, UsageError
from hpc_elastic.failures.error_handler import ChildFailedError, ProcessFailure

NEEDS_OTHERS = tuple(
    f"hpc_elastic.{name}" for name in ("__main__", "pytorch", "inprocess", "integrations", "submission")
)
"""Not imported here: these need torch, submitit or a training framework, or run."""


def all_error_types() -> list[type[HpcElasticError]]:
    """Every error type of every module that needs nothing but the standard library."""
    walk = pkgutil.walk_packages(hpc_elastic.__path__, "hpc_elastic.", onerror=lambda name: None)
    for module in walk:
        if not module.name.startswith(NEEDS_OTHERS):
            importlib.import_module(module.name)
    found: list[type[HpcElasticError]] = []
    waiting = [HpcElasticError]
    while waiting:
        kind = waiting.pop()
        if kind.__module__.startswith("hpc_elastic."):
            found.append(kind)
        waiting += kind.__subclasses__()
    return sorted(found, key=lambda kind: (kind.__module__, kind.__name__))


def sample(kind: type[HpcElasticError]) -> HpcElasticError:
    """An instance with each fact that its template names."""
    if kind is ChildFailedError:  # torch's own signature
        return ChildFailedError("train.py", {3: ProcessFailure(0, 42, -9, "<N/A>")})
    facts: dict[str, object] = {}
    for _, name, spec, _ in string.Formatter().parse(kind.template):
        if name:
            facts[name] = 3 if spec else f"<{name}>"
    return kind(**facts)


def test_every_error_of_the_package_pickles_with_its_facts_and_text() -> None:
    kinds = all_error_types()
    assert {UsageError, UnsafePathError, IllegalTransitionError} <= set(kinds)
    for kind in kinds:
        error = sample(kind)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert again.facts == error.facts
        assert str(again) == str(error)


def test_facts_are_attributes_and_fill_the_text() -> None:
    error = IllegalTransitionError(state="final", event="join")
    assert (error.state, error.event) == ("final", "join")
    assert "from state final on event join" in str(error)


@pytest.mark.parametrize("args", [(), ("no route to the store",), ("code", 7)])
def test_errors_that_have_a_peers_name_take_the_arguments_of_any_exception(args: tuple[object, ...]) -> None:
    for kind in all_error_types():
        if "Rendezvous" in kind.__name__:
            error = pickle.loads(pickle.dumps(kind(*args)))
            assert (error.args, str(error)) == (args, str(Exception(*args)))


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="UsageError has no attribute 'nodes'"):
        _ = UsageError("bad").nodes


def test_usage_error_takes_its_message_by_position_and_keeps_braces_in_it() -> None:
    error = UsageError("--nodes {4-2}: say {MIN}-{MAX}")
    assert str(error) == "--nodes {4-2}: say {MIN}-{MAX}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
