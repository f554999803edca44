"""Nodes and environments that differ, launchers around the script, and failures with the default options."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, TORCH, Case

GROUP = "environments, launchers"
PLAIN = ENVIRON + MEET
NODE = 'node = int(os.environ["GROUP_RANK"])\n'
ON_NODE_1 = '#!/bin/bash\nif [ "$GROUP_RANK" = 1 ]; then {}\nfi\nexec python3 train.py\n'

CASES = (
    Case(
        "package-of-another-version",
        GROUP,
        PLAIN
        + NODE
        + """\
sys.path.insert(0, f"site{node}")
import fastlib
fastlib.fused_norm(1)
time.sleep(60)
""",
        ranks=(2, 3),
        says=("module 'fastlib' has no attribute 'fused_norm'",),
        files={
            "site0/fastlib.py": "def fused_norm(x):\n    return x\n",
            "site1/fastlib.py": "def norm(x):\n    return x\n",
        },
    ),
    Case(
        "variable-missing-on-a-node",
        GROUP,
        PLAIN
        + """\
os.environ["DATA_ROOT"]
time.sleep(60)
""",
        ranks=(0, 1),
        says=("KeyError: 'DATA_ROOT'",),
        command=["--no-python", "./start.sh"],
        files={"start.sh": ON_NODE_1.format("export DATA_ROOT=/data")},
    ),
    Case(
        "interpreter-missing-on-a-node",
        GROUP,
        PLAIN + "time.sleep(60)\n",
        ranks=(2, 3),
        says=("/opt/site/py312/bin/python", "No such file"),
        command=["--no-python", "./start.sh"],
        files={"start.sh": ON_NODE_1.format("exec /opt/site/py312/bin/python train.py")},
    ),
    Case(
        "few-descriptors-on-a-node",
        GROUP,
        PLAIN
        + """\
kept = [open("train.py") for _ in range(100)]
time.sleep(60)
""",
        ranks=(2, 3),
        says=("Too many open files",),
        command=["--no-python", "./start.sh"],
        files={"start.sh": ON_NODE_1.format("ulimit -n 64")},
    ),
    Case(
        "instruction-missing-on-a-node",
        GROUP,
        PLAIN
        + NODE
        + """\
import signal
if node == 1:
    os.kill(os.getpid(), signal.SIGILL)
time.sleep(60)
""",
        ranks=(2, 3),
        says=("SIGILL",),
    ),
    Case(
        "network-interface-missing-on-a-node",
        GROUP,
        TORCH
        + NODE
        + """\
if node == 1:
    os.environ["GLOO_SOCKET_IFNAME"] = "ib0"
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
dist.barrier()
time.sleep(60)
""",
        ranks=(2, 3),
        says=("ib0",),
    ),
    Case(
        "world-size-of-one-node",
        GROUP,
        TORCH
        + """\
os.environ["WORLD_SIZE"] = "2"
dist.init_process_group("gloo", timeout=timedelta(seconds=8))
dist.barrier()
time.sleep(30)
""",
        ranks=(2, 3),
        says=("rank", "world", "ended"),
    ),
    Case(
        "launcher-drops-the-environment",
        GROUP,
        ENVIRON + "time.sleep(60)\n",
        ranks=(0, 1, 2, 3),
        says=("KeyError: 'RANK'",),
        command=["--no-python", "./start.sh"],
        files={"start.sh": '#!/bin/bash\nexec env -i PATH="$PATH" python3 train.py\n'},
    ),
    Case(
        "launcher-raises-for-its-child",
        GROUP,
        PLAIN
        + """\
import subprocess
def launch(command):
    process = subprocess.Popen(command)
    process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(returncode=process.returncode, cmd=command)
launch([sys.executable, "real.py"])
""",
        ranks=(2,),
        says=("mixing ratio of 'code' is 1.5",),
        files={
            "real.py": ENVIRON
            + "def mix():\n    raise ValueError(\"mixing ratio of 'code' is 1.5\")\n"
            + "if rank == 2:\n    mix()\ntime.sleep(60)\n"
        },
    ),
    Case(
        "launcher-hands-the-signal-on",
        GROUP,
        PLAIN
        + """\
import signal, subprocess
code = subprocess.call([sys.executable, "real.py"])
sys.exit(code if code >= 0 else 128 - code)
""",
        ranks=(1,),
        says=("SIGSEGV", "Segmentation fault"),
        files={"real.py": ENVIRON + "if rank == 1:\n    os.kill(os.getpid(), 11)\ntime.sleep(60)\n"},
    ),
    Case(
        "spawned-process-is-killed",
        GROUP,
        TORCH
        + MEET
        + """\
