"""The agent's first look at its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.agent import main
from hpc_elastic.errors import UsageError
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.run_spec import UnreadableRunError
from tests.rigs.fake_clock import FakeClock


@pytest.mark.parametrize(
    ("why", "tries"), [("unreadable: [Errno 5] Input/output error", 7), ("missing", 1), ("unreadable: cut off", 1)]
)
def test_a_fault_of_the_filesystem_is_waited_out_and_no_other(
    why: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def load(path: Path) -> None:
        looks.append(path)
        raise UnreadableRunError(path=str(path), why=why)

    monkeypatch.setattr(main, "load_run_spec", load)
    with pytest.raises(UsageError, match="can't be read from this node"):
        main._load(RunPaths(Path("/nowhere/run")), 0, FakeClock())
    assert len(looks) == tries
