from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.failures.classify import category_of, classify
from hpc_elastic.failures.evidence import describe_failure
from hpc_elastic.failures.failure_text import Frame, RaisedException
from hpc_elastic.failures.patterns import PATTERNS, find_pattern
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from tests.rigs.described import described, traceback_in

# Captured from click 8.5, rich-click 1.9, typer 0.29, fire 0.7, absl 2.5, hydra 1.3.8, tyro 1.0, cyclopts 5.4,
# docopt 0.6.
CLICK = (
    "Missing option '--lr'.",
    "Invalid value for '--lr': 'x' is not a valid float.",
    "No such option '--rl'. (Did you mean one of: '--help', '--lr'?)",
    "steps and epochs exclude each other",  # a click.UsageError of the script's own
)
HYDRA = "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."


DATA = Path(__file__).resolve().parents[2] / "data" / "failures"


CASES = json.loads((DATA / "expected.json").read_text())


def describe(name: str, exitcode: int, tmp_path: Path) -> WorkerFailure:
    facts = WorkerFailure(exitcode=exitcode, ended_ns=1)
    return describe_failure(facts=facts, error_file=tmp_path / "error.json", stderr_log=DATA / name)


@pytest.mark.parametrize("case", CASES, ids=[case["file"].removesuffix(".txt") for case in CASES])
def test_real_words(case: dict[str, Any], tmp_path: Path) -> None:
    """Alone, and at the end of a long log, with faulthandler's dump of all threads after what ended in SIGABRT."""
    text = "loss 0.25, step 17\n" * 10_000 + (DATA / case["file"]).read_text()
    if case["exitcode"] == -6:
        thread = "Thread 0x00007f1542893b90 (most recent call first):\n" + '  File "/u/t.py", line 3 in wait\n' * 12
        text += f"Fatal Python error: Aborted\n\n{thread * 40}"
    after_an_hour = described(tmp_path, text, exitcode=case["exitcode"], ended_ns=1)
    wanted = {key: case[key] for key in ("failure_class", "category", "retryable", "node_suspect")}
    for failure in (describe(case["file"], case["exitcode"], tmp_path), after_an_hour):
        assert case["reason"] in failure.reason
        assert {key: getattr(failure, key) for key in wanted} == wanted


def test_the_line_by_which_a_library_ended_the_process_is_the_message(tmp_path: Path) -> None:
    failure = describe("nccl-watchdog-stuck.txt", -6, tmp_path)
    assert failure.message.startswith("[PG 0 Rank 1]")
    assert failure.message.endswith("(SIGABRT)")
    assert "watchdog got stuck for 600 seconds" in failure.message
    assert "Heartbeat monitor timed out!" in failure.stderr_tail
    failure = describe("nccl-ib-no-answer.txt", -6, tmp_path)
    assert failure.message.endswith("with error 12, opcode 0, len 0, vendor err 129"), "all of a C++ exception's text"
    assert failure.headline.startswith("std::runtime_error: NCCL error: remote process exited")
    assert "frame #0" not in describe("nccl-timeout-watchdog.txt", -6, tmp_path).message


def test_every_captured_text_is_tried_and_has_a_source() -> None:
    assert sorted(path.name for path in DATA.glob("*.txt")) == [case["file"] for case in CASES]
    for case in CASES:
        assert re.search(r"[\w.-]+/[\w.-]+#\d+|torch 2\.13|the same|in that run", case["source"]), case


def test_every_row_of_the_table_can_be_reached() -> None:
    """A row whose words all stand in an earlier row's would never be told."""
    for at, row in enumerate(PATTERNS):
        reached = [words for words in row.any_of if find_pattern(words.replace("*", " ")) is row]
        assert reached, (at, row.says)
        assert all(words == words.lower() for words in row.any_of)


