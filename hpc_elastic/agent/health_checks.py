"""A node's health checks, all at once and each bounded, while the agent's loop goes on; and what they measure.

A check that touches a disk has a thread of its own, since every `measure_*` may hang where a mount does; NVML and the
user's own check are processes, started from the agent's main thread and attended by a thread, and ended with all that
they started.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent import health
from hpc_elastic.agent.health import (
    ClockOffset,
    GpuFacts,
    HealthFinding,
    MemoryFacts,
    RoomFacts,
    SharedFacts,
    gpus_from_json,
)
from hpc_elastic.agent.part import HealthVerdict, Part
from hpc_elastic.agent.supervision import Phase
from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.base.host_facts import LOOPBACK, available_memory, kernel_fields, kernel_text, links, module_command
from hpc_elastic.base.loop import Inbox, describe_no_descriptor, is_refusal, start_thread
from hpc_elastic.base.text import size_text
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.run.option_values import Check
from hpc_elastic.slurm.job_environment import JobEnvironment, in_job
from hpc_elastic.workers.linux import memory_folders
from hpc_elastic.workers.spawn import Inherited, WorkerStartError
from hpc_elastic.workers.user_command import END_SECONDS, UserCommand, last_lines

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from hpc_elastic.agent.node_agent import NodeAgent
    from hpc_elastic.agent.part import AgentSite

AGAIN_SECONDS = 1.0
"""A lack of room or memory is looked at again: what ended workers held may still be on its way back."""
_NVIDIA = "/dev/nvidiactl"
_LOOK_SECONDS = 0.01
_NO_PROGRAM = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)


class HealthSite(Struct, frozen=True, kw_only=True):
    limits: Mapping[Check, float] = {}
    command: tuple[str, ...] = ()
    command_seconds: float = 30.0
    probe: Path | None = None
    """A file of this agent's own in the run directory, for the check of that filesystem; None: it is left out."""
    environ: Mapping[str, str]
    cwd: str = "/"
    inherited: Inherited
    addresses: tuple[str, ...] = ()
    """The addresses that other nodes use; empty: no other node takes part."""
    is_refused_alone: Callable[[], bool] = lambda: False
    """The shared filesystem refuses this node and not the others: then it need not be waited for."""
    gpus_given: int | None = None
    """GPUs that Slurm gave to the job on this node; None: there is no Slurm."""


