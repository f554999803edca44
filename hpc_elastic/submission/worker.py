"""The program of every worker of a submitted function: the function, and submitit's checkpoints for every rank.

The agent's preemption notice comes as SIGUSR2, as submitit's does. `decide` is submitit's own rule (1.5); but each rank
writes its own state, and a state counts only where all ranks of its attempt have written theirs.
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
from enum import Enum
from types import FrameType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.function_call import ExitHold
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.failures.error_handler import ErrorHandler
from hpc_elastic.run.paths import AttemptPaths, ExitCode, RunPaths, UnreadableAttemptError, load_attempt
from hpc_elastic.submission import call as call_module
from hpc_elastic.submission.call import (
    Call,
    CallTerms,
    UnreadableObjectError,
    WorkerPlace,
    is_timed_out,
    ranks,
    read_call,
    read_head,
    read_object,
    read_terms,
    submitit_variables,
    write_object,
)
from hpc_elastic.worker_api import heartbeat
from hpc_elastic.worker_api.records import LAST_STEP, VARIABLE


class JobNotRequeuedError(HpcElasticError):
    template = "Job not requeued because: {reason}."


class PreemptionAction(Enum):
    GO_ON = "go on"
    """The function asks for notices itself, and saves at the step that is agreed on."""
    SAVE = "save"
    """Call checkpoint(), write its state, and leave: the job is requeued."""
    LEAVE = "leave"
    """The job is requeued, and the function begins anew."""
    END = "end"


class PreemptionDecision(Struct, frozen=True, kw_only=True):
    action: PreemptionAction
    timed_out: bool
    timeouts_left: int
    """The next attempt's; below 0: there is to be none."""
    reason: str = ""


def decide(
    *, ran: float, limit: float, timeouts_left: int, has_checkpoint: bool, asks_itself: bool
) -> PreemptionDecision:
    """Only timeouts count against `max_num_timeout`. `ran` and `limit` in seconds; no `limit`: unknown."""
    timed_out = is_timed_out(ran, limit=limit)
    left = timeouts_left - timed_out
    action, reason = PreemptionAction.LEAVE, ""
    if asks_itself and not has_checkpoint:
        action = PreemptionAction.GO_ON
    elif left < 0:
        action, reason = PreemptionAction.END, "timed-out too many times"
    elif has_checkpoint:
        action = PreemptionAction.SAVE
    elif timed_out:
        action, reason = PreemptionAction.END, "timed-out and not checkpointable"
    return PreemptionDecision(action=action, timed_out=timed_out, timeouts_left=left, reason=reason)


def next_call(call: Call) -> Call | None:
    assert call.checkpoint is not None
    delayed = call.checkpoint(*call.args, **call.kwargs)
    if delayed is None:
        return None
    try:
        return Call(delayed.function, tuple(delayed.args), dict(delayed.kwargs))
    except AttributeError:
        raise TypeError(
            f"checkpoint() returned a {type(delayed).__name__}; return a submitit.helpers.DelayedSubmission, or None"
        ) from None


def save_state(attempt: AttemptPaths, call: Call, *, rank: int, world_size: int, timeouts_left: int) -> None:
    make_private_dir(attempt.checkpoint)
    head = {"rank": rank, "world_size": world_size, "timeouts_left": timeouts_left}
    write_object(attempt.rank_checkpoint(rank), head, (call.function, call.args, dict(call.kwargs)))


class SavedState(Struct, frozen=True, kw_only=True):
    call: Call
    timeouts_left: int
    attempt: AttemptPaths


def find_state(paths: RunPaths, *, rank: int, before: int) -> SavedState | None:
    """A rank beyond that attempt's world takes rank 0's. Raises UnreadableObjectError: a module is missing here."""
    for attempt in reversed(paths.begun_attempts()):
        if attempt.number >= before:
            continue
        # By name: a thousand ranks must not each open a thousand.
        written = ranks(attempt.checkpoint)
        try:
            head = read_head(attempt.rank_checkpoint(0))
            world_size, left = int(head["world_size"]), int(head["timeouts_left"])
        except (UnreadableObjectError, KeyError):
            continue  # none was asked for
        if written != list(range(world_size)):
            continue  # some rank was not quick enough: the set before it counts
        function, args, kwargs = read_object(attempt.rank_checkpoint(rank if rank < world_size else 0))
        return SavedState(call=Call(function, args, kwargs), timeouts_left=left, attempt=attempt)
    return None


def forget_states(paths: RunPaths, *, rank: int, before: AttemptPaths) -> None:
    for attempt in paths.begun_attempts():
        if attempt.number < before.number:
            attempt.rank_checkpoint(rank).unlink(missing_ok=True)


NOTICE_SIGNAL = signal.SIGUSR2
"""submitit's own default; NCCL may use SIGUSR1."""


class _Leave(SystemExit):
    """Leaves the user's function, which a signal has interrupted: ``except Exception`` must not stop it."""


