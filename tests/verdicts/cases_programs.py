"""What other programs, languages and logging frameworks print at their end: the texts were captured from them."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, MEET, Case

GROUP = "other programs' texts"


def _said(
    name: str,
    text: str,
    code: int,
    says: str,
    *,
    rank: int = 2,
    stream: str = "stderr",
    before: str = "",
    end: str = "",
) -> Case:
    """One rank prints a text and ends, by a signal where the code is negative; the others would go on.

    Args:
        name: The case's.
        text: What is printed.
        code: The exit code, as Python's subprocess counts it.
        says: What is right to report.
        rank: The one that fails.
        stream: Where it is printed.
        before: Python before it.
        end: Python after it.
    """
    leave = f"os._exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code}); time.sleep(9)"
    script = f"""\
if rank == {rank}:
{_indented(before)}
    sys.{stream}.write(open("said.txt", encoding="utf-8").read())
    sys.{stream}.flush()
{_indented(end)}
    {leave}
time.sleep(60)
"""
    return Case(name, GROUP, ENVIRON + MEET + script, ranks=(rank,), says=(says,), files={"said.txt": text})


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in (text or "pass").splitlines())


CASES = (
    _said(
        "loguru-catch",
        """\
2026-11-23 04:37:52.101 | INFO     | __main__:main:3 - step 410 loss 2.71
2026-11-23 04:37:56.875 | ERROR    | __main__:<module>:7 - An error has been caught in function '<module>', \
process 'MainProcess' (27854), thread 'MainThread' (140171467729792):
Traceback (most recent call last):

> File "/home/u/train.py", line 7, in <module>
    main("b")
    └ <function main at 0x7f7c352d2de0>

  File "/home/u/train.py", line 6, in main
    return table[path]
           │     └ 'b'
           └ {'a': 1}

KeyError: 'b'
""",
        1,
        "KeyError: 'b'",
    ),
    _said(
        "structlog-traceback-in-json",
        '{"step": 11, "event": "step", "level": "info", "timestamp": "2026-11-23T04:37:57.260175Z"}\n'
        '{"step": 12, "event": "training failed", "level": "error", "timestamp": "2026-11-23T04:37:58.260175Z",'
        ' "exception": "Traceback (most recent call last):\\n  File \\"/home/u/st3.py\\", line 6, in <module>\\n'
        '    load(\\"b\\")\\n  File \\"/home/u/st3.py\\", line 4, in load\\n    return index[path]\\n'
        "           ~~~~~^^^^^^\\nKeyError: 'no shard for language zu'\"}\n",
        1,
        "no shard for language zu",
    ),
    _said(
        "structlog-dict-tracebacks",
        '{"step": 12, "event": "training failed", "level": "error", "timestamp": "2026-11-23T04:37:57.225902Z",'
        ' "exception": [{"exc_type": "KeyError", "exc_value": "\'no shard for zu\'", "exc_notes": [],'
        ' "syntax_error": null, "is_cause": false, "frames": [{"filename": "/home/u/st.py", "lineno": 6,'
        ' "name": "<module>", "locals": {"sys": "<module \'sys\' (built-in)>"}}, {"filename": "/home/u/st.py",'
        ' "lineno": 4, "name": "load", "locals": {"path": "\'b\'"}}], "is_group": false, "exceptions": []}]}\n',
        1,
        "no shard for zu",
    ),
    _said(
        "absl-fatal",
        """\
I1123 04:37:58.570026 139989761588096 ab.py:4] starting
F1123 04:37:58.570145 139989761588096 ab.py:5] manifest has 3 shards, 4 expected
Fatal Python error: Aborted

Current thread 0x00007f51e802fb80 (most recent call first):
  File "/opt/venv/lib/python3.11/site-packages/absl/logging/__init__.py", line 1017 in emit
  File "/usr/lib/python3.11/logging/__init__.py", line 978 in handle
  File "/opt/venv/lib/python3.11/site-packages/absl/logging/__init__.py", line 419 in fatal
  File "/home/u/train.py", line 5 in main
  File "/opt/venv/lib/python3.11/site-packages/absl/app.py", line 410 in run
  File "/home/u/train.py", line 6 in <module>
