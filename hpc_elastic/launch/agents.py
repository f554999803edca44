"""The agents of an attempt, as the supervisor keeps them: one on each node, by a `Launcher`, until a node is given up.

An agent announces itself in the store before all else. What ends without having done so was never an agent, and the
node is *unable* after one more start.

srun reports an agent's end only while it hears of the node: it waits for ever for one that lost its power and was back
before Slurm missed it (SlurmdTimeout: 300 s by default; seen on 20.11 to 26.05). So where the run has lost a node and
Slurm has not, an agent is started there on trial, with growing pauses.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.host_facts import own_command
from hpc_elastic.base.text import plural
from hpc_elastic.failures.classify import signal_name
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.state import RoundRecord, node_of
from hpc_elastic.run.control_events import AgentProcessEnded, AgentRelaunched, NodeGivenUp
from hpc_elastic.run.events import EventLog, Note
from hpc_elastic.run.node_score import is_everywhere
from hpc_elastic.run.paths import REFUSED_CODE, STORE_LOST_CODE, UNHEALTHY_CODE, ExitCode, GivenUp, RunPaths
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.workers.tree import node_key

logger = logging.getLogger(__name__)

RELAUNCHES_PER_NODE = 3
FRUITLESS_RELAUNCHES = 1
"""The number for a node whose starts never became an agent; the second start has a step of its own."""
SETTLE_SECONDS = 0.3
"""Delay between an agent's end and its restart: the record of the run's end may be on its way."""
NEWS_SECONDS = 10.0
"""The same delay where the store does not answer whether the run has ended."""
MESSAGE_SECONDS = 1.0
FIRST_TRIAL = 3.0
"""Seconds from a loss to the first trial. A node that only stood still is back by then."""
LONGEST_PAUSE = 120.0
MAX_TRIALS = 8
"""About ten minutes: a site's SlurmdTimeout, and a slow reboot."""
_LASTING = (ExitCode.USAGE, 126, 127)  # the shell's codes for what can't be executed, and what is not found
_NAMED = 4
_LEFT = {
    UNHEALTHY_CODE: (GivenUp.UNHEALTHY, "it failed a health check, or its workers alone failed"),
    REFUSED_CODE: (GivenUp.REFUSED, "the filesystem of the run directory refuses it, or does not answer"),
    # Never with a new agent: it would take an empty folder for a run that begins.
    STORE_LOST_CODE: (GivenUp.STORE_LOST, "its agent has lost the run's store"),
}


class AgentEnd(Struct, frozen=True, kw_only=True):
    node: int
    code: int | None
    """The code as `subprocess` has it; None: unknown."""
    detail: str
    started: bool = True
    lasts: bool = False
    """`detail` is a refusal that would come back, and blames no node."""
    gone: bool = False
    """The site has given the node up: it never comes back into this job."""


def describe_code(code: int | None) -> str:
    if code is None:
        return "unknown"
    return signal_name(-code) if code < 0 else f"exit code {code}"


def agent_command(paths: RunPaths, attempt: int, *arguments: str) -> list[str]:
    return own_command("agent", "--run-dir", str(paths.root), "--attempt", str(attempt), *arguments)


def node_mark(spec: RunSpec, cluster: str, node: int = 0) -> str:
    return f"{spec.uid}:{node_key(cluster, node)}"


class Launcher(Protocol):
    @property
    def unlaunched(self) -> Mapping[int, str]: ...

    @property
    def hears_all_ends(self) -> bool: ...

    def launch(self) -> None: ...

    def relaunch(self, node: int) -> None: ...

    def filenos(self) -> list[int]: ...

    def due(self) -> float | None:
        """When `take` may have something that no descriptor announces, on the monotonic clock; None: never."""
        ...

    def take(self) -> list[AgentEnd]: ...

    def last_message(self, node: int) -> str:
        """The newest start's last error line on a node, which may come a moment after the end; empty: unknown."""
        ...

    def running(self) -> bool: ...

    def terminate(self) -> None:
        """SIGTERM to all agents; a repeated call does it again."""
        ...

    def end(self, *, within: float) -> None:
        """Leave nothing of ours behind: SIGTERM, and SIGKILL after `within` seconds."""
        ...


