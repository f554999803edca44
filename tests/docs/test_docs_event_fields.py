"""The events that one part of the program hands to another, which writes them, are described with all their fields.

`test_docs_events` holds those that are written by name; here are the pairs of a name and its fields.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
IN_MEMORY = {"agents_departed", "end_claimed", "end_unclaimed", "looked_anew"}
"""For the supervisor alone, which does not write them."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def trees() -> list[ast.Module]:
    """The source that mentions an event's name beside a mapping."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "hpc_elastic").rglob("*.py"))]
    return [ast.parse(text) for text in texts if re.search(r'"[a-z]+(_[a-z]+)+", ?\{|RoundEvent\.\w+: "', text)]


def constants(dictionary: ast.Dict) -> set[str]:
    return {str(key.value) for key in dictionary.keys if isinstance(key, ast.Constant)}


def assigned(function: ast.AST, name: str, *, before: int) -> tuple[set[str], list[ast.Assign]]:
    """The keys with which a local mapping is made last before a line, and the keys that are put in after that."""
    made = [
        node
        for node in ast.walk(function)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and isinstance(node.value, ast.Dict)
        and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) == name
        and node.lineno <= before
    ]
    last = max(made, key=lambda node: node.lineno)
    assert isinstance(last.value, ast.Dict)
    put = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Subscript)
        and ast.unparse(node.targets[0].value) == name
        and last.lineno < node.lineno <= before
    ]
    return constants(last.value), put


def key_of(put: ast.Assign) -> str:
    target = put.targets[0]
    assert isinstance(target, ast.Subscript)
    assert isinstance(target.slice, ast.Constant)
    return str(target.slice.value)


def returned_by(name: str) -> set[str]:
    """The keys of the mapping that a function of this name returns."""
    found = set()
    for path in (ROOT / "hpc_elastic" / "rendezvous").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, FUNCTIONS) and function.name == name:
                for node in ast.walk(function):
                    if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
                        found |= constants(node.value)
    assert found, f"what {name} returns is not understood here"
    return found


def keys_of(dictionary: ast.Dict, function: ast.AST) -> set[str]:
    found = constants(dictionary)
    for key, value in zip(dictionary.keys, dictionary.values, strict=True):
        if key is None and isinstance(value, ast.Call):
            called = value.func
            found |= returned_by(called.attr if isinstance(called, ast.Attribute) else ast.unparse(called))
        elif key is None:
            made, put = assigned(function, ast.unparse(value), before=dictionary.lineno)
            found |= made | {key_of(each) for each in put}
    return found


def handed_on() -> Iterator[tuple[str, set[str]]]:
    """Name and fields of each event that stands as a pair in the source."""
    for tree in trees():
        for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
            for node in ast.walk(function):
                pair = node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else []
                if len(pair) != 2 or not isinstance(pair[0], ast.Constant):
                    continue
                name, fields = pair
                if re.fullmatch(r"[a-z]+(_[a-z]+)+", str(name.value)):
                    if isinstance(fields, ast.Dict):
                        yield str(name.value), keys_of(fields, function)
                    elif isinstance(fields, ast.Call) and ast.unparse(fields.func).endswith(".fields"):
                        yield str(name.value), returned_by("fields")


def decided() -> Iterator[tuple[str, set[str]]]:
    """The same of the coordinator's decisions, whose names stand in a table by `RoundEvent`."""
    for tree in trees():
        names = {
            ast.unparse(key): str(value.value)
            for table in ast.walk(tree)
            if isinstance(table, ast.Dict)
            for key, value in zip(table.keys, table.values, strict=True)
            if key is not None and ast.unparse(key).startswith("RoundEvent.") and isinstance(value, ast.Constant)
        }
        for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
            for end in (node for node in ast.walk(function) if isinstance(node, ast.Return) and names):
                if not (isinstance(end.value, ast.Tuple) and isinstance(end.value.elts[0], ast.Subscript)):
                    continue
                fields = end.value.elts[1]
                if isinstance(fields, ast.Dict):
                    continue  # fewer than the coordinator's own
                _, put = assigned(function, ast.unparse(fields), before=end.lineno)
                for branch in (node for node in ast.walk(function) if isinstance(node, ast.If)):
                    events = set(re.findall(r"RoundEvent\.\w+", ast.unparse(branch.test)))
                    inside = {key_of(each) for each in put if each in branch.body}
                    assert events, "a field that some decisions have is not understood here"
                    for event in events:
                        yield names[event], inside
                made, _ = assigned(function, ast.unparse(fields), before=end.lineno)
                for event, name in names.items():
                    if event != "RoundEvent.TAKE_OVER":  # no decision of a coordinator's: another node's
                        yield name, made


def described() -> dict[str, str]:
    """Event → its rows on the page."""
    page = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8").split("## Supervisor", 1)[1]
    found: dict[str, str] = {}
    for name, row in re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", page, re.MULTILINE):
        found[name] = f"{found.get(name, '')} {row}"
    return found


def test_fields_that_are_handed_on_are_described_and_no_others() -> None:
    rows = described()
    found: dict[str, set[str]] = {}
    for name, fields in (*handed_on(), *decided()):
        found.setdefault(name, set()).update(fields)
    assert {"node_lost", "node_replaced", "link_lost", "filesystem_refused", "closed", "step_agreed"} <= set(found)
    for name, fields in found.items():
        if name in IN_MEMORY or name == "end_taken_over":  # its writer gives it by name
            continue
        names = set(re.findall(r"`([a-z_]+)`", rows[name]))
        assert fields <= names, f"{name}: {fields - names} are written, and not described"
        # What stands behind a colon or in brackets explains; what stands by itself is a field.
        plain = re.sub(r"\([^()]*\)", "", rows[name]).split(":")[0]
        others = set(re.findall(r"`([a-z_]+)`", plain)) - fields
        assert not others, f"{name}: {others} are described, and not written"