NO_ROW = "no row of the table"
OLD_DRIVER = "does not fit its libraries"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("xid (pci:0000:01:00): 45, x\nXid (PCI:0000:02:00): 79, GPU", "Xid 79"),  # the most telling one
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "Xid 14: an error of the GPU or its driver"),
        ("NVRM: Xid (PCI:0000:01:00): 999999, what", NO_ROW),
        ("RuntimeError: CUDA driver error: out of memory", "the GPU's memory is full"),
        ("RuntimeError: Triton Error [CUDA]: out of memory", "the GPU's memory is full"),
        ("Failed to initialize NVML: Driver/library version mismatch", OLD_DRIVER),
        ("Error 804: forward compatibility was attempted on non supported HW", OLD_DRIVER),
        ("The NVIDIA driver on your system is too old (found version 11040).", "too old for this torch"),
        (
            "Cuda failure 700 'an illegal memory access was encountered'\nNCCL WARN Failed to CUDA calloc 8 bytes",
            "touched memory that is not its own",
        ),
        ("OSError: [Errno 24] Too many open files: 'x'", "may open no more files (ulimit -n)"),
        ("OSError: received 0 items of ancdata", "may open no more files (ulimit -n)"),
        # A star stays within a line and 200 characters.
        ("TCPStore(host): the client timed out", ""),
        ("TCPStore(host)\nthe client timed out", NO_ROW),
        (f"TCPStore({'x' * 300}) timed out", NO_ROW),
        (f"TCPStore({'x' * 300}) TCPStore timed out", ""),
    ],
)
def test_the_row_that_a_text_finds(text: str, says: str) -> None:
    found = find_pattern(text)
    assert says in (found.says if found is not None else NO_ROW)


@pytest.mark.parametrize(
    ("due_to", "says"),
    [
        ("timeout - timeout watchdog detected operation timeout", "a collective waited for a peer until its timeout"),
        ("timeout - collective operation timed out", "a collective waited for a peer until its timeout"),
        ("error - nccl hit async error: remote process exited or there was a network error", "a peer was gone"),
        ("error - nccl hit async error: unhandled system error", "NCCL gave up after a peer was gone"),
        ("error - timeout watchdog detected operation error", "NCCL gave up after a peer was gone"),
        ("error - nccl hit async error: unhandled cuda error", "a CUDA call inside NCCL failed"),
    ],
)
def test_how_torchs_second_nccl_group_ends_a_process(due_to: str, says: str, tmp_path: Path) -> None:
    """By abort(), without an exception; torch's c10d/nccl2, which ``nccl`` stands for after 2.13."""
    text = f"[rank1]:[E1122 10:00:00.123 ProcessGroupNCCL.cpp:1] Aborting process on rank 1 due to {due_to}\n"
    failure = described(tmp_path, text, exitcode=-6, ended_ns=1)
    assert says in failure.reason
    assert failure.failure_class == ("root" if "cuda" in due_to else "symptom")


@pytest.mark.parametrize(
    "kind",
    [
        "requests.exceptions.ConnectionError",
        "urllib3.exceptions.ProtocolError",
        "http.client.RemoteDisconnected",
        "aiohttp.client_exceptions.ClientOSError",
        "botocore.exceptions.ReadTimeoutError",
    ],
)
def test_a_service_outside_the_job_is_no_peer(kind: str) -> None:
    reset = RaisedException(exception_type="ConnectionResetError", message="Connection reset by peer")
    found = exception(kind, "Connection reset by peer", earlier=[reset])
    assert found.failure_class is FailureClass.ROOT
    # … but its words on this node's disk count.
    assert exception(kind, "[Errno 28] No space left on device").failure_class is FailureClass.INFRASTRUCTURE


SYMPTOM, ROOT, INFRASTRUCTURE = FailureClass.SYMPTOM, FailureClass.ROOT, FailureClass.INFRASTRUCTURE
TORCH = "/venv/lib/python3.11/site-packages/torch"
COLLECTIVE = f"{TORCH}/distributed/distributed_c10d.py"


def raised(kind: str, message: str = "", *, file: str = "", source: str = "", **more: Any) -> RaisedException:
    """An exception whose innermost frame is in `file`."""
    frames = (Frame(file=file, line=3, function="f"),) if file else ()
    return RaisedException(exception_type=kind, message=message, frames=frames, source=source, **more)


def exception(
    kind: str, message: str = "", *, file: str = "", earlier: Sequence[RaisedException] = (), **facts: Any
) -> WorkerFailure:
    chain = [raised(kind, message, file=file), *earlier]
    given = {name: facts.pop(name) for name in ("node_bytes", "stderr_tail", "overcommits") if name in facts}
    return classify(WorkerFailure(**facts), chain=chain, **given)