class UnableNode(Struct, frozen=True, kw_only=True):
    name: str
    code: int | None
    detail: str
    message: str = ""
    lasts: bool = False
    """srun refused the options, and would refuse them again."""

    @property
    def reason(self) -> str:
        how = describe_code(self.code) if self.code else self.detail
        message = self.message.removeprefix("hpc-elastic: error: ")
        return f"{how}: {message}" if message else how


class UnableNodes(Struct, frozen=True):
    nodes: tuple[UnableNode, ...]
    total: int

    @property
    def is_same_everywhere(self) -> bool:
        """One failing node shows nothing about the others, unless its agent itself says that the run is not usable."""
        count, codes = len(self.nodes), {node.code for node in self.nodes}
        if count == self.total and all(node.lasts for node in self.nodes):
            return True
        if count == self.total == 1:
            return codes == {ExitCode.USAGE}
        if not is_everywhere(count, nodes=self.total) or len(codes) != 1:
            return False
        # slurmstepd's text (20.11 to 26.05); the exit code is the program's own.
        return codes <= set(_LASTING) or all("TaskProlog failed" in node.message for node in self.nodes)

    @property
    def are_refusals(self) -> bool:
        return len(self.nodes) == self.total and all(node.code == ExitCode.USAGE for node in self.nodes)

    def __str__(self) -> str:
        if not self.nodes:
            return ""
        first = self.nodes[0]
        if self.are_refusals:
            whose = "the agent" if self.total == 1 else "every agent"
            return f"{whose} refused to start the workers ({first.reason})"
        if is_everywhere(len(self.nodes), nodes=self.total):
            whose = "no node" if len(self.nodes) == self.total else "no node but the batch host"
            return f"{whose} could run the agent: {first.name}: {first.reason}"
        parts = [f"{node.name} could not run the agent: {node.reason}" for node in self.nodes]
        more = f"; {len(parts) - _NAMED} more nodes could not either" if len(parts) > _NAMED else ""
        return "; ".join(parts[:_NAMED]) + more


class _Relaunch(Struct, frozen=True, kw_only=True):
    at: float
    look: int
    """This look at the log comes first: the agent may have ended because the run has."""
    ended: AgentEnd
    has_waited: bool = False


class _Trial(Struct, kw_only=True):
    at: float | None
    """Time of the next start; None: an agent is on its way, or runs."""
    trials: int = 0


