"""Agents as tasks of an srun step, one per node of the allocation; and the messages of srun and slurmstepd about them.

srun's end and exit code are no verdict, and it may never return (slurm 20.11 to 26.05). What is used of it: its
messages, as early news (which task ended how, which node is gone, which made a launch fail); and its own end, as "no
agent of this step runs any more". The messages are those of 20.11, 22.05, 24.11 and 26.05 (which prints slurmstepd's as
``[time] error: …``).
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.loop import wait_readable
from hpc_elastic.launch.agents import AgentEnd, describe_code
from hpc_elastic.slurm.commands import SlurmError, classify, scrubbed_environment, srun_agents
from hpc_elastic.slurm.job_environment import HostlistError, expand
from hpc_elastic.workers.linux import signals_unblocked

logger = logging.getLogger(__name__)


class SrunEventKind(Enum):
    TASK_EXITED = "task exited"
    TASK_KILLED = "task killed"
    """`detail` is the signal's name as strsignal gives it: ``Killed``, ``Segmentation fault (core dumped)``."""
    NODE_FAILED = "node failed"
    """Slurm gave the node up. The job goes on without it under --no-kill."""
    LAUNCH_FAILED = "launch failed"
    """The step could not be started on `nodes`: launch again without them."""
    STEP_REFUSED = "step refused"
    CANCELLED = "cancelled"


class SrunEvent(Struct, frozen=True, kw_only=True):
    kind: SrunEventKind
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    detail: str = ""


_TASKS = r"srun: error: (?P<nodes>\S+): tasks? [0-9,-]+: "
_STEPD = r"(?:slurmstepd(?:-\S+?)?: (?:error: )?|\[\d{4}-\d\d-\d\dT[0-9:.]+\] (?:\[[^\]]*\] )?(?:error: )?)"
_RULES = tuple(
    (kind, re.compile(pattern + r"\Z"))
    for kind, pattern in (
        (SrunEventKind.TASK_EXITED, _TASKS + r"(?P<detail>Exited with exit code (?P<code>\d+).*)"),
        (SrunEventKind.TASK_KILLED, _TASKS + r"(?P<detail>.*)"),
        (SrunEventKind.NODE_FAILED, r"srun: error: Node failure on (?P<nodes>\S+)"),
        (SrunEventKind.LAUNCH_FAILED, r"srun: error: Task launch for .*?failed on node (?P<nodes>\S+): (?P<detail>.*)"),
        (
            SrunEventKind.STEP_REFUSED,
            r"srun: error: (?:Unable to create (?:job )?step|Unable to confirm allocation |Unable to allocate resources"
            r"|(?:Slurm j|J)ob \d+ .*has expired).*",
        ),
        (SrunEventKind.CANCELLED, _STEPD + r"\*\*\* (?:STEP|JOB) \S+ (?:ON \S+ )?CANCELLED AT .*"),
    )
)
_SRUN_COMPLAINT = re.compile(
    r"srun: (?:(?:error|fatal): .+|(?:unrecognized|invalid|unknown|ambiguous) option.*|option .*requires.*)\Z"
)
_PASSING = re.compile(
    r"nodes? .*(?:busy|down|drain|available|respond|fail)|time[ds]? ?out|credential|expired|completing|cancel|aborted"
    r"|prolog|terminat|killed|temporarily",
    re.IGNORECASE,
)


def is_passing(complaint: str) -> bool:
    return classify(complaint) is not SlurmError or bool(_PASSING.search(complaint))


def parse_srun_line(line: str) -> SrunEvent | None:
    """The event in a line of srun's standard error; None: anything else, such as a worker's own output."""
    text = line.rstrip("\r\n")
    for kind, pattern in _RULES:
        if match := pattern.match(text):
            found = match.groupdict()
            try:
                nodes = expand(found.get("nodes") or "")
            except HostlistError:
                nodes = ()
            code = found.get("code")
            return SrunEvent(
                kind=kind, nodes=nodes, exit_code=int(code) if code else None, detail=found.get("detail") or ""
            )
    return None


_LAUNCH_TRIES = 3
_EARLY_SECONDS = 30.0
"""An srun that ends earlier, with no task's end and an error of its own, has started no agent."""
_KEPT_MESSAGES = 200
"""Newest lines of a step: a node's output comes within a second of its task's end."""
_LONGEST_MESSAGE = 350
_COMPLAINT = re.compile(
    r"error|exception|denied|no such|not found|cannot|can't|could not|failed|fatal|refused|read-only|no space", re.I
)
"""A dying interpreter prints more after the line that says why: its state, the frames of its threads."""


