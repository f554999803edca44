"""What a worker's script or a launcher in it changed of the rendezvous that the agents gave, and what a file holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_elastic.worker_api.torch_import import STORE_VARIABLE, look_at_rendezvous

OURS = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "r 1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29501",
    STORE_VARIABLE: "r 1 10.0.0.1 29501",
}
SET = "the script set MASTER_ADDR/MASTER_PORT itself, to "


@pytest.mark.parametrize(
    ("url", "changes", "is_kept", "said"),
    [
        ("env://", {}, True, ""),
        ("env://", {"MASTER_PORT": "29500"}, False, f"{SET}10.0.0.1:29500; the run's are 10.0.0.1:29501"),
        ("env://", {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, False, f"{SET}localhost:1; "),
        ("env://", {"MASTER_ADDR": "127.0.0.1"}, True, f"{SET}127.0.0.1:29501; "),
        ("env://", {"MASTER_PORT": ""}, True, ""),
        # torchrun in a worker serves a store of its own, and says so with its own run's id.
        ("env://", {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}, True, ""),
        ("tcp://10.0.0.1:29501?rank=0&world_size=2", {}, True, ""),
        ("tcp://h7:23456?rank=0&world_size=2", {}, False, "the script set init_method to tcp://h7:23456; the run's"),
    ],
)
def test_the_agents_store_is_not_waited_for_elsewhere(
    url: str, changes: dict[str, str], is_kept: bool, said: str
) -> None:
    env = {**OURS, **changes}
    found = look_at_rendezvous(url, env)
    assert found.startswith(said)
    assert bool(found) == bool(said)
    assert ("TORCHELASTIC_USE_AGENT_STORE" in env) is is_kept


@pytest.mark.parametrize(
    ("content", "age", "said"),
    [("", 100.0, ""), ("x", 9e9, ""), ("x", 5.0, "an earlier round or run left the file "), (None, 5.0, "")],
)
def test_a_file_that_is_older_than_the_process_is_named(
    tmp_path: Path, content: str | None, age: float, said: str
) -> None:
    path = tmp_path / "meet"
    if content is not None:
        path.write_text(content)
        os.utime(path, (1e9, 1e9))
    found = look_at_rendezvous(f"file://{path}?rank=0&world_size=2", {}, age)
    assert found.startswith(said)
    assert (str(path) in found) is bool(said)