""",
        -6,
        "manifest has 3 shards, 4 expected",
    ),
    _said(
        "glog-check-failed",
        """\
WARNING: Logging before InitGoogleLogging() is written to STDERR
F20261123 04:37:58.570145  8096 sampler.cc:77] Check failed: n_shards == expected (3 vs. 4)
*** Check failure stack trace: ***
    @     0x7f0f4c3d1b03  google::LogMessage::Fail()
    @     0x7f0f4c3d9b39  google::LogMessage::SendToLog()
    @     0x7f0f4c3d1820  google::LogMessage::Flush()
    @     0x55d6a1c0a1de  Sampler::open()
    @     0x7f0f4bc45249  (unknown)
""",
        -6,
        "n_shards == expected (3 vs. 4)",
    ),
    _said(
        "absl-flags",
        """\
FATAL Flags parsing error: flag --x=None: Flag --x must have a value other than None.
Pass --helpshort or --helpfull to see help on flags.
""",
        1,
        "Flag --x must have a value other than None",
    ),
    _said(
        "fire-unknown-argument",
        """\
ERROR: Could not consume arg: --lrr=3
Usage: train.py -

For detailed information on this command, run:
  train.py - --help
""",
        2,
        "Could not consume arg: --lrr=3",
    ),
    _said(
        "typer-box",
        """\
Usage: train.py [OPTIONS]
Try 'train.py --help' for help.
╭─ Error ──────────────────────────────────────────────────────────────────────╮
│ No such option: --lrr (Possible options: --lr)                               │
╰──────────────────────────────────────────────────────────────────────────────╯
""",
        2,
        "No such option: --lrr",
    ),
    _said(
        "jsonargparse-two-lines",
        """\
usage: train.py [--config CONFIG] [--lr LR] [--steps STEPS]
tip: For details of accepted options run: train.py --help
error: Parser key "lr":
  Expected a <class 'float'>. Got value: fast
""",
        2,
        "Got value: fast",
    ),
    _said(
        "hydra-override",
        """\
Could not override 'model.depth'.
To append to your config use +model.depth=3
Key 'model' is not in struct
    full_key: model
    object_type=dict

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
""",
        1,
        "Could not override 'model.depth'",
    ),
    _said(
        "pydantic-two-errors",
        """\
Traceback (most recent call last):
  File "/home/u/train.py", line 5, in <module>
    Config(**values)
  File "/opt/venv/lib/python3.11/site-packages/pydantic/main.py", line 280, in __init__
    validated_self = self.__pydantic_validator__.validate_python(data, self_instance=self)
pydantic_core._pydantic_core.ValidationError: 2 validation errors for Config
lr
  Input should be a valid number, unable to parse string as a number [type=float_parsing, input_value='fast', \
input_type=str]
    For further information visit https://errors.pydantic.dev/2.14/v/float_parsing
