"""What the supervisor needs in a template of the user's own."""

from __future__ import annotations

import pytest

from hpc_elastic.launch.submit_job import load_template, render_script
from hpc_elastic.options.run_request import check_template, sbatch_words
from hpc_elastic.options.sbatch import SbatchOptions

GOOD = """#!/bin/bash -l
#SBATCH --partition=gpu  # ours
#SBATCH -A "my project" --mail-type=END
@SBATCH_LINES@

set -u
trap '' USR2
module load cuda
export DATA=/scratch/x
exec @COMMAND@
"""


def test_ours_and_a_good_one_have_all() -> None:
    assert check_template(load_template()) == []
    assert check_template(GOOD) == []
    script = render_script(SbatchOptions(partition="cpu"), run_dir="/r/a b", command=["/py", "x y"], template=GOOD)
    assert script.index("--partition=gpu") < script.index("--partition=cpu") < script.index("trap")
    assert script.endswith("exec '/py' 'x y'\n")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("#!/bin/bash -l\n", "", "line 1 must name the shell"),
        ("#!/bin/bash -l", "#!/usr/bin/env python3", "line 1 names python3"),
        ("#!/bin/bash -l", "#!/bin/csh", "line 1 names csh"),
        ("\n", "\r\n", "DOS line ends"),
        ("@SBATCH_LINES@\n", "", "a line @SBATCH_LINES@ is missing"),
        ("@SBATCH_LINES@\n\nset -u\n", "set -u\n@SBATCH_LINES@\n", "@SBATCH_LINES@ must stand before line 4"),
        ("@SBATCH_LINES@\n", "@SBATCH_LINES@\n#SBATCH -t 5\n", "after the template's own #SBATCH lines (line 5)"),
        ("set -u\n", "set -u\n#SBATCH -t 5\n", "line 7: sbatch reads no #SBATCH line after the first command"),
        ("trap '' USR2\n", "", "trap '' USR2 is missing"),
        ("trap '' USR2\nmodule load cuda\n", "module load cuda\ntrap '' USR2\n", "must stand before line 7"),
        ("trap '' USR2", "# trap '' USR2", "trap '' USR2 is missing"),
        ("exec @COMMAND@", "@COMMAND@", "must be started with exec"),
        ("exec @COMMAND@", "srun hostname", "@COMMAND@ is missing"),
        ("exec @COMMAND@", "x=(@COMMAND@)\nexec hostname", "must be started with exec"),
        ("/scratch/x", "@DATA_DIR@", "@DATA_DIR@ is not a known placeholder"),
        ("--mail-type=END", "--ntasks-per-node=4", "line 3: --ntasks-per-node=4: not possible here: tasks are started"),
        ("--mail-type=END", "-n 4", "line 3: -n: not possible here"),
        ("--mail-type=END", "--gpus-per-task=1", "use --gpus-per-node"),
        ("--mail-type=END", "--signal=USR2@60", "the supervisor must get USR2"),
        ("--mail-type=END", "--signal=B:TERM@60", "the supervisor must get USR2"),
        ('"my project"', '"my project', "line 3: no closing quotation"),
        ("#SBATCH -A", "#SBATCH hetjob\n#SBATCH -A", "line 3: heterogeneous jobs are not supported"),
    ],
)
def test_each_thing_that_is_missing_is_said(old: str, new: str, said: str) -> None:
    assert old in GOOD
    problems = check_template(GOOD.replace(old, new))
    assert any(said in problem for problem in problems), problems


def test_a_job_may_be_called_hetjob() -> None:
    assert check_template(GOOD.replace("--mail-type=END", "-J hetjob")) == []


def test_one_fault_gives_one_message() -> None:
    assert len(check_template(GOOD.replace("trap '' USR2\n", ""))) == 1
    assert len(check_template(GOOD.replace("exec @COMMAND@", ""))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "exec nice @COMMAND@",
        'it=(@COMMAND@)\nexec "${it[@]}"',
        "cd /x && exec @COMMAND@",
        "[[ -d /x ]] || exit 2; exec @COMMAND@",
    ],
)
def test_other_ways_to_exec_it(line: str) -> None:
    assert check_template(GOOD.replace("exec @COMMAND@", line)) == []


def test_words_as_sbatch_reads_them() -> None:
    assert sbatch_words(GOOD.splitlines()) == ["--partition=gpu", "-A", "my project", "--mail-type=END"]
