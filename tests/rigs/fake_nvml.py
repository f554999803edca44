"""A library with NVML's interface, built here, that answers as the environment has it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.rigs.requirements import require

# Signatures and codes as in NVIDIA's nvml.h (API 12). FAKE_NVML: "index:key=value,...;index:..." with keys ecc, pages,
# pending, failed, handle (a code) and h100 (its name); FAKE_NVML_INIT: what nvmlInit_v2 returns,
# or "hang".
_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct nvmlDevice_st { int index; } *nvmlDevice_t;
typedef int nvmlReturn_t;
static struct nvmlDevice_st devices[16];
static const char *state(void) {  /* FAKE_NVML_FILE: what it holds counts, as it is now */
    static char text[4096];
    const char *path = getenv("FAKE_NVML_FILE");
    FILE *file = path ? fopen(path, "r") : 0;
    if (!file) return getenv("FAKE_NVML");
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    return text;
}
static int value(int index, const char *key, int otherwise) {
    const char *text = state();
    char head[16], name[32];
    snprintf(head, sizeof head, "%d:", index);
    snprintf(name, sizeof name, "%s=", key);
    while (text && *text) {
        const char *end = strchr(text, ';');
        size_t length = end ? (size_t)(end - text) : strlen(text);
        if (!strncmp(text, head, strlen(head))) {
            const char *found = strstr(text, name);
            return found && found < text + length ? atoi(found + strlen(name)) : otherwise;
        }
        text = end ? end + 1 : 0;
    }
    return otherwise;
}
nvmlReturn_t nvmlInit_v2(void) {
    const char *text = getenv("FAKE_NVML_INIT");
    if (text && !strcmp(text, "hang")) for (;;) sleep(1000);
    if (text && !strcmp(text, "crash")) abort();
    return text ? atoi(text) : 0;
}
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    const char *text = state();
    *count = text && *text ? 1 : 0;
    for (; text && *text; text++) *count += *text == ';';
    return 0;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    devices[index].index = index;
    *device = &devices[index];
    return value(index, "handle", 0);
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    if (length < 80) return 7;
    snprintf(version, length, "%s", getenv("FAKE_NVML_DRIVER") ? getenv("FAKE_NVML_DRIVER") : "");
    return 0;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    if (length < 96) return 7;
    snprintf(name, length, "%s", value(device->index, "h100", 0) ? "NVIDIA H100 80GB HBM3" : "");
    return 0;
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    if (length < 80) return 7;
    snprintf(uuid, length, "GPU-%08d-0000-0000-0000-000000000000", device->index);
    return 0;
}
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter, unsigned long long *count) {
    if (type != 1 || counter != 0) return 2;
    int found = value(device->index, "ecc", 0);
    *count = found < 0 ? 0 : found;
    return found < 0 ? -found : 0;
}
nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, int *pending) {
    *pending = value(device->index, "pages", -1);
    return *pending < 0 ? 3 : 0;
}
#ifndef OLD
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                       unsigned int *pending, unsigned int *failed) {
    *corrected = 5; *uncorrected = 7;
    *pending = value(device->index, "pending", 0);
    *failed = value(device->index, "failed", 0);
    return 0;
}
#endif
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *found) {
    int gpu = value(device->index, "busy", -1);
    if (gpu < 0) return 3;  /* MIG, and vGPUs */
    found->gpu = gpu;
    found->memory = value(device->index, "mem", 0);
    return 0;
}
#define MIB(key, otherwise) ((unsigned long long)value(device->index, key, otherwise) << 20)
#ifndef OLD
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    if (memory->version != (sizeof *memory | 2 << 24)) return 25;
    if (value(device->index, "used", -1) < 0) return 3;
    memory->total = 81920ULL << 20; memory->reserved = 600ULL << 20;
    memory->used = MIB("used", 0);
    memory->free = memory->total - memory->reserved - memory->used;
    return 0;
}
#endif
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    if (value(device->index, "used", -1) < 0) return 3;
    memory->total = 81920ULL << 20;
    memory->used = MIB("used", 0) + (600ULL << 20);
    memory->free = memory->total - memory->used;
    return 0;
}
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } nvmlProcessInfo_t;
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *infos) {
    int pid = value(device->index, "pid", 0), used = value(device->index, "its", 0);
    if (pid && *count < 1) { *count = 1; return 7; }
    *count = pid ? 1 : 0;
    if (pid) {
        infos[0].pid = pid;
        infos[0].used = used < 0 ? ~0ULL : (unsigned long long)used << 20;
        infos[0].gi = infos[0].ci = 0xffffffff;
    }
    return 0;
}
"""


def build_nvml(folder: Path, *flags: str) -> str:
    """Make libnvidia-ml.so.1 in a folder, which is returned. Without a compiler the test is skipped; in CI it fails."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    require("NVML's stand-in", "" if compiler else "no C compiler (apt-get install gcc)")
    assert compiler is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvml.c").write_text(_SOURCE)
    target = str(folder / "libnvidia-ml.so.1")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", *flags, "-o", target, str(folder / "nvml.c")], check=True
    )
    return str(folder)
