"""Reads a worker's script without running it: its top-level imports, and variables that it sets too late."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence

_READ_BY_LIBRARIES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")
"""Variables that compiled libraries read when they are loaded."""


def top_level_imports(source: str) -> list[str]:
    """The packages that a script's top-level statements import, each once; none of one that is not Python."""
    return list(dict.fromkeys(root for statement in _statements(source) for root in _imports_of(statement)))


def late_settings(source: str, *, imported: Collection[str], reads: Mapping[str, str]) -> list[str]:
    """`imported`: modules that were imported beforehand. `reads`: variable → the module whose import has read it."""
    roots = {name.partition(".")[0] for name in imported}
    found = []
    for statement in _flat(_statements(source)):
        if roots & set(_imports_of(statement)):
            break
        found += [
            f"line {statement.lineno} sets {name}, which {reads.get(name, 'a library')} has read already, since it "
            "is preloaded; set it in the job's environment, or leave the module out of --preload"
            for name in _set_variables(statement)
            if name in reads or name.startswith(_READ_BY_LIBRARIES)
        ]
    return found


def _statements(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return []


def _imports_of(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
        return [statement.module.partition(".")[0]]
    return []


def _flat(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements inside if, for, try and with count, those of functions don't."""
    for statement in statements:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for name in ("body", "handlers", "orelse", "finalbody"):
                yield from _flat(getattr(statement, name, ()))


def _set_variables(statement: ast.stmt) -> list[str]:
    keys: list[ast.expr | None] = []
    if isinstance(statement, (ast.Assign, ast.Delete)):
        keys += [
            target.slice
            for target in statement.targets
            if isinstance(target, ast.Subscript) and _is_environ(target.value)
        ]
    elif (
        isinstance(statement, ast.AugAssign) and _is_environ(statement.target) and isinstance(statement.value, ast.Dict)
    ):
        keys += statement.value.keys
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call, function = statement.value, statement.value.func
        if isinstance(function, ast.Attribute) and (function.attr == "putenv" or _is_environ(function.value)):
            if function.attr in ("putenv", "setdefault", "pop"):
                keys += call.args[:1]
            elif function.attr == "update":
                keys += [key for each in call.args if isinstance(each, ast.Dict) for key in each.keys]
                keys += [ast.Constant(keyword.arg) for keyword in call.keywords]
    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )
