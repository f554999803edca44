"""GPUs by NVML: the real program against a library with NVML's interface, built here and told what to answer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hpc_elastic.agent.health import GpuDevice, GpuFacts, HealthPlan, HealthVerdict
from hpc_elastic.agent.health_checks import HealthChecks, HealthSite
from hpc_elastic.agent.health_gpu import from_json
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.self_command import module_command
from hpc_elastic.options.machine import workers_here
from hpc_elastic.run.option_values import Check
from hpc_elastic.workers.spawn import Inherited

# Signatures and codes as in NVIDIA's nvml.h (API 12). FAKE_NVML: "index:key=value,...;index:..." with keys ecc, pages,
# pending, failed, handle (a code) and uuid; FAKE_NVML_INIT: what nvmlInit_v2 returns, or "hang".
_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct nvmlDevice_st { int index; } *nvmlDevice_t;
typedef int nvmlReturn_t;
static struct nvmlDevice_st devices[16];
static int value(int index, const char *key, int otherwise) {
    const char *text = getenv("FAKE_NVML");
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
    const char *text = getenv("FAKE_NVML");
    *count = text && *text ? 1 : 0;
    for (; text && *text; text++) *count += *text == ';';
    return 0;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    devices[index].index = index;
    *device = &devices[index];
    return value(index, "handle", 0);
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
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with libnvidia-ml.so.1: ``new``, and ``old``, which knows nothing of remapped rows."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler: the GPU checks can't be tested (apt-get install gcc)")
        pytest.skip("no C compiler (apt-get install gcc)")
    found = {}
    for name, flags in (("new", []), ("old", ["-DOLD"])):
        folder = tmp_path_factory.mktemp(name)
        (folder / "nvml.c").write_text(_SOURCE)
        target = str(folder / "libnvidia-ml.so.1")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-Wall", "-Werror", *flags, "-o", target, str(folder / "nvml.c")], check=True
        )
        found[name] = str(folder)
    return found


def ask(library: str, **environ: str) -> GpuFacts:
    argv = module_command("hpc_elastic.agent.health_gpu", "main")
    env = {**os.environ, "LD_LIBRARY_PATH": library, **environ}
    return from_json(subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=False).stdout)


def test_what_nvml_says(libraries: dict[str, str], tmp_path: Path) -> None:
    facts = ask(
        libraries["new"], FAKE_NVML="0:ecc=0;1:ecc=3;2:ecc=-3,pages=1;3:pending=1;4:failed=1;5:handle=15;6:ecc=-15"
    )
    uuids = [f"GPU-{index:08d}-0000-0000-0000-000000000000" for index in range(7)]
    assert facts == GpuFacts(
        devices=(
            GpuDevice(index=0, uuid=uuids[0], uncorrectable=0, waits_for_reset=False, remap_failed=False),
            GpuDevice(index=1, uuid=uuids[1], uncorrectable=3, waits_for_reset=False, remap_failed=False),
            GpuDevice(index=2, uuid=uuids[2], uncorrectable=None, waits_for_reset=True, remap_failed=False),
            GpuDevice(index=3, uuid=uuids[3], uncorrectable=0, waits_for_reset=True, remap_failed=False),
            GpuDevice(index=4, uuid=uuids[4], uncorrectable=0, waits_for_reset=False, remap_failed=True),
            GpuDevice(index=5, error="GPU is lost"),
            GpuDevice(index=6, error="GPU is lost"),
        )
    )
    old = ask(libraries["old"], FAKE_NVML="0:pages=0")
    assert old.devices[0].remap_failed is None
    assert ask(libraries["new"], FAKE_NVML="", FAKE_NVML_INIT="9") == GpuFacts(error="the driver is not loaded")
    assert ask(libraries["new"], FAKE_NVML="0:", FAKE_NVML_INIT="crash").error == "asking it failed"
    assert not ask(str(tmp_path)).is_there


def test_the_workers_of_a_machine_are_its_gpus(libraries: dict[str, str]) -> None:
    """``--nproc-per-node gpu`` without Slurm."""
    env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    env |= {"LD_LIBRARY_PATH": libraries["new"], "FAKE_NVML": "0:;1:;2:"}
    assert workers_here("gpu", env) == workers_here("auto", env) == 3
    assert workers_here("gpu", {**env, "CUDA_VISIBLE_DEVICES": "2,0"}) == 2
    assert workers_here("auto", {**env, "FAKE_NVML_INIT": "9"}) == len(os.sched_getaffinity(0))


def verdict_of(library: str, *, given: int, seconds: float = 30.0, **environ: str) -> HealthVerdict:
    checks = HealthChecks(
        HealthPlan(limits={Check.GPU: 1}),
        HealthSite(
            environ={**os.environ, "LD_LIBRARY_PATH": library, **environ},
            inherited=Inherited(umask=0o077, core_limit=(0, 0), subreaper=False),
            gpus_given=given,
        ),
        clock=SystemClock(),
    )
    checks.begin(-1)
    checks.wait(seconds)
    found = checks.take()
    checks.close()
    assert not checks.pids
    assert found is not None
    return found


def test_a_node_with_a_broken_gpu_is_unfit(libraries: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    library = libraries["new"]
    assert verdict_of(library, given=2, FAKE_NVML="0:;1:").is_healthy
    bad = verdict_of(library, given=3, FAKE_NVML="0:;1:;2:ecc=3")
    assert bad.reason == "health check failed: GPU 2 has 3 uncorrectable ECC errors"
    assert verdict_of(library, given=0, FAKE_NVML="0:ecc=3").is_healthy
    monkeypatch.setattr("hpc_elastic.agent.health_checks.GPU_SECONDS", 0.5)
    hung = verdict_of(library, given=1, FAKE_NVML="0:", FAKE_NVML_INIT="hang")
    assert hung.reason == "health check failed: NVML has not answered for 0.5 s"