class _Step:
    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], nodes: set[int], umask: int, keep: Sequence[int]
    ) -> None:
        self.nodes = nodes
        self.ended: set[int] = set()
        self.bad: dict[int, str] = {}
        self.complaint = ""
        self.is_refused = False
        self.began = time.monotonic()
        self.instead_of: dict[int, _Step] = {}
        with signals_unblocked():
            self.process = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                umask=umask,
                pass_fds=keep,
            )
        assert self.process.stderr is not None
        self.stderr = self.process.stderr.fileno()
        os.set_blocking(self.stderr, False)
        self._partial = b""
        self._said: deque[str] = deque(maxlen=_KEPT_MESSAGES)
        self.is_silent = False
        """srun has closed its standard error: only its end is still to come."""

    def lines(self) -> list[str]:
        try:
            raw = os.read(self.stderr, 1 << 20)
        except BlockingIOError:
            return []
        self.is_silent = not raw
        *whole, self._partial = (self._partial + raw).split(b"\n")
        if not raw and self._partial:
            whole, self._partial = [self._partial], b""
        return [line.decode("utf-8", "replace") for line in whole]

    def keep_message(self, line: str, event: SrunEvent | None) -> None:
        is_end = event is not None and event.kind is SrunEventKind.CANCELLED
        if event is None or event.kind is SrunEventKind.STEP_REFUSED:
            text = line.rstrip("\r\n")
            self.complaint = text if _SRUN_COMPLAINT.match(text) else self.complaint
        if line.strip() and not line.startswith("srun: ") and not is_end:
            self._said.append(line.strip()[:_LONGEST_MESSAGE])

    def last_message(self, name: str) -> str:
        """Lines carry no node, so those that name it come first. A failure to change the folder is only a warning."""
        lines = list(self._said)
        if len(self.nodes) > 1:
            named = re.compile(rf"(?:(?<![\w.-])|(?<=slurmstepd-)){re.escape(name)}(?![\w-])")
            lines = [line for line in lines if named.search(line) and "couldn't chdir" not in line] or lines
        return next((line for line in reversed(lines) if _COMPLAINT.search(line)), lines[-1] if lines else "")