class HealthChecks(Part):
    @classmethod
    def for_agent(cls, site: AgentSite) -> HealthChecks:
        me, spec = site.me, site.me.spec
        return cls(
            HealthSite(
                limits=spec.health_checks,
                command=spec.health_check,
                command_seconds=spec.health_check_timeout,
                probe=me.paths.health_probe(me.node, me.short_uid),
                environ=me.command_environment(site.environ),
                cwd=spec.cwd,
                inherited=me.inherited,
                addresses=tuple(address for address in site.info.addresses if address != LOOPBACK),
                is_refused_alone=site.coordination.is_refused_alone,
                gpus_given=JobEnvironment.from_env(me.env).gpus if in_job(me.env) else None,
            ),
            clock=SystemClock(),  # it judges the wall clock as that is now
        )

    def __init__(self, site: HealthSite, *, clock: Clock) -> None:
        self._site = site
        self._clock = clock
        self._verdicts = Inbox[HealthVerdict]()
        self._session: _Session | None = None
        self._looks: _Session | None = None
        self._memory_before: dict[str, int] = {}
        self._warned: set[str] = set()
        self._have_had_link: set[str] = set()
        """The driver may not know the others."""
        self._is_awaited = False

    def watched(self) -> Collection[FileDescriptorLike]:
        return (self._verdicts,)

    @property
    def pids(self) -> Collection[int]:
        return frozenset().union(*(session.pids for session in (self._session, self._looks) if session is not None))

    @property
    def is_stuck(self) -> bool:
        return self._session is not None and self._session.is_stuck

    def on_join(self, last_round: int) -> None:
        if self._is_awaited:
            return
        self._is_awaited = True
        self._session = _Session(self._verdicts.put, self._site.inherited, self._clock)
        self._session.run(self._jobs(self._session, last_round))

    def holds_join(self, agent: NodeAgent) -> bool:
        return self._is_awaited

    def look(self, agent: NodeAgent) -> None:
        if (verdict := self.take()) is not None and agent.phase is Phase.JOINING:
            agent.on_health(verdict)

    def take(self) -> HealthVerdict | None:
        """A check's warning is given once in an agent's life."""
        if not (verdicts := self._verdicts.take()):
            return None
        self._is_awaited, verdict = False, verdicts[0]
        news = {check: text for check, text in verdict.warnings.items() if check not in self._warned}
        self._warned.update(news)
        return replace(verdict, warnings=news)

    def close(self) -> None:
        for session in (self._session, self._looks):
            if session is not None:
                session.cancel()
                session.join(END_SECONDS)

    def _jobs(self, session: _Session, last_round: int) -> list[_Job]:
        site, limits = self._site, self._site.limits
        jobs = []
        for check, path in ((Check.TMP, site.environ.get("TMPDIR") or "/tmp"), (Check.SHM, "/dev/shm")):
            if check in limits:
                jobs.append(self._room(session, check, path))
        if Check.MEMORY in limits:
            least = limits[Check.MEMORY]
            action = session.twice(lambda: [health.judge_memory(measure_memory(), least=least)])
            jobs.append(_Job(Check.MEMORY.value, "this node's memory", health.CHECK_SECONDS, action))
        if site.probe is not None and (Check.SHARED in limits or Check.CLOCK in limits):
            jobs.append(self._shared(session, site.probe))
        if Check.LINK in limits and site.addresses:
            jobs.append(self._link(session))
        if (Check.GPU in limits or Check.GPU_MEMORY in limits) and self._has_gpus:
            jobs.append(self._gpus(session, last_round))
        if site.command:
            jobs.append(self._script(session, last_round))
        return jobs

    def _room(self, session: _Session, check: Check, path: str) -> _Job:
        least = self._site.limits[check]
        action = session.twice(lambda: [health.judge_room(check, measure_room(path), least=least)])
        return _Job(check.value, path, health.CHECK_SECONDS, action)

    def _shared(self, session: _Session, probe: Path) -> _Job:
        limits, clock, is_alone = self._site.limits, self._clock, self._site.is_refused_alone

        def measure() -> SharedFacts:
            """A filesystem that refuses is waited for as one that hangs is."""
            began, patience = time.monotonic(), limits.get(Check.SHARED, 0.0)
            deadline = began + max(patience / 2, patience - 2 * AGAIN_SECONDS)  # before it counts as one that hangs
            while (facts := measure_shared(probe, clock)).is_refusal:
                if is_alone() or not session.pause(min(AGAIN_SECONDS, deadline - time.monotonic())):
                    return replace(facts, error=f"{facts.error}, for {time.monotonic() - began:.0f} s")
            return facts

        def look() -> list[HealthFinding]:
            facts = measure()
            found = [health.judge_shared(facts)] if Check.SHARED in limits else []
            if Check.CLOCK in limits:
                found.append(health.judge_clock(facts.clock, most=limits[Check.CLOCK]))
            return found

        if Check.SHARED in limits:
            what = f"the run directory's filesystem ({probe.parent})"
            return _Job(Check.SHARED.value, what, limits[Check.SHARED], session.twice(look, only=health.DESCRIPTORS))
        return _Job(Check.CLOCK.value, "", health.CHECK_SECONDS, look, must_answer=False)

    def _link(self, session: _Session) -> _Job:
        seconds, addresses = self._site.limits[Check.LINK], self._site.addresses

        def look() -> list[HealthFinding]:
            deadline = time.monotonic() + seconds
            while True:
                found = links(addresses)
                self._have_had_link.update(name for name, has_link in found if has_link)
                known = [link for link in found if link[0] in self._have_had_link]
                finding = health.judge_links(known, seconds=seconds)
                if not finding.reason or not session.pause(min(AGAIN_SECONDS, deadline - time.monotonic())):
                    return [finding]

        return _Job(Check.LINK.value, "the network's link", seconds + health.CHECK_SECONDS, look)

    @property
    def _has_gpus(self) -> bool:
        given = self._site.gpus_given
        return os.path.exists(_NVIDIA) if given is None else given > 0

    def look_at_gpus(self, take: Callable[[GpuFacts], None]) -> None:
        """`take` is called with NVML's answer in another thread, soon or never."""
        if not self._has_gpus:
            return
        session = self._looks = _Session(lambda _: None, self._site.inherited, self._clock)
        child = self._start_nvml(session)
        if not isinstance(child, WorkerStartError):
            start_thread(lambda: take(self._own(gpus_from_json(child.run(health.GPU_SECONDS).stdout))))

    def _own(self, facts: GpuFacts) -> GpuFacts:
        given, visible = self._site.gpus_given, self._site.environ.get("CUDA_VISIBLE_DEVICES")
        return replace(facts, devices=tuple(health.own_gpus(facts.devices, given=given, visible=visible)))

    def _start_nvml(self, session: _Session, *arguments: str) -> UserCommand | WorkerStartError:
        argv = [*module_command("hpc_elastic.agent.health", "print_gpus"), *arguments]
        return session.start(argv, environ=self._site.environ, cwd="/")

    def _gpus(self, session: _Session, last_round: int) -> _Job:
        site, limits = self._site, self._site.limits
        seconds = limits.get(Check.GPU_MEMORY, 0.0) if last_round >= 0 and self._memory_before else 0.0
        before = self._memory_before if seconds else {}
        pairs = ",".join(f"{uuid}={held}" for uuid, held in before.items())
        child = self._start_nvml(session, *([f"{seconds:g}", pairs] if before else []))

        def look() -> list[HealthFinding]:
            if isinstance(child, WorkerStartError):
                return [HealthFinding(check=Check.GPU.value, warning=f"the GPUs can't be looked at: {child}")]
            facts = gpus_from_json(child.run(health.GPU_SECONDS + seconds + END_SECONDS).stdout)
            visible = site.environ.get("CUDA_VISIBLE_DEVICES")
            for device in self._own(facts).devices:
                if device.held is not None and device.uuid:
                    known = self._memory_before.setdefault(device.uuid, device.held)
                    self._memory_before[device.uuid] = min(known, device.held)
            found = [health.judge_gpu_memory(facts, before=before)] if before else []
            if Check.GPU in limits:
                least = limits[Check.GPU]
                found.append(health.judge_gpus(facts, given=site.gpus_given, visible=visible, least_errors=least))
            return found

        return _Job(Check.GPU.value, "NVML", health.GPU_SECONDS + seconds, look)

    def _script(self, session: _Session, last_round: int) -> _Job:
        command, seconds = self._site.command, self._site.command_seconds
        environ = {**self._site.environ, "HPC_ELASTIC_LAST_ROUND": str(last_round)}
        child = session.start(command, environ=environ, cwd=self._site.cwd)

        def look() -> list[HealthFinding]:
            if isinstance(child, WorkerStartError):
                is_usage = child.errno in _NO_PROGRAM
                option = "--health-check: " if is_usage else ""
                return [HealthFinding(check="script", reason=f"{option}{child}", is_usage=is_usage)]
            ended = child.run(seconds + END_SECONDS)
            line = "".join(last_lines(ended.stderr, 1)).strip()[:200]
            return [health.judge_script(ended.exitcode, line, command=command[0])]

        return _Job("script", command[0], seconds, look)


