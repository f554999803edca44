"""What Slurm says of jobs, asked for all of them at once and seldom: submitit's watcher, through our Slurm client."""

from __future__ import annotations

import os
import time

from submitit.core.core import InfoWatcher

from hpc_elastic.clock import SystemClock
from hpc_elastic.slurm.client import CommandSlurmClient, SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import SlurmError
from hpc_elastic.slurm.job_state import JobPhase, JobState

SLURM_SECONDS = 30.0
FORGOTTEN = "UNKNOWN"
"""Slurm does not know the job (any more), or could not be asked."""
_WITHOUT_A_START = frozenset(("CANCELLED", "DEADLINE", "REVOKED"))


def slurm_client() -> SlurmClient:
    """This cluster's."""
    return CommandSlurmClient(SubprocessRunner(os.environ), SystemClock(), timeout=SLURM_SECONDS)


class ElasticWatcher(InfoWatcher):  # type: ignore[misc]
    """One for all jobs of a program. Asks 2 s, 4 s, 8 s … after the last submission, then once a minute."""

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s)
        self._asked_about: dict[str, int] = {}
        """How often Slurm has answered about each."""

    def update(self) -> None:
        """Ask for every job that is not known to have ended."""
        wanted = sorted(self._registered - self._finished)
        if not wanted:
            return
        self._num_calls += 1
        try:
            states = slurm_client().queue_states([JobId(job_id) for job_id in wanted])
        except SlurmError:
            return  # the controller restarts, say: what was known holds, and the next look asks again
        finally:
            self._last_status_check = time.time()
        told = {state.job_id: state for state in states}
        for job_id in wanted:
            self._asked_about[job_id] = self._asked_about.get(job_id, 0) + 1
            self._info_dict[job_id] = _info(job_id, told.get(job_id) or _of_pending_array(job_id, states))
            if told.get(job_id) is not None and told[job_id].phase is JobPhase.FINISHED:
                self._finished.add(job_id)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Slurm's word; `FORGOTTEN` where it has none."""
        return str(self.get_info(job_id, mode=mode).get("State") or FORGOTTEN)

    def answers_about(self, job_id: str) -> int:
        """How often Slurm has answered, be it that it does not know the job. A look that failed is no answer."""
        return self._asked_about.get(job_id, 0)

    def look_again_at(self, job_id: str) -> None:
        """It was taken to have ended, and may be back in the queue."""
        self._finished.discard(job_id)


def is_over(state: str) -> bool:
    """Whether a job of which Slurm says this has ended."""
    return JobState(job_id="", state=state, reason="").phase is JobPhase.FINISHED


def is_over_before_it_began(state: str) -> bool:
    """Whether a job of which Slurm says this, and nothing is known besides, has never run."""
    return state in _WITHOUT_A_START


def _info(job_id: str, state: JobState | None) -> dict[str, str]:
    if state is None:
        return {"JobID": job_id, "State": FORGOTTEN}
    return {"JobID": job_id, "State": state.state, "NodeList": ",".join(state.nodes), "Reason": state.reason}


def _of_pending_array(job_id: str, states: tuple[JobState, ...]) -> JobState | None:
    """Tasks that wait have one line together: ``70_[3-7%2]``."""
    array, _, task = job_id.partition("_")
    if not task:
        return None
    return next((state for state in states if state.job_id.startswith(f"{array}_[")), None)
