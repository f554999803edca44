"""Options → batch script, as text."""

from __future__ import annotations

import pytest
from msgspec.structs import fields

from hpc_elastic.errors import UsageError
from hpc_elastic.launch.submit_job import literal_path, load_template, render_script
from hpc_elastic.options import job_options
from hpc_elastic.options.sbatch import (
    AS_IT_IS,
    FORMS,
    SbatchOptions,
    check_srun_argument,
    notice_grace,
    sbatch_arguments,
    sbatch_line,
)
from hpc_elastic.options.table import Keys, parse

OURS = ["--requeue", "--no-kill", "--open-mode=append", "--signal=B:USR2@120"]


def render(options: SbatchOptions | None = None, run_dir: str = "/runs/r1") -> str:
    return render_script(options or SbatchOptions(), run_dir=run_dir, command=["/usr/bin/python3", "batch", run_dir])


def test_the_least_that_is_asked_for() -> None:
    assert sbatch_arguments(SbatchOptions(nodes="4")) == ["--nodes=4", *OURS]


def test_every_option_reaches_sbatch_by_its_name() -> None:
    values = {
        field.name: "1-02:00:00" if field.name == "time" else "2:4" if field.name == "nodes" else f"{field.name}-value"
        for field in fields(SbatchOptions)
        if field.name not in ("requeue", "grace", "extra", "components")
    }
    options = SbatchOptions(**values, requeue=False, extra=("--licenses=matlab:2", "-Lx"))
    arguments = sbatch_arguments(options)
    for name in values:
        assert sum(argument.startswith(f"--{name.replace('_', '-')}=") for argument in arguments) == 1
    assert "--nodes=2-4" in arguments
    assert "--signal=signal-value" in arguments
    assert "--no-requeue" in arguments
    assert "--requeue" not in arguments
    assert arguments[-2:] == ["--licenses=matlab:2", "-Lx"]


@pytest.mark.parametrize("word", AS_IT_IS.split())
def test_any_option_of_sbatch_is_taken_as_it_is(word: str) -> None:
    """By each of its names, and by its key in a file; its SBATCH_* variable does not win over it."""
    *short, name = word.rstrip("=?").split("/")
    option = Keys(job_options.OPTIONS).by_name[name[2:]]
    text = FORMS.get(option.dest, ("", "x y"))[1].partition(" or ")[0]
    argv = [[one, text] if word.endswith("=") else [one] for one in (*short, name)]
    argv += [[f"{name}=x"]] if word.endswith("?") else []
    for words in argv:
        parsed = parse([*words, "train.py"], job_options.OPTIONS, refused={})
        value = parsed.get(option.dest) if option.metavar else None
        options = job_options.sbatch_options(parsed, nodes=(1, 1), job_name="j", grace=9)
        assert sbatch_arguments(options)[-1] == (f"{name}={value}" if value else name)
        assert f"SBATCH_{option.dest.upper()}" in options.overruled_variables()
        assert parsed.command == ("train.py",)


def test_no_task_count_ever_reaches_sbatch() -> None:
    """With one, 20.11 and 22.05 give `-N3-4` 3 nodes with 4 idle."""
    script = render(SbatchOptions(nodes="3-4", gpus_per_node="2"))
    assert "ntasks" not in "".join(line for line in script.splitlines() if line.startswith("#SBATCH"))
    assert "#SBATCH --nodes=3-4\n" in script