class _Job(Struct, frozen=True):
    name: str
    what: str
    seconds: float
    look: Callable[[], list[HealthFinding]]
    must_answer: bool = True


class _Session:
    def __init__(self, post: Callable[[HealthVerdict], None], inherited: Inherited, clock: Clock) -> None:
        self._post, self._inherited, self._clock = post, inherited, clock
        self._changed = threading.Condition()
        self._found: dict[str, list[HealthFinding]] = {}
        self._cancelled = threading.Event()
        self._children: list[UserCommand] = []
        self._busy: set[str] = set()

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(child.pid for child in self._children if not child.is_gone)

    @property
    def is_stuck(self) -> bool:
        return bool(self._busy)

    def start(self, argv: Sequence[str], *, environ: Mapping[str, str], cwd: str) -> UserCommand | WorkerStartError:
        inherited, clock, cancelled = self._inherited, self._clock, self._cancelled
        try:
            child = UserCommand.start(
                argv, environ=environ, cwd=cwd, inherited=inherited, clock=clock, cancelled=cancelled
            )
        except WorkerStartError as error:
            return error
        self._children.append(child)
        return child

    def twice(self, look: Callable[[], list[HealthFinding]], *, only: str = "") -> Callable[[], list[HealthFinding]]:
        def act() -> list[HealthFinding]:
            found = look()
            bad = [finding for finding in found if finding.reason and (not only or finding.check == only)]
            if not bad or self._cancelled.wait(AGAIN_SECONDS):
                return found
            return look()

        return act

    def pause(self, seconds: float) -> bool:
        return seconds > 0 and not self._cancelled.wait(seconds)

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(not child.is_gone for child in self._children) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def run(self, jobs: Sequence[_Job]) -> None:
        if not jobs:
            self._finish(HealthVerdict())
            return
        self._busy = {job.name for job in jobs}  # a thread that never begins is one that does not answer
        for job in jobs:
            start_thread(partial(self._do, job))
        start_thread(partial(self._judge, jobs))

    def cancel(self) -> None:
        self._cancelled.set()
        for child in self._children:
            child.kill()
        with self._changed:
            self._changed.notify_all()

    def _do(self, job: _Job) -> None:
        try:
            found = job.look()
        except Exception as error:  # a defect of ours is no fault of the node
            found = [HealthFinding(check=job.name, warning=f"the health check {job.name} failed: {error!r}")]
        with self._changed:
            self._found[job.name] = found
            self._busy.discard(job.name)
            self._changed.notify_all()

    def _judge(self, jobs: Sequence[_Job]) -> None:
        began = time.monotonic()
        with self._changed:
            while not self._cancelled.is_set():
                findings = [finding for found in self._found.values() for finding in found]
                waited = time.monotonic() - began
                open_jobs = [job for job in jobs if job.name not in self._found]
                late = [job for job in open_jobs if waited >= job.seconds]
                findings += [health.did_not_answer(job.name, job.what, job.seconds) for job in late if job.must_answer]
                if len(late) == len(open_jobs) or any(finding.reason for finding in findings):
                    self._finish(health.sum_up_findings(findings))
                    return
                left = min(job.seconds for job in open_jobs if job not in late) - waited
                self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _finish(self, verdict: HealthVerdict) -> None:
        if verdict.reason:
            self.cancel()
        self._post(verdict)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LIMIT = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