def test_a_long_message_is_searched_at_both_ends() -> None:
    filler = "x" * 1_000_000
    for message in (f"{filler} Connection closed by peer", f"Connection closed by peer {filler}"):
        assert exception("RuntimeError", message, file=COLLECTIVE).failure_class is SYMPTOM


@pytest.mark.parametrize(
    ("facts", "kind", "message", "failure_class"),
    [
        ({"stopped_by_agent": True}, "ValueError", "bad", ROOT),
        ({"stopped_by_agent": True}, "RuntimeError", "[pair.cc:1] Connection closed by peer", SYMPTOM),
        ({"stderr_tail": "Connection closed by peer\nValueError: bad"}, "ValueError", "bad", ROOT),
        ({"oom_kills": 1}, "RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.", INFRASTRUCTURE),
        ({"oom_kills": 1}, "ValueError", "bad", ROOT),  # an unrelated process of the cgroup was killed
        ({}, "ImportError", "libx.so: Stale file handle", INFRASTRUCTURE),  # a broken mount
    ],
)
def test_what_else_is_known_of_a_worker_that_raised(
    facts: dict[str, Any], kind: str, message: str, failure_class: FailureClass
) -> None:
    assert exception(kind, message, **facts).failure_class is failure_class


def test_stderr_is_searched_where_none_is_known() -> None:
    closed = "[E1122 10:00:00.1 pair.cc:553] Connection closed by peer"
    assert classify(WorkerFailure(exitcode=5), stderr_tail=closed).failure_class is SYMPTOM
    # … but not for a kill, which needs no words, and not for what another program says of its own connection.
    assert classify(WorkerFailure(exitcode=-9), stderr_tail=closed).failure_class is ROOT
    rsync = "rsync: connection reset by peer"
    assert classify(WorkerFailure(exitcode=5), stderr_tail=rsync).failure_class is ROOT


@pytest.mark.parametrize("exitcode", [-15, -9, -6, 143, 137])
def test_what_the_agent_ended_is_no_failure_of_the_worker(exitcode: int) -> None:
    found = classify(WorkerFailure(exitcode=exitcode, stopped_by_agent=True))
    assert found.failure_class is FailureClass.STOPPED_BY_US
    assert classify(WorkerFailure(exitcode=exitcode)).failure_class is not FailureClass.STOPPED_BY_US
    for kind in ("SystemExit", "KeyboardInterrupt"):  # an exit on request
        assert exception(kind, exitcode=1, stopped_by_agent=True).failure_class is FailureClass.STOPPED_BY_US


@pytest.mark.parametrize("kind", ["SyntaxError", "IndentationError", "ModuleNotFoundError", "ImportError"])
def test_a_script_that_cannot_start_is_not_tried_again(kind: str) -> None:
    found = exception(kind, "x")
    assert (found.failure_class, found.category, found.retryable) == (ROOT, Category.INPUT, False)
    # One that had trained already is another matter.
    assert exception(kind, "x", last_step=10).retryable


@pytest.mark.parametrize(
    ("exitcode", "stderr"),
    [
        (2, "usage: train.py [-h] [--lr LR]\ntrain.py: error: argument --lr: invalid float value: 'x'"),
        (2, "python: can't open file '/home/ann/nosuch.py': [Errno 2] No such file or directory"),
        (1, "/usr/bin/python3: No module named nosuch"),
        (127, "bash: trian: command not found"),
        (126, ""),
        *((2, f"Usage: c.py [OPTIONS]\nTry 'c.py --help' for help.\n\nError: {text}") for text in CLICK),
        (
            2,
            "Usage: t.py [OPTIONS]\nTry 't.py --help' for help.\n"
            "╭─ Error ──────────────────────────────────────────────────────────────────────╮\n"
            "│ No such option: --rl (Possible options: --help, --lr)                        │\n"
            "╰──────────────────────────────────────────────────────────────────────────────╯",
        ),
        (
            2,
            "ERROR: Could not consume arg: --rl\nUsage: f.py -\n\n"
            "For detailed information on this command, run:\n  f.py - --help",
        ),
        (
            1,
            "FATAL Flags parsing error: Unknown command line flag 'rl'\n"
            "Pass --helpshort or --helpfull to see help on flags.",
        ),
        (
            1,
            "Could not override 'lr'.\nTo append to your config use +lr=3\nKey 'lr' is not in struct\n"
            "    full_key: lr\n    object_type=dict\n\n" + HYDRA,
        ),
        (1, "Cannot find primary config 'nope'. Check that it's in your config search path.\n\n" + HYDRA),
    ],
)
def test_a_wrong_call_is_the_users_input(exitcode: int, stderr: str) -> None:
    found = classify(WorkerFailure(exitcode=exitcode), stderr_tail=stderr)
    assert (found.category, found.retryable) == (Category.INPUT, False)


