"""The executor's parameters: submitit's names, Slurm's and ours become the command line's; through AutoExecutor too."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import submitit

from hpc_elastic.errors import UsageError
from hpc_elastic.options.table import Parsed
from hpc_elastic.submission.executor import (
    NAMES,
    ElasticExecutor,
    UnknownParameterError,
    normalized,
    parsed_options,
    unknown,
)

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
    ("name", "nearest"), [("min_node", "min_nodes"), ("timout_min", "timeout_min"), ("spare", "spares")]
)
def test_an_unknown_name_is_refused_with_the_nearest_as_submitit_refuses_it_anywhere(name: str, nearest: str) -> None:
    """ValueError or NameError by update_parameters, TypeError by a constructor."""
    with pytest.raises(UnknownParameterError, match=rf"no parameter {name}; did you mean {nearest}\?") as caught:
        normalized({name: 1})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NameError)
    assert isinstance(unknown(name), TypeError)


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


@pytest.fixture
def auto(tmp_path: Path) -> submitit.AutoExecutor:
    return submitit.AutoExecutor(tmp_path, cluster="elastic", elastic_cluster="local")


def parameters(auto: submitit.AutoExecutor) -> dict[str, Any]:
    found: dict[str, Any] = auto._executor.parameters
    return found


def test_its_presence_changes_nothing_for_other_clusters(tmp_path: Path) -> None:
    assert submitit.AutoExecutor.which() != "elastic"
    other = submitit.AutoExecutor(tmp_path, cluster="local")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        other.update_parameters(partition="x", signal_delay_s=30)
    messages = [str(warning.message) for warning in said]
    assert any("slurm_partition" in message for message in messages)
    assert not any("elastic" in message for message in messages)


def test_slurms_parameters_are_not_dropped(auto: submitit.AutoExecutor) -> None:
    auto.update_parameters(
        timeout_min=3, nodes=2, slurm_partition="a100", slurm_setup=["module load x"], local_setup=[]
    )
    assert parameters(auto) == {
        "cluster": "local", "time": 3, "nodes": 2, "partition": "a100", "setup": ["module load x"],
    }  # fmt: skip


def test_the_nearer_prefix_wins(auto: submitit.AutoExecutor) -> None:
    auto.update_parameters(timeout_min=3, slurm_time=4, slurm_qos="low", elastic_qos="high", elastic_spares=1)
    assert [parameters(auto)[name] for name in ("time", "qos", "spares")] == [4, "high", 1]
    auto.update_parameters(timeout_min=5)
    assert parameters(auto)["time"] == 5


def test_slurms_arguments_of_the_constructor_count_too(tmp_path: Path) -> None:
    auto = submitit.AutoExecutor(tmp_path, cluster="elastic", slurm_max_num_timeout=7, slurm_python="/opt/python")
    assert (auto._executor.max_num_timeout, auto._executor.python) == (7, "/opt/python")


@pytest.mark.parametrize("prefix", ["elastic_", "slurm_"])
def test_an_unknown_name(auto: submitit.AutoExecutor, prefix: str) -> None:
    with pytest.raises(NameError, match="partitio"):
        auto.update_parameters(**{f"{prefix}partitio": "x"})
    with pytest.raises(NameError, match=r"did you mean min_nodes\?"):
        auto.update_parameters(elastic_min_node=1)


def test_a_value_is_checked_when_it_is_given(auto: submitit.AutoExecutor) -> None:
    with pytest.raises(ValueError, match="no parameter tasks_per_nod; did you mean tasks_per_node"):
        auto._executor.update_parameters(tasks_per_nod=1)
    for given in ({"elastic_max_restarts": "often"}, {"elastic_grow": "yes"}, {"slurm_time": "soon"}):
        before = dict(parameters(auto))
        with pytest.raises(Exception, match=str(next(iter(given.values())))):
            auto.update_parameters(**given)
        assert parameters(auto) == before, "nothing of it is kept"


def test_every_slurm_parameter_of_submitit_is_taken() -> None:
    assert set(submitit.SlurmExecutor._valid_parameters()) <= set(NAMES)


def test_debug_runs_in_this_process(tmp_path: Path) -> None:
    executor = ElasticExecutor(tmp_path, cluster="debug")
    job = executor.submit(lambda: (os.getpid(), os.environ["WORLD_SIZE"], os.environ["RANK"]))
    assert job.result() == (os.getpid(), "1", "0")
    assert job.results() == [job.result()]
    assert "WORLD_SIZE" not in os.environ
