"""torch's ranks in `FileSystemStore` on two clients of a filesystem: eight of them lose no increment, and none waits
for ever. What torch's own FileStore does there: docs/reference/filesystems.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.network_mounts import KINDS, NetworkMounts
from tests.rigs.nfs_emulator import NfsEmulator
from tests.rigs.store_ranks import count_together

pytest.importorskip("torch")

RANKS, EACH = 8, 25


def check_counting(mounts: list[Path]) -> None:
    counted = count_together(
        [mounts[rank % 2] / "torch-store" for rank in range(RANKS)], "ours", each=EACH, seconds=300
    )
    assert counted.stuck == 0
    assert counted.errors == ()
    assert counted.total == RANKS * EACH
    assert counted.sums == list(range(1, RANKS * EACH + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_on_two_clients_lose_no_increment(kind: str, network_mounts: Callable[[str], NetworkMounts]) -> None:
    check_counting(network_mounts(kind).paths)


def test_ranks_on_two_emulated_clients_lose_no_increment(tmp_path: Path) -> None:
    with NfsEmulator(tmp_path, mounts=2) as emulator:
        check_counting(emulator.paths)