@pytest.mark.parametrize(
    ("exitcode", "stderr"),
    [
        (1, "Error executing job with overrides: []\nloss diverged\n\n" + HYDRA),
        (1, "Usage: 80 % of /scratch/run.py\nloss diverged"),
        (1, "Usage: c.py [OPTIONS]\n\nError: the loss diverged"),
        (3, "FATAL Flags parsing error: Unknown command line flag 'rl'"),
        (2, "Usage: 80 %\nepoch 3 done"),
        (2, "loss 0.2"),
    ],
)
def test_what_only_looks_like_a_wrong_call_is_retried(exitcode: int, stderr: str) -> None:
    assert classify(WorkerFailure(exitcode=exitcode), stderr_tail=stderr).retryable
    assert classify(WorkerFailure(exitcode=2, last_step=10), stderr_tail=f"Usage: c.py\nError: {CLICK[3]}").retryable, (
        "it had trained"
    )


def test_nothing_but_input_and_93_is_never_retried() -> None:
    for failure_class in FailureClass:
        for exitcode in range(-64, 256):
            for wrong_call in (True, False):
                category, retryable = category_of(failure_class, exitcode, wrong_call=wrong_call)
                assert retryable or category is Category.INPUT or exitcode == 93
        assert category_of(failure_class, 93, wrong_call=True) == (Category.WORKER, False)


_BOX = "╭─ {title} ─────────╮\n{text}\n╰───────────────────╯\n"


