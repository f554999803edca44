"""One readable line for each event: what happened, where, and why. Pure.

An event that this version does not know, or can't read, is shown with its fields. Where an event has a `reason`, that
is put behind the sentence.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpc_elastic.base.text import clean_text, plural, ranks_text
from hpc_elastic.run import agent_events as of_agent
from hpc_elastic.run import coordinator_events as of_coordinator
from hpc_elastic.run import supervisor_events as of_supervisor
from hpc_elastic.run.event_reader import EventLine
from hpc_elastic.run.event_types import AgentEvent, CoordinatorEvent, RunEvent, SupervisorEvent

_HEAD = ("v", "t", "n", "host", "node", "role", "event")
_LONGEST_VALUE = 200


def describe_event(line: EventLine) -> str:
    """Describe it with its reason in one line without control characters."""
    text, fields = _sentence(line.event, line), line.value
    if not text:
        left = {key: value for key, value in fields.items() if key not in (*_HEAD, "reason")}
        text = " ".join(f"{key}={_short(value)}" for key, value in left.items())
    # Of a failure it says how that is judged, not why it happened.
    reason = "" if isinstance(line.event, of_agent.WorkerFailed) else fields.get("reason")
    if isinstance(reason, str) and reason and reason not in text:
        text = f"{text}: {reason}" if text else reason
    return clean_text(text).replace("\n", " ").replace("\t", " ")


def _sentence(event: RunEvent | None, line: EventLine) -> str:
    match event:
        case SupervisorEvent():
            return _of_supervisor(event)
        case CoordinatorEvent():
            return _of_coordinator(event, line)
        case AgentEvent():
            return _of_round(event) if hasattr(event, "round") else _of_agent(event)
    return ""


def _of_supervisor(event: SupervisorEvent) -> str:
    match event:
        case of_supervisor.AttemptStarted():
            job = f", job {event.job_id}" if event.job_id else ""
            armed = "enabled" if event.requeue_armed else f"not enabled: {event.requeue_reason or 'no reason'}"
            return f"attempt {event.attempt}{job}, {plural(len(event.nodes), 'node')}; requeue {armed}"
        case of_supervisor.AttemptSuperseded():
            ended = f"; it has ended on {', '.join(event.ended)}" if event.ended else ""
            silent = f"; not heard from: {', '.join(event.silent)}" if event.silent else ""
            return f"attempt {event.superseded} was superseded{ended}{silent}"
        case of_supervisor.AgentsLaunched():
            return f"{plural(event.nodes, 'agent')} launched"
        case of_supervisor.AgentProcessEnded():
            code = f"exit code {event.code}"
            detail = f" ({event.detail})" if event.detail not in ("", code) else ""
            return f"the agent on {event.name or f'node {event.node}'} ended, {code}{detail}"
        case of_supervisor.AgentRelaunched():
            return f"the agent on {event.name} is started again"
        case of_supervisor.NodeGivenUp():
            return f"{event.name or f'node {event.node}'} is given up ({_words(event.cause)})"
        case of_supervisor.SignalReceived():
            return f"{event.signal}{event.sender and ' ' + event.sender}: the end of the run is asked for"
        case of_supervisor.SignalDecided():
            until = f"the workers may save, it ends in {event.seconds:.0f} s"
            ends = until if event.saves else "all processes are killed now"
            return f"{event.meaning}, received by the {event.heard_by}; the job {event.slurm}: {ends}"
        case of_supervisor.VerdictReached():
            return _words(event.outcome)
        case of_supervisor.RequeueDecided():
            return {"requeue": "the job is requeued", "end": "the job ends"}.get(event.action, event.action)
        case of_supervisor.NodesCompared():
            return f"Slurm and the run {'disagree' if event.taken or event.kept else 'agree'} about the nodes"
        case of_supervisor.NodesJudged():
            excluded = ", ".join(event.excluded)
            stays = "".join(f"; {one.node} stays: {one.reason}" for one in event.spared)
            return (f"the next attempt excludes {excluded}" if excluded else "bad nodes stay") + stays
        case of_supervisor.AttemptRequeued():
            return "the next attempt is queued"
        case of_supervisor.AttemptEnded():
            return f"{_words(event.outcome)}, exit code {event.exit_code}"
        case of_supervisor.EndTakenOver():
            return f"this node finishes the attempt, for agent {event.by}"
    return ""


def _of_agent(event: AgentEvent) -> str:
    match event:
        case of_agent.AgentStarted():
            return f"pid {event.pid}, version {event.version}"
        case of_agent.AgentEnded():
            return f"ended, exit code {event.code}"
        case of_agent.AgentFailed():
            return f"the agent itself failed: {event.error} at {event.where}"
        case of_agent.HealthWarning():
            return event.check
        case of_agent.UserCommandEnded():
            about = f" ({event.about})" if event.about else ""
            return f"--{event.command}{about}: {'failed after ' if event.reason else ''}{event.seconds:.1f} s"
        case of_agent.CheckpointCommitted():
            return f"step {event.step} is committed{' at the end' if event.at_end else ''}: {event.size} bytes"
        case of_agent.CheckpointNotCommitted():
            which = "checkpoints are" if event.step is None else f"step {event.step} is"
            last = "none" if event.last_step is None else f"step {event.last_step}"
            return f"{which} not copied: {event.reason}; the last one that is committed: {last}"
        case of_agent.ForkServerReady():
            size = f"{event.rss / 2**20:.0f} MiB"
            return f"the fork server is ready after {event.seconds:.2f} s: {event.modules} modules, {size}"
        case of_agent.ForkServerEnded():
            return "another fork server is started"
        case of_agent.ForkServerGaveUp():
            return "no fork server any more: workers are started fresh"
        case of_agent.PreloadLeftOut():
            return f"the fork server does without {event.module}"
        case of_agent.ClockCompared():
            ahead, bound = event.offset_ns / 1e6, event.bound_ns / 1e6
            return (
                f"this node's clock since its boot is {ahead:.3f} ms ahead of node {event.reference}'s, "
                f"give or take {bound:.3f} ms"
            )
        case of_agent.OutputLost():
            whose = f" of {_ranks({one.rank for one in event.streams})}" if event.streams else ""
            return f"{event.not_in_files} bytes{whose} are in no file, {event.not_in_job_log} not in the job log"
        case of_agent.FilesystemRefused():
            lasted = f"{event.seconds:.0f} s{_to_the_end(event.over)}"
            where = f" ({event.path})" if event.path else ""
            return f"the shared filesystem refused for {lasted}: {event.error}{where}"
        case of_agent.EventsDropped():
            return f"{event.count} events lost: the disk was full"
    return ""


def _of_round(event: AgentEvent) -> str:
    text, index = "", getattr(event, "round", None)
    match event:
        case of_agent.HealthCheckFailed():
            return f"this node leaves the run ({', '.join(event.checks)})"
        case of_agent.RoundFinal():
            text = (
                f"{_ranks(event.ranks)} of {event.world_size}, node {event.group_rank} of {event.group_world_size}, "
                f"master {event.master}, {event.restarts_used} of {event.max_restarts} restarts used"
            )
        case of_agent.CheckpointChosen():
            where = "on the nodes" if event.is_local else "on the shared filesystem"
            text = "no checkpoint" if event.step is None else f"continue from step {event.step}, {where}"
        case of_agent.WorkersStarted():
            fresh = f"; fresh, since {event.started_fresh}" if event.started_fresh else ""
            text = f"{plural(len(event.pids), 'worker')} started{fresh}"
        case of_agent.WorkerFailed():
            how = f"{_code(event.exitcode)} ({_words(event.failure_class)})"
            text = f"rank {event.global_rank} failed, {how}: {event.message}"
        case of_agent.WorkerReplaced():
            text = f"a fresh process ({event.pid}) takes the place of rank {event.rank}; the others stay"
        case of_agent.ReplacementRefused():
            text = "all workers are to start again"
        case of_agent.InProcessRestarted():
            active = f"{event.active_world_size} of {event.world_size} ranks active"
            text = (
                f"the function starts again in its processes (iteration {event.iteration}, "
                f"{event.seconds:.2f} s after the fault, {active})"
            )
        case of_agent.InProcessLeft():
            text = f"rank {event.rank} leaves the in-process restart group"
        case of_agent.InProcessGaveUp():
            text = f"the in-process restart group gives up on rank {event.rank}"
        case of_agent.PlatformFailure():
            text = "a part of hpc-elastic itself failed"
        case of_agent.HangSuspected():
            return f"the run seems to hang: {event.reason}"
        case of_agent.SlowRankFound():
            return str(event.slow)
        case of_agent.SlowRankEnded():
            text = f"rank {event.slow.rank} on {event.slow.host} was slow for {event.seconds:.0f} s"
        case of_agent.RunSlowed():
            return str(event.pace)
        case of_agent.RunSlowEnded():
            text = f"the run was slower than in its best hour for {event.seconds:.0f} s"
        case of_agent.HangFound():
            text = f"no heartbeat for {event.limit} s"
        case of_agent.StacksTaken():
            silent = f", none of {_ranks(event.silent)}" if event.silent else ""
            text = f"stacks of {_ranks(rank for group in event.groups for rank in group.ranks)} taken{silent}"
        case of_agent.RanksObserved():
            text = "; ".join(f"rank {one.rank} {'failed ' if one.failed else ''}{one.where}" for one in event.ranks)
        case of_agent.WorkersStopping():
            text = "workers are being stopped"
        case of_agent.WorkersStopped():
            killed = f", {event.killed} by SIGKILL" if event.killed else ""
            left = f", left: {', '.join(map(str, event.left))}" if event.left else ""
            orphans = f", with what outlived its worker: {', '.join(event.orphans)}" if event.orphans else ""
            text = f"workers stopped in {event.seconds:.1f} s{killed}{left}{orphans}"
        case of_agent.WorkersSucceeded():
            text = "all workers here ended with 0"
    return f"round {index}: {text}" if text else ""


def _of_coordinator(event: CoordinatorEvent, line: EventLine) -> str:
    index, name = f"round {event.round}", line.host or f"node {line.node}"
    match event:
        case of_coordinator.RoundOpened():
            return f"{index} opened"
        case of_coordinator.RoundFrozen():
            return f"{index}: {plural(len(event.nodes), 'node')} are in"
        case of_coordinator.RoundConfirmed():
            return f"{index} confirmed by all"
        case of_coordinator.NodeLost():
            return f"{name} is taken out of {index}{_silence(event)}"
        case of_coordinator.NodeLeft():
            return f"{name} left"
        case of_coordinator.SpareLost():
            return f"{name}, which waited for a place, had died{_silence(event)}"
        case of_coordinator.NodeMissing():
            return f"{index} begins without node {event.node}"
        case of_coordinator.NodeReplaced():
            gone = event.replaces_host or f"node {event.replaces_node}"
            return f"{index}: {name} took the place of {gone} (node {event.group_rank} of the round)"
        case of_coordinator.NodesWaiting():
            return f"{index}: nodes wait"
        case of_coordinator.LinkLost():
            return f"the network link to {name} was lost for {event.seconds:.0f} s{_to_the_end(event.over)}"
        case of_coordinator.NodesAsked():
            return f"{index}: checking whether nodes are alive"
        case of_coordinator.CoordinatorChanged():
            return f"{index}: this node coordinates now"
        case of_coordinator.SignalHeard():
            return f"{index}: the supervisor is asked what a signal means"
        case of_coordinator.NoticeGiven():
            return f"{index}: the job is about to end; workers have {event.seconds:.0f} s to save"
        case of_coordinator.StepAgreed():
            return index
        case of_coordinator.RunClosed():
            return f"the run is closed in {index}: {_words(event.outcome)}"
    return ""


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."


def _words(name: str) -> str:
    return name.replace("_", " ")


def _ranks(ranks: Iterable[int]) -> str:
    return ranks_text(sorted(ranks))


def _code(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _silence(event: of_coordinator.NodeLost | of_coordinator.SpareLost) -> str:
    return "" if event.reason else f": no heartbeat for {event.age:.1f} s"


def _to_the_end(over: bool) -> str:
    return "" if over else ", to the end"
