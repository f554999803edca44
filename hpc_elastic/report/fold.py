"""Many ranks, one line: failures that tell the same become one entry with a list of ranks.

A failure is the same again where its words are (`wording_of`). What healthy ranks say of a peer that is gone comes in
many words, and which rank says which is chance: symptoms are one entry by what they tell (`kind_of`), and keep their
wordings.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from hpc_elastic.failures.classify import symptom_kind
from hpc_elastic.failures.fingerprint import normalise_message
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import NO_CLOCKS, Clocks

Wording = tuple[str, str, int]
Kind = tuple[str, str, int]


class SimilarFailures(Struct, frozen=True, kw_only=True):
    """Failures whose words differ in numbers, addresses and paths at most."""

    members: tuple[WorkerFailure, ...]
    """By time."""

    @property
    def first(self) -> WorkerFailure:
        """The earliest: it stands for the others."""
        return self.members[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, ascending."""
        return tuple(sorted(failure.global_rank for failure in self.members))


class Fold(Struct, frozen=True, kw_only=True):
    """Failures of one kind."""

    first: WorkerFailure
    """The earliest."""
    members: tuple[WorkerFailure, ...]
    """All of them, by time."""
    wordings: tuple[SimilarFailures, ...]
    """The most frequent first, then by their words; of what is no symptom there is one."""

    @property
    def headline(self) -> str:
        """What most of them say."""
        return self.wordings[0].first.headline

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, ascending."""
        return tuple(sorted(failure.global_rank for failure in self.members))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Each once, by node index."""
        return tuple(dict.fromkeys(f.host for f in sorted(self.members, key=lambda f: (f.node, f.host))))


def wording_of(failure: WorkerFailure) -> Wording:
    """Equal for failures with the same words, of one class and exit code."""
    return failure.fingerprint or failure.headline, failure.failure_class.value, failure.exitcode


def kind_of(failure: WorkerFailure) -> Kind:
    """Equal for failures that are one entry of a report: of symptoms by what they tell, of others by their words."""
    if failure.failure_class is not FailureClass.SYMPTOM or not failure.reason:
        return wording_of(failure)
    # How such a rank ends (an exception, std::terminate) says nothing of what happened either.
    return symptom_kind(failure.reason), failure.failure_class.value, 0


def fold_failures(failures: Iterable[WorkerFailure], clocks: Clocks = NO_CLOCKS) -> tuple[Fold, ...]:
    """Group failures by their kind; groups and their members by time, then rank.

    Which ranks are in which group does not depend on who was first.
    """
    groups: dict[Kind, dict[Wording, list[WorkerFailure]]] = {}
    members: dict[Kind, list[WorkerFailure]] = {}
    for failure in sorted(failures, key=lambda f: (clocks.of_failure(f).at_ns, f.global_rank)):
        kind = kind_of(failure)
        groups.setdefault(kind, {}).setdefault(wording_of(failure), []).append(failure)
        members.setdefault(kind, []).append(failure)
    return tuple(
        Fold(first=members[kind][0], members=tuple(members[kind]), wordings=_by_frequency(wordings))
        for kind, wordings in groups.items()
    )


def _by_frequency(wordings: dict[Wording, list[WorkerFailure]]) -> tuple[SimilarFailures, ...]:
    found = [(wording, SimilarFailures(members=tuple(members))) for wording, members in wordings.items()]
    if len(found) > 1:
        found.sort(key=lambda item: (-len(item[1].members), normalise_message(item[1].first.headline), item[0]))
    return tuple(same for _, same in found)
