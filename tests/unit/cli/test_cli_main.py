"""Which subcommand, its ``--help`` and ``--help-all``, and how every failure ends."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_elastic import __version__
from hpc_elastic.cli import main as cli
from hpc_elastic.cli.run_argument import check_ranks, parse_numbers
from hpc_elastic.errors import HpcElasticError, UsageError
from hpc_elastic.launch import batch as launch_batch
from hpc_elastic.options.run_request import ALL_OPTIONS
from hpc_elastic.options.table import Group


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def failing(error: BaseException) -> SimpleNamespace:
    def main(argv: list[str]) -> int:
        raise error

    return SimpleNamespace(main=main)


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help(capsys: pytest.CaptureFixture[str], word: str) -> None:
    code, out, err = run(capsys, word)
    assert (code, err) == (0, "")
    for name in ("submit", "run", "report", "agent"):
        assert f"\n  {name} " in out
    assert "  batch " not in out


def test_nothing_at_all_and_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert err.startswith("usage: hpc-elastic ")
    assert run(capsys, "--version") == (0, f"hpc-elastic {__version__}\n", "")


_HET = "heterogeneous jobs are not supported; give one job of one component, with nodes of one kind"


@pytest.mark.parametrize(
    ("argv", "before"),
    [
        (("submit", "--het", "-N 2", "x.py"), "--het: was removed: "),
        (("submit", "--cluster", "slurm", "--template", "job.sh", "x.py"), "--template job.sh: line 2: "),
        (("run", "x.py"), "SLURM_HET_SIZE=2: "),
        (("agent", "x.py"), "SLURM_HET_SIZE=2: "),
    ],
)
def test_a_heterogeneous_job_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    argv: tuple[str, ...],
    before: str,
) -> None:
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n#SBATCH hetjob\n#SBATCH -N1\n@SBATCH_LINES@\ntrap '' USR2\nexec @COMMAND@\n"
    )
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)
    step = {"run": "batch", "agent": "step-n1-task0"}.get(argv[0])
    if step is not None:
        data = Path(__file__).parents[2] / "data" / "slurm" / "22.05.8" / f"env-het-{step}.txt"
        for line in data.read_text().splitlines():
            monkeypatch.setenv(*line.split("=", 1))
    if step == "batch":  # as in salloc's shell, which has no SLURM_JOB_NODELIST (22.05)
        monkeypatch.delenv("SLURM_JOB_NODELIST")
        monkeypatch.delenv("SLURM_NODELIST")
    assert run(capsys, *argv) == (2, "", f"hpc-elastic: error: {before}{_HET}\n")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UsageError("--nodes x: no"), 2, "hpc-elastic: error: --nodes x: no\n"),
        (UsageError("two\nlines"), 2, "hpc-elastic: error: two lines\n"),
        (HpcElasticError(message="it broke"), 1, "hpc-elastic: error: it broke\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_failures_are_one_line_and_a_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, says: str
) -> None:
    monkeypatch.setitem(sys.modules, "hpc_elastic.cli.submit", failing(error))
    assert run(capsys, "submit") == (code, "", says)


def test_a_path_that_is_no_text_is_printed_all_the_same(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hpc_elastic.cli.submit", failing(UsageError("no such file: \udcff")))
    assert cli.main(["submit"]) == 2
    assert b"no such file: " in capfdbinary.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["config"], ["status", "--no-slurm", "run"]])
def test_a_full_disk_under_the_output_is_said_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: list[str]
) -> None:
    (tmp_path / "run" / "attempt-000").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code = cli.main(argv)
    assert code == 1
    assert capsys.readouterr().err == "hpc-elastic: error: standard output can't be written: No space left on device\n"


def test_an_error_of_no_file_is_a_defect_and_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hpc_elastic.cli.submit", failing(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        cli.main(["submit"])


def test_closed_standard_streams_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def fstat(number: int) -> None:
        if number < 3:
            raise OSError(9, "Bad file descriptor")

    def opens(path: str, flags: int) -> int:
        opened.append(len(opened))
        return opened[-1]

    with monkeypatch.context() as patched:
        patched.setattr(
            cli,
            "os",
            SimpleNamespace(
                fstat=fstat,
                open=opens,
                devnull=os.devnull,
                O_RDWR=os.O_RDWR,
                set_inheritable=lambda number, inheritable: None,
            ),
        )
        patched.setattr(sys, "stdout", None)
        assert cli.main(["--version"]) == 0
        sys.stdout.close()
    assert opened == [0, 1, 2]


def test_a_job_that_a_worker_submitted_is_none_of_that_workers_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By hand, with a script or a template of its own: sbatch hands the whole environment on."""
    seen: list[Mapping[str, str]] = []
    monkeypatch.setattr(launch_batch, "run_of_this_job", lambda run_dir, env: seen.append(env) or run_dir)
    monkeypatch.setattr(launch_batch, "run_batch", lambda run_dir, env: seen.append(env) or 0)
    own = {"SLURM_JOB_ID": "13", "HPC_ELASTIC_PROFILE": "big"}
    workers = {"HPC_ELASTIC_TAG": "a:host:b", "HPC_ELASTIC_NODE_TAG": "a:host", "RANK": "3", "TORCHELASTIC_RUN_ID": "a"}
    monkeypatch.setattr(os, "environ", {**own, **workers})
    assert cli.main(["batch", str(tmp_path)]) == 0
    assert seen == [own, own]


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", [3]), ("0-3,7", [0, 1, 2, 3, 7]), (" 2 , 1", [1, 2]), ("0-999999999", list(range(20)))]
)
def test_what_is_in_it(text: str, numbers: list[int]) -> None:
    assert parse_numbers(text, option="--rank").within(range(20)) == numbers


