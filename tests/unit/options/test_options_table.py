"""Command lines against a table of options, and the hint for what people type who come from other launchers."""

from __future__ import annotations

import re

import pytest

from hpc_elastic.cli.config import HELP, read_command_line
from hpc_elastic.errors import UsageError
from hpc_elastic.options.run_request import ALL_OPTIONS, default_of
from hpc_elastic.options.table import MEANT, HelpWanted, Keys, Option, Parsed, key_of, nearest, parse, variable_of
from hpc_elastic.submission.executor import unknown

TABLE = (
    Option(names=("-N", "--nodes", "--nnodes"), dest="nodes", metavar="N", help="nodes", env="PET_NNODES"),
    Option(names=("--nproc-per-node",), dest="nproc", metavar="N", help="workers"),
    Option(names=("-m", "--module"), dest="module", help="a module", env="PET_MODULE"),
    Option(names=("--exclusive",), dest="exclusive", metavar="user", optional_value=True, help="alone"),
    Option(names=("--requeue",), dest="requeue", help="again"),
    Option(names=("--no-requeue",), dest="requeue", constant="0", help="never"),
    Option(names=("--sbatch-arg",), dest="extra", metavar="ARG", repeatable=True, help="more"),
)
ENV = {"HPC_ELASTIC_SITE_CONFIG": "", "HPC_ELASTIC_USER_CONFIG": "", "HPC_ELASTIC_PROJECT_CONFIG": ""}
NAMES = {name[2:] for option in ALL_OPTIONS for name in option.names if name.startswith("--")}


def read(*argv: str) -> Parsed:
    return parse(argv, TABLE, refused={"--rdzv-backend": "not needed: nodes find each other"})


@pytest.mark.parametrize(
    ("argv", "values", "command"),
    [
        (["-N", "4", "s.py"], {"nodes": ("4",)}, ["s.py"]),
        (["-N4", "s.py"], {"nodes": ("4",)}, ["s.py"]),
        (["--nodes", "4", "s.py"], {"nodes": ("4",)}, ["s.py"]),
        (["--nnodes=4", "s.py"], {"nodes": ("4",)}, ["s.py"]),
        (["--nodes=2", "--nodes=4", "--", "s.py"], {"nodes": ("4",)}, ["s.py"]),
        # Underscores are dashes in names only.
        (["--nproc_per_node=a_b", "my_s.py", "--nproc_per_node"], {"nproc": ("a_b",)}, ["my_s.py", "--nproc_per_node"]),
        # What follows the script is the script's.
        (["s.py", "--nodes", "9"], {}, ["s.py", "--nodes", "9"]),
        (["s.py", "--", "-h"], {}, ["s.py", "--", "-h"]),
        (["s.py", "a b", "$HOME", "new\nline", "é", "", "-"], {}, ["s.py", "a b", "$HOME", "new\nline", "é", "", "-"]),
        (["-", "x"], {}, ["-", "x"]),
        # The first double dash ends ours, and is dropped.
        (["--", "--odd-name.py", "--", "x"], {}, ["--odd-name.py", "--", "x"]),
        (["-N4", "--"], {"nodes": ("4",)}, []),
        # A value may begin with a dash.
        (["--sbatch-arg", "--licenses=m", "--sbatch-arg=-Lx", "s"], {"extra": ("--licenses=m", "-Lx")}, ["s"]),
        (["-m", "--exclusive", "pkg.mod"], {"module": ("1",), "exclusive": ("",)}, ["pkg.mod"]),
        (["--exclusive=user", "s"], {"exclusive": ("user",)}, ["s"]),
        (["--requeue", "--no-requeue", "s"], {"requeue": ("0",)}, ["s"]),
        (["--no-requeue", "--requeue", "s"], {"requeue": ("1",)}, ["s"]),
    ],
)
def test_a_command_line(argv: list[str], values: dict[str, tuple[str, ...]], command: list[str]) -> None:
    parsed = read(*argv)
    assert {dest: parsed.all(dest) for dest in parsed.values} == values
    assert parsed.command == tuple(command)


