"""``hpc_elastic.should_checkpoint`` and ``preemption_notice``: a worker learns that its job is about to end. No torch.

The agents agree on a step, so that all ranks save the same one: a rank reads it from the page that its heartbeats are
written to. For the process that gives a worker's heartbeats, as there; in any other there is never a notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import CLOCK_BOOTTIME, clock_gettime_ns

from hpc_elastic import worker_heartbeat
from hpc_elastic.heartbeat_record import STEP_PENDING, NoticeRecord


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """The job is going to be ended: by its time limit, a preemption, or ``hpc-elastic requeue``."""

    deadline_ns: int
    """Until then a checkpoint is waited for: CLOCK_BOOTTIME of this host, nanoseconds. It may come nearer."""
    step: int | None
    """After this step all ranks save; None while it is being agreed on, and where there are no steps to agree on."""
    is_agreed: bool
    """False: the agents are still about to agree; go on training."""

    @property
    def seconds_left(self) -> float:
        """Until `deadline_ns`; never below 0."""
        return max(0.0, (self.deadline_ns - clock_gettime_ns(CLOCK_BOOTTIME)) / 1e9)

    def is_due(self, step: int) -> bool:
        """Whether to save now, after `step`. True on all ranks after the same step, where their steps are told."""
        return self.is_agreed and (self.step is None or step >= self.step)


def preemption_notice() -> PreemptionNotice | None:
    """The notice that this worker's agent has for it, or None. Some microseconds.

    Call it, or `should_checkpoint`, from the first step on: where no worker ever does, nobody waits for a checkpoint.
    """
    found = worker_heartbeat.read_notice_of_agent()
    return None if found is None else _notice(found)


def should_checkpoint(step: int) -> bool:
    """Tell the agent that `step` is complete, and whether to save now because the job is going to be ended.

    For the end of every step, on every rank, with the same count on all: it is a `heartbeat` too. Where it returns
    True, save, call `checkpoint_done`, and either end with 0 or go on; the job is requeued and resumes from there.

    Args:
        step: Whole, 0 or more.

    Returns:
        True from the agreed step on; False otherwise, and outside of a run.

    Raises:
        TypeError, ValueError: as `heartbeat`.
    """
    worker_heartbeat.heartbeat(step)
    notice = preemption_notice()
    return notice is not None and notice.is_due(step)


def _notice(found: NoticeRecord) -> PreemptionNotice:
    return PreemptionNotice(
        deadline_ns=found.deadline_ns,
        step=found.step if found.step >= 0 else None,
        is_agreed=found.step != STEP_PENDING,
    )
