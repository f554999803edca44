"""torch's LaunchConfig, as `launch` understands it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.run.option_values import NumaBinding
from hpc_elastic.submission.executor import ElasticExecutor
from hpc_elastic.submission.notebook import LaunchConfig, _parameters, launch


@dataclass
class Logs:
    """Attributes of torch 2.13's DefaultLogsSpecs."""

    _root_log_dir: str | None = None
    _redirects: Any = 0
    _tee: Any = 0
    _local_ranks_filter: set[int] | None = None


@dataclass
class TorchConfig:
    """Fields and defaults of torch 2.13's, as it stands once it has been made."""

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 2
    logs_specs: Any = field(default_factory=lambda: Logs(f"{tempfile.gettempdir()}/torchelastic_ab12"))
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=lambda: {"timeout": 900})
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = 30


def accepted(config: object, folder: Path) -> dict[str, Any]:
    """The executor's parameters, which it has taken."""
    parameters = _parameters(config, {})
    executor = ElasticExecutor(folder, cluster="local")
    executor.update_parameters(**{name: value for name, value in parameters.items() if name != "log_dir"})
    return parameters


def test_one_with_torchs_defaults_says_nothing_but_how_many(tmp_path: Path) -> None:
    parameters = accepted(TorchConfig(), tmp_path)
    assert parameters.pop("nodes") == (1, 1)
    assert parameters == {
        "nproc_per_node": 2,
        "max_restarts": 3,
        "monitor_interval": 0.1,
        "shutdown_timeout": 30,
        "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "timeout_min": "UNLIMITED",
    }


def test_what_it_says_reaches_the_run(tmp_path: Path) -> None:
    logs = Logs(_root_log_dir=str(tmp_path), _redirects=3, _tee={1: 3, 0: 1, 2: 0}, _local_ranks_filter={1, 0})
    config = TorchConfig(
        min_nodes=2, max_nodes=4, run_id="mine", role="trainer", logs_specs=logs, rdzv_configs={"timeout": 60}
    )
    parameters = accepted(config, tmp_path)
    assert parameters["nodes"] == (2, 4)
    assert (parameters["name"], parameters["role"]) == ("mine", "trainer")
    assert parameters["rdzv_conf"] == {"timeout": 60}
    assert parameters["log_dir"] == str(tmp_path)
    assert (parameters["redirects"], parameters["tee"]) == ("3", "0:1,1:3")
    assert parameters["local_ranks_filter"] == [0, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("log_line_prefix_template", "[${rank}]"),
        ("metrics_cfg", {"a": "b"}),
        ("event_log_handler", "console"),
        ("rdzv_backend", "etcd-v2"),
        ("rdzv_endpoint", "here:29400"),
        ("local_addr", "10.0.0.1"),
    ],
)
def test_what_there_is_nothing_for_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"{name}=.*leave it out"):
        _parameters(TorchConfig(**{name: value}), {})


def test_numa_options_a_virtual_local_rank_and_further_signals_reach_the_run(tmp_path: Path) -> None:
    options = SimpleNamespace(affinity_mode=NumaBinding.CORE_COMPLEX)
    config = TorchConfig(numa_options=options, virtual_local_rank=True, signals_to_handle="SIGTERM,SIGUSR1")
    parameters = accepted(config, tmp_path)
    assert (parameters["numa_binding"], parameters["virtual_local_rank"]) == ("core-complex", True)
    assert parameters["signals_to_handle"] == "SIGTERM,SIGUSR1"


def test_a_configuration_in_the_place_of_the_program_is_refused() -> None:
    """As `elastic_launch(config, …)` has it."""
    with pytest.raises(UsageError, match="a LaunchConfig is not a function, script, command or module"):
        launch(LaunchConfig(), print)  # type: ignore[arg-type]
