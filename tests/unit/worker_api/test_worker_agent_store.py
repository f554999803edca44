"""A launcher that a worker starts hands the agents' store on, and gives its own ranks another port."""

from __future__ import annotations

import pytest

from hpc_elastic.worker_api.agent_store import STORE_VARIABLE, drop_other_store

OURS = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "r 1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29501",
    STORE_VARIABLE: "r 1 29501",
}


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({}, True),
        ({"MASTER_PORT": "29500"}, False),
        ({"MASTER_ADDR": "127.0.0.1"}, True),
        ({"MASTER_PORT": ""}, True),
        # torchrun in a worker serves a store of its own, and says so with its own run's id.
        ({"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}, True),
        ({"MASTER_PORT": "29500", STORE_VARIABLE: ""}, True),
        ({"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "False"}, True),
    ],
)
def test_the_agents_store_is_not_waited_for_at_another_port(
    changes: dict[str, str], is_kept: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {**OURS, **changes}
    drop_other_store(env)
    assert ("TORCHELASTIC_USE_AGENT_STORE" in env) is is_kept
    err = capsys.readouterr().err
    assert err.count("\n") == (not is_kept)
    if not is_kept:
        assert "no agent serves a store at port 29500" in err
