"""Exit codes and the last words on stderr or stdout: argument parsers, aborts, glibc, wrappers, nested launchers."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, Case

GROUP = "exit codes, last words"
ALL = (0, 1, 2, 3)
_LIBC = "import ctypes\nlibc = ctypes.CDLL(None)\n"
_SLEEP = "time.sleep(60)\n"
_FAILS_ON_2 = (
    ENVIRON
    + MEET
    + """\
if rank == 2:
    raise RuntimeError("tokenizer and model disagree: 32000 != 32064")
time.sleep(60)
"""
)


def _abort(name: str, call: str, *says: str, rank: int = 1) -> Case:
    """A rank that the C library ends."""
    return Case(name, GROUP, ENVIRON + _LIBC + MEET + f"if rank == {rank}:\n    {call}\n" + _SLEEP, (rank,), says)


CASES = (
    Case(
        "argparse-unknown-option",
        GROUP,
        ENVIRON
        + """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
parser.parse_args()
""",
        ranks=ALL,
        says=("unrecognized arguments: --batchsize=32",),
        arguments=("--batchsize=32",),
    ),
    Case(
        "click-bad-choice",
        GROUP,
        ENVIRON
        + """\
import click
@click.command()
@click.option("--precision", type=click.Choice(["fp32", "bf16"]))
def main(precision):
    time.sleep(60)
main()
""",
        ranks=ALL,
        says=("'bf8' is not one of",),
        arguments=("--precision", "bf8"),
    ),
    Case(
        "sys-exit-with-text",
        GROUP,
        GLOO
        + """\
if rank == 3:
    sys.exit("config error: tensor_parallel=3 does not divide 4 ranks")
dist.all_reduce(torch.ones(2))
""",
        ranks=(3,),
        says=("tensor_parallel=3 does not divide",),
    ),
    Case(
        "only-stdout",
        GROUP,
        ENVIRON
        + MEET
        + """\
if rank == 2:
    print("step 0 loss 11.2")
    print("ERROR: tokenizer vocabulary (50257) does not match the checkpoint (32000)")
    sys.exit(3)
time.sleep(60)
""",
        ranks=(2,),
        says=("tokenizer vocabulary (50257)",),
    ),
    Case(
        "os-exit-after-a-log-line",
        GROUP,
        ENVIRON
        + """\
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
"""
        + MEET
        + """\
if rank == 0:
    logging.error("licence server refused a seat for user svc-train")
    os._exit(13)
time.sleep(60)
""",
        ranks=(0,),
        says=("licence server refused a seat",),
    ),
    Case(
        "exit-minus-one-after-warnings",
        GROUP,
        ENVIRON
        + """\
import warnings
"""
        + MEET
        + """\
if rank == 1:
    print("FATAL: no free slot in the KV cache (4096 of 4096 used)", file=sys.stderr)
    for number in range(3):
        warnings.warn_explicit(f"leaked semaphore object {number} at shutdown", UserWarning, "tracker.py", number + 1)
    sys.exit(-1)
time.sleep(60)
""",
        ranks=(1,),
        says=("no free slot in the KV cache",),
    ),
    _abort(
        "cpp-exception",
        """throw = ctypes.CDLL("libstdc++.so.6")._ZSt20__throw_out_of_rangePKc
    throw(b"expert 17 of 16")""",
        "expert 17 of 16",
    ),
    _abort(
        "double-free",
        """libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    block = libc.malloc(4000)
    libc.free(block)
    libc.free(block)""",
        "double free",
        rank=3,
    ),
    _abort(
        "heap-overflow",
        """libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    first, second = libc.malloc(3000), libc.malloc(3000)
    ctypes.memset(first, 0x41, 3100)
    libc.free(second)
    libc.free(first)""",
        # Added after a run: which of its checks glibc comes to first depends on what lies between the two blocks.
        "double free or corruption",
        "free(): invalid",
        "corrupted",
        "munmap_chunk()",
        "double free or corruption",  # which one glibc says depends on where its blocks lie
        rank=0,
    ),
    _abort(
        "assert-in-c",
        'libc.__assert_fail(b"slot < capacity", b"csrc/router.cpp", 218, b"dispatch")',
        "Assertion `slot < capacity' failed",
        rank=2,
    ),
    _abort("buffer-overflow", "libc.__chk_fail()", "buffer overflow detected"),
    _abort(
        "fatal-python-error",
        'ctypes.pythonapi.Py_FatalError(b"deallocating None in fused_adam")',
        "deallocating None in fused_adam",
        rank=3,
    ),
    Case(
        "abort-among-gloo-peers",
        GROUP,
        GLOO
        + _LIBC
        + """\
if rank == 1:
    libc.__assert_fail(b"numel % 128 == 0", b"csrc/quant_kernels.cpp", 77, b"pack_int4")