import torch.multiprocessing as mp
def feed(n):
    os.kill(os.getpid(), 11)
if __name__ == "__main__":
    if rank == 3:
        mp.spawn(feed, nprocs=1)
    time.sleep(60)
""",
        ranks=(3,),
        says=("terminated with signal SIGSEGV",),
    ),
    Case(
        "module-that-is-no-package",
        GROUP,
        "from .model import build\nbuild()\n",
        ranks=(0, 1, 2, 3),
        says=("attempted relative import with no known parent package",),
    ),
    Case(
        "script-mistyped-in-a-wrapper",
        GROUP,
        "pass\n",
        ranks=(0, 1, 2, 3),
        says=("can't open file",),
        command=["--no-python", "./start.sh"],
        files={"start.sh": "#!/bin/bash\nset -x\nmodule_list=none\npython3 trian.py --lr 0.1\n"},
    ),
    Case(
        "trap-prints-after-the-error",
        GROUP,
        PLAIN
        + """\
if rank == 0:
    raise RuntimeError("tokenizer returned an empty batch")
time.sleep(60)
""",
        ranks=(0,),
        says=("tokenizer returned an empty batch",),
        command=["--no-python", "./start.sh"],
        files={
            "start.sh": "#!/bin/bash\nset -eE\ntrap 'echo \"error: $BASH_COMMAND failed with $?\" >&2' ERR\n"
            "python3 train.py\necho done\n"
        },
    ),
    Case(
        "no-compiler-for-torch-compile",
        GROUP,
        TORCH
        + MEET
        + """\
@torch.compile
def step(x):
    return torch.sin(x) + torch.cos(x)
step(torch.ones(1000))
time.sleep(60)
""",
        ranks=(0, 1, 2, 3),
        says=("compiler",),
        environ={"CXX": "/opt/no/such/g++"},
    ),
    Case(
        "graph-break-under-fullgraph",
        GROUP,
        TORCH
        + MEET
        + """\
@torch.compile(fullgraph=True, backend="eager")
def step(x):
    if x.sum().item() > 3:
        return x + 1
    return x
if rank == 1:
    step(torch.ones(10))
time.sleep(60)
""",
        ranks=(1,),
        says=("data-dependent", "Unsupported", "item"),
    ),
    Case(
        "hub-cannot-be-reached",
        GROUP,
        PLAIN
        + """\
import urllib.request
def fetch(name):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:9/{name}", timeout=2)
    except OSError as error:
        raise EnvironmentError(
            f"We couldn't connect to 'https://hub.example' to load the files of {name}, and couldn't find them in the"
            " cached files. Check your internet connection or see how to run the library in offline mode."
        ) from error
if rank == 2:
    fetch("tiny-gpt")
time.sleep(60)
""",
        ranks=(2,),
        says=("Connection refused", "We couldn't connect"),
    ),
    Case(
        "pickled-class-has-moved",
        GROUP,
        PLAIN
        + """\
import pickle
if rank == 1:
    pickle.loads(b"cold_package.schedules\\nCosine\\n.")
time.sleep(60)
""",
        ranks=(1,),
        says=("No module named 'old_package'",),
    ),
    Case(
        "default-options-and-a-bug",
        GROUP,
        GLOO
        + """\
def head(width):
    assert width % 64 == 0, f"width {width} is no multiple of 64"
if rank == 3:
    head(100)
dist.all_reduce(torch.ones(1))
time.sleep(60)
""",
        ranks=(3,),
        says=("width 100 is no multiple of 64",),
        options=("--max-restarts", "3"),
    ),
    Case(
        "another-rank-each-time",
        GROUP,
        PLAIN
        + """\
n = len([f for f in os.listdir(".") if f.startswith("tried")])
time.sleep(0.5)
if rank == 1 and n == 0:
    open("tried-1", "w").close()
    raise ValueError("shard 4 has no header")
if rank == 2 and n == 1:
    open("tried-2", "w").close()
    os._exit(41)
if rank == 3 and n == 2:
    raise OverflowError("int too large to convert in step counter")
time.sleep(20)
""",
        ranks=(3,),
        says=("int too large to convert in step counter",),
        options=("--max-restarts", "2"),
    ),
)
