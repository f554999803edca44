"""The numbers of a rendezvous, the same on every node of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.errors import UsageError
from hpc_elastic.run.option_values import GrowPolicy, number_of


class RendezvousSettings(Struct, frozen=True, kw_only=True):
    """Seconds, unless it says otherwise."""

    min_nodes: int = 1
    max_nodes: int = 1
    expected_nodes: int = 1
    """How many agents were launched: no node waits for one that does not exist."""
    segment: int = 1
    """Nodes of which only all are any use (``--segment``): neighbours in Slurm's order; `min_nodes` and `max_nodes` are
    multiples of it."""
    timeout: float = 600.0
    """Runs from the start of waiting to a final round."""
    last_call_timeout: float = 30.0
    """Wait for nodes that were launched and never seen, once MIN nodes are here."""
    grow: GrowPolicy = GrowPolicy.NOW
    """When a healthy round that is smaller than MAX is ended to take a node in that waits."""
    grow_patience: float = 300.0
    """After so long without a checkpoint that the script reports, CHECKPOINT waits for none."""
    give_up: bool = True
    """Close the run for all where too few nodes are left; off: each one waits out its own timeout."""
    heartbeat_interval: float = 4.0
    heartbeat_ttl: float = 20.0
    """Without a change for so long, a node counts as lost. Above three times what the filesystem takes to show one."""
    poll_interval: float = 1.0
    """The fallback's, where no notification comes through."""
    operations_per_second: float = 150.0
    """Limit of all nodes together on the file server while workers run: `poll_intervals` derives longer intervals
    from it where there are many nodes. At 8192 nodes three times as much."""
    doorbell: bool = True
    """Off: the files alone, slower."""
    member_filter: bool = True
    """The workers' TCPStore serves the addresses of the round's nodes alone."""
    beat_interval: float = 1.0
    """Between two datagrams that say "alive"."""
    beat_silence: float = 3.0
    """After so long without one, a node whose datagrams came before is asked through the files whether it lives."""
    suspect_answer: float = 4.0
    """How long it may take to rewrite its heartbeat then. Above what the filesystem takes to show a change."""

    @property
    def silence_until_lost(self) -> float:
        """Seconds without a sign of life after which the others may go on without a node, at the earliest."""
        if not self.doorbell:
            return self.heartbeat_ttl
        return min(self.heartbeat_ttl, self.beat_silence + self.suspect_answer)


_NOT_GIVEN = ("min_nodes", "max_nodes", "expected_nodes", "segment", "grow", "give_up")
_KEYS = tuple(name for name in RendezvousSettings.__struct_fields__ if name not in _NOT_GIVEN)


def parse_rdzv_conf(text: str, option: str) -> dict[str, float | bool]:
    """Read ``timeout=900,doorbell=off``: fields of `RendezvousSettings`, whose values fit each other."""
    conf: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not (equals and key and value):
            raise UsageError(f"{option} {text}: {item!r} is not of the form key=value")
        conf[key.strip()] = value.strip()
    values = rdzv_values(conf, option)
    settings_from_conf(values, RendezvousSettings())
    return values


def rdzv_values(conf: Mapping[str, str | float | bool], option: str = "--rdzv-conf") -> dict[str, float | bool]:
    values: dict[str, float | bool] = {}
    for key, text in conf.items():
        if key not in _KEYS:
            raise UsageError(f"{option}: unknown key {key!r}; it knows {', '.join(sorted(_KEYS))}")
        if not isinstance(text, str):
            values[key] = text
        elif isinstance(getattr(RendezvousSettings(), key), bool):
            if text.lower() not in ("on", "off", "true", "false", "1", "0"):
                raise UsageError(f"{option} {key}={text}: give on or off")
            values[key] = text.lower() in ("on", "true", "1")
        else:
            number = number_of(text)
            if not 0 < number < 1e7:
                way_out = "not a number of seconds" if math.isnan(number) else "give a positive number of seconds"
                raise UsageError(f"{option} {key}={text}: {way_out}")
            values[key] = number
    return values


def settings_from_conf(conf: Mapping[str, str | float | bool], base: RendezvousSettings) -> RendezvousSettings:
    """Apply ``--rdzv-conf``; raises UsageError for an unknown key, or for values that do not fit each other."""
    changes = rdzv_values(conf)
    changed = replace(base, **changes)
    if "heartbeat_ttl" in changes and "heartbeat_interval" not in changes:
        changed = replace(changed, heartbeat_interval=changed.heartbeat_ttl / 5)
    if "suspect_answer" not in changes:  # the node that is asked has to look first
        changed = replace(changed, suspect_answer=max(changed.suspect_answer, 4 * changed.poll_interval))
    if "beat_silence" not in changes:
        changed = replace(changed, beat_silence=max(changed.beat_silence, 3 * changed.beat_interval))
    for longer, shorter in (
        ("heartbeat_ttl", "heartbeat_interval"),
        ("suspect_answer", "poll_interval"),
        ("beat_silence", "beat_interval"),
    ):
        least, given = 2 * getattr(changed, shorter), getattr(changed, longer)
        if given < least:
            raise UsageError(f"--rdzv-conf {longer}={given:g} must be at least twice {shorter}={least / 2:g}")
    return changed
