"""``--het`` and ``--gpus``."""

from __future__ import annotations

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options
from hpc_elastic.options.run_request import het_components
from hpc_elastic.options.sbatch import SbatchOptions
from hpc_elastic.options.table import Parsed, parse
from hpc_elastic.slurm.batch_script import render_script


def read(*argv: str) -> Parsed:
    return parse([*argv, "train.py"], job_options.OPTIONS, refused={}, env={})


def test_a_component_has_its_own_options_and_those_of_the_job() -> None:
    (part,) = het_components(
        read("-t", "1:00:00", "-A", "mine", "-p", "cpu", "--het", "-N 2-3 -p gpu --gres=gpu:a100:2")
    )
    assert part.nodes == (2, 3)
    assert set(part.arguments) == {
        *("--nodes=2-3", "--partition=gpu", "--time=1:00:00", "--account=mine", "--gres=gpu:a100:2"),
        *("--requeue", "--no-kill"),
    }


def test_the_script_has_them_one_after_the_other() -> None:
    parts = het_components(read("--no-requeue", "--het=-N2 --sbatch-arg=--licenses=x", "--het", "-t 5"))
    options = SbatchOptions(nodes="1", requeue=False, components=tuple(part.arguments for part in parts))
    lines = [line for line in render_script(options, run_dir="/r", command=["/py"]).splitlines() if "#SBATCH" in line]
    first, second, third = " ".join(lines).split(" #SBATCH hetjob ")
    assert "--nodes=1 " in first
    assert "--signal=B:USR2" in first
    assert "--output=/r/job.log" in first
    assert second == "#SBATCH --nodes=2 #SBATCH --no-requeue #SBATCH --no-kill #SBATCH --licenses=x"
    assert third == "#SBATCH --nodes=1 #SBATCH --time=5 #SBATCH --no-requeue #SBATCH --no-kill"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--het", "-N x"), "not a number of nodes"),
        (("--het", "--output=x"), "unknown option --output"),
        (("--het", "gpu"), "give options of sbatch's"),
        (("--het", "-p 'gpu"), "No closing quotation"),
        (("--het", "--sbatch-arg=--ntasks=4"), "not possible here"),
        (("--array", "0-1", "--het", "-N1"), "no arrays of het jobs"),
    ],
)
def test_what_no_component_can_have(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        het_components(read(*argv))


@pytest.mark.parametrize(
    ("argv", "nodes", "each"),
    [
        (("--gpus", "8"), (4, 4), "2"),
        (("-G", "a100:8"), (2, 2), "a100:4"),
        (("--gpus", "6", "--spares", "1"), (2, 2), "2"),
    ],
)
def test_a_total_of_gpus_is_asked_for_by_node(argv: tuple[str, ...], nodes: tuple[int, int], each: str) -> None:
    options = job_options.sbatch_options(read(*argv), nodes=nodes, job_name="x", grace=60)
    assert options.gpus_per_node == each


@pytest.mark.parametrize(
    ("argv", "nodes"),
    [
        (("--gpus", "8"), (2, 4)),
        (("--gpus", "7"), (2, 2)),
        (("--gpus", "a100:2,v100:2"), (2, 2)),
        (("--gpus", "0"), (1, 1)),
        (("--gpus", "4", "--gpus-per-node", "2"), (2, 2)),
    ],
)
def test_a_total_that_can_not_be_the_same_everywhere(argv: tuple[str, ...], nodes: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"^--gpus "):
        job_options.sbatch_options(read(*argv), nodes=nodes, job_name="x", grace=60)


@pytest.mark.parametrize(
    "argument", ["--gpus-per-task=1", "-G4", "--gpus=4", "--array=0-3", "-a0-3", "-n4", "--ntasks=4"]
)
def test_what_can_not_be_passed_on_as_it_is(argument: str) -> None:
    with pytest.raises(UsageError, match=f"^--sbatch-arg {argument}: not possible here: "):
        render_script(SbatchOptions(extra=(argument,)), run_dir="/r", command=["/py"])
