"""What the tests on a GPU stand on: what this machine has, runs on it, and the table of what was seen.

::

    python -m tests.rigs.gpu probe                  what torch, CUDA and NCCL are here, as JSON
    python -m tests.rigs.gpu share WAY RANK PORT    one of two ranks on one GPU, which sum over NCCL
    python -m tests.rigs.gpu memory UUID            the GPU's memory in use: monotonic seconds and bytes, each 10 ms

Each is a process of its own: a driver in trouble may hold for ever what calls it, and a CUDA context takes memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.rigs.inprocess_ranks import free_ports
from tests.rigs.local_run import ROOT, LocalRun

PROBE_SECONDS = 240.0
"""The first start of torch on a machine reads gigabytes of libraries."""
SHARE_SECONDS = 45.0
"""For one way to share a GPU."""
RUN_SECONDS = 150.0
"""For one run; most take 10 s."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    reason: str = ""
    """Why no test can run here; empty: they can."""
    gpu: str = "none"
    count: int = 0
    uuid: str = ""
    """Of the first GPU; empty where torch does not say."""
    driver: str = "none"
    torch: str = "none"
    nccl: str = "none"
    python: str = platform.python_version()

    def rows(self) -> list[tuple[str, str]]:
        gpu = self.gpu if self.count < 2 else f"{self.count} × {self.gpu}"
        names = (("GPU", gpu), ("driver", self.driver), ("PyTorch", f"{self.torch}, Python {self.python}"))
        return [*names, ("NCCL", self.nccl), *([("not run", self.reason)] if self.reason else [])]


