"""Options → sbatch's arguments and batch script, as text; nodes, times, arrays and GPUs as users type them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import fields

from hpc_elastic.cli.run import nodes_of
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.submit_job import literal_path, load_template, render_script
from hpc_elastic.options import job_options, worker_options
from hpc_elastic.options.run_request import asked_by, read_template
from hpc_elastic.options.sbatch import (
    AS_IT_IS,
    FORMS,
    SbatchOptions,
    check_srun_argument,
    check_time_option,
    notice_grace,
    parse_array,
    parse_nodes,
    parse_time_limit,
    sbatch_arguments,
    sbatch_line,
)
from hpc_elastic.options.table import Keys, Parsed, parse

OURS = ["--requeue", "--no-kill", "--open-mode=append", "--signal=B:USR2@120"]
TABLE = (*worker_options.OPTIONS, *job_options.OPTIONS)


def read(*argv: str) -> Parsed:
    return parse([*argv, "train.py"], TABLE, refused=worker_options.REFUSED)


def sbatch_options(*argv: str, nodes: tuple[int, int]) -> SbatchOptions:
    return job_options.sbatch_options(read(*argv), nodes=nodes, job_name="j", grace=9)


def render(options: SbatchOptions | None = None, run_dir: str = "/runs/r1") -> str:
    return render_script(options or SbatchOptions(), run_dir=run_dir, command=["/usr/bin/python3", "batch", run_dir])


@pytest.mark.parametrize(
    ("parse_text", "text", "value"),
    [
        (parse_array, "0-3", (0, 1, 2, 3)),
        (parse_array, "0-3%2", (0, 1, 2, 3)),
        (parse_array, "0-15:4%1", (0, 4, 8, 12)),
        (parse_array, "7,1,1-2", (1, 2, 7)),
        (parse_nodes, "4", (4, 4)),
        (parse_nodes, "2-4", (2, 4)),
        (parse_nodes, "1:1", (1, 1)),
        (check_time_option, "30", 1800),
        (check_time_option, "10:05", 605),
        (check_time_option, "2:00:00", 7200),
        (check_time_option, "00:05:00", 300),
        (check_time_option, "1-12", 129600),
        (check_time_option, "1-12:30", 131400),
        (check_time_option, "1-12:30:15", 131415),
        (check_time_option, "UNLIMITED", None),
        (check_time_option, "-1", None),
    ],
)
def test_what_users_type_means_what_it_means_to_sbatch(
    parse_text: Callable[[str], object], text: str, value: object
) -> None:
    assert parse_text(text) == value


@pytest.mark.parametrize(
    ("parse_text", "says", "texts"),
    [
        (parse_array, "not a list of tasks; ", ["", "a", "1-", "%2", "1,,2", "1-3%", "٣"]),
        (parse_array, "3-1 has no task; the lower number comes first", ["3-1"]),
        (parse_array, "1-3:0 has no task", ["1-3:0"]),
        (parse_array, "more than 131072 tasks", ["0-131072", "0-9999999"]),
        (parse_nodes, "the minimum is above the maximum; write -x 2-4", ["4:2"]),
        (parse_nodes, "a run needs at least 1 node", ["0-4", "0"]),
        (parse_nodes, "not a number of nodes; ", ["", "2..4", "2-", "٣"]),
        (parse_nodes, "at most 131072 nodes", ["131073"]),
        (check_time_option, "not a time; ", ["", "1:2:3:4", "1-", "-5", "1h", "1.5", "1-2-3", "٣", " 5", "5\n"]),
        (check_time_option, "a time limit of zero; leave -x out", ["0", "0:00", "00:00:00"]),
        (check_time_option, "here -x is the time limit, as in sbatch; torchrun's -t is --tee 0:3", ["0:3", "0:3,1:1"]),
        (check_time_option, "here -x is the time limit", ["1:0", "0:1,1:2,2:3"]),
    ],
)
def test_what_means_nothing_to_sbatch_is_refused_by_name(
    parse_text: Callable[..., object], says: str, texts: list[str]
) -> None:
    for text in texts:
        with pytest.raises(UsageError) as caught:
            parse_text(text, option="-x")
        assert str(caught.value).startswith(f"-x {text}: {says}")


def test_the_largest_array_and_a_time_of_slurms_own() -> None:
    assert len(parse_array("1-131072")) == 131072
    assert parse_time_limit("infinite") is None
    with pytest.raises(ValueError, match="'soon' is not a time"):
        parse_time_limit("soon")


@pytest.mark.parametrize(
    ("argv", "nodes", "each"),
    [
        (["--gpus", "8"], (4, 4), "2"),
        (["-G", "a100:8"], (2, 2), "a100:4"),
        (["--gpus", "6", "--spares", "1"], (2, 2), "2"),
        (["--gpus", "8"], (2, 4), "--gpus 8: not the same number on each of 2-4 nodes; give --gpus-per-node"),
        (["--gpus", "7", "--spares", "1"], (1, 1), "--gpus 7: not the same number on each of 1 nodes and 1 spares; "),
        (["--gpus", "a100:2,v100:2"], (2, 2), "--gpus a100:2,v100:2: give a number, as in 8 or a100:8"),
        (["--gpus", "0"], (1, 1), "--gpus 0: give a number"),
        (["--gpus", "4", "--gpus-per-node", "2"], (2, 2), "--gpus 4: --gpus-per-node is given too; leave one out"),
    ],
)
def test_a_total_of_gpus_is_asked_for_by_node_or_refused(argv: list[str], nodes: tuple[int, int], each: str) -> None:
    if not each.startswith("--gpus"):
        assert sbatch_options(*argv, nodes=nodes).gpus_per_node == each
        return
    with pytest.raises(UsageError) as caught:
        sbatch_options(*argv, nodes=nodes)
    assert str(caught.value).startswith(each)


@pytest.mark.parametrize(
    ("nodes", "spares", "asked"),
    [
        pytest.param((4, 4), 0, "4", id="no spares"),
        pytest.param((4, 4), 2, "6", id="spares of a fixed number are wanted for certain"),
        pytest.param((2, 4), 0, "2-4", id="a range"),
        pytest.param((2, 4), 2, "2-6", id="where less than MAX will do no spare is waited for"),
    ],
)
def test_slurm_is_asked_for_the_spares_too(nodes: tuple[int, int], spares: int, asked: str) -> None:
    assert sbatch_options("--spares", str(spares), nodes=nodes).nodes == asked


@pytest.mark.parametrize(
    ("argv", "workers"),
    [
        ([], (4, 4)),
        (["--spares=1"], (3, 3)),
        (["--nodes=2", "--spares=1"], (2, 2)),
        (["--nodes=2-9", "--spares=1"], (2, 4)),
    ],
)
def test_in_an_allocation_of_four_spares_are_what_is_beyond_max(argv: list[str], workers: tuple[int, int]) -> None:
    assert nodes_of(read(*argv), 4, what="allocation") == workers
    with pytest.raises(UsageError, match="--spares 4: this allocation has 4 nodes"):
        nodes_of(read("--spares=4"), 4, what="allocation")


@pytest.mark.parametrize(
    ("argv", "nodes", "segment"),
    [
        ([], (3, 5), 1),
        (["--segment=4"], (4, 16), 4),
        (["--segment=2", "--spares=4"], (2, 2), 2),
        (["--segment=0"], (4, 4), "--segment 0: give a number of nodes, 1 or more"),
        (["--segment=4"], (4, 6), "--segment 4: --nodes 6 is not a multiple of it"),
        (["--segment=4"], (2, 8), "--segment 4: --nodes 2 is not a multiple of it"),
        (["--segment=4", "--spares=1"], (4, 4), "--segment 4: --spares 1 is not a multiple of it"),
    ],
)
def test_segments_are_whole_or_refused(argv: list[str], nodes: tuple[int, int], segment: int | str) -> None:
    if isinstance(segment, int):
        assert job_options.segment_nodes(read(*argv), nodes) == segment
        return
    with pytest.raises(UsageError) as found:
        job_options.segment_nodes(read(*argv), nodes)
    assert str(found.value).startswith(segment)


def test_sbatchs_options_by_their_short_names() -> None:
    short = "-N2:4 -p gpu -A acc -q high -t 10 -c 8 -C a100 -x n3 -w n1 -d afterok:1 -a 1-3 -o o.txt -e e.txt"
    long = ["--gres=gpu:2", "--gpus-per-node=a100:4", "--mem=4G", "--exclusive", "--reservation=r", "--signal=USR1@9"]
    more = ["--comment=c d", "--mail-type=END", "--mail-user=a@b", "--export=NONE", "--begin=now+1", "--no-requeue"]
    given = [*short.split(), *long, *more, "--sbatch-arg=--nice", "--sbatch_arg", "-L x"]
    assert sbatch_options(*given, nodes=(2, 4)) == SbatchOptions(
        nodes="2-4", partition="gpu", account="acc", qos="high", time="10", job_name="j", exclude="n3",
        array="1-3", output="o.txt", error="e.txt", gpus_per_node="a100:4", signal="USR1@9", comment="c d",
        requeue=False, grace=9,
        extra=(
            "--cpus-per-task=8", "--nodelist=n1", "--mem=4G", "--export=NONE", "--begin=now+1", "--constraint=a100",
            "--dependency=afterok:1", "--gres=gpu:2", "--mail-type=END", "--mail-user=a@b", "--reservation=r",
            "--exclusive", "--nice", "-L x",
        ),
    )  # fmt: skip


def test_every_option_reaches_sbatch_by_its_name() -> None:
    assert sbatch_arguments(SbatchOptions(nodes="4")) == ["--nodes=4", *OURS]
    values = {
        field.name: "1-02:00:00" if field.name == "time" else "2:4" if field.name == "nodes" else f"{field.name}-value"
        for field in fields(SbatchOptions)
        if field.name not in ("requeue", "grace", "extra", "components")
    }
    options = SbatchOptions(**values, requeue=False, extra=("--licenses=matlab:2", "-Lx"))
    arguments = sbatch_arguments(options)
    for name in values:
        assert sum(argument.startswith(f"--{name.replace('_', '-')}=") for argument in arguments) == 1
    assert {"--nodes=2-4", "--signal=signal-value", "--no-requeue"} <= set(arguments)
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


def test_what_was_given_wins_over_sbatchs_variables() -> None:
    options = SbatchOptions(partition="gpu", time="10", array="1-2", extra=("--mem=4G",))
    overruled = set(options.overruled_variables())
    assert overruled >= {"SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_MEM_PER_CPU", "SBATCH_ARRAY_INX"}
    assert overruled >= {"SBATCH_OPEN_MODE", "SBATCH_NO_KILL", "SBATCH_OUTPUT"}
    assert "SBATCH_ACCOUNT" not in overruled
    assert "SBATCH_ARRAY_INX" in SbatchOptions().overruled_variables(), "no array was asked for, and none is made"


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
        (SbatchOptions(extra=("-W",)), "submit --wait"),
        (SbatchOptions(extra=("--wrap=id",)), "--wrap"),
        # What a run needs to be as it is.
        (SbatchOptions(extra=("--signal=USR1@60",)), "--sbatch-arg --signal=USR1@60: "),
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
def test_what_an_sbatch_line_can_not_hold_is_refused_by_option(bad: str) -> None:
    for name in ("comment", "job_name", "output", "account"):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} "):
            render(SbatchOptions(**{name: bad}))
    with pytest.raises(UsageError, match="--output"):
        render(run_dir=f"/runs/{bad}")


@pytest.mark.parametrize(
    ("argument", "line"),
    [
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


def test_the_script() -> None:
    """#SBATCH lines before any command; the trap is the first command, exec of the supervisor the last.

    No task count ever reaches sbatch: with one, 20.11 and 22.05 give `-N3-4` 3 nodes with 4 idle.
    """
    script = render(SbatchOptions(nodes="3-4", gpus_per_node="2", comment="@COMMAND@"), run_dir="/runs/@RUN_DIR@")
    lines = [line for line in script.splitlines() if line]
    assert lines[0] == "#!/bin/bash"
    options = [index for index, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options == list(range(1, len(options) + 1))
    assert "#SBATCH --nodes=3-4" in lines
    assert not any("ntasks" in line for line in lines[: len(options) + 1])
    code = [line for line in lines if not line.startswith("#")]
    assert code[0] == "trap '' USR2"
    assert code[-1] == 'exec "${supervisor[@]}"'
    assert not any("umask" in line for line in code)  # the supervisor sets it, and gives workers the user's own
    assert script.count("@COMMAND@") == 1, "values are not searched for placeholders"
    assert "run_dir='/runs/@RUN_DIR@'" in script
    assert "@SBATCH_LINES@" in load_template()
    assert "@SBATCH_LINES@" not in script


@pytest.mark.parametrize("argument", ["--ntasks=4", "-n4", "-N2", "--nodelist=n1", "-K", "--output=x", "--pty", "x"])
def test_options_of_srun_under_which_no_agent_works(argument: str) -> None:
    with pytest.raises(UsageError, match=f"--srun-arg {argument}: "):
        check_srun_argument(argument)
    for other in ("--mpi=none", "--cpu-bind=cores", "--export=ALL,X=1", "-v"):
        check_srun_argument(other)


TEMPLATE = """#!/bin/bash
#SBATCH -N 4 --time=1:00:00 --licenses matlab:2 --no-requeue
#SBATCH --exclusive -p gpu
@SBATCH_LINES@
trap '' USR2
exec @COMMAND@
"""


def test_a_templates_lines_count_where_nothing_else_says_so(tmp_path: Path) -> None:
    (tmp_path / "t.sh").write_text(TEMPLATE)
    text, parsed = read_template(read("--template", "t.sh", "-t", "30"), tmp_path, {"SBATCH_PARTITION": "cpu"})
    assert text == TEMPLATE
    assert (parsed.get("nodes"), parsed.get("time"), parsed.get("requeue")) == ("4", "30", "0")
    assert parsed.get("partition") is None, "the variable wins, as with sbatch"
    assert parsed.get("exclusive") == ""
    assert parsed.source("nodes", "") == "t.sh: -N"
    words = ["--frobnicate", "matlab:2", "-N4", "-L", "x", "--exclusive=user", "--requeue", "-t"]
    assert asked_by(words) == {
        "nodes": ("-N", "4"),
        "licenses": ("-L", "x"),
        "exclusive": ("--exclusive", "user"),
        "requeue": ("--requeue", "1"),
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b"#!/bin/bash\necho @COMMAND@\n",
            ["@SBATCH_LINES@ is missing", "trap '' USR2 is missing", "started with exec"],
        ),
        (None, [" can't be read: No such file"]),
        (b"\xff\xfe", [": not UTF-8 text"]),
    ],
)
def test_all_that_is_wrong_in_a_template_stands_in_one_message(
    tmp_path: Path, content: bytes | None, says: list[str]
) -> None:
    if content is not None:
        (tmp_path / "t.sh").write_bytes(content)
    with pytest.raises(UsageError) as raised:
        read_template(read("--template", "t.sh"), tmp_path, {})
    said = str(raised.value)
    assert said.startswith("--template t.sh")
    assert "\n" not in said
    assert [word for word in says if word not in said] == []
