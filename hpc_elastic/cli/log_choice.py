"""Of which attempt, rounds, ranks and streams somebody wants to see the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_elastic.cli.rank_set import NumberSet, check_ranks
from hpc_elastic.cli.run_argument import asked_nodes, check_rounds, node_names
from hpc_elastic.errors import UsageError
from hpc_elastic.log_times import STDERR, STDOUT
from hpc_elastic.reading.log_streams import (
    LogStream,
    RoundLayout,
    rank_numbers,
    read_layouts,
    round_numbers,
    streams_of,
)
from hpc_elastic.run_paths import AttemptPaths

ALL_STREAMS = (STDOUT, STDERR)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChoice:
    """What was asked for."""

    ranks: NumberSet | None = None
    nodes: str | None = None
    rounds: NumberSet | None = None
    """None: the newest."""
    all_rounds: bool = False
    streams: tuple[int, ...] = ALL_STREAMS

    def rounds_of(self, attempt: AttemptPaths) -> list[int]:
        """The rounds, ascending; empty where there is none yet.

        Raises:
            UsageError: none that was asked for is there.
        """
        numbers = round_numbers(attempt)
        if self.rounds is not None:
            return check_rounds(self.rounds, numbers, attempt.number)
        return numbers if self.all_rounds else numbers[-1:]

    def check(self, attempt: AttemptPaths, rounds: Sequence[int]) -> None:
        """Refuse ranks and nodes that are in none of the rounds.

        Raises:
            UsageError: with those that are.
        """
        if self.ranks is None and self.nodes is None:
            return
        layouts = read_layouts(attempt)
        if self.nodes is not None:
            self._node_indices(attempt, layouts)
        if self.ranks is None or not rounds:
            return
        world = max((layouts[index].world_size for index in rounds if index in layouts), default=0)
        world = max([world, *(1 + rank for index in rounds for rank in rank_numbers(attempt, index)[-1:])])
        name = f"round {rounds[-1]}" if len(rounds) == 1 else f"rounds {rounds[0]}-{rounds[-1]}"
        check_ranks(self.ranks, world, option="--rank", where=f"{name} of attempt {attempt.number}")

    def streams_in(self, attempt: AttemptPaths, round_number: int) -> list[LogStream]:
        """The outputs of a round."""
        ranks = self.ranks
        if self.nodes is None:
            return streams_of(
                attempt, round_number, wanted=lambda rank: ranks is None or rank in ranks, streams=self.streams
            )
        layouts = read_layouts(attempt)
        indices = self._node_indices(attempt, layouts)
        places = layouts[round_number].nodes if round_number in layouts else {}
        return streams_of(
            attempt,
            round_number,
            wanted=lambda rank: (ranks is None or rank in ranks) and places.get(rank) in indices,
            streams=self.streams,
        )

    def _node_indices(self, attempt: AttemptPaths, layouts: dict[int, RoundLayout]) -> frozenset[int]:
        hosts = {index: name for layout in layouts.values() for index, name in layout.hosts.items()}
        hosts.update(enumerate(node_names(attempt)))
        if not hosts:
            raise UsageError(f"--node {self.nodes}: attempt {attempt.number} does not tell its nodes; use --rank")
        return asked_nodes(self.nodes or "", hosts)
