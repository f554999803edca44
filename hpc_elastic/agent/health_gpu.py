"""A node's GPUs as NVML sees them. Run as a program of its own, whose one line of output is JSON.

A process of its own, since a driver in trouble can hold the process that asks it in the kernel for ever, and since an
agent that loaded the library would carry it for the whole run. Names, arguments and codes: NVIDIA's nvml.h.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from hpc_elastic.agent.health import GpuDevice, GpuFacts
from hpc_elastic.base import codec

LIBRARY = "libnvidia-ml.so.1"
_UNCORRECTED = 1  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED
_VOLATILE = 0  # NVML_VOLATILE_ECC: since the driver was loaded
_UUID_BYTES = 96
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
"""nvmlReturn_t. What is not in here is shown by its number."""
_BROKEN = frozenset({9, 10, 11, 14, 15, 16, 17, 18, 999})
"""Of a single figure: the GPU does not work. Anything else: it has no such figure."""


class _NvmlError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
        self.text = _ERRORS.get(code, f"NVML error {code}")


def read_gpus(library: str = LIBRARY) -> GpuFacts:
    """Ask the driver. May hang."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return GpuFacts(is_there=False)
    try:
        _call(nvml, "nvmlInit_v2")
        count = ctypes.c_uint()
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        return GpuFacts(devices=tuple(_device(nvml, index) for index in range(count.value)))
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
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        _optional(nvml, "nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_UUID_BYTES))
        errors = ctypes.c_ulonglong()
        counts = _optional(nvml, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE, ctypes.byref(errors))
        pages = ctypes.c_int()  # nvmlEnableState_t
        retires = _optional(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle, ctypes.byref(pages))
        rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
        remaps = _optional(nvml, "nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, rows))
    except _NvmlError as error:
        return GpuDevice(index=index, error=error.text)
    pending = ([bool(pages.value)] if retires else []) + ([bool(rows[2].value)] if remaps else [])
    return GpuDevice(
        index=index,
        uuid=uuid.value.decode("ascii", "replace"),
        uncorrectable=errors.value if counts else None,
        waits_for_reset=any(pending) if pending else None,
        remap_failed=bool(rows[3].value) if remaps else None,
    )


def _optional(nvml: ctypes.CDLL, name: str, *arguments: Any) -> bool:
    """Whether this GPU has that figure (many have no ECC, older ones remap no rows, or an older library knows none)."""
    try:
        _call(nvml, name, *arguments)
    except _NvmlError as error:
        if error.code in _BROKEN:
            raise
        return False
    return True


def from_json(text: str) -> GpuFacts:
    """What the program printed. Anything else is an error of it: a crash of the library, say."""
    try:
        return codec.loads(GpuFacts, text)
    except codec.UnreadableRecordError:
        return GpuFacts(error="asking it failed")


def main() -> None:
    sys.stdout.write(codec.dumps(read_gpus()) + "\n")
