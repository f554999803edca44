"""What a notification said was written, and no listing shows: its folder is invalidated, once."""

from __future__ import annotations

from hpc_elastic.rendezvous.claims import ClaimKind, claim_key
from hpc_elastic.rendezvous.cluster_view import MOST_PENDING, PendingNotifications
from hpc_elastic.rendezvous.membership import record_name

JOIN = claim_key(4, ClaimKind.JOIN, "00001-n1-aa")
FAIL = claim_key(3, ClaimKind.FAIL, "00001-n1-aa")


def hidden(*keys: str, newest: int = 7, claims: dict[int, dict[str, list[str]]] | None = None) -> set[str]:
    about = PendingNotifications()
    about.add(keys)
    found = about.take_hidden(newest=newest, claims=claims or {})
    assert about.take_hidden(newest=newest, claims=claims or {}) == set(), "once"
    return found


def test_a_record_that_was_seen_is_not_looked_for() -> None:
    assert hidden(record_name(7)) == hidden(record_name(1)) == set()


def test_a_record_that_no_listing_showed_is() -> None:
    assert hidden(record_name(8)) == {"log"}


def test_a_claim_is_looked_for_in_the_rounds_that_were_listed() -> None:
    assert hidden(JOIN, FAIL, claims={3: {"fail": ["00002-n2-bb"]}, 4: {}}) == {"round/000003", "round/000004"}
    assert hidden(JOIN, FAIL, claims={3: {"fail": ["00001-n1-aa"]}, 4: {"join": ["00001-n1-aa"]}}) == set()
    assert hidden(JOIN, FAIL, claims={5: {}, 6: {}}) == set(), "of a round that is over"


def test_who_lists_no_claims_looks_for_none() -> None:
    assert hidden(JOIN, record_name(9)) == {"log"}


def test_nonsense_is_ignored() -> None:
    wild = ["", "log/", "log/x", "log/-1", "log/²", "log/" + "9" * 30, "../../etc", "/", "a/b/c", "round/000004"]
    assert hidden(*wild, claims={3: {}, 4: {}}) == set()


def test_the_list_has_an_end() -> None:
    about = PendingNotifications()
    about.add(record_name(number) for number in range(10 * MOST_PENDING))
    assert len(about.keys) == MOST_PENDING
