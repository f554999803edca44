"""Who was heard, and who was asked: times of one clock, kept over records and stand-stills."""

from __future__ import annotations

from hpc_elastic.rendezvous.failure_detector import PacketSilence


def test_who_was_never_heard_is_not_silent() -> None:
    packets = PacketSilence()
    assert packets.silence("a", 100.0) is None
    packets.heard(["a"], 100.0)
    assert packets.silence("a", 103.0) == 3.0
    packets.heard(["a", "b"], 104.0)
    assert packets.silence("a", 105.0) == packets.silence("b", 105.0) == 1.0
    packets.forget("a")
    packets.forget("nosuch")
    assert packets.silence("a", 106.0) is None


def test_a_question_counts_from_when_it_was_first_asked() -> None:
    packets = PacketSilence()
    packets.asked(["a"], 100.0)
    packets.asked(["a", "b"], 103.0)
    assert packets.asked_since("a") == 100.0
    assert packets.asked_since("b") == 103.0
    packets.asked(["b"], 104.0)
    assert packets.asked_since("a") is None
    packets.asked(["a", "b"], 105.0)
    assert packets.asked_since("a") == 105.0, "asked again"


def test_time_that_stood_still_counts_for_neither() -> None:
    packets = PacketSilence()
    packets.heard(["a"], 100.0)
    packets.heard(["b"], 158.0)
    packets.asked(["c"], 101.0)
    packets.paused_for(55.0, now=160.0)
    assert packets.silence("a", 160.0) == 5.0
    assert packets.silence("b", 160.0) == 0.0, "never in the future"
    assert packets.asked_since("c") == 156.0


def test_nobody_is_silent_while_this_notifier_is_muted() -> None:
    packets = PacketSilence()
    packets.heard(["a"], 100.0)
    packets.asked(["a"], 101.0)
    packets.packets_dropped_for(2.5, now=104.0)
    assert packets.silence("a", 104.0) == 1.5
    assert packets.asked_since("a") == 101.0, "an answer comes through the files"
    packets.packets_dropped_for(10.0, now=104.0)
    assert packets.silence("a", 104.0) == 0.0


def test_who_answers_through_the_files_and_is_heard_again_had_lost_its_link() -> None:
    packets = PacketSilence()
    packets.heard(["b"], 10.0)
    packets.asked(["b"], 13.5)
    packets.answered("b")
    assert packets.silence("b", 14.0) is None
    assert packets.out() == {"b": 10.0}
    packets.heard(["b"], 18.0)
    assert packets.take_back() == [("b", 10.0, 18.0)]
    assert packets.take_back() == []
    assert packets.out() == {}


def test_who_is_heard_before_it_answers_had_only_been_slow() -> None:
    packets = PacketSilence()
    packets.heard(["b"], 10.0)
    packets.asked(["b"], 13.5)
    packets.heard(["b"], 14.0)
    assert packets.take_back() == []


def test_who_is_lost_after_that_had_more_than_a_lost_link() -> None:
    packets = PacketSilence()
    packets.heard(["b"], 10.0)
    packets.answered("b")
    packets.lost(["b"])
    packets.heard(["b"], 60.0)
    assert packets.take_back() == []