@pytest.mark.parametrize("word", ["-h", "--help", "--help-all", "--help_all"])
def test_help_is_asked_for_before_the_script_only(word: str) -> None:
    with pytest.raises(HelpWanted) as wanted:
        read("-N4", word)
    assert wanted.value.everything is ("all" in word)
    assert read("s.py", word).command == ("s.py", word)


def answer(*argv: str) -> str:
    """What `submit` says to it; the option's name where it is taken."""
    try:
        parsed = read_command_line([*argv, "train.py"], subcommand="submit", help_=HELP, env=ENV)
    except UsageError as error:
        return str(error)
    assert parsed is not None
    (source,) = parsed.sources.values()
    return source


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--nproc_per_node", "--nproc-per-node"),
        ("--nproc-per-nod", "unknown option --nproc-per-nod; did you mean --nproc-per-node?"),
        ("--nprocs", "did you mean --nproc-per-node (on each node)?"),
        ("--nnode", "did you mean --nodes?"),
        ("--node_rank", "--node-rank: not needed: Slurm says which node is which"),
        ("--rdzv_timeout", "did you mean --rdzv-conf (timeout=SECONDS)?"),
        ("--num_processes", "did you mean --nproc-per-node (per node, not in total)?"),
        ("--mixed_precision", "--mixed-precision: not a launcher's option: set it in the script"),
        ("--main_process_ip", "did you mean --master-addr (only if"),
        ("--max-nodes", "did you mean --nodes (a range, as in --nodes 2-4)?"),
        ("--gpus", "--gpus"),
        ("--ntasks", "--ntasks: tasks are started by srun, one agent per node; use --nproc-per-node"),
        ("-n", "-n: tasks are started by srun, one agent per node; use --nproc-per-node"),
        ("--gpus-per-task", "--gpus-per-task: one agent per node has all its GPUs; use --gpus-per-node"),
        ("--mail", "did you mean --mail-user (with --mail-type)?"),
        ("--open-mode", "--open-mode: every attempt appends to the job log"),
        ("--nodez", "did you mean --nodes?"),
        ("--quos", "did you mean --qos?"),
        ("--frobnicate", "unknown option --frobnicate; script arguments go after the script, sbatch's other options"),
    ],
)
def test_the_command_lines_hint(typed: str, says: str) -> None:
    found = answer(typed, "1")
    assert found == says if says in (f"--{name}" for name in NAMES) else says in found


@pytest.mark.parametrize("typed", MEANT)
def test_a_hint_names_an_option_of_ours_and_is_given(typed: str) -> None:
    assert typed not in NAMES, "an option of ours needs no hint"
    meant, _ = MEANT[typed]
    assert meant in NAMES
    assert f"did you mean --{meant}" in answer(f"--{typed}", "1")


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("num_nodes", "nodes"),
        ("num-processes", "nproc-per-node"),
        ("time_limit", "time"),
        ("partitoin", "partition"),
        ("frobnicate", None),
    ],
)
def test_so_it_is_in_files_and_for_the_executor(typed: str, key: str | None) -> None:
    assert Keys(ALL_OPTIONS).nearest(typed) == key
    found = str(unknown(typed.replace("-", "_")))
    assert f"did you mean {key.replace('-', '_')}?" in found if key else "goes into additional_parameters" in found


def test_only_what_is_known_is_meant() -> None:
    assert nearest("num-nodes", ["nodez"]) is None
    assert nearest("mail", ["mails"]) == "mails"


@pytest.mark.parametrize("option", Keys(ALL_OPTIONS).options(), ids=key_of)
def test_the_default_that_the_help_tells_is_the_true_one(option: Option) -> None:
    told = re.search(r"\(default (\d+)[);]", option.help)
    if told is not None:
        assert default_of(option) == told[1]
    elif "(default: never" in option.help or "(default: none" in option.help:
        assert default_of(option) is None


def test_names_outside_the_command_line_are_unambiguous() -> None:
    keys = Keys(ALL_OPTIONS)
    assert {"nodes", "nnodes", "runs-dir", "log-dir", "max-restarts", "requeue"} <= set(keys.by_name)
    variables = [variable_of(option) for option in keys.options()]
    assert len(set(variables)) == len(variables)
    assert {option.dest for option in keys.options()} == {option.dest for option in ALL_OPTIONS}
