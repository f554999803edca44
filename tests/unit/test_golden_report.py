"""The golden reports' normaliser: blind to chance, and to nothing else. Reports are made in memory of made-up runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.report.document import Document
from hpc_elastic.report.history import AttemptHistory, RoundHistory, RoundNode, RunHistory
from hpc_elastic.report.render_text import render_text
from tests.rigs.golden_report import normalise
from tests.rigs.run_builder import START_NS, make_failure

FOLDER = Path("/tmp/hpc-cat-abcdefgh")
GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] "
CLOSED, READ, RESET, PIPE = (
    f"{GLOO}Connection closed by peer [127.0.0.1]:24496",
    f"{GLOO}Read error [127.0.0.1]:9: Connection reset by peer",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
)


def golden(
    words: tuple[str, str, str],
    *,
    times: tuple[float, float, float] = (2.0, 2.1, 2.2),
    seconds: float = 1.2,
    culprit: str = "",
    pid: int = 4711,
    started_ns: int = START_NS,
) -> str:
    """The report on rank 1, which was killed, and three that lost it."""
    root = replace(make_failure(1, at=1.0, per_node=2, exitcode=-9, exception=culprit), pid=pid)
    root = root if culprit else replace(root, message=f"Signal 9 (SIGKILL) received by PID {pid}")
    others = [
        make_failure(rank, at=at, exception=text, per_node=2)
        for rank, at, text in zip((0, 2, 3), times, words, strict=True)
    ]
    nodes = tuple(RoundNode(node=n, host=f"n{n + 1}", group_rank=n, ranks=(2 * n, 2 * n + 1)) for n in (0, 1))
    part = RoundHistory(index=0, seconds=seconds, world_size=4, nodes=nodes, failures=(root, *others))
    attempt = AttemptHistory(
        number=0, nodes=("n1", "n2"), started_ns=started_ns, outcome="failed", exit_code=1, rounds=(part,)
    )
    history = RunHistory(run_id="r", run_dir=f"{FOLDER}/runs/20261121-053000-train-9f3c", name="train.py")
    return normalise(render_text(Document(replace(history, attempts=(attempt,)))), folder=FOLDER)


USUAL = golden((CLOSED, CLOSED, CLOSED))


@pytest.mark.parametrize("words", [(READ, CLOSED, READ), (CLOSED, READ, RESET), (PIPE, RESET, CLOSED), (PIPE,) * 3])
def test_which_words_a_library_had_for_a_loss_is_chance(words: tuple[str, str, str]) -> None:
    assert golden(words) == USUAL
    assert "  ranks 0,2-3 on 2 hosts, from <TIME> [consequence]: <WORDS>" in USUAL.splitlines()


def test_so_are_who_was_first_and_how_long_it_took() -> None:
    assert golden((READ, CLOSED, CLOSED), times=(2.9, 2.0, 2.5)) == USUAL
    for seconds in (0.4, 9.9, 10.0, 99.9):
        for pid in (9, 99, 4194303):
            assert golden((CLOSED, CLOSED, CLOSED), seconds=seconds, pid=pid) == USUAL


def test_who_failed_and_how_is_not() -> None:
    late = "RuntimeError: [/gloo/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"
    others = (
        golden((late, CLOSED, CLOSED)),
        golden(("ValueError: bad", CLOSED, CLOSED)),
        golden((CLOSED, CLOSED, CLOSED), culprit="ValueError: bad"),
    )
    assert len({USUAL, *others}) == 4


def test_a_busy_job_log_is_chance_and_a_full_disk_is_not() -> None:
    lines = (
        "  output lost  : 625 bytes of the output of rank 1 are in no file: No space left on device",
        "  output lost  : 99 bytes of the output of rank 1 are not in the job log: the job log could not keep up",
    )
    left = normalise("\n".join(lines), folder=FOLDER)
    assert left == "  output lost  : <N> bytes of the output of rank 1 are in no file: No space left on device"