def measure_room(path: str) -> RoomFacts:
    """A folder that is not there is not reported as full."""
    try:
        found = os.statvfs(path)
    except (FileNotFoundError, PermissionError):
        return RoomFacts(path=path, free=_NO_LIMIT)
    except OSError as error:
        return RoomFacts(path=path, error=error.strerror or str(error))
    # Some filesystems count no inodes at all: then both are 0.
    return RoomFacts(
        path=path, free=found.f_bavail * found.f_frsize, has_inodes=not found.f_files or found.f_favail > 0
    )


def measure_memory(proc: str = "/proc") -> MemoryFacts | None:
    available = available_memory()
    own = [] if available is None else [MemoryFacts(free=available)]
    return min([*own, *memory_limits(proc)], key=lambda facts: facts.free, default=None)


def memory_limits(proc: str = "/proc") -> list[MemoryFacts]:
    """The kernel gives up what it keeps of files first, so that counts as free."""
    found = []
    for folder, is_v2 in memory_folders(proc=proc):
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_number(os.path.join(folder, name)) for name in names)
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        stat, prefix = kernel_fields(os.path.join(folder, "memory.stat"), " "), "" if is_v2 else "total_"
        kept = sum(int(stat.get(f"{prefix}{name}", "0")) for name in ("inactive_file", "active_file"))
        free = limit - max(0, used - kept)
        found.append(MemoryFacts(free=max(0, free), limited_by=f"the cgroup's limit of {size_text(limit)}"))
    return found


def measure_shared(path: Path, clock: Clock) -> SharedFacts:
    text = os.urandom(16).hex().encode()
    folder, flags = str(path.parent), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:  # the first time
            make_private_dir(path.parent)
            fd = os.open(path, flags | os.O_CREAT, 0o600)
        try:
            before = clock.time_ns()
            os.pwrite(fd, text, 0)
            _sync(fd)
            after = clock.time_ns()
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            back = os.pread(fd, len(text) + 1, 0)
            stamp = os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
    except FileNotFoundError:
        return SharedFacts(path=folder)  # the run was removed: the store reports that itself, and better
    except OSError as error:
        return SharedFacts(
            path=folder,
            error=describe_no_descriptor(error) or error.strerror or str(error),
            is_full=error.errno in _FULL,
            lacks_descriptor=bool(describe_no_descriptor(error)),
            is_refusal=is_refusal(error),
        )
    except UnsafePathError as error:
        return SharedFacts(path=folder, error=str(error))
    if back != text:
        return SharedFacts(path=folder, error="what was written is not what is read back")
    return SharedFacts(path=folder, clock=ClockOffset(least=(stamp - after) / 1e9, most=(stamp - before) / 1e9))


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def _number(path: str) -> int | None:
    text = kernel_text(path).strip()
    return int(text) if text.isdecimal() else None  # "max" among them
