"""Decides whether a node is fit for a round: pure decisions from what was measured and the limits to a reason.

The default limits are floors that no node falls below on which a training could still start. The GPUs are as NVML sees
them: `print_gpus` runs as a program of its own, whose one line of output is JSON, since a driver in trouble can hold
the process that asks it in the kernel forever, and since an agent that loaded the library would carry it for the whole
run. Names, arguments and codes: NVIDIA's nvml.h.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from hpc_elastic.agent.part import HealthVerdict
from hpc_elastic.base import codec
from hpc_elastic.base.text import size_text
from hpc_elastic.run.option_values import Check
from hpc_elastic.workers.tree import TAG_VARIABLE, Environ, look_at

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


LIBRARY = "libnvidia-ml.so.1"
_UNCORRECTED = 1  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED
_VOLATILE = 0  # NVML_VOLATILE_ECC: since the driver was loaded
_TEXT_BYTES = 96
_INSUFFICIENT_SIZE = 7
_NOT_AVAILABLE = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE: a process' memory, on some systems."""
_LOOK_SECONDS = 0.1
_ERRORS = {
    2: "invalid argument",
    3: "not supported",
    4: "no permission",
    9: "the driver is not loaded",
    10: "timeout",
    11: "interrupt problem",
    14: "corrupted infoROM",
    15: "GPU is lost",
    16: "a reset is required",
    17: "the operating system has blocked it",
    18: "driver and library are of different versions",
    999: "unknown error",
}
"""nvmlReturn_t; others are shown by their number."""
_BROKEN = frozenset({9, 10, 11, 14, 15, 16, 17, 18, 999})
"""The GPU does not work. Anything else: it has no such figure."""


class _NvmlError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
        self.text = _ERRORS.get(code, f"NVML error {code}")


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class _MemoryV2(ctypes.Structure):
    """Its `used` is without what the driver keeps for itself."""

    _fields_ = (
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def read_gpus(library: str = LIBRARY, *, before: Mapping[str, int] | None = None, within: float = 0.0) -> GpuFacts:
    """May hang. `before`: UUID → `GpuDevice.held` before the workers used it: memory beyond that is waited for."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return GpuFacts(is_there=False)
    try:
        _call(nvml, "nvmlInit_v2")
        count = ctypes.c_uint()
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        driver = ctypes.create_string_buffer(_TEXT_BYTES)
        _optional(nvml, "nvmlSystemGetDriverVersion", driver, ctypes.c_uint(_TEXT_BYTES))
        began = time.monotonic()
        waited, most = 0.0, 0
        while True:
            devices = tuple(_device(nvml, index) for index in range(count.value))
            left = max((held for _, held in still_held(devices, before or {})), default=0)
            most, waited = max(most, left), time.monotonic() - began
            if not left or waited >= within:
                return GpuFacts(
                    devices=devices,
                    driver=driver.value.decode("ascii", "replace"),
                    waited=round(waited, 2) if most else 0.0,
                    waited_for=most,
                )
            time.sleep(_LOOK_SECONDS)
    except _NvmlError as error:
        return GpuFacts(error=error.text)


def _call(nvml: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Raises _NvmlError; a function that an older library lacks is "not supported"."""
    try:
        function = getattr(nvml, name)
    except AttributeError:
        raise _NvmlError(3) from None
    code = function(*arguments)
    if code != 0:
        raise _NvmlError(code)


def _device(nvml: ctypes.CDLL, index: int) -> GpuDevice:
    handle = ctypes.c_void_p()
    try:
        _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        uuid, name = (ctypes.create_string_buffer(_TEXT_BYTES) for _ in range(2))
        _optional(nvml, "nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_TEXT_BYTES))
        _optional(nvml, "nvmlDeviceGetName", handle, name, ctypes.c_uint(_TEXT_BYTES))
        errors = ctypes.c_ulonglong()
        counts = _optional(nvml, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE, ctypes.byref(errors))
        pages = ctypes.c_int()  # nvmlEnableState_t
        retires = _optional(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle, ctypes.byref(pages))
        rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
        remaps = _optional(nvml, "nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, rows))
        use = _Utilization()
        has_use = _optional(nvml, "nvmlDeviceGetUtilizationRates", handle, ctypes.byref(use))
        held = _held(nvml, handle)
    except _NvmlError as error:
        return GpuDevice(index=index, error=error.text)
    pending = ([bool(pages.value)] if retires else []) + ([bool(rows[2].value)] if remaps else [])
    return GpuDevice(
        index=index,
        name=name.value.decode("ascii", "replace"),
        uuid=uuid.value.decode("ascii", "replace"),
        uncorrectable=errors.value if counts else None,
        waits_for_reset=any(pending) if pending else None,
        remap_failed=bool(rows[3].value) if remaps else None,
        use=use.gpu if has_use else None,
        memory_use=use.memory if has_use else None,
        held=held,
    )


def _held(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> int | None:
    newer, older = _MemoryV2(version=ctypes.sizeof(_MemoryV2) | 2 << 24), _Memory()
    if _optional(nvml, "nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(newer)):
        used = int(newer.used)
    elif _optional(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(older)):
        used = int(older.used)
    else:
        return None
    for process in _processes(nvml, handle):
        if _is_of_others(process.pid):
            if process.used == _NOT_AVAILABLE:
                return None
            used -= int(process.used)
    return max(0, used)


def _processes(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> list[_Process]:
    for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
        count = ctypes.c_uint(64)
        for _ in range(3):
            found = (_Process * count.value)()
            try:
                _call(nvml, name, handle, ctypes.byref(count), found)
                return list(found[: count.value])
            except _NvmlError as error:
                if error.code in _BROKEN:
                    raise
                if error.code != _INSUFFICIENT_SIZE:
                    break
                count = ctypes.c_uint(count.value + 16)
    return []


def _is_of_others(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            tag = Environ(file.read()).get(TAG_VARIABLE) or ""
    except PermissionError:
        return True
    except OSError:
        return False  # gone: the driver has not given its memory back yet
    own = os.environ.get(TAG_VARIABLE, "").rpartition(":")[0]
    if not tag and ((proc := look_at(pid)) is None or proc.is_dead):
        return False  # a process of which only its entry is left has an empty environment
    return not own or tag.rpartition(":")[0] != own


def _optional(nvml: ctypes.CDLL, name: str, *arguments: Any) -> bool:
    """Many GPUs have no ECC, older ones remap no rows, and an older library knows no such figure."""
    try:
        _call(nvml, name, *arguments)
    except _NvmlError as error:
        if error.code in _BROKEN:
            raise
        return False
    return True


def gpus_from_json(text: str | bytes) -> GpuFacts:
    """Anything else than the program's line is an error: a crash of the library, say."""
    try:
        return codec.loads(GpuFacts, text)
    except codec.UnreadableRecordError:
        return GpuFacts(error="asking it failed")


def print_gpus() -> None:
    """Optional arguments: seconds, and ``UUID=BYTES,...``, as of `read_gpus`."""
    within, before = [*sys.argv[1:3], "0", ""][:2] if len(sys.argv) > 2 else ["0", ""]
    pairs = (part.partition("=") for part in before.split(",") if part)
    facts = read_gpus(before={uuid: int(held) for uuid, _, held in pairs}, within=float(within))
    sys.stdout.write(codec.dumps(facts) + "\n")
