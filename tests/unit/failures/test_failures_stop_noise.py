"""Exceptions that a stop itself provokes are the cause of nothing; others of a stopped worker are."""

from __future__ import annotations

import pytest

from hpc_elastic.failures.classify import classify
from hpc_elastic.failures.failure_text import RaisedException
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from tests.rigs.described import traceback_in

HANDLER = """\
[rank2]: Traceback (most recent call last):
[rank2]:   File "/home/ann/train.py", line 9, in <module>
[rank2]:     time.sleep(8)
[rank2]:   File "/home/ann/train.py", line 5, in on_term
[rank2]:     raise Stop('asked to end')
[rank2]: Stop: asked to end
"""
DECORATED = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 9, in <module>
    stop_early(loss)
  File "/home/ann/train.py", line 5, in stop_early
    raise ValueError('loss is nan')
ValueError: loss is nan
"""


def class_of(chain: tuple[RaisedException, ...], *, stopped: bool = True) -> FailureClass:
    return classify(WorkerFailure(exitcode=1, stopped_by_agent=stopped), chain=chain).failure_class


def raised(kind: str, message: str = "") -> RaisedException:
    return RaisedException(exception_type=kind, message=message)


@pytest.mark.parametrize(
    "chain",
    [
        (raised("lightning.pytorch.utilities.exceptions.SIGTERMException"),),
        (raised("RuntimeError", "received SIGTERM, saving"),),
        (raised("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Terminated."),),
        (raised("OSError", "[Errno 2] … 'lock'"), raised("SystemExit", "143")),
        (raised("FileNotFoundError", "x"), raised("KeyboardInterrupt")),
    ],
    ids=["lightning", "text", "loader", "cleanup", "interrupt"],
)
def test_stop_noise(chain: tuple[RaisedException, ...]) -> None:
    assert class_of(chain) is FailureClass.STOPPED_BY_US
    assert class_of(chain, stopped=False) is not FailureClass.STOPPED_BY_US


def test_a_handler_is_known_by_the_line_that_did_not_call_it() -> None:
    found = traceback_in(HANDLER)
    assert found.caller == "time.sleep(8)"
    assert class_of(found.chain) is FailureClass.STOPPED_BY_US
    called = traceback_in(DECORATED)
    assert class_of(called.chain) is FailureClass.ROOT