@pytest.mark.parametrize(
    ("exitcode", "stderr", "stdout", "headline"),
    [
        (
            2,
            "Usage: c.py [OPTIONS] COMMAND [ARGS]...\n\nOptions:\n  --help  Show this message and exit.\n\n"
            "Commands:\n  train\n",
            "",
            "Usage: c.py [OPTIONS] COMMAND [ARGS]... (exit code 2)"
        ),
        (
            2,
            "  \n Usage: c.py [OPTIONS]  \n   \n Try 'c.py --help' for help\n"
            + _BOX.format(title="Error", text="│ Missing option '--lr'.  │"),
            "",
            "Missing option '--lr'. (exit code 2)"
        ),
        (
            2,
            _BOX.format(title="Error", text='│ Invalid value for LR: unable to convert "x"   │\n│ into float. │'),
            "",
            'Invalid value for LR: unable to convert "x" into float. (exit code 2)'
        ),
        (
            2,
            _BOX.format(
                title="Required options",
                text="│ Missing from t.py:      │\n│     --lr FLOAT          │\n│         (required)      │\n"
                "│ ─────────────────────── │\n│ For full helptext, run: │\n│     t.py --help         │"
            ),
            "",
            "Missing from t.py: --lr FLOAT (required) (exit code 2)"
        ),
        (
            1,
            "\n       USAGE: a.py [flags]\nflags:\n\na.py:\n  --lr: x\n    (default: '1.0')\n    (a number)\n\n"
            "Too many command-line arguments.\n",
            "",
            "Too many command-line arguments. (exit code 1)"
        ),
        (1, "Usage:\n  d.py <data> [--lr=<lr>]\n", "", "Usage: d.py <data> [--lr=<lr>] (exit code 1)"),
        (1, "", "usage: s.py CONFIG\n", "usage: s.py CONFIG (exit code 1)"),
        (2, "", "option --xx not recognized\nusage: s.py --lr X\n", "option --xx not recognized (exit code 2)"),
        (
            1,
            "Traceback (most recent call last):\n"
            '  File "/venv/omegaconf/_utils.py", line 797, in _raise\n    raise ex\n'
            "omegaconf.errors.ConfigKeyError: Key 'lrr' is not in struct\n    full_key: lrr\n    object_type=dict\n\n"
            "The above exception was the direct cause of the following exception:\n\n"
            'Traceback (most recent call last):\n  File "/home/u/train.py", line 4, in <module>\n    main()\n'
            "hydra.errors.ConfigCompositionException: Could not override 'lrr'.\nTo append to your config use +lrr=3\n",
            "",
            "hydra.errors.ConfigCompositionException: Could not override 'lrr'."
        ),
        (
            1,
            'Traceback (most recent call last):\n  File "/home/u/train.py", line 5, in <module>\n'
            "    main(standalone_mode=False)\nclick.exceptions.MissingParameter: Missing parameter: lr\n",
            "",
            "click.exceptions.MissingParameter: Missing parameter: lr"
        ),
        (
            1,
            'Traceback (most recent call last):\n  File "/home/u/train.py", line 9, in <module>\n'
            "    config = OmegaConf.merge(base, OmegaConf.from_cli())\n"
            '  File "/venv/omegaconf/_utils.py", line 1235, in _raise\n'
            "    raise ex.with_traceback(None) from None\n"
            "omegaconf.errors.ValidationError: Value 'x' of type 'str' could not be converted to Float\n"
            "    full_key: lr\n    object_type=C\n",
            "",
            "omegaconf.errors.ValidationError: Value 'x' of type 'str' could not be converted to Float"
        ),
        (
            1,
            'Traceback (most recent call last):\n  File "/home/u/train.py", line 9, in <module>\n    main()\n'
            '  File "/venv/draccus/parsers/decoding.py", line 74, in decode_from_init\n'
            "    raise DecodingError(path, f\"Couldn't parse '{raw_value}' into a {stringify_type(cls)}\") from e\n"
            "draccus.utils.DecodingError: `lr`: Couldn't parse 'x' into a float\n",
            "",
            "draccus.utils.DecodingError: `lr`: Couldn't parse 'x' into a float"
        ),
    ],
    ids=[
        "click-group", "rich-click", "cyclopts", "tyro", "absl-usage", "docopt", "by-hand", "getopt", "hydra-full",
        "click-raised", "omegaconf", "draccus",
    ],
)  # fmt: skip
def test_a_wrong_call_has_the_librarys_own_message(
    exitcode: int, stderr: str, stdout: str, headline: str, tmp_path: Path
) -> None:
    failure = described(tmp_path, stderr, stdout, exitcode=exitcode, global_rank=0)
    assert (failure.headline, failure.category, failure.retryable) == (headline, Category.INPUT, False)


# -- exceptions that a stop itself provokes are the cause of nothing; others of a stopped worker are

HANDLER = """\
[rank2]: Traceback (most recent call last):
[rank2]:   File "/home/ann/train.py", line 9, in <module>
[rank2]:     time.sleep(8)
[rank2]:   File "/home/ann/train.py", line 5, in on_term
[rank2]:     raise Stop('asked to end')
[rank2]: Stop: asked to end
"""


@pytest.mark.parametrize(
    "chain",
    [
        (raised("lightning.pytorch.utilities.exceptions.SIGTERMException"),),
        (raised("RuntimeError", "received SIGTERM, saving"),),
        (raised("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Terminated."),),
        (raised("OSError", "[Errno 2] … 'lock'"), raised("SystemExit", "143")),
        (raised("FileNotFoundError", "x"), raised("KeyboardInterrupt")),
        traceback_in(HANDLER).chain,  # the line of the frame above it did not call it
    ],
    ids=["lightning", "text", "loader", "cleanup", "interrupt", "handler"],
)
def test_stop_noise(chain: tuple[RaisedException, ...]) -> None:
    stopped = WorkerFailure(exitcode=1, stopped_by_agent=True)
    assert classify(stopped, chain=chain).failure_class is FailureClass.STOPPED_BY_US
    assert classify(WorkerFailure(exitcode=1), chain=chain).failure_class is not FailureClass.STOPPED_BY_US


