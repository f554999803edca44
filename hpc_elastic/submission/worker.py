"""What every worker of a submitted function runs.

It calls the function, and leaves what it returned or raised beside the worker's logs. The agent's notice comes as
SIGUSR2, as submitit's does, and interrupts the function wherever it is.
"""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from hpc_elastic.base.outcome import ExitCode
from hpc_elastic.failures.error_handler import ErrorHandler
from hpc_elastic.run.attempt import UnreadableAttemptError, load_attempt
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.submission import call as call_module
from hpc_elastic.submission import places
from hpc_elastic.submission.call import Call, CallTerms, read_call, read_terms, write_object
from hpc_elastic.submission.checkpointing import (
    JobNotRequeuedError,
    PreemptionAction,
    PreemptionFacts,
    decide,
    find_state,
    forget_states,
    next_call,
    save_state,
    with_state,
)
from hpc_elastic.submission.places import WorkerPlace, submitit_variables
from hpc_elastic.worker_api import heartbeat

NOTICE_SIGNAL = signal.SIGUSR2
"""submitit's own default; NCCL may use SIGUSR1."""


class _Leave(SystemExit):
    """Through the user's function, which a signal has interrupted: ``except Exception`` must not stop it."""


def main(arguments: Sequence[str] = ()) -> None:
    """Run. Ends the process with 0, 1, or 93 where no other attempt is wanted.

    Args:
        arguments: None.
    """
    sys.argv = [__file__, *arguments]
    place = WorkerPlace.from_env(os.environ)
    worker = _Worker(place)
    sys.exit(worker.run())


class _Worker:
    def __init__(self, place: WorkerPlace) -> None:
        self._place = place
        self._paths = RunPaths(place.run_dir)
        self._attempt = self._paths.attempt(place.attempt)
        self._rank_dir = self._attempt.rank(place.round, place.rank).root
        self._call: Call | None = None
        self._terms: CallTerms | None = None
        self._handled = False

    def run(self) -> int:
        try:
            self._prepare()
            assert self._call is not None
            value = self._call()
        except _Leave as leave:
            return int(leave.code or 0)
        except Exception as error:
            final = self._terms is not None and self._terms.exceptions_are_final
            return self._fail(error, ExitCode.NOT_RETRYABLE if final else ExitCode.WORKERS_FAILED)
        signal.signal(NOTICE_SIGNAL, signal.SIG_IGN)  # it is done: what comes now is its result
        try:
            write_object(places.result_file(self._rank_dir), self._head(), value)
        except Exception as error:
            problem = TypeError(f"the return value, a {type(value).__name__}, can't be handed back: {error}")
            problem.__cause__ = error
            return self._fail(problem, ExitCode.WORKERS_FAILED)
        return 0

    def _prepare(self) -> None:
        path = places.call_file(self._paths)
        terms = read_terms(path)
        self._terms = terms
        if terms.stderr_to_stdout:
            sys.stderr.flush()
            os.dup2(1, 2)
        os.environ.update(submitit_variables(os.environ, self._place, terms))
        sys.path += [entry for entry in terms.sys_path if entry not in sys.path]
        sys.path.sort(key=lambda entry: entry == "")  # what lies in the working directory hides nothing
        state = find_state(self._paths, rank=self._place.rank, before=self._place.attempt)
        self._call, self._terms = with_state(Call(_unread), terms, state)
        if state is None:
            self._call = read_call(path)
        else:
            print(f"going on from what checkpoint() gave in attempt {state.attempt.number}", flush=True)
            forget_states(self._paths, rank=self._place.rank, before=state.attempt)
        signal.signal(NOTICE_SIGNAL, self._on_notice)
        if heartbeat.notice_is_there():  # the signal came before it could be heard
            self._on_notice(NOTICE_SIGNAL, None)

    def _head(self) -> dict[str, Any]:
        return {"rank": self._place.rank, "world_size": self._place.world_size}

    # -- a notice -------------------------------------------------------------------------------------------------

    def _on_notice(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between two bytecodes of the user's function."""
        assert self._call is not None
        assert self._terms is not None
        if self._handled:
            return
        decision = decide(
            PreemptionFacts(
                ran=self._seconds_since_start(),
                limit=self._terms.timeout_min * 60,
                timeouts_left=self._terms.timeouts_left,
                has_checkpoint=self._call.checkpoint is not None,
                asks_itself=heartbeat.asks_for_notices(),
            )
        )
        if decision.action is PreemptionAction.GO_ON:
            return
        self._handled = True
        how = "timed out" if decision.timed_out else "preempted"
        print(f"{signal.Signals(number).name}: this job is {how}", file=sys.stderr, flush=True)
        reason = decision.reason
        if self._call.checkpoint is not None:  # also where the job is over: it may want to write something itself
            try:
                state = next_call(self._call)
                if state is not None:
                    self._save(state, decision.timeouts_left)
                reason = reason or ("" if state is not None else "checkpoint function returned None")
            except Exception as error:
                raise _Leave(self._fail(error, ExitCode.WORKERS_FAILED)) from None
        if reason:
            raise _Leave(self._fail(JobNotRequeuedError(reason=reason), ExitCode.NOT_RETRYABLE))
        heartbeat.checkpoint_done()  # what is left to end may take its time
        raise _Leave(0)

    def _save(self, state: Call, timeouts_left: int) -> None:
        save_state(
            self._attempt,
            state,
            rank=self._place.rank,
            world_size=self._place.world_size,
            timeouts_left=timeouts_left,
        )

    def _seconds_since_start(self) -> float:
        """Of the attempt. By two hosts' clocks, whose difference is nothing beside the minutes of a limit."""
        try:
            return time.time() - load_attempt(self._attempt.attempt_json).started_ns / 1e9
        except UnreadableAttemptError:
            return time.monotonic() - _STARTED

    # -- a failure ------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException, code: int) -> int:
        """Leave the exception for the submitting program, and the report."""
        error.__traceback__ = _of_the_user(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        sys.stderr.write(text)
        sys.stderr.flush()
        ErrorHandler().record_exception(error)
        head = {**self._head(), "type": type(error).__qualname__, "message": _text_of(error), "traceback": text}
        try:
            write_object(places.exception_file(self._rank_dir), head, _portable(error))
        except OSError as problem:
            sys.stderr.write(f"the exception can't be handed back: {problem}\n")
        return int(code)


_STARTED = time.monotonic()
_NOT_OF_THE_USER = (__file__, call_module.__file__, runpy.run_path.__code__.co_filename)


def _unread() -> None:
    raise AssertionError("the call was not read")


def _of_the_user(trace: Any) -> Any:
    """A traceback without our own frames at its beginning."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in _NOT_OF_THE_USER:
        inner = inner.tb_next
    return trace if inner is None else inner


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:16384]
    except Exception as problem:
        return f"<its text could not be made: {type(problem).__name__}>"


def _portable(error: BaseException) -> BaseException | None:
    """The exception, where a copy of it can be made elsewhere."""
    import cloudpickle

    try:
        copy = pickle.loads(cloudpickle.dumps(error))
    except Exception:
        return None
    return error if isinstance(copy, BaseException) else None


if __name__ == "__main__":  # of runs that an earlier version submitted
    main()
