"""Counted strings, as Slurm prints them."""

from __future__ import annotations

import pytest

from hpc_elastic.slurm.notation import MAX_HOSTS, device_count, expand_counts, gpu_count


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
