"""Whether a node's file tells of all its failures in a round, so that no rank's folder has to be looked into for more.

Of a thousand nodes and a hundred rounds there are a million such folders, and each look is a round trip to the file
server.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_ENDS = ("workers_stopped", "workers_succeeded")


@dataclass(slots=True)
class EventCoverage:
    """Fed with each file's events in their order.

    An agent tells of failed workers after the end of all. So it has told of all that failed once its file goes on after
    that with another round, or with the agent's own end, and no line is missing in between.
    """

    heard: set[int] = field(default_factory=set)
    """Nodes whose agents told anything."""
    missing: dict[int, int] = field(default_factory=dict)
    """How many lines of a node's files are missing."""
    _unsure: dict[int, set[int]] = field(default_factory=dict)
    _next: int = 0
    _is_whole: bool = True
    """No line since the round began is missing."""
    _has_ended: bool = False
    _place: tuple[int, int] | None = None
    """Round and node of which the file told last."""

    def begin_file(self) -> None:
        """What follows is another writer's; call it after the last file, too."""
        self._close(is_told=False)
        self._next = 0

    def miss(self) -> None:
        """An event could not be read."""
        self._is_whole = False

    def take(self, name: str, number: object, node: int | None, index: int | None) -> None:
        """Note an agent's event.

        Args:
            name: Its name.
            number: Its place in its file, ``n``.
            node: Whose it is.
            index: Of the round.
        """
        if number != self._next:
            self._miss_until(number, node)
        self._next = number + 1 if isinstance(number, int) else -1
        if name == "round_final":
            self._close(is_told=True)
            if node is not None and index is not None:
                self._place = index, node
                self.heard.add(node)
        elif name in _ENDS:
            self._has_ended = self._place is not None and self._place[0] == index
        elif name == "agent_ended":
            self._close(is_told=True)
        elif name == "agent_started" and node is not None:
            self.heard.add(node)

    def is_sure_of(self, index: int, node: int) -> bool:
        """Whether every file of that node's that tells of the round tells all of it."""
        return node not in self._unsure.get(index, ())

    def _miss_until(self, number: object, node: int | None) -> None:
        self._is_whole = False
        if isinstance(number, int) and number > self._next >= 0 and node is not None:
            self.missing[node] = self.missing.get(node, 0) + number - self._next

    def _close(self, *, is_told: bool) -> None:
        if self._place is not None and not (is_told and self._has_ended and self._is_whole):
            index, node = self._place
            self._unsure.setdefault(index, set()).add(node)
        self._place, self._has_ended, self._is_whole = None, False, True
