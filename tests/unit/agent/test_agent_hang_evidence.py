"""What a hung worker's failure is called, from how it stood and what it left."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.agent.hang_stop import HungWorker, WorkerSlot, describe_hang, read_stacks
from hpc_elastic.agent.part import Condemned
from hpc_elastic.agent.restart_policy import may_be_a_bug
from hpc_elastic.agent.worker_evidence import StopRecord, WorkerEvidence
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.stacks import ProcessState, Whereabouts
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.output.pump import HeldEnd
from hpc_elastic.run.paths import RankPaths
from hpc_elastic.workers.spawn import ExitStatus
from tests.rigs.agent_site import make_group_site

DUMP = """\
Fatal Python error: Aborted

Current thread 0x00007fe7e8a3f740 (most recent call first):
  File "/home/ann/train.py", line 12 in {function}
"""


def state(letter: str, *, children: tuple[Whereabouts, ...] = ()) -> ProcessState:
    words = {"S": "S (sleeping)", "T": "T (stopped)", "D": "D (disk sleep)"}[letter]
    main = Whereabouts(pid=7, name="python", state=words, wchan="somewhere")
    return ProcessState(pid=7, state=words, threads=(main,), thread_count=1, children=children)


def worker(folder: Path, *, stderr: str = "", of: ProcessState | None = None) -> HungWorker:
    paths = RankPaths(Path(mkdtemp(dir=folder)))
    paths.stderr.write_text(stderr)
    facts = WorkerFailure(
        attempt=0,
        round=0,
        host="n1",
        node=0,
        local_rank=0,
        global_rank=3,
        pid=7,
        exitcode=-6,
        ended_ns=5,
        ended_uptime_ns=3,
    )
    slot = WorkerSlot(0, 3, SimpleNamespace(), paths)  # type: ignore[arg-type]
    return HungWorker(slot=slot, facts=facts, state=of or state("S"), why="no heartbeat for 9.0 s")


def failure_of(hung: HungWorker) -> WorkerFailure:
    return describe_hang(hung, read_stacks(hung), last_heartbeat_ns=4)


def test_two_hangs_at_the_same_place_have_one_name_and_elsewhere_another(tmp_path: Path) -> None:
    here, again, there = (
        failure_of(worker(tmp_path, stderr=DUMP.format(function=function))) for function in ("load", "load", "save")
    )
    assert here.fingerprint == again.fingerprint != there.fingerprint
    assert here.fingerprint.startswith("hang:")
    assert may_be_a_bug(here.fingerprint)
    assert (here.failure_class, here.category) == (FailureClass.HANG, Category.WORKER)


def test_it_failed_at_its_last_sign_of_life_by_both_clocks(tmp_path: Path) -> None:
    failure = failure_of(worker(tmp_path))
    assert (failure.ended_ns, failure.ended_uptime_ns) == (4, 2)


@pytest.mark.parametrize(
    ("letter", "stderr", "name", "category", "is_a_bug", "reason"),
    [
        ("T", DUMP.format(function="load"), "hang:stopped", Category.WORKER, False, "SIGSTOP not sent by hpc-elastic"),
        ("D", "", "hang:kernel", Category.INFRASTRUCTURE, False, "D (disk sleep) in somewhere"),
        ("D", DUMP.format(function="load"), "hang:", Category.WORKER, True, ""),  # it answers: for a moment only
    ],
)
def test_how_it_stood_names_it(
    tmp_path: Path, letter: str, stderr: str, name: str, category: Category, is_a_bug: bool, reason: str
) -> None:
    failure = failure_of(worker(tmp_path, stderr=stderr, of=state(letter)))
    assert failure.fingerprint.startswith(name)
    assert (failure.category, may_be_a_bug(failure.fingerprint)) == (category, is_a_bug)
    assert reason in failure.reason
    assert ("in load" in failure.traceback) is bool(stderr)


def test_a_child_that_hangs_is_told_of(tmp_path: Path) -> None:
    child = Whereabouts(pid=8, name="python", state="D (disk sleep)", wchan="request_wait_answer")
    hung = worker(tmp_path, of=state("D", children=(child,)))
    assert "its child 8 to begin its program, which sat in D (disk sleep) in request_wait" in failure_of(hung).reason
    assert "  child 8 python: D (disk sleep) in request_wait_answer" in hung.slot.paths.stacks.read_text()


def make_evidence(folder: Path, held: dict[int, HeldEnd] | None = None, *, world_size: int = 4) -> WorkerEvidence:
    inert: Any = SimpleNamespace(
        drained=lambda pid, seconds: True,
        last_step=lambda rank: 7,
        read=lambda *_: None,
        holds=lambda pid: pid in (held or {}),
        take_held=lambda pid: (held or {}).pop(pid, None),
    )
    layout = SimpleNamespace(first_rank=0, world_size=world_size)
    site = make_group_site(folder / "attempt-000", layout=layout, pump=inert, watch=inert)
    return WorkerEvidence(site, StopRecord(), inert)


def make_slot(evidence: WorkerEvidence, rank: int, exitcode: int, *, stopped: bool = False) -> WorkerSlot:
    paths = evidence.site.attempt.rank(0, rank)
    paths.root.mkdir(parents=True)
    ended = ExitStatus(exitcode=exitcode, core_dumped=False, observed_ns=5, observed_uptime_ns=5)
    process: Any = SimpleNamespace(pid=7 + rank)
    return WorkerSlot(rank, rank, process, paths, exit=ended, stopped_by_agent=stopped)


def test_a_worker_that_is_condemned_is_described_though_its_agent_ended_it(tmp_path: Path) -> None:
    """Whatever the reason: nothing but the class of the failure tells it from a hang."""
    evidence = make_evidence(tmp_path)
    slots = [make_slot(evidence, rank, -15, stopped=True) for rank in (0, 1)]
    why = "it holds 90 GiB, and 80 are its share"
    evidence.condemned = Condemned(reason=why, failure_class=FailureClass.ROOT, ranks={1: why})
    evidence.stop.began_ns = 4
    (found,) = evidence.describe(slots)
    assert (found.global_rank, found.message, found.failure_class) == (1, why, FailureClass.ROOT)
    assert not found.is_stopped
    assert slots[1].paths.error_file.exists()


CAUSE = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\nValueError: bad\n'
CONSEQUENCE = CAUSE.replace(
    "ValueError: bad",
    "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:3216",
)
DEEP = CAUSE.replace("ValueError", '  File "/site-packages/lib.py", line 1, in f\n    g()\n' * 30 + "ValueError")


@pytest.mark.parametrize(
    ("printed", "codes", "settings", "shown"),
    [
        ({0: CAUSE}, {0: 1}, {}, [CAUSE]),
        ({0: CONSEQUENCE}, {0: 1}, {}, []),
        ({0: CONSEQUENCE}, {0: 1}, {"world_size": 1}, [CONSEQUENCE]),
        ({0: CAUSE, 1: CAUSE, 2: CONSEQUENCE}, {0: 1, 1: 1, 2: 1}, {}, [CAUSE]),
        ({0: CAUSE}, {0: 1}, {"is_elsewhere": True}, []),
        ({0: CAUSE}, {0: 0}, {}, [CAUSE]),
        ({0: CAUSE}, {0: -15}, {}, []),
    ],
    ids=[
        "cause",
        "consequence",
        "alone",
        "same on two",
        "failed elsewhere first",
        "only logged",
        "printed when stopped",
    ],
)
def test_of_what_the_workers_printed_last_the_job_log_has_the_cause(
    tmp_path: Path, printed: dict[int, str], codes: dict[int, int], settings: dict[str, Any], shown: list[str]
) -> None:
    found: list[bytes] = []
    held = {7 + rank: HeldEnd(text.encode(), 0.0, found.append) for rank, text in printed.items()}
    evidence = make_evidence(tmp_path, held, world_size=settings.get("world_size", 4))
    slots = [make_slot(evidence, rank, code, stopped=code < 0) for rank, code in codes.items()]
    for slot in slots:
        slot.paths.stderr.write_text(printed[slot.global_rank])
    failures = evidence.describe(slots)
    evidence.show_causes(are_elsewhere="is_elsewhere" in settings)
    assert [text.decode() for text in found] == shown
    kept = [one.global_rank for one in failures if one.is_shown]
    assert kept == ([0] if codes[0] == 1 and (shown or "is_elsewhere" in settings) else [])
    assert not held


def test_of_a_long_traceback_the_job_log_has_the_users_line_and_the_end(tmp_path: Path) -> None:
    found: list[bytes] = []
    evidence = make_evidence(tmp_path, {7: HeldEnd(DEEP.encode(), 0.0, found.append)})
    slot = make_slot(evidence, 0, 1)
    slot.paths.stderr.write_text(DEEP)
    (failure,) = evidence.describe([slot])
    assert failure.is_shown
    evidence.show_causes(are_elsewhere=False)
    (text,) = found
    assert text.count(b"\n") <= 12
    assert b'File "train.py", line 7' in text
    assert text.endswith(b"ValueError: bad\n")
