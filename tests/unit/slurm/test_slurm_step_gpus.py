"""The GPUs of the agents' step."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpc_elastic.errors import UsageError
from hpc_elastic.slurm.commands import scrubbed_environment, step_gpu_flags
from hpc_elastic.slurm.job_state import parse_show_job
from tests.rigs.captures import DATA, VERSIONS, captured

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}


def recorded(version: str, name: str) -> dict[str, str]:
    text = (DATA / version / f"env-{name}-batch.txt").read_text()
    return dict(line.split("=", 1) for line in text.splitlines())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["plain", "gres-gpu2", "gpus-per-node", "exclusive"])
def test_what_a_step_has_by_itself_is_not_asked_for_again(version: str, name: str) -> None:
    assert step_gpu_flags(recorded(version, name)) == ()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_with_gpus_per_task_gives_an_agent_all_of_its_node(version: str) -> None:
    env = recorded(version, "gpus-per-task")
    (flag,) = step_gpu_flags(env)
    assert flag.startswith("--gpus-per-node=")
    assert int(flag.rpartition("=")[2]) >= 1
    assert not {"SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"} & set(scrubbed_environment(env))


@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ({"SLURM_GPUS": "4", "SLURM_GPUS_ON_NODE": "2"}, ("--gpus-per-node=2",)),
        ({"SLURM_GPUS": "a100:4", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, ("--gpus-per-node=2",)),
        ({"SLURM_GPUS": "4", "SLURM_GPUS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "2"}, ()),
        ({"SLURM_GPUS": "4", "SLURMD_NODENAME": ""}, ("--gpus-per-node=2",)),  # salloc's shell, elsewhere
    ],
)
def test_a_total_is_as_many_on_each_node(env: dict[str, str], flags: tuple[str, ...]) -> None:
    assert step_gpu_flags({**JOB, **env}) == flags


@pytest.mark.parametrize("env", [{"SLURM_GPUS": "3"}, {"SLURM_GPUS": "4", "SLURM_GPUS_ON_NODE": "3"}])
def test_a_total_that_is_not_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"^--gpus=\d: .* ask with --gpus-per-node"):
        step_gpu_flags({**JOB, **env})


def test_what_another_job_asked_for_is_not_this_ones() -> None:
    """sbatch hands the variables of the job that it was called in on."""
    outer = {**JOB, "SLURM_GPUS": "7", "SLURM_GPUS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "2"}
    (per_node,) = parse_show_job(captured("22.05.8", "scontrol-show-job-running")[1])[:1]
    assert per_node.tres_asked == ("TresPerNode",)
    assert step_gpu_flags({**outer, "SLURM_GPUS_PER_TASK": "1"}, per_node) == ()
    assert step_gpu_flags(outer, replace(per_node, tres_asked=())) == ()
    total = replace(per_node, tres_asked=("TresPerJob",))
    assert step_gpu_flags({**outer, "SLURM_GPUS": "4"}, total) == ("--gpus-per-node=2",)


def test_no_step_hears_of_the_total_or_of_the_batch_hosts_gpus() -> None:
    env = {**JOB, "SLURM_GPUS": "4", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "0,1"}
    assert scrubbed_environment(env) == JOB
