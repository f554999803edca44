"""Hostlists, against what four versions of Slurm expanded and compressed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.errors import UsageError
from hpc_elastic.slurm.job_environment import (
    MAX_HOSTS,
    HostlistError,
    compress,
    device_count,
    expand,
    expand_counts,
    gpu_count,
)

DATA = Path(__file__).parents[2] / "data" / "slurm"
VERSIONS = ("20.11.4", "22.05.8", "24.11.5", "26.05.5")
# Suffixes after a second range: 24.11 learnt them; we read them whatever the version.
NEWER = {"n[1-2]-ib[0-1]x", "n[1-2].cluster.local", "tux[000-002]-[0-1]b"}
REFUSED = {"n[1-", "n[3-1]"}  # 20.11 and 22.05 expand "n[1-" to "n]"


def _rows(name: str, columns: int) -> list[tuple[str, ...]]:
    rows = []
    for version in VERSIONS:
        for line in (DATA / version / name).read_text().split("\n"):
            cells = line.split("\t")
            if len(cells) == columns:  # an error's second line is not a row
                rows.append((version, *cells))
    assert len(rows) >= 4 * 27
    return rows


@pytest.mark.parametrize(("version", "text", "rc", "names", "stderr"), _rows("hostlist-expand.tsv", 4))
def test_expands_as_slurm_does(version: str, text: str, rc: str, names: str, stderr: str) -> None:
    if text in REFUSED:
        with pytest.raises(HostlistError, match="invalid hostlist"):
            expand(text)
        return
    if not names and text in NEWER:
        assert version < "24"
        assert "Invalid" in stderr
        assert expand(text)
        return
    assert ",".join(expand(text)) == names


@pytest.mark.parametrize(
    ("version", "option", "names", "rc", "compressed", "stderr"),
    [row for row in _rows("hostlist-compress.tsv", 5) if row[1] == "hostlist"],
)
def test_compresses_as_slurm_does(version: str, option: str, names: str, rc: str, compressed: str, stderr: str) -> None:
    assert compress(expand(names)) == compressed


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("r[1-2]n[1,3]-ib", "r1n1-ib r1n3-ib r2n1-ib r2n3-ib"),
        ("a,b[9-10],c", "a b9 b10 c"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("", ""),
    ],
)
def test_expands(text: str, names: str) -> None:
    assert expand(text) == tuple(names.split())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(null)", "can't be part"),
        ("None assigned", "can't be part"),
        ("n[1-2", "not closed"),
        ("n1]", "don't match"),
        ("n[[1]]", "don't match"),
        ("n[]", "not a number"),
        ("n[1-]", "not a number"),
        ("n[a-b]", "not a number"),
        ("n[1-2],", "missing at a comma"),
        (",n1", "missing at a comma"),
        ("-w,n1", "can't be a host name"),
        ("n1;reboot", "can't be part"),
        ("n1\nn2", "can't be part"),
        ("n\u0661", "can't be part"),
        ("n[\u0661]", "not a number"),
        (f"n[0-{MAX_HOSTS}]", "more than"),
        ("n[1-1000]m[1-1000]", "more than"),
        ("n[1-100000],m[1-100000]", "more than"),
        ("n[1-999999999999999999999999]", "not a number"),
        ("x" * 300, "can't be a host name"),
    ],
)
def test_refuses_what_is_no_hostlist_and_says_why(text: str, why: str) -> None:
    with pytest.raises(HostlistError) as caught:
        expand(text)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UsageError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_largest_list_is_expanded() -> None:
    assert len(expand(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


@pytest.mark.parametrize("name", ["", "-n1", "a b", "n[1]", "a,b", "(null)", "None assigned", "n1\n"])
def test_compress_refuses_what_is_no_host_name(name: str) -> None:
    with pytest.raises(HostlistError):
        compress(["n1", name])


@given(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,5}[0-9]{0,4}(\.[a-z]{2})?", fullmatch=True), max_size=20))
def test_compress_loses_nothing(hosts: list[str]) -> None:
    assert expand(compress(hosts)) == tuple(hosts)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", (1,)), ("4(x2),1", (4, 4, 1)), ("2,1", (2, 1)), ("1,2(x2)", (1, 2, 2)), ("0(x3)", (0,) * 3)],
)
def test_counts(text: str, counts: tuple[int, ...]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize(
    "text", ["", "x", "4(x)", "4(x0)", "4x2", "-1", "4(x2", ",", "1,,2", f"1(x{MAX_HOSTS + 1})", "٣"]
)
def test_counts_refuse_nonsense(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|counts no node"):
        expand_counts(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4", 4),
        ("0", 0),
        ("a100:4", 4),
        ("a100:2,v100:1", 3),
        ("gpu:4(S:0-1)", 4),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu:a100:2(IDX:0-1),gpu:v100:1(IDX:2)", 3),
        ("gpu:1,nic:2", 1),
        ("gpu", 1),
        ("gpu:tesla", 1),
        ("gres/gpu=2", 2),
        ("gres/gpu:a100=2", 2),
        ("gres:gpu:3", 3),
        ("gpu:nvidia_a100-sxm4-80gb:8", 8),
    ],
)
def test_gpus(text: str, count: int) -> None:
    assert gpu_count(text) == count


@pytest.mark.parametrize("text", ["", "four gpus", "gpu:", ":4", "gpu:4,", "gpu:-1:$"])
def test_gpus_refuse_nonsense(text: str) -> None:
    with pytest.raises(ValueError, match=r"empty entry|is not a count"):
        gpu_count(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0,1", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("GPU-8932f937-d72c,GPU-11", 2),
        ("NoDevFiles", 0),
        ("0-3", 4),
        ("MIG-1/2/0", 1),
    ],
)
def test_devices(text: str, count: int) -> None:
    assert device_count(text) == count
