"""Scripts under torch's ``@record``, error files of others, and output in odd amounts and forms."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, Case

GROUP = "recorded, odd output"
PLAIN = ENVIRON + MEET
RECORD = "from torch.distributed.elastic.multiprocessing.errors import record\n"

CASES = (
    Case(
        "recorded-among-recorded-victims",
        GROUP,
        GLOO
        + RECORD
        + """\
@record
def main():
    for step in range(30):
        if rank == 1 and step == 9:
            raise ValueError("curriculum has no stage 3")
        dist.all_reduce(torch.ones(1))
main()
""",
        ranks=(1,),
        says=("curriculum has no stage 3",),
    ),
    Case(
        "recorded-victims-of-a-silent-exit",
        GROUP,
        GLOO
        + RECORD
        + """\
@record
def main():
    for step in range(30):
        if rank == 3 and step == 9:
            os._exit(5)
        dist.all_reduce(torch.ones(1))
main()
""",
        ranks=(3,),
        says=("exit code 5", "exitcode 5"),
    ),
    Case(
        "recorded-and-handled-then-another",
        GROUP,
        PLAIN
        + RECORD
        + """\
@record
def load(name):
    raise FileNotFoundError(f"no cache {name}")
def main():
    try:
        load("a.bin")
    except FileNotFoundError:
        print("no cache, reading the source", flush=True)
    time.sleep(2)
    if rank == 2:
        [1, 2][7]
    time.sleep(60)
main()
""",
        ranks=(2,),
        says=("IndexError",),
    ),
    Case(
        "error-file-of-a-child-that-failed-before",
        GROUP,
        PLAIN
        + """\
import subprocess
def main():
    if rank == 1:
        subprocess.run([sys.executable, "prepare.py"])  # its failure does not matter
        time.sleep(2)
        raise KeyError("tokens_per_batch")
    time.sleep(60)
main()
""",
        ranks=(1,),
        says=("KeyError: 'tokens_per_batch'",),
        files={
            "prepare.py": RECORD
            + "@record\ndef main():\n    raise PermissionError('not mine')\nif __name__ == '__main__':\n    main()\n"
        },
    ),
    Case(
        "error-file-written-by-the-script",
        GROUP,
        PLAIN
        + """\
import json
if rank == 3:
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": "the judge model refused 40 % of the samples"}, file)
    sys.exit(4)
time.sleep(60)
""",
        ranks=(3,),
        says=("the judge model refused 40 % of the samples",),
    ),
    Case(
        "module-mistyped",
        GROUP,
        "pass\n",
        ranks=(0, 1, 2, 3),
        says=("No module named trainer.trian", "No module named 'trainer"),
        command=["-m", "trainer.trian"],
        files={"trainer/__init__.py": ""},
    ),
    Case(
        "fifty-megabytes-before-the-error",
        GROUP,
        PLAIN
        + """\
if rank == 1:
    line = "batch %d " + "z" * 1000
    for n in range(50000):
        print(line % n, file=sys.stderr)
    raise ValueError("batch 50000 is empty")
time.sleep(60)
""",
        ranks=(1,),
        says=("batch 50000 is empty",),
    ),
    Case(
        "one-line-of-carriage-returns",
        GROUP,
        PLAIN
        + """\
if rank == 2:
    for n in range(60000):
        sys.stderr.write(f"\\r{n / 600:.0f}%|####      | {n}/60000 [00:12<00:20, 4711.0it/s]")
    raise RuntimeError("checksum of part 3 differs")
time.sleep(60)
""",
        ranks=(2,),
        says=("checksum of part 3 differs",),
    ),
    Case(
        "victims-print-their-c-stacks",
        GROUP,
        GLOO
        + """\
for step in range(30):
    if rank == 0 and step == 9:
        os._exit(7)
    dist.all_reduce(torch.ones(1))
""",
        ranks=(0,),
        says=("exit code 7", "exitcode 7"),
        environ={"TORCH_SHOW_CPP_STACKTRACES": "1"},
    ),
    Case(
        "development-mode-prints-after-the-error",
        GROUP,
        PLAIN
        + """\