@pytest.mark.parametrize("text", ["", "x", "3-1", "1,,2", "-1", "1-", "0x1", "1.5", "\u0663", "9" * 30])
def test_what_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="write it as 0-3,7"):
        parse_numbers(text, option="--rank")


def test_ranks_that_are_nowhere() -> None:
    ranks = parse_numbers("2,9", option="--rank")
    check_ranks(ranks, 10, option="--rank", where="round 1")
    check_ranks(ranks, 0, option="--rank", where="a round of which nobody told how large it was")
    with pytest.raises(UsageError, match=r"--rank 2,9: round 1 has ranks 0-8"):
        check_ranks(ranks, 9, option="--rank", where="round 1")
    with pytest.raises(UsageError, match="rank 0 only"):
        check_ranks(ranks, 1, option="--rank", where="round 1")


WIDTHS = (60, 80, 100, 120, 200)


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 0
    return capsys.readouterr().out


def named(text: str) -> set[str]:
    """The options that have a line of their own."""
    return set(re.findall(r"(?m)^  (?:-\w, )?(--[a-z-]+)", text)) - {"--"}


def is_command(line: str) -> bool:
    """An example, which stands on one line so that it can be pasted."""
    return line.startswith(("  hpc-elastic ", "  srun "))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["submit", "run", "agent", "config"])
@pytest.mark.parametrize("which", ["--help", "--help-all"])
def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, name: str, which: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = help_of(capsys, name, which)
    wide = [line for line in text.splitlines() if len(line) > width and not is_command(line)]
    assert not [line for line in wide if len(line.split()) > 1], wide
    assert len(wide) <= 2  # a metavar of one word


def sections(text: str) -> dict[str, list[str]]:
    """Title → its options, in order."""
    parts = re.split(r"(?m)^(\S.*):$", text)[1:]
    return {
        title: re.findall(r"(?m)^  (?:-\w, )?(--[a-z-]+)", part)
        for title, part in zip(parts[::2], parts[1::2], strict=True)
    }


THEN = ["--setup", "--export", "--container-image", "--hangs"]


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("submit", "--nodes --gpus-per-node --nproc-per-node --time --partition --max-restarts", THEN),
        ("run", "--nodes --nproc-per-node --cluster --runs-dir --module --max-restarts", [*THEN[:1], *THEN[2:]]),
        ("rehearse", "--nodes --gpus-per-node --nproc-per-node --time --partition --max-restarts", None),
    ],
)
def test_the_short_help_begins_with_six_options(
    capsys: pytest.CaptureFixture[str], name: str, first: str, then: list[str] | None
) -> None:
    text = help_of(capsys, name, "--help")
    found = sections(text)
    assert found["options that matter most"] == first.split()
    assert found.get("often needed, too") == then
    assert f"hpc-elastic {name} --help-all" in " ".join(text.split())
    assert "--segment" not in text


def test_the_full_help_has_every_option_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "submit", "--help-all")
    for option in (option for option in ALL_OPTIONS if option.help):
        assert any(line.startswith("  " + ", ".join(option.names)) for line in text.splitlines()), option.names
    titles = [group.value for group in Group if group is not Group.SHOWN]
    assert [line[:-1] for line in text.splitlines() if line[:-1] in titles] == titles
    assert "[PET_NNODES]" in text
    assert "--exclusive[=user|mcs]" in text


def test_run_and_agent_show_what_they_take(capsys: pytest.CaptureFixture[str]) -> None:
    of_run, of_agent = help_of(capsys, "run", "--help-all"), help_of(capsys, "agent", "--help-all")
    for option in ("--partition", "--time", "--mail-type", "--sbatch-arg", "--dry-run", "--follow", "--template"):
        assert option not in named(of_run) | named(of_agent)
    assert {"--nodes", "--nodelist", "--exclude", "--cluster", "--srun-arg"} <= named(of_run)
    only_run = {"--nodelist", "--exclude", "--cluster", "--srun-arg"}
    assert named(of_run) - named(of_agent) == only_run
    assert named(help_of(capsys, "config", "--help")) == {"--json", "--all", "--profile"}
    assert "--partition" in named(help_of(capsys, "config", "--help-all"))


def test_the_examples_of_configs_help_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """The others need a script or a cluster; ``tests/docs`` runs those that the documentation shows."""
    examples = re.findall(r"(?m)^  hpc-elastic (config.*)$", help_of(capsys, "config", "--help"))
    assert len(examples) == 2
    for example in examples:
        assert cli.main(example.split()) == 0, example