@pytest.mark.parametrize(
    ("time", "grace", "asked"),
    [(None, 120, 120), ("UNLIMITED", 120, 120), ("60", 120, 120), ("4", 120, 60), ("0:30", 120, 7)],
)
def test_a_short_job_is_not_told_to_stop_as_it_begins(time: str | None, grace: int, asked: int) -> None:
    assert notice_grace(SbatchOptions(time=time, grace=grace)) == asked


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (SbatchOptions(extra=("--",)), "--sbatch-arg --"),
        (SbatchOptions(extra=("--ntasks-per-node=4",)), "--nproc-per-node"),
        (SbatchOptions(extra=("-n4",)), "--nproc-per-node"),
        (SbatchOptions(extra=("--ntasks=4",)), "--nproc-per-node"),
        (SbatchOptions(extra=("--wait",)), "submit --wait"),
        (SbatchOptions(extra=("-W",)), "submit --wait"),
        (SbatchOptions(extra=("--test-only",)), "--dry-run"),
        (SbatchOptions(extra=("--wrap=id",)), "--wrap"),
        # What a run needs to be as it is.
        (SbatchOptions(extra=("--signal=USR1@60",)), "--sbatch-arg --signal=USR1@60: "),
        (SbatchOptions(extra=("--open-mode=truncate",)), "--sbatch-arg --open-mode=truncate: "),
        (SbatchOptions(extra=("-k",)), "--sbatch-arg -k: "),
        (SbatchOptions(extra=("-D/x",)), "--sbatch-arg -D/x: "),
        (SbatchOptions(comment="x" * 5000), "...: longer"),
    ],
)
def test_what_can_not_be_is_refused_by_name(options: SbatchOptions, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        render(options)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", ["a\nb", "a\r", "\x00", "tab\there", "\x1b[2J", "\x7f"])
@pytest.mark.parametrize("name", ["comment", "job_name", "output", "account"])
def test_what_an_sbatch_line_can_not_hold_is_refused_by_option(name: str, bad: str) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} "):
        render(SbatchOptions(**{name: bad}))


def test_a_run_directory_with_a_line_break_is_refused() -> None:
    with pytest.raises(UsageError, match="--output"):
        render(run_dir="/runs/a\nb")


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("--nodes=2-4", "#SBATCH --nodes=2-4"),
        ("--exclude=n[1-3,5]", "#SBATCH --exclude=n[1-3,5]"),
        ("--comment=a b", '#SBATCH --comment="a b"'),
        ("--comment=#1", '#SBATCH --comment="#1"'),
        ('--comment="\\', '#SBATCH --comment="\\"\\\\"'),
        ("--comment=it's", '#SBATCH --comment="it\'s"'),
        ("-J a b", '#SBATCH "-J a b"'),
        ("--comment=é", '#SBATCH --comment="é"'),
        ("--comment=", "#SBATCH --comment="),
    ],
)
def test_lines(argument: str, line: str) -> None:
    assert sbatch_line(argument) == line


def test_both_streams_go_to_the_job_log() -> None:
    assert '#SBATCH --output="/runs/50%% off/job.log"\n' in render(run_dir="/runs/50% off")
    assert "#SBATCH --output=/runs/r1/task-%a/job.log\n" in render(SbatchOptions(array="1-3"))
    given = render(SbatchOptions(output="/o/%j.txt"))
    assert "#SBATCH --output=/o/%j.txt\n" in given
    assert "job.log" not in given
    assert literal_path("a%b") == "a%%b"
    assert literal_path("a%j\\b") == "a%j\\\\b"  # with a backslash in it Slurm replaces nothing
    with pytest.raises(UsageError, match="--array"):
        render(SbatchOptions(array="1-3"), run_dir="/runs/a\\b")


def test_the_scripts_order() -> None:
    """#SBATCH lines before any command; the trap is the first command, exec of the supervisor the last."""
    lines = [line for line in render(SbatchOptions(nodes="2")).splitlines() if line]
    assert lines[0] == "#!/bin/bash"
    options = [index for index, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options == list(range(1, len(options) + 1))
    code = [line for line in lines if not line.startswith("#")]
    assert code[0] == "trap '' USR2"
    assert code[-1] == 'exec "${supervisor[@]}"'
    assert not any("umask" in line for line in code)  # the supervisor sets it, and gives workers the user's own


def test_no_placeholder_is_left_and_values_are_not_searched_for_them() -> None:
    script = render(SbatchOptions(comment="@COMMAND@"), run_dir="/runs/@RUN_DIR@")
    assert script.count("@COMMAND@") == 1
    assert "run_dir='/runs/@RUN_DIR@'" in script
    assert "@SBATCH_LINES@" in load_template()
    assert "@SBATCH_LINES@" not in script


def test_what_was_given_wins_over_sbatchs_variables() -> None:
    options = SbatchOptions(partition="gpu", time="10", array="1-2", extra=("--mem=4G",))
    overruled = set(options.overruled_variables())
    assert overruled >= {"SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_MEM_PER_CPU", "SBATCH_ARRAY_INX"}
    assert overruled >= {"SBATCH_OPEN_MODE", "SBATCH_NO_KILL", "SBATCH_OUTPUT"}
    assert "SBATCH_ACCOUNT" not in overruled
    assert "SBATCH_ARRAY_INX" in SbatchOptions().overruled_variables(), "no array was asked for, and none is made"


@pytest.mark.parametrize("argument", ["--ntasks=4", "-n4", "-N2", "--nodelist=n1", "-K", "--output=x", "--pty", "x"])
def test_options_of_srun_under_which_no_agent_works(argument: str) -> None:
    with pytest.raises(UsageError, match=f"--srun-arg {argument}: "):
        check_srun_argument(argument)


def test_other_options_of_srun_pass() -> None:
    for argument in ("--mpi=none", "--cpu-bind=cores", "--export=ALL,X=1", "-v"):
        check_srun_argument(argument)
