"""What stands in files and arguments steers no terminal, whichever subcommand shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.base.files import json_text
from hpc_elastic.cli.main import main, print_note
from tests.rigs.run_builder import RunBuilder, make_failure

NASTY = "\x1b]0;title\x07\x1b[2J\x9b31m\x7f\u202eevil\u2066\u061c\u200e\ufeff\u2028\u200b\x85\x00\r\b"
_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_STRUCTURE = frozenset(
    ("event", "role", "outcome", "kind", "failure_class", "category", "source", "cluster", "action", "what", "cause")
)


def poisoned(value: Any, key: str = "") -> Any:
    """`value` with what is nasty in every text that is not one of a few known words."""
    if isinstance(value, str):
        return value if key in _STRUCTURE else value + NASTY
    if isinstance(value, list):
        return [poisoned(item, key) for item in value]
    return {name: poisoned(item, name) for name, item in value.items()} if isinstance(value, dict) else value


def poison(root: Path) -> None:
    for path in root.rglob("*.json*"):
        lines = path.read_text().strip().split("\n") if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text("".join(json.dumps(poisoned(json.loads(line)), ensure_ascii=False) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    built = RunBuilder(tmp_path / "runs" / f"run{NASTY.replace(chr(0), '')}").begin(at=1.0)
    built.fail(make_failure(rank=1, at=5.0, exception="RuntimeError: no"), error_file=True)
    built.event(0, "agent", 2, 6.0, "node_left", node=2, host="n3", reason="why")
    built.end(0, at=9.0, outcome="failed", code=1, decision="end: no", reason="it failed")
    rank = built.paths.attempt(0).rank(0, 1).root
    rank.mkdir(parents=True, exist_ok=True)
    (rank / "stderr.log").write_text("last words\n")
    poison(built.root)
    return built.root


@pytest.mark.parametrize(
    "argv",
    [
        ["report", "RUN"], ["report", "RUN", "--all"], ["report", "RUN", "--rank", "1"],
        ["report", "RUN", "--format", "json"], ["report", "RUN", "--format", "html"], ["logs", "RUN"],
        ["logs", "RUN", "--around-failure"], ["logs", "RUN", "--events"], ["status", "RUN", "--no-slurm"],
        ["status", "RUN", "--no-slurm", "--json"], ["cancel", "RUN"], ["requeue", "RUN"],
        ["report", "RUN", "--attempt", "7"], ["logs", "RUN", "--rank", "99"],
        ["logs", "RUN", "--node", f"n{NASTY}".replace("\0", "")],
        ["logs", "RUN", "--events", "--node", f"n{NASTY}".replace("\0", "")],
        ["logs", "RUN", "--event", f"x{NASTY}".replace("\0", "")],
        ["list", "--runs-dir", "RUNS"], ["list", "--runs-dir", "RUNS", "--json"], ["list", "--runs-dir", "/no\x1b[2J"],
        ["report", "x\x1b[2J\u202e"], ["submit\x1b[2J"], ["run", "--nodes", "\x9b2J"], ["run", "none\u202e.py"],
        ["config", "nodes\x1b[2J"], ["config", "--python", "\x1b[2J", "python"], ["status", "--\x1b[2J"],
        ["run", "--dry-run", "--python", "\x1b[2J", "--no-python", "true"],
    ],
    ids=lambda argv: ascii(argv)[:60],
)  # fmt: skip
def test_a_run_directory_and_command_lines_full_of_escapes(run: Path, argv: list[str], capfdbinary: Any) -> None:
    main([{"RUN": str(run), "RUNS": str(run.parent)}.get(word, word) for word in argv])
    out, err = (data.decode() for data in capfdbinary.readouterr())
    assert out or err
    assert _SHOWN.search(out + err) is None, _SHOWN.findall(out + err)


def test_what_a_configuration_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hpc_elastic.toml"
    path.write_text('python = "\\u001b[2J\\u202e/x"\n[profile.x]\nnodes = 1\n')
    monkeypatch.setenv("HPC_ELASTIC_PROJECT_CONFIG", str(path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["config", "python"]) == 0
    assert main(["submit", "--cluster", "local", "--dry-run", "train.py"]) == 2  # there is no such interpreter
    printed = "".join(capsys.readouterr())
    assert _SHOWN.search(printed) is None
    assert f"hpc-elastic: {path}:1: python = " in printed
    path.write_text('"\\u001b[2J" = 1\n')
    assert main(["config"]) == 2
    assert _SHOWN.search(capsys.readouterr().err) is None


def test_a_line_for_the_person(capsys: pytest.CaptureFixture[str]) -> None:
    print_note(f"gr\u00fc\u00df{NASTY}\nline")
    err = capsys.readouterr().err
    assert err.startswith("hpc-elastic: gr\u00fc\u00df")
    assert err.count("\n") == 1
    assert _SHOWN.search(err) is None


@pytest.mark.parametrize("text", [NASTY, "\x7f", "\U000e0041", "gr\u00fc\u00df", "\udcff\u202e"])
def test_json_escapes_what_deceives_and_keeps_the_value(text: str) -> None:
    written = json_text({"x": text})
    assert json.loads(written) == {"x": text}
    assert _SHOWN.search(written) is None
    assert "\U000e0041" not in written
