"""The loss of workers' output on this node, as an event. The job log has it by then."""

from __future__ import annotations

from hpc_elastic.agent.pump import Pump
from hpc_elastic.events import EventLog
from hpc_elastic.run_paths import round_index

_MOST_STREAMS = 100


def log_losses(events: EventLog, pump: Pump) -> None:
    """Write an event where an episode of losses has ended. Costs next to nothing where there is none."""
    episode = pump.take_losses()
    if episode is None:
        return
    events.write(
        "output_lost",
        reason=episode.reason or "the job log could not keep up",
        not_in_files=episode.not_in_files,
        not_in_job_log=episode.not_in_job_log,
        streams=[
            {
                "round": round_index(one.path.parent.parent.name),
                "rank": one.rank,
                "stream": one.stream,
                "not_in_file": one.not_in_file,
                "not_in_job_log": one.not_in_job_log,
            }
            for one in episode.streams[:_MOST_STREAMS]
        ],
    )
