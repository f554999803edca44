"""``--rdzv-conf``: what is wrong is named."""

from __future__ import annotations

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.run.spec import RendezvousSettings, settings_from_conf

BASE = RendezvousSettings(min_nodes=2, max_nodes=4, expected_nodes=4)


def test_nothing_given_changes_nothing() -> None:
    assert settings_from_conf({}, BASE) == BASE


def test_each_key_is_taken() -> None:
    conf = {
        "timeout": "90",
        "last_call_timeout": "1.5",
        "heartbeat_interval": "2",
        "heartbeat_ttl": "9",
        "poll_interval": "0.5",
        "operations_per_second": "1500",
        "doorbell": "off",
    }
    found = settings_from_conf(conf, BASE)
    assert (found.timeout, found.last_call_timeout, found.heartbeat_interval) == (90, 1.5, 2)
    assert (found.heartbeat_ttl, found.poll_interval, found.doorbell) == (9, 0.5, False)
    assert found.operations_per_second == 1500
    assert (found.min_nodes, found.max_nodes, found.expected_nodes) == (2, 4, 4)


@pytest.mark.parametrize(
    ("text", "value"), [("on", True), ("true", True), ("1", True), ("OFF", False), ("False", False), ("0", False)]
)
def test_the_doorbell_is_on_or_off(text: str, value: bool) -> None:
    assert settings_from_conf({"doorbell": text}, BASE).doorbell is value


def test_a_shorter_life_brings_faster_beats() -> None:
    found = settings_from_conf({"heartbeat_ttl": "5"}, BASE)
    assert found.heartbeat_ttl == 5
    assert found.heartbeat_interval == 1


def test_who_looks_rarely_has_time_to_answer() -> None:
    """Or a node whose packets are lost would be out before it could read that it was asked."""
    found = settings_from_conf({"poll_interval": "10"}, BASE)
    assert found.suspect_answer >= 2 * found.poll_interval
    assert settings_from_conf({"poll_interval": "0.5"}, BASE).suspect_answer == BASE.suspect_answer


def test_slower_beats_are_missed_later() -> None:
    found = settings_from_conf({"beat_interval": "10"}, BASE)
    assert found.beat_silence >= 3 * found.beat_interval
    assert settings_from_conf({"beat_interval": "0.5"}, BASE).beat_silence == BASE.beat_silence


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"timeuot": "5"}, ["timeuot", "timeout"]),
        ({"min_nodes": "5"}, ["min_nodes"]),
        ({"timeout": "soon"}, ["timeout=soon", "not a number"]),
        ({"timeout": ""}, ["timeout="]),
        ({"timeout": "0"}, ["timeout=0", "positive"]),
        ({"timeout": "-3"}, ["timeout=-3"]),
        ({"timeout": "nan"}, ["timeout=nan"]),
        ({"timeout": "inf"}, ["timeout=inf"]),
        ({"doorbell": "maybe"}, ["doorbell=maybe", "on or off"]),
        ({"member_filter": "2"}, ["member_filter=2", "on or off"]),
        ({"heartbeat_interval": "15"}, ["heartbeat_ttl=20", "heartbeat_interval=15", "twice"]),
        ({"heartbeat_interval": "4", "heartbeat_ttl": "6"}, ["heartbeat_ttl=6", "heartbeat_interval=4"]),
        ({"poll_interval": "4", "suspect_answer": "7"}, ["suspect_answer=7", "poll_interval=4", "twice"]),
        ({"suspect_answer": "1"}, ["suspect_answer=1", "poll_interval=1"]),
        ({"beat_interval": "4", "beat_silence": "7"}, ["beat_silence=7", "beat_interval=4", "twice"]),
    ],
)
def test_what_is_wrong_is_named(conf: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        settings_from_conf(conf, BASE)
    text = str(caught.value)
    assert text.startswith("--rdzv-conf")
    assert "\n" not in text
    for word in words:
        assert word in text


def test_when_the_others_go_on_without_a_silent_node() -> None:
    assert BASE.silence_until_lost == BASE.beat_silence + BASE.suspect_answer
    assert settings_from_conf({"doorbell": "off"}, BASE).silence_until_lost == BASE.heartbeat_ttl
    assert settings_from_conf({"heartbeat_ttl": "5"}, BASE).silence_until_lost == 5
