"""Time limits and node ranges, as users type them."""

from __future__ import annotations

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options.sbatch import check_time_option, parse_nodes, parse_time_limit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("90:00", 5400),
        ("10:05", 605),
        ("2:00:00", 7200),
        ("00:05:00", 300),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:15", 131415),
        ("365-00:00:00", 31536000),
        ("UNLIMITED", None),
        ("infinite", None),
        ("-1", None),
    ],
)
def test_times(text: str, seconds: int | None) -> None:
    assert parse_time_limit(text) == seconds
    assert check_time_option(text) == seconds


@pytest.mark.parametrize("text", ["soon", "", "1:2:3:4", "1-", "-5", "1h", "1.5", "1-2-3", "٣", " 5", "5\n"])
def test_what_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="not a time"):
        parse_time_limit(text)
    with pytest.raises(UsageError) as caught:
        check_time_option(text, option="--time")
    assert str(caught.value).startswith(f"--time {text}: not a time")


@pytest.mark.parametrize("text", ["0:3", "0:3,1:1", "1:0", "0:1,1:2,2:3"])
def test_torchruns_tee_is_recognised(text: str) -> None:
    with pytest.raises(UsageError, match=f"--tee {text}"):
        check_time_option(text)


@pytest.mark.parametrize("text", ["0", "0:00", "00:00:00"])
def test_no_time_at_all_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="zero"):
        check_time_option(text)


@pytest.mark.parametrize(
    ("text", "nodes"), [("4", (4, 4)), ("2-4", (2, 4)), ("2:4", (2, 4)), ("1:1", (1, 1)), ("100000", (100000, 100000))]
)
def test_nodes(text: str, nodes: tuple[int, int]) -> None:
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4:2", "write --nnodes 2-4"),
        ("0-4", "at least 1 node"),
        ("", "not a number of nodes"),
        ("2..4", "not a number of nodes"),
        ("2-", "not a number of nodes"),
        ("٣", "not a number of nodes"),
        ("9999999", "at most"),
    ],
)
def test_bad_nodes_are_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_nodes(text, option="--nnodes")
    assert str(caught.value).startswith(f"--nnodes {text}: ")
    assert says in str(caught.value)
