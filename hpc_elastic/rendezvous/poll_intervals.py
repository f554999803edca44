"""How often a participant looks and says that it lives: from the settings and the number of nodes, for a server that
all of them share.

A metadata server takes some 10,000 operations a second, and a job should leave nearly all of them to others. So the
intervals grow with the number of nodes, such that all nodes together stay below `budget`. Where packets get through
("connected"), no node has to look often: each beat says which record is the newest, and a silence of the coordinator is
noticed within seconds.
"""

from __future__ import annotations

from hpc_elastic.light_dataclasses import dataclass
from hpc_elastic.rendezvous.settings import RendezvousSettings

OPERATIONS_PER_PERIOD = 12.5
"""One look at the log and one heartbeat: asking for the attributes of six folders and a file, and a write; and a little
for the coordinator."""
WITHOUT_PACKETS = 1.3
"""How many times as much that is where the coordinator has to read the heartbeats too."""
BEATS_PER_SECOND = 2048.0
"""Datagrams that one coordinator takes in."""
CONNECTED_HEARTBEAT = 30.0
FEW_NODES = 16
"""Up to so many, heartbeats are read at once; of more nodes, a claim is sign of life enough for a while."""
LOOK_AT_ONCE = 64
"""Up to so many nodes look for the first record at once; more of them wait for the ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PollIntervals:
    """Between two looks, heartbeats and answers. In seconds."""

    poll: float
    """Between two looks at the log, where no packets come."""
    poll_connected: float
    poll_in_round: float
    """The first interval after a new record, where no packets come; it grows to `poll`."""
    poll_anxious: float
    """While this node has just lost touch: it may be asked whether it lives."""
    anxious: float
    """For so long."""
    first_look: float
    """Up to this time after its first claim, a node waits for the ring before it looks."""
    coordinator: float
    """The least time between two looks of the coordinator at the claims."""
    gathering: float
    """Between two looks of the coordinator while nodes gather or confirm."""
    ending: float
    """How many times as rarely as a few nodes these look for who sees to the run's end."""
    heartbeat: float
    heartbeat_connected: float
    early: float
    """A heartbeat that is due within this part of its interval is written with a look: the folders above are asked for
    only once then."""
    first_reading: float
    """From the first claim of a node that is not heard until its heartbeat is read; then …"""
    reading: float
    """… the time between two readings."""
    lease: float
    """Without a sign of life for so long, a member counts as lost."""
    beat: float
    """Between two datagrams that say "alive"."""
    silence: float
    """After so long without one, who was heard is asked through the files."""
    answer: float
    """How long the answer may take for who was in touch …"""
    answer_unheard: float
    """… and for who was not, and looks as rarely as ever."""
    stride: float
    """The longest time between two steps, of which most do nothing."""


def poll_intervals(settings: RendezvousSettings) -> PollIntervals:
    """The intervals for a run of `settings.expected_nodes` nodes. None is shorter than the settings say."""
    nodes = max(1, settings.expected_nodes)
    period = OPERATIONS_PER_PERIOD * nodes / budget(nodes, settings.operations_per_second)
    hop = nodes / BEATS_PER_SECOND
    beat = max(settings.beat_interval, hop)
    silence = max(settings.beat_silence, 3 * beat)
    poll = max(settings.poll_interval, WITHOUT_PACKETS * period)
    poll_connected = max(2 * settings.poll_interval, period)
    anxious = max(settings.poll_interval, hop)
    stride = max(settings.poll_interval, hop)
    # Who is in touch hears within a beat that it is not heard any more, notices that within a stride, and looks.
    answer = max(settings.suspect_answer, beat + stride + 2 * anxious)
    heartbeat = max(settings.heartbeat_interval, WITHOUT_PACKETS * period)
    few = nodes <= FEW_NODES
    return PollIntervals(
        poll=poll,
        poll_connected=poll_connected,
        poll_in_round=min(poll, max(settings.poll_interval, nodes / 200)),
        poll_anxious=anxious,
        anxious=max(30.0, 4 * answer),
        first_look=0.0 if nodes <= LOOK_AT_ONCE else max(0.5, nodes / 400),
        coordinator=0.0 if nodes <= LOOK_AT_ONCE else nodes / 40_000,
        gathering=min(max(0.25, nodes / 16_000), settings.poll_interval),
        ending=max(1.0, nodes / 64),
        heartbeat=heartbeat,
        heartbeat_connected=max(settings.heartbeat_interval, period, CONNECTED_HEARTBEAT),
        early=0.4 if period > settings.heartbeat_interval else 0.0,
        first_reading=0.0 if few else heartbeat,
        reading=settings.heartbeat_interval / 4 if few else heartbeat,
        lease=max(settings.heartbeat_ttl, 3 * heartbeat if heartbeat > settings.heartbeat_interval else 0.0),
        beat=beat,
        silence=silence,
        answer=answer,
        answer_unheard=max(answer, 1.2 * max(poll, poll_connected) + 2 * anxious),
        stride=stride,
    )


def budget(nodes: int, operations_per_second: float) -> float:
    """Operations a second for the looks and heartbeats of all nodes together, while workers run.

    Up to some thousand nodes nine tenths of what the setting says; beyond, at the default of 150, of one for 17 nodes.
    """
    return 0.9 * operations_per_second * max(1.0, nodes / 17 / 150)