steps
  Field required [type=missing, input_value={'lr': 'fast'}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.14/v/missing
""",
        1,
        "2 validation errors for Config",
    ),
    _said(
        "ipython-traceback",
        """\
---------------------------------------------------------------------------
ZeroDivisionError                         Traceback (most recent call last)
Cell In[1], line 3
      1 def f(x):
      2     return 1 / x
----> 3 f(0)

Cell In[1], line 2, in f(x)
      1 def f(x):
----> 2     return 1 / x

ZeroDivisionError: division by zero
""",
        1,
        "ZeroDivisionError: division by zero",
    ),
    _said(
        "java-exception",
        """\
26/11/23 04:37:58 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform
Exception in thread "main" org.example.BlockError: cannot read block index
\tat org.example.Reader.open(Reader.java:44)
\tat org.example.Main.main(Main.java:1)
Caused by: java.lang.NumberFormatException: For input string: "12x"
\tat java.base/java.lang.NumberFormatException.forInputString(NumberFormatException.java:67)
\tat java.base/java.lang.Integer.parseInt(Integer.java:668)
\t... 11 more
""",
        1,
        'For input string: "12x"',
    ),
    _said(
        "node-js-exception",
        """\
/opt/site/prefetch.js:1
function load(){ throw new Error("shard map has no entry for 7"); } load()
                 ^

Error: shard map has no entry for 7
    at load (/opt/site/prefetch.js:1:24)
    at Object.<anonymous> (/opt/site/prefetch.js:1:69)
    at node:internal/main/run_main_module:51:3

Node.js v20.20.2
""",
        1,
        "shard map has no entry for 7",
    ),
    _said(
        "rust-panic",
        """\

thread 'main' (28281) panicked at src/tokenizer.rs:1:87:
index out of bounds: the len is 3 but the index is 7
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace
""",
        101,
        "the len is 3 but the index is 7",
    ),
    _said(
        "rust-panic-with-backtrace",
        """\

thread '<unnamed>' (28281) panicked at src/tokenizer.rs:1:87:
called `Result::unwrap()` on an `Err` value: "merge 50113 is not in the vocabulary"
stack backtrace:
   0: __rustc::rust_begin_unwind
             at /rustc/59807616e1fa2540724bfbac14d7976d7e4a3860/library/std/src/panicking.rs:689:5
   1: core::panicking::panic_fmt
             at /rustc/59807616e1fa2540724bfbac14d7976d7e4a3860/library/core/src/panicking.rs:80:14
   2: core::result::unwrap_failed
             at /rustc/59807616e1fa2540724bfbac14d7976d7e4a3860/library/core/src/result.rs:1852:5
   3: tokenizer::load
   4: tokenizer::main
note: Some details are omitted, run with `RUST_BACKTRACE=full` for a verbose backtrace.
""",
        -6,
        "merge 50113 is not in the vocabulary",
    ),
    _said(
        "go-panic",
        """\
panic: runtime error: index out of range [7] with length 3

goroutine 1 [running]:
main.shard(...)
\t/home/u/fetch.go:6
main.main()
\t/home/u/fetch.go:10 +0x1d
exit status 2
""",
        2,
        "index out of range [7] with length 3",
    ),
    _said(
        "address-sanitizer",
        """\
=================================================================
==28296==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602000000019 at pc 0x556e1471b1db bp 0x7ffd9
WRITE of size 1 at 0x602000000019 thread T0
    #0 0x556e1471b1da in fused_rope /home/u/rope.c:2
    #1 0x7f6a87c45249 in __libc_start_call_main ../sysdeps/nptl/libc_start_call_main.h:58
    #2 0x556e1471b0b0 in _start (/home/u/a+0x10b0)

0x602000000019 is located 1 bytes to the right of 8-byte region [0x602000000010,0x602000000018)
allocated by thread T0 here:
    #0 0x7f6a87eb89cf in __interceptor_malloc ../../../../src/libsanitizer/asan/asan_malloc_linux.cpp:69
    #1 0x556e1471b191 in fused_rope /home/u/rope.c:2

SUMMARY: AddressSanitizer: heap-buffer-overflow /home/u/rope.c:2 in fused_rope
Shadow bytes around the buggy address:
  0x0c047fff7fb0: 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
  0x0c047fff7fc0: 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
  0x0c047fff7fd0: 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
=>0x0c047fff8000: fa fa 00[fa]fa fa fa fa fa fa fa fa fa fa fa fa
  0x0c047fff8010: fa fa fa fa fa fa fa fa fa fa fa fa fa fa fa fa
  0x0c047fff8020: fa fa fa fa fa fa fa fa fa fa fa fa fa fa fa fa
Shadow byte legend (one shadow byte represents 8 application bytes):
  Addressable:           00
  Partially addressable: 01 02 03 04 05 06 07
  Heap left redzone:       fa
  Freed heap region:       fd
  Stack left redzone:      f1
  Stack mid redzone:       f2
  Stack after return:      f5
  Global redzone:          f9
  Poisoned by user:        f7
  Container overflow:      fc
  ASan internal:           fe
  Right alloca redzone:    cb
==28296==ABORTING
""",
        1,
        "AddressSanitizer: heap-buffer-overflow",
    ),
    _said(
        "fortran-runtime-error",
        """\
At line 12 of file /home/u/mesh.f90 (unit = 10, file = 'mesh.dat')
Fortran runtime error: End of file

Error termination. Backtrace:
#0  0x7f1c2e423960 in ???
#1  0x7f1c2e4244d9 in ???
#2  0x55d0a5c6f2a3 in MAIN__
""",
        2,
        "Fortran runtime error: End of file",
    ),
    _said(
        "pytest-runs-the-training",
        """\
============================= test session starts ==============================
collected 1 item

test_train.py F                                                          [100%]

=================================== FAILURES ===================================
__________________________________ test_train __________________________________

    def test_train():
        loss = 2.71
>       assert loss < 2.0, "loss after 100 steps is too high"
E       AssertionError: loss after 100 steps is too high
E       assert 2.71 < 2.0

test_train.py:4: AssertionError
=========================== short test summary info ============================
FAILED test_train.py::test_train - AssertionError: loss after 100 steps is too high
============================== 1 failed in 0.05s ===============================
""",
        1,
        "loss after 100 steps is too high",
        stream="stdout",
    ),
    _said(
        "conda-run-has-the-last-line",
        """\
Traceback (most recent call last):
  File "/home/u/train.py", line 3, in <module>
    build(config)
  File "/home/u/train.py", line 2, in build
    raise ValueError("n_heads 7 does not divide d_model 512")
ValueError: n_heads 7 does not divide d_model 512

ERROR conda.cli.main_run:execute(49): `conda run python train.py` failed. (See above for error)
""",
        1,
        "n_heads 7 does not divide d_model 512",
    ),
    _said(
        "make-has-the-last-line",
        """\
python train.py --config base.yaml
train.py: base.yaml: key 'optimizer' is given twice
make: *** [Makefile:12: train] Error 3
""",
        2,
        "key 'optimizer' is given twice",
    ),
    _said(
        "container-runtime",
        """\
INFO:    Using cached SIF image
FATAL:   container creation failed: mount hook function failure: mount /scratch->/scratch error: while mounting \
/scratch: mount source /scratch doesn't exist
""",
        255,
        "mount source /scratch doesn't exist",
    ),
    _said(
        "prefixed-by-a-pipe",
        """\
[04:37:58 rank2] epoch 1 step 30 loss 2.9
[04:37:58 rank2] Traceback (most recent call last):
[04:37:58 rank2]   File "/home/u/train.py", line 9, in <module>
[04:37:58 rank2]     train()
[04:37:58 rank2]   File "/home/u/train.py", line 5, in train
[04:37:58 rank2]     scale = table[name]
[04:37:58 rank2] KeyError: 'no scale for layer 17'
""",
        1,
        "no scale for layer 17",
    ),
    _said(
        "label-of-an-inner-srun",
        """\
0: epoch 1 step 30 loss 2.9
1: Traceback (most recent call last):
1:   File "/home/u/train.py", line 9, in <module>
1:     train()
1:   File "/home/u/train.py", line 5, in train
1:     scale = table[name]
1: KeyError: 'no scale for layer 17'
srun: error: n02: task 1: Exited with exit code 1
srun: Terminating StepId=812.0
""",
        1,
        "no scale for layer 17",
        stream="stdout",
    ),
    _said(
        "traceback-logged-with-a-time-before-each-line",
        """\
2026-11-23 04:37:58,570 ERROR train: Traceback (most recent call last):
2026-11-23 04:37:58,570 ERROR train:   File "/home/u/train.py", line 9, in <module>
2026-11-23 04:37:58,570 ERROR train:     train()
2026-11-23 04:37:58,570 ERROR train:   File "/home/u/train.py", line 5, in train
2026-11-23 04:37:58,570 ERROR train:     scale = table[name]
2026-11-23 04:37:58,570 ERROR train: KeyError: 'no scale for layer 17'
2026-11-23 04:37:58,571 INFO train: closing the writers
2026-11-23 04:37:58,572 INFO train: bye
""",
        1,
        "no scale for layer 17",
    ),
    _said(
        "wandb-after-the-error",
        """\
2026-11-23 04:37:58,570 - trainer - CRITICAL - perplexity of the held-out set is 1e9, limit 1e4
wandb: Waiting for W&B process to finish... (failed 3).
wandb: Run history:
wandb: loss █▆▅▃▂▁
wandb: Run summary:
wandb: loss 2.71
wandb: Synced helpful-sun-12: https://wandb.example/u/p/runs/1
wandb: Find logs at: ./wandb/run-20261123/logs
""",
        3,
        "perplexity of the held-out set is 1e9",
    ),
    _said(
        "cleanup-logged-after-the-error",
        "2026-11-23 04:37:58,570 ERROR trainer: the tokenizer's hash differs from the checkpoint's: 81fa, 7c02\n"
        + "".join(f"2026-11-23 04:37:58,{600 + n} INFO trainer: closing writer {n}\n" for n in range(40)),
        1,
        "the tokenizer's hash differs from the checkpoint's",
    ),
    _said(
        "huge-output-after-the-error",
        "ERROR: index of shard 12 is newer than its data\n",
        1,
        "index of shard 12 is newer than its data",
        end='for n in range(3000):\n    print("DEBUG released buffer %d of the pool %s" % (n, "x" * 200), '
        "file=sys.stderr)",
    ),
    _said(
        "stderr-has-only-a-warning",
        "cannot continue: vocabulary of 50257 does not match embedding of 50304 rows\n",
        1,
        "does not match embedding of 50304 rows",
        stream="stdout",
        before="import warnings; warnings.warn('torch.cuda.amp.autocast(args...) is deprecated', FutureWarning)",
    ),
    _said(
        "perl-die",
        "reading manifest\ncannot parse manifest line 3 at ./mkindex.pl line 12, <IN> line 3.\n",
        255,
        "cannot parse manifest line 3",
    ),
    _said(
        "julia-error",
        """\
ERROR: LoadError: BoundsError: attempt to access 3-element Vector{Int64} at index [7]
Stacktrace:
 [1] throw_boundserror(A::Vector{Int64}, I::Tuple{Int64})
   @ Base ./essentials.jl:14
 [2] top-level scope
   @ /home/u/mesh.jl:3
in expression starting at /home/u/mesh.jl:3
""",
        1,
        "attempt to access 3-element Vector{Int64} at index [7]",
    ),
    _said(
        "mpi-abort",
        """\
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD
with errorcode 13.

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
--------------------------------------------------------------------------
""",
        13,
        "MPI_ABORT was invoked on rank 0",
    ),
    _said(
        "compiler-error-of-an-extension",
        """\
[1/3] c++ -MMD -MF rope.o.d -DTORCH_EXTENSION_NAME=rope -c /home/u/rope.cpp -o rope.o
FAILED: rope.o
c++ -MMD -MF rope.o.d -DTORCH_EXTENSION_NAME=rope -c /home/u/rope.cpp -o rope.o
/home/u/rope.cpp:7:12: error: 'TensorAccessr' is not a member of 'torch'
    7 |     torch::TensorAccessr x;
      |            ^~~~~~~~~~~~~
ninja: build stopped: subcommand failed.
Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/torch/utils/cpp_extension.py", line 2597, in _run_ninja_build
    subprocess.run(
  File "/usr/lib/python3.11/subprocess.py", line 571, in run
    raise CalledProcessError(retcode, process.args,
subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/u/train.py", line 3, in <module>
    rope = load("rope", ["rope.cpp"])
  File "/opt/venv/lib/python3.11/site-packages/torch/utils/cpp_extension.py", line 1681, in load
    return _jit_compile(
  File "/opt/venv/lib/python3.11/site-packages/torch/utils/cpp_extension.py", line 2613, in _run_ninja_build
    raise RuntimeError(message) from e
RuntimeError: Error building extension 'rope'
""",
        1,
        "'TensorAccessr' is not a member of 'torch'",
    ),
)
