"""Through submitit's AutoExecutor: prefixes, names, and what it keeps to itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core import plugins

from hpc_elastic.submission.executor import ElasticExecutor


@pytest.fixture
def auto(tmp_path: Path) -> submitit.AutoExecutor:
    return submitit.AutoExecutor(tmp_path, cluster="elastic", elastic_cluster="local")


def parameters(auto: submitit.AutoExecutor) -> dict[str, Any]:
    found: dict[str, Any] = auto._executor.parameters
    return found


def test_it_is_found_by_its_name(auto: submitit.AutoExecutor) -> None:
    assert isinstance(auto._executor, ElasticExecutor)
    assert ElasticExecutor.name() == "elastic"
    assert "elastic" in plugins.get_job_environments()


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
    missing = set(submitit.SlurmExecutor._valid_parameters()) - set.union(set(), _all_names())
    assert not missing


def _all_names() -> set[str]:
    from hpc_elastic.submission.executor import NAMES

    return set(NAMES)


def test_debug_runs_in_this_process(tmp_path: Path) -> None:
    import os

    executor = ElasticExecutor(tmp_path, cluster="debug")
    job = executor.submit(lambda: (os.getpid(), os.environ["WORLD_SIZE"], os.environ["RANK"]))
    assert job.result() == (os.getpid(), "1", "0")
    assert job.results() == [job.result()]
    assert "WORLD_SIZE" not in os.environ