def find_machine() -> Machine:
    """Look at this machine, in bounded time."""
    try:
        done = _own("probe", seconds=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return Machine(reason=f"needs a GPU: CUDA did not answer within {PROBE_SECONDS:g} s")
    try:
        return Machine(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return Machine(reason=f"needs a GPU: the look at it ended with {done.returncode}: {done.stderr.strip()[-300:]}")


def _own(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.rigs.gpu", *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=seconds)


def _probe() -> Machine:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Machine(reason=f"needs torch: {error}")
    facts: dict[str, Any] = {"torch": str(torch.__version__), "driver": _driver()}
    if torch.version.cuda is None:
        return Machine(reason=f"needs a GPU and torch with CUDA: torch {torch.__version__} has none", **facts)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if not torch.cuda.is_available():
            why = f": {warned[-1].message}" if warned else ""
            return Machine(reason=f"needs a GPU: torch sees none{why}"[:400], **facts)
    with contextlib.suppress(Exception):  # built without it
        version = torch.cuda.nccl.version()
        facts["nccl"] = version if isinstance(version, str) else ".".join(map(str, version))
    try:
        properties = torch.cuda.get_device_properties(0)
        total = torch.ones(1000, device="cuda").sum().item()
    except RuntimeError as error:
        return Machine(reason=f"needs a GPU that works: {error}"[:400], **facts)
    uuid = str(getattr(properties, "uuid", ""))
    return Machine(
        reason="" if total == 1000 else f"needs a GPU that works: it counts {total} for 1000",
        gpu=f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.major}.{properties.minor}",
        count=torch.cuda.device_count(),
        uuid=f"GPU-{uuid}" if uuid and not uuid.startswith(("GPU-", "MIG-")) else uuid,
        **facts,
    )


def _driver() -> str:
    try:
        nvml = _nvml()
        text = ctypes.create_string_buffer(80)
        nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        return text.value.decode()
    except OSError:
        return "none"


def _nvml() -> ctypes.CDLL:
    """Raises OSError where there is none."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml.nvmlInit_v2() != 0:
        raise OSError("NVML does not work")
    return nvml


# -- several ranks on one GPU ----------------------------------------------------------------------------------------


def try_sharing(way: str, folder: Path) -> str:
    """Why two ranks of NCCL can't sum on one GPU in this way (`torch_ranks.SHARING`); empty: they can."""
    port, paths, ranks = str(free_ports()), [folder / f"{way}-{rank}.txt" for rank in range(2)], []
    for rank, path in enumerate(paths):
        argv = [sys.executable, "-m", "tests.rigs.gpu", "share", way, str(rank), port]
        with open(path, "w") as output:
            ranks.append(subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output))
    deadline = time.monotonic() + SHARE_SECONDS
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if any(rank.poll() for rank in ranks):
            deadline = min(deadline, time.monotonic() + 3.0)  # the other may wait for this one
        time.sleep(0.05)
    codes = [rank.poll() for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.wait()
    for code, path in zip(codes, paths, strict=True):
        if code:
            lines = path.read_text(errors="replace").strip().splitlines()
            return lines[-1][:300] if lines else f"exit code {code}"
    return "" if codes == [0, 0] else f"no sum within {SHARE_SECONDS:g} s"


def _share(way: str, rank: str, port: str) -> None:
    import torch
    import torch.distributed as dist

    from tests.rigs.torch_ranks import join

    os.environ.update(RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    try:
        device = join("nccl", "cuda", way, seconds=SHARE_SECONDS)
        value = torch.ones(1000, device=device)
        for _ in range(3):
            dist.all_reduce(value)
        total = value.sum().item()
        why = "" if total == 8000 else f"the sum is {total}"
    except RuntimeError as error:
        why = str(error).partition("Last error:")[2] or str(error)
    print(" ".join(why.split()), flush=True)
    os._exit(1 if why else 0)  # what is tried is the sum: not how a group ends, nor what torch says of that


# -- runs ------------------------------------------------------------------------------------------------------------


class GpuRun(LocalRun):
    """A run whose libraries may leave caches in HOME and TMPDIR: CUDA's, NCCL's and torch's are none of ours."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recorder = self.folder / "recorder"
        self.recorder.mkdir(exist_ok=True)
        dump = str(self.recorder / "dump-")
        # The flight recorder's names in torch 2.4, and those that came later.
        recorder = dict.fromkeys(("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"), dump)
        recorder |= dict.fromkeys(("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"), "2000")
        recorder |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "5000"}
        recorder["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = str(self.recorder / "pipe-")
        cache = str(self.folder / "cuda-cache")
        self.environ = {"CUDA_CACHE_PATH": cache, "OMP_NUM_THREADS": "1", **recorder, **self.environ}

    def flight_recorder_dumps(self) -> list[Path]:
        return sorted(self.recorder.glob("dump-*"))

    def left(self) -> list[str]:
        own = (f"file {self.tmp}/", f"file {self.folder / 'home'}/")
        return [item for item in super().left() if not item.startswith(own)]

    def cause(self) -> dict[str, Any]:
        """What the report says of the cause, once the run has ended."""
        self.finish(within=RUN_SECONDS)
        failure = self.report()["verdict"]["failure"]
        assert failure, self.explain()
        return {key: failure[key] for key in ("failure_class", "reason", "category", "retryable", "global_rank")}

    def explain(self) -> str:
        """The report, the job log and what the workers printed: for a reader without access to this machine."""
        verdicts = [path.read_text(errors="replace") for path in self.runs.rglob("report.json")]
        summaries = [str(json.loads(text)["verdict"]["summary"]) for text in verdicts] or ["no report"]
        texts = [f"the run says: {'; '.join(summaries)}\n{self.log_tail()}"]
        for path in sorted(self.runs.rglob("stderr*")):
            texts.append(f"--- {path}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-30:]))
        return "\n".join(texts)


@contextlib.contextmanager
def memory_watched(machine: Machine, folder: Path) -> Iterator[Path]:
    """While it lasts, the memory in use of the first GPU is written to a file; see `memory_readings`."""
    found = folder / "memory.txt"
    argv = [sys.executable, "-m", "tests.rigs.gpu", "memory", machine.uuid]
    with open(found, "w") as out, subprocess.Popen(argv, cwd=ROOT, stdout=out) as process:
        try:
            yield found
        finally:
            process.kill()


def memory_readings(path: Path) -> list[tuple[float, int]]:
    """Monotonic seconds and bytes in use; none where NVML does not say."""
    lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(float(seconds), int(used)) for seconds, used in lines]


def _watch_memory(uuid: str) -> None:
    class Memory(ctypes.Structure):
        _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))

    nvml, handle, memory = _nvml(), ctypes.c_void_p(), Memory()
    if not uuid or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(handle))
    while os.getppid() != 1 and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
        print(time.monotonic(), memory.used, flush=True)
        time.sleep(0.01)


# -- what was seen ---------------------------------------------------------------------------------------------------


def render(machine: Machine, *, day: str, seen: Sequence[tuple[str, str]], outcomes: Mapping[str, str]) -> str:
    """The table for docs/reference/versions.md. `outcomes`: test → passed, failed: … or skipped: …"""
    counts = [
        (sum(text.startswith(kind) for text in outcomes.values()), kind) for kind in ("passed", "failed", "skipped")
    ]
    rows = [*machine.rows(), ("tests", ", ".join(f"{count} {kind}" for count, kind in counts))]
    rows += seen
    said = machine.reason or "passed"  # one reason for all stands in the table once
    rows += [(name, text) for name, text in outcomes.items() if text != "passed" and said not in text]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join([f"| | {day} |", "| --- | --- |", *(f"| {first} | {second} |" for first, second in cells)]) + "\n"


def main(argv: Sequence[str]) -> None:
    if argv[0] == "probe":
        print(json.dumps(asdict(_probe())))
    elif argv[0] == "share":
        _share(*argv[1:])
    else:
        _watch_memory(argv[1])


if __name__ == "__main__":
    main(sys.argv[1:])
