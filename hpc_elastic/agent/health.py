"""Decides whether a node is fit for a round: what is measured, and pure decisions from that and the limits to a reason.

The default limits are floors that no node falls below on which a training could still start. Every `measure_*` may hang
where a mount does: each gets a thread of its own (`health_checks`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from hpc_elastic.agent.part import HealthVerdict
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.base.host_facts import available_memory, kernel_fields, kernel_text
from hpc_elastic.base.loop import describe_no_descriptor, is_refusal
from hpc_elastic.base.text import size_text
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.run.option_values import Check
from hpc_elastic.workers.linux import memory_folders

DESCRIPTORS = "descriptors"
CHECK_SECONDS = 10.0
GPU_MEMORY_SLACK = 512 << 20
"""Bytes of a GPU's memory in use that are no reason to wait: a CUDA context of others that came meanwhile, say."""
GPU_SECONDS = 60.0
"""How long NVML may take: without persistence mode it starts every GPU first, seconds each."""
_MOST_REASONS = 4


class RoomFacts(Struct, frozen=True, kw_only=True):
    path: str
    free: int = 0
    has_inodes: bool = True
    error: str = ""


class MemoryFacts(Struct, frozen=True, kw_only=True):
    free: int
    limited_by: str = ""
    """``the cgroup's limit of 8.0 GiB``; empty: the node's own memory."""


class ClockOffset(Struct, frozen=True, kw_only=True):
    """How far the server's clock is ahead of this host's, at least and at most, seconds; below 0: behind."""

    least: float
    most: float


class SharedFacts(Struct, frozen=True, kw_only=True):
    path: str
    error: str = ""
    is_full: bool = False
    """There was no room: that stops recording, not training."""
    lacks_descriptor: bool = False
    """No file could be opened, wherever it lies: that is no sign of this filesystem."""
    is_refusal: bool = False
    clock: ClockOffset | None = None
    """A client that stamps by itself shows no offset."""


class GpuDevice(Struct, frozen=True, kw_only=True):
    """One GPU by NVML. None: it has no such figure."""

    index: int
    name: str = ""
    uuid: str = ""
    uncorrectable: int | None = None
    """ECC errors since the driver was loaded or the GPU was reset."""
    waits_for_reset: bool | None = None
    """Pages or rows of its memory are to be retired or remapped at the next reset."""
    remap_failed: bool | None = None
    use: int | None = None
    """Percent of the last moment, a sixth of a second or one, in which a kernel ran."""
    memory_use: int | None = None
    """Percent of it in which its memory was read or written."""
    held: int | None = None
    """Memory in use, but not by a living process that is none of this node's workers."""
    error: str = ""


class GpuFacts(Struct, frozen=True, kw_only=True):
    devices: tuple[GpuDevice, ...] = ()
    driver: str = ""
    error: str = ""
    is_there: bool = True
    waited: float = 0.0
    waited_for: int = 0


class HealthFinding(Struct, frozen=True, kw_only=True):
    check: str
    reason: str = ""
    warning: str = ""
    note: str = ""
    is_refusal: bool = False
    """The run directory's filesystem refuses, or does not answer: that need not be this node's fault."""
    is_usage: bool = False
    """The user's own check can't be started as it was given: no other try would do better."""


def sum_up_findings(findings: Sequence[HealthFinding]) -> HealthVerdict:
    bad = [finding for finding in findings if finding.reason]
    reasons = [finding.reason for finding in bad]
    is_usage = bool(bad) and all(finding.is_usage for finding in bad)
    more = f"; and {len(reasons) - _MOST_REASONS} more" if len(reasons) > _MOST_REASONS else ""
    return HealthVerdict(
        reason=f"{'' if is_usage else 'health check failed: '}{'; '.join(reasons[:_MOST_REASONS])}{more}"
        if bad
        else "",
        checks=tuple(finding.check for finding in bad),
        warnings={finding.check: finding.warning for finding in findings if finding.warning},
        notes=tuple(finding.note for finding in findings if finding.note),
        is_refusal=bool(bad) and all(finding.is_refusal for finding in bad),
        is_usage=is_usage,
    )


def judge_room(check: Check, facts: RoomFacts, *, least: float) -> HealthFinding:
    reason = ""
    if facts.error:
        reason = f"{facts.path} does not work: {facts.error}"
    elif facts.free < least:
        reason = f"{facts.path} has {size_text(facts.free)} free, less than {size_text(least)}"
    elif not facts.has_inodes and least:
        reason = f"{facts.path} has no inode free"
    return HealthFinding(check=check.value, reason=reason)


def judge_memory(facts: MemoryFacts | None, *, least: float) -> HealthFinding:
    reason = ""
    if facts is not None and facts.free < least:
        below = f" below {facts.limited_by}" if facts.limited_by else ""
        reason = f"{size_text(facts.free)} of memory are free{below}, less than {size_text(least)}"
    return HealthFinding(check=Check.MEMORY.value, reason=reason)


