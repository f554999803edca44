"""The values of options: what their parsers take and refuse, and how they travel in run.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.run.option_values import (
    DEFAULT_LIMITS,
    LEARNED_LEAST,
    BadNodeSettings,
    Check,
    MetricsTarget,
    Scope,
    SectionTimeouts,
    Std,
    command_like,
    parse_bad_nodes,
    parse_health_checks,
    parse_local_ranks,
    parse_metrics,
    parse_rank_ranges,
    parse_section_timeouts,
    parse_std_streams,
    parse_words,
    shown_in_job_log,
)

GIB = 1 << 30


# -- --redirects, --tee, --local-ranks-filter --------------------------------------------------------------------------


def _shown(
    local_rank: int, *, redirects: str = "0", tee: str = "0", only: str | None = None, ranks: str = "", rank: int = 0
) -> Std:
    return shown_in_job_log(
        local_rank,
        rank,
        redirects=parse_std_streams(redirects, option="--redirects"),
        tee=parse_std_streams(tee, option="--tee"),
        only_local_ranks=None if only is None else parse_local_ranks(only),
        only_ranks=parse_rank_ranges(ranks, "--job-log-ranks") if ranks else None,
    )


ALL, NONE = Std.ALL, Std.NONE


@pytest.mark.parametrize(
    ("local_rank", "asked_for", "expected"),
    [
        pytest.param(0, {}, ALL, id="all of it unless something was asked for"),
        pytest.param(0, {"redirects": "3"}, NONE, id="redirected streams stay in the files"),
        pytest.param(0, {"redirects": "1"}, Std.ERR, id="one of them is redirected"),
        pytest.param(0, {"redirects": "3", "tee": "1"}, Std.OUT, id="unless they are teed"),
        pytest.param(1, {"redirects": "3", "tee": "0:3"}, NONE, id="teed of another rank"),
        pytest.param(0, {"redirects": "0:3"}, NONE, id="redirected of this rank"),
        pytest.param(1, {"redirects": "0:3"}, ALL, id="redirected of another rank"),
        pytest.param(0, {"only": "0,1"}, ALL, id="a rank that is named"),
        pytest.param(2, {"only": "0,1"}, NONE, id="a rank that is not"),
        pytest.param(2, {"only": "0,1", "tee": "3"}, NONE, id="not, though it is teed"),
        pytest.param(0, {"ranks": "0", "rank": 4}, NONE, id="local rank 0 of the second node"),
        pytest.param(1, {"ranks": "0-3", "rank": 1, "only": "0"}, NONE, id="local and global ranks both hold"),
        pytest.param(0, {"ranks": "0", "rank": 1, "tee": "3"}, NONE, id="another global rank, though it is teed"),
    ],
)
def test_what_the_job_log_shows(local_rank: int, asked_for: dict[str, Any], expected: Std) -> None:
    assert _shown(local_rank, **asked_for) == expected


def test_lists_of_ranks() -> None:
    assert [rank for rank in range(12) if _shown(0, ranks="8, 0-3", rank=rank)] == [0, 1, 2, 3, 8]
    assert parse_rank_ranges("5,0-2,3,1-2", "x") == ((0, 3), (5, 5))
    assert parse_local_ranks("2,0,2") == (0, 2)
    with pytest.raises(UsageError, match="local rank 1 is named twice"):
        parse_std_streams("1:3,1:1", option="--tee")


@pytest.mark.parametrize(
    ("text", "of_0", "of_1", "of_12"),
    [
        ("0", Std.NONE, Std.NONE, Std.NONE),
        ("3", Std.ALL, Std.ALL, Std.ALL),
        (" 1 ", Std.OUT, Std.OUT, Std.OUT),
        ("0:3", Std.ALL, Std.NONE, Std.NONE),
        ("0:3,1:1", Std.ALL, Std.OUT, Std.NONE),
        ("0:1,12:2", Std.OUT, Std.NONE, Std.ERR),
    ],
)
def test_streams(text: str, of_0: Std, of_1: Std, of_12: Std) -> None:
    choice = parse_std_streams(text, option="--tee")
    assert [choice.of(rank) for rank in (0, 1, 12)] == [of_0, of_1, of_12]
    assert str(parse_std_streams(str(choice), "--tee")) == str(choice) == text.replace(" ", "")


# -- --section-timeouts ------------------------------------------------------------------------------------------------


def test_timeouts_as_they_are_written() -> None:
    found = parse_section_timeouts("setup:900, step:60,checkpoint:1.5")
    assert found == SectionTimeouts(seconds={"setup": 900.0, "step": 60.0, "checkpoint": 1.5})
    assert found.shortest == 1.5
    auto = parse_section_timeouts("step:auto,setup:900")
    assert auto == SectionTimeouts(seconds={"setup": 900.0}, learns_step=True)
    assert auto.shortest == LEARNED_LEAST
    assert not SectionTimeouts()
    assert SectionTimeouts().shortest is None


# -- --health-checks, --health-check -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", dict(DEFAULT_LIMITS)),
        ("default", dict(DEFAULT_LIMITS)),
        ("none", {}),
        ("tmp", {Check.TMP: DEFAULT_LIMITS[Check.TMP]}),
        ("tmp=10G, shm=500m,memory=0", {Check.TMP: 10 * GIB, Check.SHM: 500 << 20, Check.MEMORY: 0}),
        ("default,tmp=1.5K", {**DEFAULT_LIMITS, Check.TMP: 1536}),
        ("tmp=10G,default", {**DEFAULT_LIMITS, Check.TMP: 10 * GIB}),
        ("shared=7.5,clock=2,gpu=10", {Check.SHARED: 7.5, Check.CLOCK: 2, Check.GPU: 10}),
    ],
)
def test_checks_are_asked_for_by_name(text: str, expected: dict[Check, float]) -> None:
    assert parse_health_checks(text) == expected


def test_a_command_is_split_and_never_given_to_a_shell() -> None:
    parse = command_like("/path/check.sh --fast")
    assert parse("/a/check.sh --fast 'a b; rm'", "--health-check") == ("/a/check.sh", "--fast", "a b; rm")
    for text in ("", "  ", "'open", "''"):
        with pytest.raises(UsageError, match=r"^--health-check "):
            parse(text, "--health-check")
    with pytest.raises(UsageError, match="quote as for a shell"):
        parse_words("--bind '/a", "--container-args")
    assert parse_metrics("prometheus:/x/a.prom") == MetricsTarget(path="/x/a.prom")


# -- --bad-nodes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", BadNodeSettings()),
        ("run", BadNodeSettings()),
        ("off", BadNodeSettings(scope=Scope.OFF)),
        ("run, share=0.5 ,hours=0.5", BadNodeSettings(share=0.5, hours=0.5)),
        ("share=1", BadNodeSettings(share=1)),
    ],
)
def test_bad_nodes(text: str, settings: BadNodeSettings) -> None:
    assert parse_bad_nodes(text) == parse_bad_nodes(str(settings)) == settings


# -- what makes no sense -----------------------------------------------------------------------------------------------

NONSENSE: dict[str, tuple[Callable[[str], object], str]] = {
    "--job-log-ranks": (lambda text: parse_rank_ranges(text, "--job-log-ranks"), "|a|3-1|-1|0-|0,,1|1-2-3"),
    "--local-ranks-filter": (parse_local_ranks, "|a|0,|-1|0 1"),
    "--tee": (lambda text: parse_std_streams(text, "--tee"), "|4|-1|x|0:|:3|0:4|0:3,|0:3;1:1|0:3:1|0-3|1,2|\u00b2|00"),
    "--health-checks": (
        parse_health_checks, "disk|tmp=|tmp=x|tmp=-1|tmp=1X|shared=0|shared=1M|default=3|none,tmp|tmp,|gpu=nan"
    ),
    "--metrics": (parse_metrics, "csv:/tmp/x|jsonl:/tmp/x|prometheus:|prometheus:a.prom|prometheus:/tmp/x.txt"),
    "--bad-nodes": (
        parse_bad_nodes, "on|run,off|jobs|hours=0|hours=-1|hours=x|hours=nan|share=1.1|share=|run,|hours"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("option", "text"), [(option, text) for option, (_, texts) in NONSENSE.items() for text in texts.split("|")]
)
def test_what_makes_no_sense_is_refused_with_the_option(option: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"^{option}\b") as caught:
        NONSENSE[option][0](text)
    assert option != "--tee" or repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        *[("", "''"), ("step", "'step'"), ("60", "'60'"), ("step:60,", "''"), (":60", "''")],
        *[(f"step:{seconds}", f"'{seconds}'") for seconds in ("", "0", "-1", "nan", "inf", "1e9", "60s")],
        *[("two words:60", "'two words'"), ("x" * 33 + ":60", "x" * 33), ("checkpoint:auto", "'checkpoint:auto'")],
        *[(f"step:{first},step:70", "'step' is given twice") for first in ("60", "auto")],
    ],
)
def test_timeouts_that_cannot_be_right(text: str, named: str) -> None:
    with pytest.raises(UsageError, match="--section-timeouts") as caught:
        parse_section_timeouts(text)
    assert named in str(caught.value)