dist.all_reduce(torch.ones(2))
""",
        ranks=(1,),
        says=("Assertion `numel % 128 == 0' failed",),
    ),
    Case(
        "wrapper-with-tee",
        GROUP,
        _FAILS_ON_2,
        ranks=(2,),
        says=("tokenizer and model disagree",),
        command=("--no-python", "./launch.sh"),
        files={
            "launch.sh": """\
#!/bin/bash
set -o pipefail
python3 -u train.py 2>&1 | tee -a "log-$RANK.txt"
"""
        },
    ),
    Case(
        "wrapper-with-a-trailer",
        GROUP,
        _FAILS_ON_2,
        ranks=(2,),
        says=("tokenizer and model disagree",),
        command=("--no-python", "./launch.sh"),
        files={
            "launch.sh": """\
#!/bin/bash
python3 -u train.py
code=$?
[ $code = 0 ] || echo "ERROR env-run:execute(49): \\`env-run python train.py\\` failed. (See above for error)" >&2
exit $code
"""
        },
    ),
    Case(
        "tee-and-argparse",
        GROUP,
        """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--seq-len", type=int)
parser.parse_args()
""",
        ranks=ALL,
        says=("invalid int value: '4k'",),
        command=("--no-python", "./launch.sh"),
        files={
            "launch.sh": """\
#!/bin/bash
python3 -u train.py --seq-len 4k |& tee out-$RANK.log
exit ${PIPESTATUS[0]}
"""
        },
    ),
    Case(
        "wrapper-unbound-variable",
        GROUP,
        ENVIRON + _SLEEP,
        ranks=(1,),
        says=("SCRATCH_DIR: unbound variable",),
        command=("--no-python", "./launch.sh"),
        files={
            "launch.sh": """\
#!/bin/bash
set -euo pipefail
if [ "$RANK" = 1 ]; then sleep 1; cp index.bin "$SCRATCH_DIR/"; fi
exec python3 -u train.py
"""
        },
    ),
    Case(
        "wrapper-missing-environment",
        GROUP,
        ENVIRON + _SLEEP,
        ranks=ALL,
        says=("/opt/site/modules.sh: No such file or directory",),
        command=("--no-python", "./launch.sh"),
        files={
            "launch.sh": """\
#!/bin/bash
set -e
source /opt/site/modules.sh
exec python3 -u train.py
"""
        },
    ),
    Case(
        "command-not-found",
        GROUP,
        ENVIRON + _SLEEP,
        ranks=ALL,
        says=("pyhton3: not found", "pyhton3: command not found"),
        command=("--no-python", "./launch.sh"),
        files={"launch.sh": "#!/bin/bash\nexec pyhton3 -u train.py\n"},
    ),
    Case(
        # In place of a script that is not executable: hpc-elastic refuses that before anything starts. Mistaken at
        # first: the kernel's words, in place of which the report states what they mean.
        "missing-interpreter",
        GROUP,
        ENVIRON + _SLEEP,
        ranks=ALL,
        says=("/opt/site/bin/bash", "the interpreter that its first line ('#!') names is not"),
        command=("--no-python", "./launch.sh"),
        files={"launch.sh": "#!/opt/site/bin/bash\nexec python3 -u train.py\n"},
    ),
    Case(
        "nested-launcher",
        GROUP,
        ENVIRON
        + MEET
        + """\
import subprocess
own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
if rank == 1:
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "inner.py"],
        env=own,
        check=True,
    )
time.sleep(90)
""",
        ranks=(1,),
        says=("tokenizer.model is not a SentencePiece file",),
        files={"inner.py": 'raise OSError("tokenizer.model is not a SentencePiece file")\n'},
    ),
    Case(
        "missing-library",
        GROUP,
        ENVIRON
        + """\
import ctypes
ctypes.CDLL("libcudnn_graph.so.9")
""",
        ranks=ALL,
        says=("libcudnn_graph.so.9: cannot open shared object file",),
    ),
    Case(
        "missing-package",
        GROUP,
        ENVIRON + "import flash_attn_3\n",
        ranks=ALL,
        says=("No module named 'flash_attn_3'",),
        retryable=False,
    ),
    Case(
        "indentation-in-a-module",
        GROUP,
        ENVIRON + "import schedule\n",
        ranks=ALL,
        says=("expected an indented block",),
        files={"schedule.py": "def warmup(step):\nreturn step / 100\n"},
        retryable=False,
    ),
    Case(
        "unittest-like-runner",
        GROUP,
        ENVIRON
        + MEET
        + """\
def check(name, passed):
    print(f"{name} ... {'ok' if passed else 'FAIL'}", file=sys.stderr)
    return passed
if rank == 3:
    results = [check("shapes", True), check("grad norm of layer 7 is finite", False), check("dtype", True)]
    print("\\nRan 3 checks in 0.01s\\n\\nFAILED (failures=1)", file=sys.stderr)
    sys.exit(not all(results))
time.sleep(60)
""",
        ranks=(3,),
        says=("grad norm of layer 7 is finite",),
    ),
)