def judge_shared(facts: SharedFacts) -> HealthFinding:
    if facts.lacks_descriptor:
        return HealthFinding(check=DESCRIPTORS, reason=f"the agent can open no file, wherever it lies: {facts.error}")
    if facts.is_full:
        return HealthFinding(check=Check.SHARED.value, warning=f"{facts.path} is full: {facts.error}")
    reason = f"the run directory can't be written: {facts.error} ({facts.path})" if facts.error else ""
    return HealthFinding(check=Check.SHARED.value, reason=reason, is_refusal=facts.is_refusal)


def judge_clock(offset: ClockOffset | None, *, most: float) -> HealthFinding:
    if offset is None or (offset.least <= most and offset.most >= -most):
        return HealthFinding(check=Check.CLOCK.value)
    ahead = offset.least > 0
    apart = offset.least if ahead else -offset.most
    way = "behind" if ahead else "ahead of"
    return HealthFinding(
        check=Check.CLOCK.value,
        warning=f"this node's clock is at least {apart:.0f} s {way} the run directory's server's: "
        "times in logs and reports mislead",
    )


def judge_links(interfaces: Sequence[tuple[str, bool]], *, seconds: float) -> HealthFinding:
    reason = ""
    if interfaces and not any(has_link for _, has_link in interfaces):
        names = ", ".join(name for name, _ in interfaces)
        reason = f"the network has no link ({names}), looked at for {seconds:g} s"
    return HealthFinding(check=Check.LINK.value, reason=reason)


def judge_gpus(facts: GpuFacts, *, given: int | None, visible: str | None, least_errors: float) -> HealthFinding:
    """NVML shows GPUs of other jobs too, where Slurm confines no devices. `given`: how many Slurm gave this node; None:
    there is no Slurm. `visible`: CUDA_VISIBLE_DEVICES."""
    reasons = []
    if given == 0 or not facts.is_there:
        pass  # none of ours; or none of NVIDIA's, or a container without the library
    elif facts.error:
        reasons.append(f"NVML does not work: {facts.error}")
    else:
        if given is not None and len(facts.devices) < given:
            reasons.append(f"Slurm gave {given} GPUs, and {len(facts.devices)} are there")
        for device in own_gpus(facts.devices, given=given, visible=visible):
            reasons += _faults(device, least_errors)
    return HealthFinding(check=Check.GPU.value, reason=", ".join(reasons))


def still_held(devices: Sequence[GpuDevice], before: Mapping[str, int]) -> list[tuple[GpuDevice, int]]:
    more = [(one, one.held - before[one.uuid]) for one in devices if one.held is not None and one.uuid in before]
    return [(device, held) for device, held in more if held > GPU_MEMORY_SLACK]


def judge_gpu_memory(facts: GpuFacts, *, before: Mapping[str, int]) -> HealthFinding:
    """`before`: UUID → `GpuDevice.held` before workers ran here, of the job's own GPUs."""
    reasons = [
        f"{size_text(held)} of GPU {device.index}'s memory are still in use {facts.waited:.0f} s after its workers' end"
        for device, held in still_held(facts.devices, before)
    ]
    note = f"waited {facts.waited:.1f} s for {size_text(facts.waited_for)} of GPU memory that ended workers held"
    return HealthFinding(
        check=Check.GPU_MEMORY.value, reason=", ".join(reasons), note=note if facts.waited_for and not reasons else ""
    )


def own_gpus(devices: Sequence[GpuDevice], *, given: int | None, visible: str | None) -> Sequence[GpuDevice]:
    if given is None and visible is None:
        return devices
    if given is not None and len(devices) <= given:
        return devices
    entries = [entry.strip() for entry in (visible or "").split(",") if entry.strip()]
    found = [
        device
        for device in devices
        if any(
            # CUDA takes any beginning of a UUID that is unambiguous.
            entry == str(device.index) or (device.uuid and entry.startswith("GPU-") and device.uuid.startswith(entry))
            for entry in entries
        )
    ]
    return found if len(found) == len(entries) else []


def _faults(device: GpuDevice, least_errors: float) -> list[str]:
    name = f"GPU {device.index}"
    if device.error:
        return [f"{name}: {device.error}"]
    faults = []
    if device.uncorrectable is not None and device.uncorrectable >= least_errors:
        plural = "" if device.uncorrectable == 1 else "s"
        faults.append(f"{name} has {device.uncorrectable} uncorrectable ECC error{plural}")
    if device.remap_failed:
        faults.append(f"{name}'s memory could not be repaired (row remapping failed)")
    elif device.waits_for_reset:
        faults.append(f"{name} has to be reset (pages or rows of its memory are to be retired)")
    return faults


def judge_script(exitcode: int, last_line: str, *, command: str) -> HealthFinding:
    if exitcode == 0:
        return HealthFinding(check="script")
    how = f"exit code {exitcode}" if exitcode > 0 else f"signal {-exitcode}"
    return HealthFinding(check="script", reason=last_line or f"{command} ended with {how}")


def did_not_answer(check: str, what: str, seconds: float) -> HealthFinding:
    reason = f"{what} has not answered for {seconds:g} s"
    return HealthFinding(check=check, reason=reason, is_refusal=check == Check.SHARED.value)


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