class Agents(Struct, eq=False):
    """Starts the agents, and starts them again. `step` runs in the supervisor's loop, and never waits."""

    launcher: Launcher
    names: Sequence[str]
    ask: Callable[[Callable[[Participant], None]], None]
    events: EventLog
    clock: Clock
    _is_ending: bool = False
    _relaunches: dict[int, _Relaunch] = field(default_factory=dict)
    _relaunched: Counter[int] = field(default_factory=Counter)
    _trials: dict[int, _Trial] = field(default_factory=dict)
    _have_trained: set[int] = field(default_factory=set)
    _looks_asked: int = 0
    _looks_done: int = 0
    _announced: frozenset[str] = field(default_factory=frozenset)
    _announcements: Counter[int] = field(default_factory=Counter)
    _announced_by_end: Counter[int] = field(default_factory=Counter)
    """Announcements of a node by the last end there that was handled."""
    _unable: dict[int, UnableNode] = field(default_factory=dict)
    _given_up: dict[int, set[GivenUp]] = field(default_factory=dict)

    def launch(self) -> None:
        self.launcher.launch()
        self.events.write(Note(subject="agents_launched", text=f"{plural(len(self.names), 'agent')} launched"))

    def step(self) -> None:
        for ended in self.launcher.take():
            self._handle_ended(ended)
        now = self.clock.monotonic()
        for node, relaunch in list(self._relaunches.items()):
            if now >= self._relaunch_at(relaunch):
                self._relaunch_or_give_up(node, relaunch)
        for node, trial in sorted(self._trials.items()):
            if trial.at is not None and trial.at <= now:
                trial.at, trial.trials = None, trial.trials + 1
                logger.info(
                    "%s is lost to the run, not to Slurm: starting an agent there, should it be back", self.names[node]
                )
                self._relaunch(node, "the node is lost, and may be back")

    def due(self) -> float | None:
        """When `step` has something to do without news, on the monotonic clock; None: never."""
        found = [self.launcher.due(), *map(self._relaunch_at, self._relaunches.values())]
        found += [trial.at for trial in self._trials.values()]
        return min((at for at in found if at is not None), default=None)

    def running(self) -> bool:
        return self.launcher.running() or bool(self._relaunches)

    def stop_relaunching(self) -> None:
        self._is_ending = True
        self._relaunches.clear()
        self._trials.clear()

    # -- what the log shows ------------------------------------------------------------------------------------------

    def on_record(self, record: RoundRecord) -> None:
        """Note which nodes the run has lost. A node that returned and is lost again begins anew."""
        self._have_trained |= {member.node for member in record.members}
        if self.launcher.hears_all_ends or self._is_ending:
            return
        lost = self._have_trained.intersection(record.lost) - self._given_up.keys() - self._relaunches.keys()
        first = self.clock.monotonic() + FIRST_TRIAL
        self._trials = {node: self._trials.get(node) or _Trial(at=first) for node in lost}

    def on_looked_anew(self, serial: int, announced: frozenset[str]) -> None:
        self._looks_done = serial
        self._announcements.update(node_of(uid) for uid in announced - self._announced)
        self._announced |= announced

    # -- an agent's end ----------------------------------------------------------------------------------------------

    def _handle_ended(self, ended: AgentEnd) -> None:
        node, name = ended.node, self.names[ended.node]
        if not ended.started and not ended.gone and self._is_tried_later(ended):
            return
        self.events.write(
            AgentProcessEnded(node=node, name=name, code=ended.code, detail=ended.detail, started=ended.started)
        )
        if self._is_ending:
            if ended.gone:  # srun may wait for its task for as long as it runs
                self.ask(lambda participant: participant.ending.give_up_node(node))
            return
        if not ended.started:
            logger.warning("no agent on %s: %s", name, ended.detail)
            if ended.lasts:
                self._unable[node] = UnableNode(name=name, code=None, detail=ended.detail, lasts=True)
            self._give_up(node, GivenUp.NOT_STARTED, ended.detail)
        elif ended.code in _LEFT:
            cause, reason = _LEFT[ended.code]
            logger.warning("%s has left the run: %s", name, reason)
            if cause is GivenUp.STORE_LOST:
                self.ask(lambda participant: participant.heartbeat_sender.recheck_store_id())
            self._give_up(node, cause, reason)
        else:
            look = self._looks_asked = self._looks_asked + 1
            self._relaunches[node] = _Relaunch(at=self.clock.monotonic() + SETTLE_SECONDS, look=look, ended=ended)
            self.ask(lambda participant: participant.refresh(look))

    def _is_tried_later(self, ended: AgentEnd) -> bool:
        trial = self._trials.get(ended.node)
        if trial is None or trial.at is not None or trial.trials >= MAX_TRIALS:
            return False
        pause = min(LONGEST_PAUSE, FIRST_TRIAL * 2.0**trial.trials)
        trial.at = self.clock.monotonic() + pause
        logger.info("%s is not back (%s); again in %g s", self.names[ended.node], ended.detail, pause)
        return True

    def _relaunch_at(self, relaunch: _Relaunch) -> float:
        return relaunch.at + (NEWS_SECONDS if relaunch.look > self._looks_done else 0.0)

    def _relaunch_or_give_up(self, node: int, relaunch: _Relaunch) -> None:
        name, used, ended = self.names[node], self._relaunched[node], relaunch.ended
        message, has_come = self.launcher.last_message(node), self._has_come(relaunch)
        if not (message or relaunch.has_waited or has_come):
            at = self.clock.monotonic() + MESSAGE_SECONDS
            self._relaunches[node] = replace(relaunch, at=at, has_waited=True)
            return
        del self._relaunches[node]
        self._announced_by_end[node] = announced = self._announcements[node]
        if not has_come and not ended.gone and self._is_tried_later(ended):
            return
        unable = UnableNode(name=name, code=ended.code, detail=ended.detail, message="" if has_come else message)
        never_came = not has_come and announced == 0
        most = FRUITLESS_RELAUNCHES if never_came else RELAUNCHES_PER_NODE
        # The code for wrong usage: the agent said why, and would say it again.
        is_refusal = ended.code == ExitCode.USAGE
        failing = 1 + len(self._unable) + sum(not self._has_come(other) for other in self._relaunches.values())
        fails_everywhere = failing > 1 and 2 * failing > len(self.names)
        if used >= most or is_refusal or (never_came and fails_everywhere):
            starts = plural(used + 1, "start")
            logger.error("the agent on %s ended (%s); giving the node up after %s", name, unable.reason, starts)
            is_unable = never_came or is_refusal
            if is_unable:
                self._unable[node] = unable
            self._give_up(node, GivenUp.COULD_NOT_RUN if is_unable else GivenUp.DIED, unable.reason)
            return
        self._relaunched[node] += 1
        logger.warning("the agent on %s ended (%s); starting it again", name, unable.reason)
        self._relaunch(node, f"it ended: {unable.reason}")

    def _has_come(self, relaunch: _Relaunch) -> bool:
        node = relaunch.ended.node
        return relaunch.look > self._looks_done or self._announcements[node] > self._announced_by_end[node]

    def _relaunch(self, node: int, reason: str) -> None:
        self.events.write(AgentRelaunched(node=node, name=self.names[node], reason=reason))
        self.launcher.relaunch(node)

    def _give_up(self, node: int, cause: GivenUp, reason: str) -> None:
        self.events.write(NodeGivenUp(node=node, name=self.names[node], cause=cause.value, reason=reason))
        self._given_up.setdefault(node, set()).add(cause)
        self._trials.pop(node, None)
        self.ask(lambda participant: participant.claims.give_up_node(node))

    # -- what is left ------------------------------------------------------------------------------------------------

    def _count(self, cause: GivenUp) -> int:
        return sum(cause in causes for causes in self._given_up.values())

    @property
    def has_lost_store(self) -> bool:
        return self._count(GivenUp.STORE_LOST) > 0

    @property
    def none_is_left(self) -> bool:
        return len(self._given_up) == len(self.names)

    @property
    def are_all_unfit(self) -> bool:
        unfit = self._count(GivenUp.UNHEALTHY) + self._count(GivenUp.REFUSED)
        return self.none_is_left and (unfit > 0 or len(self._unable) == len(self._given_up))

    @property
    def unable(self) -> UnableNodes:
        return UnableNodes(tuple(self._unable.values()), len(self.names))

    def why_none_is_left(self, refusal: object) -> str:
        unhealthy, refused, known = self._count(GivenUp.UNHEALTHY), self._count(GivenUp.REFUSED), len(self._given_up)
        reasons = [f"{unhealthy} of {known} failed a health check"] if unhealthy else []
        if refused:
            what = f"the filesystem of the run directory refused {refused} of {known}, or did not answer"
            reasons.append(what if refusal is None else f"{what}: {refusal}")
        if reasons:
            return f"no node is left: {'; '.join(reasons)}"
        return str(self.unable) or "no agent could be started"
