"""What a worker finds in its environment: all that torchrun gives, and a few documented variables of ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.worker_environment import RoundFacts, WorkerSettings, worker_environment
from hpc_elastic.rendezvous.proposals import RankLayout
from hpc_elastic.slurm.job_environment import without_run_variables

DOCS = Path(__file__).parents[3] / "docs/reference/environment.md"
LAYOUT = RankLayout(group_rank=1, group_world_size=3, first_rank=4, local_world_size=2, world_size=9)
SPEC = WorkerSettings(run_id="20261121-train-9f3c", role="trainer", max_restarts=3)
FACTS = RoundFacts(
    spec=SPEC,
    layout=LAYOUT,
    round=2,
    master_addr="10.0.0.1",
    master_port=29501,
    agent_store=True,
    run_dir="/runs/x",
    attempt=1,
    tag="uid:host:agent",
)
TORCHRUNS = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "9",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "9",
    "ROLE_NAME": "trainer",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "20261121-train-9f3c",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_ERROR_FILE": "/runs/x/error.json",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "OMP_NUM_THREADS": "1",
}
OURS = {
    "HPC_ELASTIC_RUN_DIR": "/runs/x",
    "HPC_ELASTIC_ATTEMPT": "1",
    "HPC_ELASTIC_TAG": "uid:host:agent",
    "HPC_ELASTIC_AGENT_STORE": "20261121-train-9f3c 10.0.0.1 29501",
    "PYTHONFAULTHANDLER": "1",
}


def environment(base: dict[str, str] | None = None, facts: RoundFacts = FACTS, local_rank: int = 1) -> dict[str, str]:
    return worker_environment(base or {}, facts, local_rank=local_rank, error_file="/runs/x/error.json")


def test_each_local_rank_has_its_own_ranks() -> None:
    first = environment(local_rank=0)
    assert (first["RANK"], first["LOCAL_RANK"], first["ROLE_RANK"]) == ("4", "0", "4")
    assert first["LOCAL_WORLD_SIZE"] == "2"


def test_a_virtual_local_rank_is_0_and_sees_its_own_gpu_alone() -> None:
    """As torchrun's ``--virtual-local-rank``."""
    facts = replace(FACTS, spec=replace(SPEC, virtual_local_rank=True))
    for base, gpu in (({}, "1"), ({"CUDA_VISIBLE_DEVICES": "4, 6"}, "6"), ({"CUDA_VISIBLE_DEVICES": "4"}, "")):
        env = environment(dict(base), facts, local_rank=1)
        assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", gpu)
        assert env["RANK"] == environment(local_rank=1)["RANK"]


def test_a_wandb_run_is_each_ranks_own_and_the_same_in_every_round_and_attempt() -> None:
    facts = replace(FACTS, spec=replace(SPEC, wandb=True))
    rank_5 = environment({}, facts)
    assert (rank_5["WANDB_RUN_ID"], rank_5["WANDB_RESUME"]) == ("20261121-train-9f3c-rank5", "allow")
    later = replace(facts, round=7, attempt=3, layout=replace(LAYOUT, first_rank=0))
    assert environment({}, later, local_rank=0)["WANDB_RUN_ID"] == "20261121-train-9f3c"
    own = environment({"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, facts)
    assert (own["WANDB_RUN_ID"], own["WANDB_RESUME"]) == ("mine", "must")
    assert "WANDB_RUN_ID" not in environment()


def test_all_that_torchrun_gives_and_ours_is_added_to_the_agents_own_which_is_not_changed() -> None:
    base = {"PATH": "/bin", "USER_SETTING": "a b\nc"}
    assert environment(base) == {**base, **TORCHRUNS, **OURS}
    assert base == {"PATH": "/bin", "USER_SETTING": "a b\nc"}


def test_what_another_launcher_left_is_replaced() -> None:
    """An agent that runs under torchrun, or in a shell where somebody exported a rank."""
    base = {key: "stale" for key in TORCHRUNS if key not in ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")}
    base |= {"HPC_ELASTIC_TAG": "another:run:x"}
    assert environment(base) == {**TORCHRUNS, **OURS}


@pytest.mark.parametrize(
    ("base", "local_world_size", "expected"),
    [
        ({}, 1, None),
        ({}, 2, "1"),
        ({}, 8, "1"),
        ({"OMP_NUM_THREADS": "7"}, 1, "7"),
        ({"OMP_NUM_THREADS": "7"}, 8, "7"),
        ({"OMP_NUM_THREADS": ""}, 8, ""),
    ],
)
def test_threads_are_limited_only_where_unset_and_there_are_several_workers(
    base: dict[str, str], local_world_size: int, expected: str | None
) -> None:
    facts = replace(FACTS, layout=replace(LAYOUT, local_world_size=local_world_size))
    assert environment(base, facts, local_rank=0).get("OMP_NUM_THREADS") == expected


@pytest.mark.parametrize("key", ["PYTHONFAULTHANDLER", "TORCH_NCCL_ASYNC_ERROR_HANDLING"])
def test_what_the_user_set_stays(key: str) -> None:
    assert environment({key: "0"})[key] == "0"


def test_where_no_store_of_ours_serves_rank_0_opens_it() -> None:
    assert environment(facts=replace(FACTS, agent_store=False))["TORCHELASTIC_USE_AGENT_STORE"] == "False"


AS_SLURM_WOULD = {
    "SLURM_NTASKS": "9",
    "SLURM_NPROCS": "9",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def an_agents_task(version: str) -> dict[str, str]:
    """The environment of a task that srun started, recorded: one of the agents, to Slurm."""
    (name, *_) = sorted((Path(__file__).parents[2] / "data/slurm" / version).glob("env-gpus-per-node-step-*"))
    lines = (line.partition("=") for line in name.read_text().splitlines() if line.startswith("SLURM"))
    return {key: value for key, _, value in lines}


@pytest.mark.parametrize("version", ["20.11.4", "22.05.8", "24.11.5", "26.05.5"])
def test_inside_slurm_each_worker_is_a_task(version: str) -> None:
    """Lightning and others take SLURM_NTASKS for the world size and SLURM_PROCID for the rank: the agents'."""
    base = an_agents_task(version)
    assert {"SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"} <= base.keys()
    env = environment(base)
    assert {key: env.get(key) for key in AS_SLURM_WOULD} == AS_SLURM_WOULD
    assert not env.keys() & {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_GTIDS"}
    kept = {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_STEP_ID"}
    assert {key: env[key] for key in kept & base.keys()} == {key: base[key] for key in kept & base.keys()}


def test_the_variables_are_documented() -> None:
    assert {*environment(), *AS_SLURM_WOULD} <= set(re.findall(r"`([A-Z][A-Z_]+)`", DOCS.read_text()))


def test_what_a_worker_gets_of_its_run_is_left_out_of_what_it_submits() -> None:
    env = without_run_variables({**environment(), "PATH": "/bin"})
    defaults = {"OMP_NUM_THREADS", "PYTHONFAULTHANDLER", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    assert env.keys() - defaults == {"PATH"}
