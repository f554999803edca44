"""What a worker's script says without being run: its top-level imports, and variables that it sets too late."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping

_READ_BY_LIBRARIES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")
"""Variables that compiled libraries read when they are loaded."""


def top_level_imports(source: str) -> list[str]:
    """The packages that a script's top-level statements import, each once; none of one that is not Python."""
    return list(dict.fromkeys(root for statement in _statements(source) for root in _imports_of(statement)))


def late_settings(source: str, *, imported: Collection[str], reads: Mapping[str, str]) -> list[str]:
    """Where a script sets a variable that a module has read already, since it was imported beforehand.

    Args:
        source: The script.
        imported: The modules that were imported beforehand.
        reads: Variable → the module whose import has read it.
    """
    roots = {name.partition(".")[0] for name in imported}
    found = []
    for statement in _statements(source):
        if roots & set(_imports_of(statement)):
            break
        name = _set_variable(statement)
        if name and (name in reads or name.startswith(_READ_BY_LIBRARIES)):
            found.append(
                f"line {statement.lineno} sets {name}, which {reads.get(name, 'a library')} has read already, since it "
                "is preloaded; set it in the job's environment, or leave the module out of --preload"
            )
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


def _set_variable(statement: ast.stmt) -> str:
    """The variable that the statement puts into the environment; "" for none."""
    key: ast.expr | None = None
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        target = statement.targets[0]
        key = target.slice if _is_environ(target.value) else None
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and statement.value.args:
        function = statement.value.func
        if isinstance(function, ast.Attribute) and (
            function.attr == "putenv" or (function.attr == "setdefault" and _is_environ(function.value))
        ):
            key = statement.value.args[0]
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )
