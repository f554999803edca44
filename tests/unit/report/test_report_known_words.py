"""What a whole job says when one rank fails: real words of every rank, and the verdict over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_elastic.failures.evidence import describe_failure
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.verdict import Cause
from hpc_elastic.report.wording import without_failure
from tests.rigs.run_builder import decide_verdict, make_failure

DATA = Path(__file__).resolve().parents[2] / "data" / "failures"
EXITCODES = {case["file"]: case["exitcode"] for case in json.loads((DATA / "expected.json").read_text())}


def failures_of(folder: Path, names: list[str]) -> list[WorkerFailure]:
    """One rank per text, each on a node of its own, in the order in which they ended."""
    found = []
    for rank, name in enumerate(names):
        facts = WorkerFailure(
            attempt=0,
            round=0,
            host=f"n{rank:02}",
            node=rank,
            local_rank=0,
            global_rank=rank,
            pid=100 + rank,
            exitcode=EXITCODES[f"{name}.txt"],
            ended_ns=1_700_000_000_000_000_000 + rank * 10**9,
        )
        found.append(describe_failure(facts=facts, error_file=folder / "error.json", stderr_log=DATA / f"{name}.txt"))
    return found


@pytest.mark.parametrize(
    ("names", "culprit"),
    [
        # The others' words come first: whoever hung or crashed on the GPU is noticed last.
        (["nccl-timeout-torch-2.6", "nccl-timeout-elsewhere", "cuda-device-side-assert"], 2),
        (["nccl-remote-exited", "nccl-remote-broken-pipe", "cuda-illegal-access-watchdog"], 2),
        (["store-broken-pipe", "nccl-communicator-aborted", "cuda-out-of-memory-torch-2.6"], 2),
        (["nccl-ib-no-answer", "nccl-ofi-undeliverable", "nccl-ib-catastrophic"], 2),
        (["nccl-timeout-watchdog", "cuda-ecc", "nccl-remote-exited"], 1),
        (["nccl-timeout-torch-2.2", "nccl-watchdog-stuck"], 1),
        (["nccl-internal-after-peer", "nccl-connect-failed", "nccl-shm-full"], 2),
        (["xid-45-after-149", "xid-149"], 1),
        (["gloo-connection-closed", "gloo-full-mesh", "gloo-the-one-that-raised"], 2),
        (["gloo-connection-refused", "store-gone", "cuda-no-kernel-image"], 2),
    ],
)
def test_the_one_whose_words_are_no_consequence_is_the_cause(tmp_path: Path, names: list[str], culprit: int) -> None:
    verdict = decide_verdict(failures_of(tmp_path, names))
    assert verdict.cause is Cause.WORKER
    assert verdict.failure is not None
    assert verdict.failure.global_rank == culprit
    others = "2 others are consequences" if len(names) == 3 else "1 other is a consequence"
    assert verdict.evidence.startswith("the only failure that is not a consequence of another one")
    assert others in verdict.evidence


def test_where_all_waited_nobody_is_blamed(tmp_path: Path) -> None:
    names = ["nccl-timeout-torch-2.6", "nccl-timeout-elsewhere", "nccl-remote-broken-pipe", "store-broken-pipe"]
    verdict = decide_verdict(failures_of(tmp_path, names))
    assert verdict.cause is Cause.UNKNOWN
    assert verdict.retryable


@pytest.mark.parametrize(
    ("name", "retryable"), [("cuda-out-of-memory-torch-2.6", True), ("cuda-no-kernel-image", False), ("cuda-ecc", True)]
)
def test_whether_another_try_may_help(tmp_path: Path, name: str, retryable: bool) -> None:
    assert decide_verdict(failures_of(tmp_path, ["nccl-remote-exited", name])).retryable is retryable


def test_a_reason_without_a_cause_is_shown_without_the_victim_that_it_quotes() -> None:
    lost = make_failure(1, at=1.0, exception="RuntimeError: Connection closed by peer")
    line = "given up: restarts exhausted (0 of 0 restarts used): cause not known, first seen: rank 1: RuntimeError: Co"
    assert without_failure(line, [lost], lost) == (
        "given up: restarts exhausted (0 of 0 restarts used): cause not known"
    )