def test_what_a_function_of_the_script_raised_before_the_stop_is_its_own() -> None:
    called = HANDLER.replace("[rank2]: ", "").replace("time.sleep(8)", "on_term(loss)")
    stopped = WorkerFailure(exitcode=1, stopped_by_agent=True)
    assert classify(stopped, chain=traceback_in(called).chain).failure_class is ROOT


# -- numbers against facts: what was asked for, and what there is (texts of torch 2.13 and numpy 2.4)

GIB = 1 << 30
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "{count} bytes. Error code 12 (Cannot allocate memory)"
)
NUMPY = "Unable to allocate {size} for an array with shape (10000000000000,) and data type float64"
GPU = (
    "CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of 79.10 GiB of which 40.00 GiB is free."
)
NUMPY_ERROR, TORCH_ERROR = "numpy._core._exceptions._ArrayMemoryError", "torch.OutOfMemoryError"


def judged(
    kind: str, message: str, file: str = "/home/ann/train.py", *, node_bytes: int = 64 * GIB, overcommits: bool = False
) -> WorkerFailure:
    chain = [raised(kind, message, file=file, source="x = make(n)")]
    return classify(WorkerFailure(exitcode=1), chain=chain, node_bytes=node_bytes, overcommits=overcommits)


FULL, STDLIB = "[Errno 28] No space left on device", "/usr/lib/python3.11/multiprocessing/synchronize.py"
SHM = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
POSITION = "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
IN_STDLIB, IN_SERIALIZATION = {"file": STDLIB}, {"file": f"{TORCH}/serialization.py"}
BUG, SHM_FULL, NOT_WRITTEN = "^one allocation of ", "/dev/shm is full", "could not be written"


@pytest.mark.parametrize(
    ("kind", "message", "facts", "failure_class", "reason"),
    [
        ("RuntimeError", CPU.format(count=40_000_000_000_000), {}, ROOT, BUG),
        (
            NUMPY_ERROR,
            NUMPY.format(size="72.8 TiB"),
            {},
            ROOT,
            f"{BUG}72.8 TiB, and the whole node has 64.0 GiB",
        ),
        (TORCH_ERROR, GPU.format(size="200000.00 MiB"), {}, ROOT, BUG),
        (TORCH_ERROR, GPU.format(size="372529.03 GiB"), {}, ROOT, BUG),
        ("RuntimeError", CPU.format(count=40_000_000_000_000), {"node_bytes": 0}, INFRASTRUCTURE, ""),
        ("RuntimeError", CPU.format(count=4_000_000_000), {}, INFRASTRUCTURE, ""),
        ("RuntimeError", CPU.format(count=4_000_000_000), {"overcommits": True}, ROOT, "a limit of the process"),
        (NUMPY_ERROR, NUMPY.format(size="7.45 GiB"), {}, INFRASTRUCTURE, r"^the node's memory is full\Z"),
        (TORCH_ERROR, GPU.format(size="2.00 GiB"), {}, ROOT, r"^the GPU's memory is full\Z"),
        # Shared memory that is too small is no full disk.
        ("OSError", FULL, IN_STDLIB, INFRASTRUCTURE, SHM_FULL),
        ("OSError", f"{FULL}: '/dev/shm/cache.bin'", {}, INFRASTRUCTURE, SHM_FULL),
        ("RuntimeError", SHM, {}, INFRASTRUCTURE, SHM_FULL),
        ("OSError", f"{FULL}: '/scratch/x.pt'", {}, INFRASTRUCTURE, "a disk or a quota is full"),
        ("RuntimeError", "basic_ios::clear: iostream error", IN_SERIALIZATION, INFRASTRUCTURE, NOT_WRITTEN),
        ("RuntimeError", POSITION, IN_SERIALIZATION, INFRASTRUCTURE, NOT_WRITTEN),
    ],
)
def test_more_than_there_is_at_all_is_a_bug_and_the_rest_is_full_memory_or_a_full_disk(
    kind: str, message: str, facts: dict[str, Any], failure_class: FailureClass, reason: str
) -> None:
    found = judged(kind, message, **facts)
    category = Category.WORKER if failure_class is ROOT else Category.INFRASTRUCTURE
    assert (found.failure_class, found.category) == (failure_class, category)
    assert re.search(reason, found.reason)
