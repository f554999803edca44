"""How often a participant looks and says that it lives: from the settings and the number of nodes, for a server that
all of them share.

A metadata server takes some 10,000 operations a second, and a job should leave nearly all of them to others. So the
intervals grow with the number of nodes, such that all nodes together stay below `budget`. Where packets get through
("in touch"), nobody has to look often: each beat says which record is the newest, and a silence of the coordinator is
noticed within seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_elastic.rendezvous.settings import RendezvousSettings

OPERATIONS_PER_PERIOD = 8.0
"""One look at the log, and one heartbeat: opening three folders and a file, asking for the attributes of those above
them, a write."""
BEATS_PER_SECOND = 2048.0
"""Datagrams that one coordinator takes in."""
IN_TOUCH_POLL = 5.0
IN_TOUCH_HEARTBEAT = 30.0
DIRECT_RINGS = 48
"""Nodes that one participant rings by itself; of more, it rings some, and they ring the others."""
FIRST_LOOK_AT_ONCE = 64
"""Up to so many nodes look for the first record at once; more of them wait for the ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds."""

    poll: float
    """Between two looks at the log, while a round goes on and no packets come."""
    poll_in_touch: float
    poll_in_round: float
    """The first interval after a new record while nodes gather or confirm; it grows to `poll`."""
    poll_anxious: float
    """While this node has just lost touch: it may be asked whether it lives."""
    first_look: float
    """Up to this time after its first claim, a node waits for the ring before it looks."""
    coordinator: float
    """The least time between two looks of the coordinator at the claims."""
    gathering: float
    """Between two looks of the coordinator while nodes gather or confirm."""
    heartbeat: float
    heartbeat_in_touch: float
    lease: float
    """Without a sign of life for so long, a member counts as lost."""
    beat: float
    """Between two datagrams that say "alive"."""
    silence: float
    """After so long without one, who was in touch is asked through the files."""
    answer: float
    """How long the answer may take for who was in touch …"""
    answer_unheard: float
    """… and for who was not, and does not know that it has to look."""
    stride: float
    """The longest time between two steps, of which most do nothing."""


def pace_of(settings: RendezvousSettings) -> Pace:
    """The intervals for a run of `settings.expected_nodes` nodes. None is shorter than the settings say."""
    nodes = max(1, settings.expected_nodes)
    period = OPERATIONS_PER_PERIOD * nodes / budget(nodes, settings.operations_per_second)
    beat = max(settings.beat_interval, nodes / BEATS_PER_SECOND)
    poll = max(settings.poll_interval, period)
    anxious = max(settings.poll_interval, nodes / BEATS_PER_SECOND)
    heartbeat = max(settings.heartbeat_interval, period)
    silence = max(settings.beat_silence, 3 * beat)
    return Pace(
        poll=poll,
        poll_in_touch=max(poll, min(IN_TOUCH_POLL, 5 * settings.poll_interval)),
        poll_in_round=min(poll, max(settings.poll_interval, nodes / 200)),
        poll_anxious=anxious,
        first_look=0.0 if nodes <= FIRST_LOOK_AT_ONCE else max(0.5, nodes / 1000),
        coordinator=nodes / 40_000,
        gathering=min(max(0.25, nodes / 16_000), settings.poll_interval),
        heartbeat=heartbeat,
        heartbeat_in_touch=max(heartbeat, IN_TOUCH_HEARTBEAT),
        lease=max(settings.heartbeat_ttl, 3 * heartbeat if heartbeat > settings.heartbeat_interval else 0.0),
        beat=beat,
        silence=silence,
        answer=max(settings.suspect_answer, 4 * anxious),
        answer_unheard=max(settings.suspect_answer, 2 * poll + 2 * anxious),
        stride=max(1.0, beat),
    )


def budget(nodes: int, operations_per_second: float) -> float:
    """Operations a second of all nodes together while workers run.

    Up to some thousand nodes as many as the setting says; beyond, at the default of 150, one for 17 nodes.
    """
    return operations_per_second * max(1.0, nodes / 17 / 150) * 0.8
