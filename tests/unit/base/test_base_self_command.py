"""One way to start a Python of ours: the source is searched for others, and it is tried in a hostile folder."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpc_elastic
from hpc_elastic.base.host_facts import (
    module_command,
    own_command,
    source_command,
    source_environment,
    worker_arguments,
)

PACKAGE = Path(hpc_elastic.__file__).parent
WORKER = "hpc_elastic.base.text"
PASSED_OVER = ("options/",)
"""Reads command lines of users."""
SHELLS = re.compile(r"'(/bin/)?(ba)?sh'|_BASH if .*")
KNOWN = {
    ("base/host_facts.py", "-c"),
    ("cli/submit.py", "python -m"),  # reads a command line of a user's
    ("run/spec.py", "-m"),  # a user's module, as `python -m` has it
    ("submission/executor.py", "-c"),  # sh
    ("workers/fork_server.py", "-c"),  # compares
}
_FLAG = re.compile(r"""['"]-[A-Za-z]*[cm]['"]""")
_TEXT = re.compile(r"\bpython[\d.]*['\"]?( -\w+)* -[A-Za-z]*[cm]\b")


def starts(source: str) -> Iterator[str]:
    """The flags by which a list, a tuple, a call or a text of `source` may run a Python of its own."""
    tree = ast.parse(source)
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        words = node.elts if isinstance(node, ast.List | ast.Tuple) else node.args if isinstance(node, ast.Call) else []
        for before, word, after in zip([None, *words], words, words[1:], strict=False):
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                is_option = isinstance(after, ast.Constant) and str(after.value).startswith("-")
                is_shell = before is not None and SHELLS.fullmatch(ast.unparse(before))
                if re.fullmatch(r"-[A-Za-z]*[cm]", word.value) and not is_option and not is_shell:
                    yield f"-{word.value[-1]}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield from (found[0] for found in _TEXT.finditer(node.value))


def test_what_finds_starts_finds_them() -> None:
    for found in (
        "run([python, '-c', TEXT])",
        "run((sys.executable, '-u', '-m', 'module'))",
        "run([python, '-uc', TEXT])",
        "posix_spawn(path, python, '-c', text)",
        "a = ('-c', TEXT)",
        "os.system(f'{folder}/python3 -u -c pass')",
        "system('python3.11 -m module')",
    ):
        assert list(starts(found)), found
    for other in ("run(['bash', '-c', line])", "names = ('-c', '--cpus')", "('--cd', '-c')", '"""python -m x"""'):
        assert not list(starts(other)), other


def test_no_other_module_starts_a_python_by_a_text_or_a_modules_name() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name, source = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        if not name.startswith(PASSED_OVER) and (_FLAG.search(source) or _TEXT.search(source)):  # most need no parser
            found |= {(name, flag) for flag in starts(source)}
    assert found == KNOWN


_SAYS_PATH = "import json, sys; sys.stdout.write(json.__file__)"


@pytest.mark.parametrize(
    "argv",
    [
        [*own_command("--version")],
        [*module_command("hpc_elastic.agent.health", "print_gpus")],
        [*source_command(sys.executable, _SAYS_PATH)],
        [sys.executable, *worker_arguments(WORKER)],
    ],
)
def test_modules_of_the_working_directory_are_not_imported(argv: list[str], tmp_path: Path) -> None:
    names = [
        "json",
        "os",
        "re",
        "sys",
        "types",
        "signal",
        "socket",
        "pathlib",
        "msgspec",
        "hpc_elastic",
        "importlib",
        "subprocess",
        "torch",
        "traceback",
    ]
    if WORKER not in argv or sys.version_info < (3, 13):  # its `-c` imports it before all, and not all know `-P`
        names.append("linecache")
    for name in names:
        (tmp_path / f"{name}.py").write_text("open('attacked', 'w')")
    environ = source_environment() if argv[-1].endswith(_SAYS_PATH) else None
    subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, timeout=60, check=False)
    assert not (tmp_path / "attacked").exists()


def test_a_text_gets_its_arguments_and_keeps_pythonpath(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("here = 7")
    argv = [*source_command(sys.executable, "import mine\nprint(mine.here, *sys.argv[1:])"), "a", "b"]
    done = subprocess.run(argv, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert done.stdout == "7 a b\n"
