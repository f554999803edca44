"""The grammar of --tee, --redirects and --local-ranks-filter, and what they mean together."""

from __future__ import annotations

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options.worker_values import Std, parse_local_ranks, parse_std_streams, shown_in_job_log


def _shown(local_rank: int, *, redirects: str = "0", tee: str = "0", only: str | None = None) -> Std:
    return shown_in_job_log(
        local_rank,
        redirects=parse_std_streams(redirects, option="--redirects"),
        tee=parse_std_streams(tee, option="--tee"),
        only_local_ranks=None if only is None else parse_local_ranks(only),
    )


@pytest.mark.parametrize(
    ("text", "of_0", "of_1", "of_12"),
    [
        ("0", Std.NONE, Std.NONE, Std.NONE),
        ("3", Std.ALL, Std.ALL, Std.ALL),
        (" 1 ", Std.OUT, Std.OUT, Std.OUT),
        ("0:3", Std.ALL, Std.NONE, Std.NONE),
        ("0:3,1:1", Std.ALL, Std.OUT, Std.NONE),
        ("12:2, 0:1", Std.OUT, Std.NONE, Std.ERR),
    ],
)
def test_grammar(text: str, of_0: Std, of_1: Std, of_12: Std) -> None:
    choice = parse_std_streams(text, option="--tee")
    assert [choice.of(rank) for rank in (0, 1, 12)] == [of_0, of_1, of_12]


@pytest.mark.parametrize(
    "text", ["", "4", "-1", "x", "0:", ":3", "0:4", "0:3,", "0:3;1:1", "0:3:1", "0-3", "1,2", "²", "00"]
)
def test_junk_is_refused_with_the_option_and_the_value(text: str) -> None:
    with pytest.raises(UsageError, match="--tee") as caught:
        parse_std_streams(text, option="--tee")
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rank_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="local rank 1 is named twice"):
        parse_std_streams("1:3,1:1", option="--tee")


def test_local_ranks() -> None:
    assert parse_local_ranks("2,0,2") == (0, 2)
    for text in ("", "a", "0,", "-1", "0 1"):
        with pytest.raises(UsageError, match="--local-ranks-filter"):
            parse_local_ranks(text)


def test_everything_is_shown_unless_something_was_asked_for() -> None:
    assert _shown(0) == _shown(7) == Std.ALL


def test_redirected_streams_stay_in_the_files_unless_teed() -> None:
    assert _shown(0, redirects="3") == Std.NONE
    assert _shown(0, redirects="1") == Std.ERR
    assert _shown(0, redirects="3", tee="1") == Std.OUT
    assert _shown(1, redirects="3", tee="0:3") == Std.NONE
    assert _shown(0, redirects="0:3") == Std.NONE
    assert _shown(1, redirects="0:3") == Std.ALL


def test_filter_shows_the_named_ranks_only() -> None:
    assert _shown(0, only="0,1") == Std.ALL
    assert _shown(2, only="0,1") == Std.NONE
    assert _shown(2, only="0,1", tee="3") == Std.NONE
