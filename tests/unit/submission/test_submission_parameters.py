"""The executor's parameters: submitit's names, Slurm's and ours become the options of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options.table import Parsed
from hpc_elastic.submission.executor import UnknownParameterError, normalized, parsed_options, unknown

ENV = {"PATH": "/bin", "HPC_ELASTIC_SITE_CONFIG": "", "HPC_ELASTIC_USER_CONFIG": "", "HPC_ELASTIC_PROJECT_CONFIG": ""}


def parsed(env: dict[str, str] | None = None, **given: Any) -> Parsed:
    return parsed_options(normalized(given), job_name="train", env={**ENV, **(env or {})}, slurm=True)


def value(dest: str, **given: Any) -> str | None:
    return parsed(**given).get(dest)


@pytest.mark.parametrize(
    ("given", "dest", "text"),
    [
        ({}, "time", "5"),  # submitit's own defaults
        ({}, "grace", "90"),
        ({}, "nproc_per_node", "1"),
        ({}, "job_name", "train"),
        ({"name": "mine"}, "job_name", "mine"),
        ({"timeout_min": 90}, "time", "90"),
        ({"timeout_min": 0.5}, "time", "0:30"),
        ({"time": "1-12"}, "time", "1-12"),
        ({"timeout_min": 10, "time": 20}, "time", "20"),
        ({"mem_gb": 4}, "mem", "4G"),
        ({"mem_gb": 0.5}, "mem", "512M"),
        ({"mem": "3GB"}, "mem", "3GB"),
        ({"nodes": 4}, "nodes", "4"),
        ({"nodes": 4, "min_nodes": 2}, "nodes", "2-4"),
        ({"nodes": (2, 4)}, "nodes", "2-4"),
        ({"nodes": "1:3"}, "nodes", "1:3"),
        ({"min_nodes": 2}, "nodes", "2"),
        ({"tasks_per_node": 8}, "nproc_per_node", "8"),
        ({"ntasks_per_node": "auto"}, "nproc_per_node", "auto"),
        ({"tasks_per_node": 8, "cpus_per_task": 3}, "cpus_per_task", "24"),
        ({"gpus_per_node": 2}, "gpus_per_node", "2"),
        ({"num_gpus": 2}, "gpus_per_node", "2"),
        ({"tasks_per_node": 4, "gpus_per_task": 2}, "gpus_per_node", "8"),
        ({"partition": "a100"}, "partition", "a100"),
        ({"exclusive": True}, "exclusive", ""),
        ({"exclusive": "user"}, "exclusive", "user"),
        ({"exclusive": False}, "exclusive", None),
        ({"signal_delay_s": 30}, "grace", "30"),
        ({"requeue": False}, "requeue", "0"),
        ({"max_restarts": 7}, "max_restarts", "7"),
        ({"max_num_timeout": 9}, "max_requeues", "9"),
        ({"max_num_timeout": 9, "max_requeues": 2}, "max_requeues", "2"),
        ({"restart_on": "never"}, "max_restarts", "0"),
        ({"restart_on": "never"}, "max_requeues", "0"),
        ({"section_timeouts": {"setup": 900, "step": 60}}, "section_timeouts", "setup:900,step:60"),
        ({"rdzv_conf": {"timeout": 60}}, "rdzv_conf", "timeout=60"),
        ({"local_ranks_filter": [0, 1]}, "local_ranks_filter", "0,1"),
        ({"additional_parameters": {"mail-user": "me@x.org"}}, "mail_user", "me@x.org"),
        ({"comment": None}, "comment", None),
    ],
)
def test_each_name_means_what_it_means_elsewhere(given: dict[str, Any], dest: str, text: str | None) -> None:
    assert value(dest, **given) == text


def test_what_sbatch_alone_knows_reaches_it() -> None:
    found = parsed(
        cpus_per_gpu=4, wckey="w", additional_parameters={"licenses": "matlab:2", "spread-job": True}, srun_args=["-v"]
    )
    assert set(found.all("sbatch_args")) == {"--cpus-per-gpu=4", "--wckey=w"}
    assert [found.get(dest) for dest in ("licenses", "spread_job")] == ["matlab:2", "1"]
    assert found.all("srun_args") == ("-v",)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("min_node", "min_nodes"),
        ("task_per_node", "tasks_per_node"),
        ("timout_min", "timeout_min"),
        ("spare", "spares"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownParameterError, match=rf"no parameter {name}; did you mean {nearest}\?") as caught:
        normalized({name: 1})
    assert isinstance(caught.value, ValueError)  # as submitit's SlurmExecutor has it
    assert isinstance(caught.value, NameError)  # as its AutoExecutor has it


@pytest.mark.parametrize(
    "given",
    [
        {"use_srun": False},
        {"restart_on": "sometimes"},
        {"cluster": "moon"},
        {"setup": "module load x"},
        {"max_num_timeout": -1},
        {"signal_delay_s": 1.5},
        {"mem_gb": "4"},
        {"timeout_min": 0},
    ],
)
def test_a_value_that_can_not_be_right(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(reversed(given))):
        parsed(**given)


def test_the_configuration_lies_below_the_parameters(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('time = "30"\nspares = 2\npartition = "slow"\nnproc-per-node = 4\n')
    env = {"HPC_ELASTIC_USER_CONFIG": str(file), "HPC_ELASTIC_MAX_RESTARTS": "5"}
    found = parsed(env, partition="fast")
    assert [found.get(dest) for dest in ("time", "spares", "partition", "nproc_per_node", "max_restarts")] == [
        *("30", "2", "fast", "4", "5")
    ]


def test_an_unknown_parameter_is_what_submitit_raises_for_it_anywhere() -> None:
    """ValueError or NameError by update_parameters, TypeError by a constructor."""
    with pytest.raises(TypeError) as caught:
        raise unknown("tiemout_min")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NameError)
    assert "did you mean timeout_min?" in str(caught.value)
