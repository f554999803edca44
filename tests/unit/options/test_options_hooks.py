"""What the options of setup, prefix and notices take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_elastic.cli.submit import plan_text
from hpc_elastic.errors import UsageError
from hpc_elastic.options.run_request import ALL_OPTIONS, spec_fields
from hpc_elastic.options.table import parse
from hpc_elastic.options.worker_options import parse_notify, parse_setup
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec


def test_a_setup_file_is_sourced_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    (tmp_path / "my env.sh").write_text("export A=1\n")
    assert parse_setup("my env.sh", "--setup") == f"source '{tmp_path}/my env.sh'"
    for text in ("module load cuda", "source /opt/env.sh", "export A=1", "conda activate a/b"):
        assert parse_setup(text, "--setup") == text


@pytest.mark.parametrize("text", ["env.sh", "./env", "/lustre/env.bash"])
def test_a_file_that_is_not_there_is_no_command(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(f"--setup {text}: there is no such file")):
        parse_setup(text, "--setup")


def test_words_and_urls() -> None:
    assert parse_notify("https://chat.example.org/x?y=z", "--notify") == "https://chat.example.org/x?y=z"
    assert parse_notify("mail -s done me@example.org", "--notify") == "mail -s done me@example.org"
    for wrong in ("ftp://example.org/x", "http:///x"):
        with pytest.raises(UsageError, match="http://"):
            parse_notify(wrong, "--notify")


def test_a_prefix_and_forks_do_not_go_together() -> None:
    argv = ["--worker-prefix", "numactl -l", "--start-method", "forkserver", "train.py"]
    with pytest.raises(UsageError, match="--worker-prefix 'numactl -l': workers that are forks of one process"):
        spec_fields(parse(argv, ALL_OPTIONS, refused={}))


def test_a_reader_sees_what_is_run_and_no_secret() -> None:
    entry = Entrypoint(kind=EntryKind.SCRIPT, target="train.py", python="python")
    spec = RunSpec(
        run_id="r", uid="u", name="n", created_ns=0, entrypoint=entry, cwd="/", setup="module load cuda",
        notify="https://chat.example.org/secret", worker_prefix=("numactl", "-l"),
    )  # fmt: skip
    assert spec.around == "--setup 'module load cuda'; --notify https://chat.example.org"
    assert spec.command == "numactl -l python -u train.py"
    assert f"around it       {spec.around}\n" in plan_text(spec, Path("/runs/r"))
