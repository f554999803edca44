"""Full disks, read-only mounts and limits, in the words of the libraries that meet them."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, MEET, TORCH, Case

GROUP = "limits, full disks"
PLAIN = ENVIRON + MEET

CASES = (
    Case(
        "stdout-on-a-full-disk",
        GROUP,
        PLAIN
        + """\
if rank == 2:
    sys.stdout = open("scratch/out.log", "w")
    print("x" * 3_000_000)
    raise SystemExit(0)
time.sleep(60)
""",
        ranks=(2,),
        says=("No space left on device",),
        tmpfs={"scratch": "1m"},
    ),
    Case(
        "numpy-writes-on-a-full-disk",
        GROUP,
        PLAIN
        + """\
if rank == 1:
    import numpy
    numpy.save("scratch/moments.npy", numpy.ones(1_000_000))
time.sleep(60)
""",
        ranks=(1,),
        says=("requested and",),
        tmpfs={"scratch": "1m"},
    ),
    Case(
        "no-inode-left",
        GROUP,
        PLAIN
        + """\
if rank == 3:
    for n in range(100):
        open(f"scratch/{n}.idx", "w").write("1")
time.sleep(60)
""",
        ranks=(3,),
        says=("No space left on device",),
        tmpfs={"scratch": "1m,nr_inodes=20"},
    ),
    Case(
        "database-on-a-full-disk",
        GROUP,
        PLAIN
        + """\
if rank == 0:
    import sqlite3
    base = sqlite3.connect("scratch/log.db")
    base.execute("create table log (text)")
    for n in range(100):
        base.execute("insert into log values (?)", ("x" * 100_000,))
        base.commit()
time.sleep(60)
""",
        ranks=(0,),
        says=("database or disk is full",),
        tmpfs={"scratch": "1m"},
    ),
    Case(
        "mounted-read-only",
        GROUP,
        PLAIN
        + """\
if rank == 0:
    import pathlib
    pathlib.Path("scratch/ckpt").mkdir()
time.sleep(60)
""",
        ranks=(0,),
        says=("Read-only file system",),
        tmpfs={"scratch": "1m,ro"},
    ),
    Case(
        "no-folder-for-temporary-files",
        GROUP,
        PLAIN
        + """\
if rank == 1:
    import tempfile
    tempfile.tempdir = None
    tempfile._candidate_tempdir_list = lambda: ["scratch"]
    open("scratch/fill", "wb", buffering=0).write(b"x" * 2_000_000)
    tempfile.TemporaryDirectory()
time.sleep(60)
""",
        ranks=(1,),
        says=("No usable temporary directory found",),
        tmpfs={"scratch": "1m"},
    ),
    Case(
        "saves-in-a-thread-on-a-full-disk",
        GROUP,
        TORCH
        + MEET
        + """\
import threading
failed = []
def save():
    try:
        torch.save({"w": torch.ones(1_000_000)}, "scratch/step.pt")
    except BaseException as error:
        failed.append(error)
        raise
if rank == 2:
    threading.Thread(target=save).start()
    time.sleep(1.5)
    if failed:
        raise RuntimeError("the checkpoint of step 100 was not written")
time.sleep(60)
""",
        ranks=(2,),
        says=("No space left", "PytorchStreamWriter", "iostream", "unexpected pos"),
        tmpfs={"scratch": "1m"},
    ),
    Case(
        "log-file-on-a-full-disk-is-noise",
        GROUP,
        PLAIN
        + """\
import logging
if rank == 3:
    logging.getLogger().addHandler(logging.FileHandler("scratch/run.log"))
    open("scratch/fill", "wb", buffering=0).write(b"x" * 2_000_000)
    for step in range(3):
        logging.getLogger().warning("step %d " + "y" * 9000, step)
    mapping = {"adamw": 1}
    mapping["adamW"]
time.sleep(60)
""",
        ranks=(3,),
        says=("KeyError: 'adamW'",),
        tmpfs={"scratch": "1m"},
    ),
    Case(
        "home-is-no-folder",
        GROUP,
        PLAIN
        + """\
import pathlib
(pathlib.Path.home() / ".cache" / "tok").mkdir(parents=True, exist_ok=True)
time.sleep(60)
""",
        ranks=(0, 1, 2, 3),
        says=("Not a directory",),
        environ={"HOME": "/dev/null"},
    ),
    Case(
        "file-name-too-long",
        GROUP,
        PLAIN
        + """\
if rank == 1:
    open("run-" + "lr0.1-" * 60 + ".json", "w")
time.sleep(60)
""",
        ranks=(1,),
        says=("File name too long",),
    ),
    Case(
        "memory-map-of-a-short-file",
        GROUP,
        PLAIN
        + """\
if rank == 2:
    import numpy
    open("tokens.bin", "wb").write(b"x" * 100)
    numpy.memmap("tokens.bin", dtype="uint16", mode="r", shape=(4096,))
time.sleep(60)
""",
        ranks=(2,),
        says=("mmap length is greater than file size",),
    ),
    Case(
        "child-over-its-processor-time",
        GROUP,
        PLAIN
        + """\
import resource, subprocess
if rank == 0:
    limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
    subprocess.run([sys.executable, "-c", "while True: pass"], preexec_fn=limit, check=True)
time.sleep(60)
""",
        ranks=(0,),
        says=("SIGXCPU",),
    ),
    Case(
        "loader-out-of-descriptors",
        GROUP,
        TORCH
        + MEET
        + """\
import resource
from torch.utils.data import DataLoader
if rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    kept = [batch for batch in DataLoader([torch.ones(4)] * 400, num_workers=1)]
time.sleep(60)
""",
        ranks=(1,),
        says=("Too many open files", "ancdata"),
    ),
    Case(
        "stack-limit-in-c",
        GROUP,
        PLAIN
        + """\
import re
if rank == 3:
    import pickle, resource
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 18, 1 << 18))
    sys.setrecursionlimit(10**7)
    class Node:
        def __reduce__(self):
            return (Node, (Node(),))
    def nest(n):
        return sorted([1], key=lambda _: nest(n + 1))
    import threading
    threading.stack_size(1 << 16)
    thread = threading.Thread(target=nest, args=(0,)); thread.start(); thread.join()
time.sleep(60)
""",
        ranks=(3,),
        says=("SIGSEGV",),
    ),
    Case(
        "lock-file-on-a-read-only-cache",
        GROUP,
        PLAIN
        + """\
def cached(name):
    try:
        return open(f"scratch/{name}").read()
    except FileNotFoundError:
        with open(f"scratch/{name}.lock", "w") as lock:
            return lock.name
cached("tokenizer.json")
time.sleep(60)
""",
        ranks=(0, 1, 2, 3),
        says=("Read-only file system",),
        tmpfs={"scratch": "1m,ro"},
    ),
)