class SlurmLauncher(Struct, eq=False):
    hears_all_ends = False  # not of a node that was back before Slurm missed it, nor of one whose slurmstepd died
    nodes: Sequence[str]
    command: Sequence[str]
    environment: Mapping[str, str]
    min_nodes: int
    umask: int
    allocated: Sequence[str] = ()
    """The allocation's nodes, some of which other runs may have. Empty: `nodes` are all."""
    keep: Sequence[int] = ()
    extra: Sequence[str] = ()
    _index: dict[str, int] = field(default_factory=dict)
    _steps: list[_Step] = field(default_factory=list)
    _newest: dict[int, _Step] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)
    _unstarted: list[AgentEnd] = field(default_factory=list)
    unlaunched: dict[int, str] = field(default_factory=dict)
    _tries: int = 0
    _ending: bool = False

    def __post_init__(self) -> None:
        self._index = {name: index for index, name in enumerate(self.nodes)}

    def launch(self) -> None:
        self._launch(set(range(len(self.nodes))))

    def _launch(self, wanted: set[int]) -> None:
        self._tries += 1
        names = {self.nodes[node] for node in wanted}
        left_out = [name for name in self.allocated or self.nodes if name not in names]
        self._start(srun_agents(len(wanted), self.command, exclude=left_out, extra=self.extra), wanted)

    def relaunch(self, node: int) -> None:
        self._start(srun_agents(1, self.command, where=[self.nodes[node]], extra=self.extra), {node})

    def _start(self, argv: Sequence[str], nodes: set[int]) -> None:
        try:
            step = _Step(argv, scrubbed_environment(self.environment), nodes, self.umask, self.keep)
        except OSError as error:  # no srun here: a container without it
            detail = f"srun can't be started: {error}"
            self._unstarted += [AgentEnd(node=node, code=None, detail=detail, started=False) for node in sorted(nodes)]
            return
        self._steps.append(step)
        step.instead_of = {node: before for node in nodes if (before := self._newest.get(node)) is not None}
        self._newest.update(dict.fromkeys(nodes, step))

    def filenos(self) -> list[int]:
        return [step.stderr for step in self._steps if not step.is_silent]

    def due(self) -> float | None:
        # srun speaks through a pipe, and its end is a SIGCHLD.
        return time.monotonic() if self._unstarted else None

    def take(self) -> list[AgentEnd]:
        found, self._unstarted = self._unstarted, []
        for step in list(self._steps):
            for line in step.lines():
                found += self._read_line(step, line)
            code = step.process.poll()
            if code is not None:
                for line in step.lines():
                    found += self._read_line(step, line)
                self._close(step)
                found += self._step_ended(step, code)
        return found

    def _read_line(self, step: _Step, line: str) -> list[AgentEnd]:
        event = parse_srun_line(line)
        step.keep_message(line, event)
        # Everything goes on into the job log: it is what a person who knows Slurm looks for.
        with suppress(OSError):  # a full disk stops the record, not the run
            print(line, file=sys.stderr, flush=True)
        if event is None:
            return []
        if event.kind is SrunEventKind.LAUNCH_FAILED:
            step.bad.update({self._index[name]: event.detail for name in event.nodes if name in self._index})
            self.unlaunched |= step.bad
            return []
        if event.kind is SrunEventKind.STEP_REFUSED:
            step.is_refused = True
            return []
        if event.kind is SrunEventKind.NODE_FAILED:
            # A node that Slurm gave up never comes back into this job: no further agent there is waited for.
            # By whichever step reports it first.
            nodes = [node for name in event.nodes if (node := self._index.get(name)) is not None]
            why = "Slurm gave the node up (node failure)"
            fresh = [node for node in nodes if node not in self._gone]
            self._gone.update(fresh)
            return [self._ended(step, node, None, why, started=False) for node in fresh]
        if event.kind in (SrunEventKind.TASK_EXITED, SrunEventKind.TASK_KILLED) and not step.bad:
            # After a failed launch srun kills all tasks: that is reported, and mended, when the step has ended.
            detail, code = event.detail or f"exit code {event.exit_code}", event.exit_code
            if event.kind is SrunEventKind.TASK_KILLED:
                code = -int(signal.SIGKILL) if event.detail.startswith("Killed") else None
            nodes = [self._index[name] for name in event.nodes if name in self._index]
            return [self._ended(step, node, code, detail) for node in self._newly_ended(step, nodes)]
        return []

    def _newly_ended(self, step: _Step, nodes: Iterable[int]) -> list[int]:
        return [node for node in nodes if node not in step.ended and self._newest.get(node) is step]

    def _ended(self, step: _Step, node: int, code: int | None, detail: str, *, started: bool = True) -> AgentEnd:
        step.ended.add(node)
        return AgentEnd(node=node, code=code, detail=detail, started=started, gone=node in self._gone)

    def _step_ended(self, step: _Step, code: int) -> list[AgentEnd]:
        others = step.nodes - set(step.bad)
        may_repeat = not self._ending and len(step.nodes) > 1 and self._tries < _LAUNCH_TRIES
        if step.bad and may_repeat and len(others) >= max(1, self.min_nodes):
            # The whole step was aborted for one dead node (slurm 22.05: rc 233 after 11 s, whatever --no-kill says).
            names = ", ".join(self.nodes[node] for node in sorted(step.bad))
            logger.warning("the launch failed on %s; launching again without", names)
            gone = [self._ended(step, node, None, why, started=False) for node, why in sorted(step.bad.items())]
            # Not those whose end was reported before: they are started again one by one, if they were not already.
            if left := step.nodes - step.ended:
                self._launch(left)
            return gone
        complaint = step.complaint if code else ""
        is_early = step.is_refused or time.monotonic() - step.began < _EARLY_SECONDS
        lasts = bool(complaint) and is_early and not (step.bad or step.ended or is_passing(complaint))
        if lasts and not self._ending and len(step.nodes) > 1 and self._tries < _LAUNCH_TRIES - 1:
            self._launch(step.nodes)  # once more: that it comes back the same way is to be seen
            return []
        started = not (step.is_refused or step.bad or lasts)
        detail = complaint or f"its step ended, srun: {describe_code(code)}"
        found = [
            replace(
                self._ended(step, node, 0 if code == 0 else None, step.bad.get(node, detail), started=started),
                lasts=lasts,
            )
            for node in self._newly_ended(step, sorted(step.nodes))
        ]
        if not started:
            # An agent that was there before may still be: what its own step reports of it is news again.
            self._newest.update({node: before for node, before in step.instead_of.items() if before in self._steps})
        return found

    def _close(self, step: _Step) -> None:
        self._steps.remove(step)
        assert step.process.stderr is not None
        step.process.stderr.close()

    def last_message(self, node: int) -> str:
        step = self._newest.get(node)
        return step.last_message(self.nodes[node]) if step is not None else ""

    def running(self) -> bool:
        return bool(self._steps)

    def terminate(self) -> None:
        # srun hands SIGTERM on to its tasks.
        for step in self._steps:
            step.process.send_signal(signal.SIGTERM)

    def end(self, *, within: float) -> None:
        self._ending = True
        if not self._steps:
            return
        self.terminate()
        deadline = time.monotonic() + within
        while self._steps and (left := deadline - time.monotonic()) > 0:
            wait_readable(self.filenos(), min(left, 0.2))
            self.take()
        for step in list(self._steps):
            step.process.kill()  # its tasks end when the batch script does
            step.process.wait()
            self._close(step)
