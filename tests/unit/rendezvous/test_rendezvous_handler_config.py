"""What a user may write: keys, a URL, and the messages where it is wrong."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.rendezvous.handler_config import config_from_keys, config_from_url, on_this_node, participant_settings


def test_a_url_says_it_all(tmp_path: Path) -> None:
    url = f"fs://{tmp_path}/a%2Fb%20%C3%BC?min_workers=1&max_workers=3&timeout=60&last_call_timeout=2.5&prefix=p%2Fq"
    url += "&reopen=on"
    config = config_from_url(url)
    assert (config.directory, config.run_id, config.prefix) == (str(tmp_path), "a/b ü", "p/q")
    assert config.reopen
    assert (config.min_nodes, config.max_nodes) == (1, 3)
    assert (config.settings.timeout, config.settings.last_call_timeout) == (60, 2.5)


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    config = config_from_url(f"fs://{tmp_path}/run")
    assert (config.min_nodes, config.max_nodes) == (1, 1)
    assert (config.settings.timeout, config.settings.last_call_timeout) == (600, 30)
    assert config_from_url(f"fs://{tmp_path}/run?min_workers=4").max_nodes == 4


def test_a_url_is_taken_on_this_node(tmp_path: Path) -> None:
    """Its name in messages, its notifier, and under Slurm its place in the order and the start of the job."""
    slurm = {"SLURM_PROCID": "3", "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "0"}
    config = config_from_url(f"fs://{tmp_path}/run", slurm)
    assert (config.host, config.node, config.job) == (socket.gethostname(), 3, "17.2.0")
    assert config.addresses
    elsewhere = config_from_url(f"fs://{tmp_path}/run", {"SLURM_PROCID": "10000"})
    assert (elsewhere.node, elsewhere.job) == (None, ""), "from 10000 on, numbers are those of second agents"
    assert on_this_node(config, {}, address="10.0.0.7").addresses == ("10.0.0.7",)


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("/run?tiemout=3", "rendezvous URL: unknown key 'tiemout'"),
        ("/run?timeout=soon", "rendezvous URL timeout=soon: not a number"),
        ("/run?timeout=", "timeout=: not a number"),
        ("/run?reopen=yes", "rendezvous URL reopen=yes: give on or off"),
        ("/run?min_workers=two", "min_workers=two"),
        ("/run?min_workers=3&max_workers=2", "min 3 and max 2"),
        ("/run?min_workers=0", "min_workers=0"),
        ("/", "run id is empty"),
        ("/missing/run", "missing is not there"),
    ],
)
def test_a_wrong_url_is_refused_by_name(tmp_path: Path, tail: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        config_from_url(f"fs://{tmp_path}{tail}")
    assert message in str(caught.value)


@pytest.mark.parametrize("url", ["etcd://host:2379/run", "fs://host/run", "/shared/run", ""])
def test_another_kind_of_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="fs:///shared/dir"):
        config_from_url(url)


def test_keys_are_refused_by_name_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--rdzv-conf: unknown key 'is_host'"):
        config_from_keys(str(tmp_path), "run", min_nodes=1, max_nodes=1, conf={"is_host": "1"})
    with pytest.raises(UsageError, match="'shared': give an absolute path"):
        config_from_keys("shared", "run", min_nodes=1, max_nodes=1, conf={})


def test_too_few_nodes_close_nothing_for_agents_that_have_their_own_timeout(tmp_path: Path) -> None:
    settings = participant_settings(config_from_url(f"fs://{tmp_path}/run?min_workers=2&max_workers=5&timeout=10"))
    assert (settings.min_nodes, settings.max_nodes, settings.expected_nodes) == (2, 5, 5)
    assert not settings.give_up
    assert settings.timeout < 10
