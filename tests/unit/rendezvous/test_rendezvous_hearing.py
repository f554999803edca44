"""Who was heard, and who was asked: times of one clock, kept over records and stand-stills."""

from __future__ import annotations

from hpc_elastic.rendezvous.hearing import Hearing


def test_who_was_never_heard_is_not_silent() -> None:
    hearing = Hearing()
    assert hearing.silence("a", 100.0) is None
    hearing.heard(["a"], 100.0)
    assert hearing.silence("a", 103.0) == 3.0
    hearing.heard(["a", "b"], 104.0)
    assert hearing.silence("a", 105.0) == hearing.silence("b", 105.0) == 1.0
    hearing.forget("a")
    hearing.forget("nosuch")
    assert hearing.silence("a", 106.0) is None


def test_a_question_counts_from_when_it_was_first_asked() -> None:
    hearing = Hearing()
    hearing.asked(["a"], 100.0)
    hearing.asked(["a", "b"], 103.0)
    assert hearing.asked_since("a") == 100.0
    assert hearing.asked_since("b") == 103.0
    hearing.asked(["b"], 104.0)
    assert hearing.asked_since("a") is None
    hearing.asked(["a", "b"], 105.0)
    assert hearing.asked_since("a") == 105.0, "asked again"


def test_time_that_stood_still_counts_for_neither() -> None:
    hearing = Hearing()
    hearing.heard(["a"], 100.0)
    hearing.heard(["b"], 158.0)
    hearing.asked(["c"], 101.0)
    hearing.paused_for(55.0, now=160.0)
    assert hearing.silence("a", 160.0) == 5.0
    assert hearing.silence("b", 160.0) == 0.0, "never in the future"
    assert hearing.asked_since("c") == 156.0


def test_nobody_is_silent_while_this_bell_is_deaf() -> None:
    hearing = Hearing()
    hearing.heard(["a"], 100.0)
    hearing.asked(["a"], 101.0)
    hearing.packets_dropped_for(2.5, now=104.0)
    assert hearing.silence("a", 104.0) == 1.5
    assert hearing.asked_since("a") == 101.0, "an answer comes through the files"
    hearing.packets_dropped_for(10.0, now=104.0)
    assert hearing.silence("a", 104.0) == 0.0


def test_who_answers_through_the_files_and_is_heard_again_had_lost_its_link() -> None:
    hearing = Hearing()
    hearing.heard(["b"], 10.0)
    hearing.asked(["b"], 13.5)
    hearing.answered("b")
    assert hearing.silence("b", 14.0) is None
    assert hearing.out() == {"b": 10.0}
    hearing.heard(["b"], 18.0)
    assert hearing.take_back() == [("b", 10.0, 18.0)]
    assert hearing.take_back() == []
    assert hearing.out() == {}


def test_who_is_heard_before_it_answers_had_only_been_slow() -> None:
    hearing = Hearing()
    hearing.heard(["b"], 10.0)
    hearing.asked(["b"], 13.5)
    hearing.heard(["b"], 14.0)
    assert hearing.take_back() == []


def test_who_is_lost_after_that_had_more_than_a_lost_link() -> None:
    hearing = Hearing()
    hearing.heard(["b"], 10.0)
    hearing.answered("b")
    hearing.lost(["b"])
    hearing.heard(["b"], 60.0)
    assert hearing.take_back() == []