def main(arguments: Sequence[str] = ()) -> None:
    """Run. Ends the process with 0, 1, or 93 where no other attempt is wanted."""
    sys.argv = [__file__, *arguments]
    sys.exit(_Worker(WorkerPlace.from_env(os.environ)).run())


class _Worker:
    def __init__(self, place: WorkerPlace) -> None:
        self._place = place
        self._paths = RunPaths(place.run_dir)
        self._attempt = self._paths.attempt(place.attempt)
        self._rank = self._attempt.rank(place.round, place.rank)
        self._call: Call | None = None
        self._terms: CallTerms | None = None
        self._handled = False
        of_round, _, number = os.environ.get(VARIABLE, "").rpartition("-")  # LOCAL_RANK may be a virtual one
        self._hold = ExitHold(
            f"{of_round}.hold" if number.isdigit() else "",
            local_rank=int(number) if number.isdigit() else 0,
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        )

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
        # It is done: what comes now is its result.
        if signal.signal(NOTICE_SIGNAL, signal.SIG_IGN) == self._on_notice and not self._handled:
            heartbeat.reporter.all_steps_done()
        try:
            write_object(self._rank.result_pickle, self._head(), value)
        except Exception as error:
            problem = TypeError(f"the return value, a {type(value).__name__}, can't be handed back: {error}")
            problem.__cause__ = error
            return self._fail(problem, ExitCode.WORKERS_FAILED)
        self._hold.wait()
        return 0

    def _prepare(self) -> None:
        path = self._paths.call_pickle
        terms = read_terms(path)
        self._terms = terms
        if terms.stderr_to_stdout:
            sys.stderr.flush()
            os.dup2(1, 2)
        os.environ.update(submitit_variables(os.environ, self._place, terms))
        sys.path += [entry for entry in terms.sys_path if entry not in sys.path]
        sys.path.sort(key=lambda entry: entry == "")  # what lies in the working directory hides nothing
        state = find_state(self._paths, rank=self._place.rank, before=self._place.attempt)
        if state is None:
            self._call = read_call(path)
        else:
            self._call, self._terms = state.call, replace(terms, timeouts_left=state.timeouts_left)
            print(f"going on from what checkpoint() gave in attempt {state.attempt.number}", flush=True)
            forget_states(self._paths, rank=self._place.rank, before=state.attempt)
        signal.signal(NOTICE_SIGNAL, self._on_notice)
        if heartbeat.notice_is_there():  # the signal came before it could be heard
            self._on_notice(NOTICE_SIGNAL, None)

    def _head(self) -> dict[str, Any]:
        return {"rank": self._place.rank, "world_size": self._place.world_size}

    def _on_notice(self, number: int, frame: FrameType | None) -> None:
        assert self._call is not None
        assert self._terms is not None
        if self._handled:
            return
        asked = self._attempt.requeue_asked.exists()  # the notice is the user's, whatever the time
        decision = decide(
            ran=self._seconds_since_start(),
            limit=0.0 if asked else self._terms.timeout_min * 60,
            timeouts_left=self._terms.timeouts_left,
            has_checkpoint=self._call.checkpoint is not None,
            asks_itself=heartbeat.reporter.asks_for_notices,
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
                    place, left = self._place, decision.timeouts_left
                    save_state(self._attempt, state, rank=place.rank, world_size=place.world_size, timeouts_left=left)
                reason = reason or ("" if state is not None else "checkpoint function returned None")
            except Exception as error:
                raise _Leave(self._fail(error, ExitCode.WORKERS_FAILED)) from None
        if reason:
            refusal = JobNotRequeuedError(reason=reason)
            print(refusal, flush=True)  # as submitit, whose log goes there
            raise _Leave(self._fail(refusal, ExitCode.NOT_RETRYABLE))
        heartbeat.checkpoint_done(LAST_STEP)  # what is left to end may take its time
        raise _Leave(0)

    def _seconds_since_start(self) -> float:
        """Seconds since the attempt began, by two hosts' clocks: their difference is small beside a limit's minutes."""
        try:
            return time.time() - load_attempt(self._attempt.attempt_json).started_ns / 1e9
        except UnreadableAttemptError:
            return time.monotonic() - _STARTED

    def _fail(self, error: BaseException, code: int) -> int:
        error.__traceback__ = _of_the_user(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        sys.stderr.write(text)
        sys.stderr.flush()
        ErrorHandler().record_exception(error)
        head = {**self._head(), "type": type(error).__qualname__, "message": _text_of(error), "traceback": text}
        try:
            write_object(self._rank.exception_pickle, head, _portable(error))
        except OSError as problem:
            sys.stderr.write(f"the exception can't be handed back: {problem}\n")
        return int(code)


_STARTED = time.monotonic()
_NOT_OF_THE_USER = (__file__, call_module.__file__, runpy.run_path.__code__.co_filename)


def _of_the_user(trace: Any) -> Any:
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
    import cloudpickle

    try:
        copy = pickle.loads(cloudpickle.dumps(error))
    except Exception:
        return None
    return error if isinstance(copy, BaseException) else None