def main():
    kept = [open("train.py") for _ in range(6)]
    if rank == 3:
        raise ArithmeticError("sum of the weights is 0.99")
    time.sleep(60)
main()
""",
        ranks=(3,),
        says=("sum of the weights is 0.99",),
        environ={"PYTHONDEVMODE": "1", "PYTHONTRACEMALLOC": "5"},
    ),
    Case(
        "process-with-an-exit-code-that-is-looked-at",
        GROUP,
        PLAIN
        + """\
import multiprocessing
def crop():
    raise ValueError("crop of 300 from an image of 224")
if __name__ == "__main__":
    if rank == 0:
        child = multiprocessing.get_context("spawn").Process(target=crop)
        child.start()
        child.join()
        if child.exitcode:
            raise RuntimeError(f"augmentation process ended with {child.exitcode}")
    time.sleep(60)
""",
        ranks=(0,),
        says=("crop of 300 from an image of 224",),
    ),
    Case(
        "openmp-twice",
        GROUP,
        PLAIN
        + """\
if rank == 1:
    sys.stderr.write(
        "OMP: Error #15: Initializing libiomp5.so, but found libgomp.so.1 already initialized.\\n"
        "OMP: Hint This means that multiple copies of the OpenMP runtime have been linked into the program. As an "
        "unsafe, unsupported, undocumented workaround you can set the environment variable KMP_DUPLICATE_LIB_OK=TRUE "
        "to allow the program to continue to execute, but that may cause crashes or silently produce incorrect "
        "results. For more information, please see http://www.intel.com/software/products/support/.\\n"
    )
    sys.stderr.flush()
    os.abort()
time.sleep(60)
""",
        ranks=(1,),
        says=("OMP: Error #15",),
    ),
    Case(
        "libcxx-terminates",
        GROUP,
        PLAIN
        + """\
if rank == 2:
    sys.stderr.write(
        "libc++abi: terminating due to uncaught exception of type std::runtime_error: shard 12 has a bad magic\\n"
    )
    sys.stderr.flush()
    os.abort()
time.sleep(60)
""",
        ranks=(2,),
        says=("shard 12 has a bad magic",),
    ),
    Case(
        "pure-virtual-call",
        GROUP,
        PLAIN
        + """\
if rank == 3:
    sys.stderr.write("pure virtual method called\\nterminate called without an active exception\\n")
    sys.stderr.flush()
    os.abort()
time.sleep(60)
""",
        ranks=(3,),
        says=("pure virtual method called",),
    ),
    Case(
        "llvm-error",
        GROUP,
        PLAIN
        + """\
if rank == 0:
    sys.stderr.write("LLVM ERROR: Symbol not found: __svml_sinf8\\n")
    sys.stderr.flush()
    os.abort()
time.sleep(60)
""",
        ranks=(0,),
        says=("Symbol not found: __svml_sinf8",),
    ),
    Case(
        "error-in-red-after-a-spinner",
        GROUP,
        PLAIN
        + """\
if rank == 1:
    for frame in "|/-" * 30:
        sys.stdout.write(f"\\r\\x1b[36m{frame}\\x1b[0m indexing")
    sys.stdout.write("\\r\\x1b[31m\\u2718 index: 12 of 40 files have no checksum\\x1b[0m\\n")
    sys.stdout.flush()
    sys.exit(1)
time.sleep(60)
""",
        ranks=(1,),
        says=("12 of 40 files have no checksum",),
    ),
    Case(
        "cause-on-stdout-noise-on-stderr",
        GROUP,
        PLAIN
        + """\
if rank == 2:
    print("FATAL: tokenizer.json was written by version 9, this is version 8", flush=True)
    for n in range(5):
        print(f"2026-11-23 04:37:5{n} INFO closing writer {n}", file=sys.stderr, flush=True)
    sys.exit(12)
time.sleep(60)
""",
        ranks=(2,),
        says=("tokenizer.json was written by version 9",),
    ),
)
