"""A node's GPUs as NVML sees them. Run as a program of its own, whose one line of output is JSON.

A process of its own, since a driver in trouble can hold the process that asks it in the kernel forever, and since an
agent that loaded the library would carry it for the whole run. Names, arguments and codes: NVIDIA's nvml.h.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from hpc_elastic.agent.health import GpuDevice, GpuFacts, still_held
from hpc_elastic.base import codec
from hpc_elastic.workers.tree import TAG_VARIABLE, Environ, look_at

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


def from_json(text: str | bytes) -> GpuFacts:
    """Anything else than the program's line is an error: a crash of the library, say."""
    try:
        return codec.loads(GpuFacts, text)
    except codec.UnreadableRecordError:
        return GpuFacts(error="asking it failed")


def main() -> None:
    """Optional arguments: seconds, and ``UUID=BYTES,...``, as of `read_gpus`."""
    within, before = [*sys.argv[1:3], "0", ""][:2] if len(sys.argv) > 2 else ["0", ""]
    pairs = (part.partition("=") for part in before.split(",") if part)
    facts = read_gpus(before={uuid: int(held) for uuid, _, held in pairs}, within=float(within))
    sys.stdout.write(codec.dumps(facts) + "\n")
