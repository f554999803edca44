"""Where an exception was raised decides what its text means, and of a chain the first exception does."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.failures.failure_text import Frame, RaisedException
from hpc_elastic.failures.origin import OWN_WATCHDOG, explain, explain_chain, explain_text, find_origin
from hpc_elastic.failures.ranking import FailureClass
from tests.rigs.described import described, traceback_in

SYMPTOM, INFRASTRUCTURE = FailureClass.SYMPTOM, FailureClass.INFRASTRUCTURE
SITE = "/venv/lib/python3.11/site-packages"
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"


def raised(
    kind: str, message: str = "", file: str = "/home/ann/train.py", source: str = "f()", *, depth: int = 2
) -> RaisedException:
    """An exception with `depth` frames, all of them in `file`."""
    frames = tuple(Frame(file=file, line=at, function="f") for at in range(depth))
    return RaisedException(exception_type=kind, message=message, frames=frames, source=source)


def class_of(*chain: RaisedException) -> FailureClass | None:
    row = explain_chain(chain)
    return row.failure_class if row is not None else None


def interrupted(
    kind: str, message: str, caller: str = "work.wait()", file: str = "distributed_c10d.py"
) -> RaisedException:
    """A handler of SIGALRM raised it, over what the main thread ran."""
    files = ("/home/ann/train.py", f"{SITE}/torch/distributed/{file}", "/home/ann/train.py")
    frames = tuple(Frame(file=name, line=at, function=f"f{at}") for at, name in enumerate(files))
    return RaisedException(exception_type=kind, message=message, frames=frames, source="raise late", caller=caller)


RESET, PIPE = "[Errno 104] Connection reset by peer", "[Errno 32] Broken pipe"
QUOTED = "raise SaveError(str(e))"


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        # What the process group did not raise is no symptom.
        (raised("ConnectionResetError", RESET, source="c.recv(10)"), None),
        (raised("BrokenPipeError", PIPE, source="p.stdin.flush()"), None),
        (raised("ConnectionResetError", RESET, "/usr/lib/python3.11/socket.py"), None),
        (raised("BrokenPipeError", PIPE, "/usr/lib/python3.11/multiprocessing/connection.py"), None),
        (raised("ConnectionResetError", "", f"{SITE}/torch/multiprocessing/reductions.py"), None),
        (raised("ConnectionRefusedError", "[Errno 111] Connection refused"), None),
        (raised("MemoryError"), None),
        (raised("RuntimeError", "broken pipeline schedule", source="raise RuntimeError('broken pipeline')"), None),
        (raised("ValueError", "zarr store is closed", source="raise ValueError(text)"), None),
        (raised("RuntimeError", "gloo was slow: timed out waiting for it", source="raise RuntimeError(text)"), None),
        (raised("ValueError", "store is closed", f"{SITE}/zarr/storage.py", "raise ValueError(text)"), None),
        # What it raised is one.
        (raised("RuntimeError", CLOSED, source="work.wait()"), SYMPTOM),
        (raised("RuntimeError", CLOSED, f"{SITE}/torch/autograd/graph.py"), SYMPTOM),
        (raised("torch.distributed.DistNetworkError", RESET, source="store.set('k', 'v')"), SYMPTOM),
        (raised("ConnectionResetError", "[Errno 104] …", f"{SITE}/torch/distributed/rpc/api.py"), SYMPTOM),
        (raised("TrainError", f"step 3 failed: {CLOSED}", source="raise TrainError(str(error)) from None"), SYMPTOM),
        (raised("RuntimeError", "Socket closed", f"{SITE}/torch/distributed/distributed_c10d.py"), SYMPTOM),
        (raised("BrokenPipeError", PIPE, f"{SITE}/torch/distributed/distributed_c10d.py"), SYMPTOM),
        # Texts of error numbers in a script's own message.
        (raised("ValueError", "the input/output error is 0.4", source="raise ValueError(text)"), None),
        (raised("AssertionError", "address already in use by tensor 4", source="assert free, text"), None),
        (raised("OSError", "[Errno 5] Input/output error", source="read(f)"), INFRASTRUCTURE),
        (raised("SaveError", "[Errno 28] No space left on device", source=QUOTED), INFRASTRUCTURE),
        (raised("OSError", "[Errno 116] Stale file handle", source="read(f)"), INFRASTRUCTURE),
        (raised("OSError", "[Errno 12] Cannot allocate memory", source="os.fork()"), INFRASTRUCTURE),
        # A time limit of the script's own that strikes in a collective, and other exceptions of a handler.
        (interrupted("TimeoutError", "no step within 60 s"), SYMPTOM),
        (interrupted("StepError", "step 7 took longer than 60 s"), SYMPTOM),
        (interrupted("ValueError", "the preemption notice came"), None),
        (interrupted("TimeoutError", "no answer of the tokenizer", caller="pickler.dump(obj)"), None),
        (raised("TimeoutError", "no step within 60 s", source="raise TimeoutError(text)"), None),
    ],
    ids=lambda one: f"{one.exception_type}: {one.message[:40]}" if isinstance(one, RaisedException) else "",
)  # fmt: skip
def test_where_it_was_raised_decides_what_a_text_means(one: RaisedException, expected: FailureClass | None) -> None:
    assert class_of(one) is expected
    row = explain(one)
    assert (row.failure_class if row else None) is expected


def handled(one: RaisedException) -> RaisedException:
    return replace(one, while_handling=True)


BAD, CLOSING = raised("ValueError", "bad batch"), raised("RuntimeError", CLOSED)
KEY, CONFIG = raised("KeyError", "'lr'"), raised("ConfigError", "no lr")
LEAVES = (Frame(file="train.py", line=9, function="<module>"), Frame(file="train.py", line=5, function="__exit__"))
IN_CLEANUP = replace(raised("RuntimeError", "2 writers are open", source="raise x"), frames=LEAVES)
OF_MODULE = replace(raised("ConfigError", "no lr", source="raise x"), frames=LEAVES[:1])


@pytest.mark.parametrize(
    ("chain", "origin", "expected"),
    [
        pytest.param([CLOSING, handled(BAD)], handled(BAD), None, id="the first exception decides"),
        pytest.param([raised("SaveError"), CLOSING], raised("SaveError"), SYMPTOM, id="and the last is named"),
        pytest.param([CLOSING, handled(CONFIG), KEY], handled(CONFIG), None, id="raised again before the symptom"),
        pytest.param([CONFIG, KEY], CONFIG, None, id="raised again"),
        pytest.param(
            [CLOSING, handled(raised("KeyError", "'cache'", depth=1))], CLOSING, SYMPTOM, id="of the normal course"
        ),
        pytest.param([IN_CLEANUP, handled(BAD)], handled(BAD), None, id="fails in the cleanup"),
        pytest.param([OF_MODULE, handled(BAD)], OF_MODULE, None, id="meant"),
    ],
)
def test_of_a_chain_the_first_exception_decides(
    chain: list[RaisedException], origin: RaisedException, expected: FailureClass | None
) -> None:
    assert class_of(*chain) is expected
    assert find_origin(chain) == origin


CHECKPOINT = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/home/ann/train.py", line 13, in <module>
[rank{rank}]:     dcp.save(state, checkpoint_id=path)
[rank{rank}]:   File "/venv/lib/python3.11/site-packages/torch/distributed/checkpoint/utils.py", line 263, in all_reduce
[rank{rank}]:     raise final_result
[rank{rank}]: torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([1])
[rank{rank}]: Traceback (most recent call last): (RANK 1)
[rank{rank}]:   File "/venv/lib/python3.11/site-packages/torch/distributed/checkpoint/utils.py", line 241, in all_reduce
[rank{rank}]:     local_data = map_fun()
[rank{rank}]:                  ^^^^^^^^^
[rank{rank}]: OSError: [Errno 28] No space left on device: '/scratch/__1_0.distcp'

"""


@pytest.mark.parametrize(("rank", "expected"), [(0, FailureClass.SYMPTOM), (1, FailureClass.INFRASTRUCTURE)])
def test_a_checkpoints_exception_is_that_of_the_rank_it_names(
    tmp_path: Path, rank: int, expected: FailureClass
) -> None:
    """Captured from torch 2.13, which raises it on all ranks."""
    failure = described(tmp_path, CHECKPOINT.format(rank=rank), global_rank=rank)
    assert failure.failure_class is expected
    assert "ranks:dict_keys([1])" in failure.headline
    assert "OSError: [Errno 28] No space left on device: '/scratch/__1_0.distcp'" in failure.headline


LOADER = """\
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/_utils.py", line 794, in reraise
    raise exception
{kind}: Caught {kind} in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/ann/train.py", line 12, in __getitem__
    return self.sock.recv(10)
           ^^^^^^^^^^^^^^^^^^
{kind}: {message}
"""


def test_the_exception_of_a_loaders_worker_is_part_of_the_chain() -> None:
    text = LOADER.format(kind="ConnectionResetError", message="[Errno 104] Connection reset by peer")
    found = traceback_in(text)
    assert [one.headline for one in found.earlier] == ["ConnectionResetError: [Errno 104] Connection reset by peer"]
    assert found.causes == ()
    assert found.earlier[0].frames[-1].file == "/home/ann/train.py"
    assert found.earlier[0].source == "return self.sock.recv(10)"
    assert class_of(*found.chain) is None
    full = traceback_in(LOADER.format(kind="OSError", message="[Errno 28] No space left on device"))
    assert class_of(*full.chain) is INFRASTRUCTURE


def test_the_exceptions_of_a_group_are_parts_of_the_chain() -> None:
    text = f"""\
  + Exception Group Traceback (most recent call last):
  |   File "/home/ann/train.py", line 13, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/ann/train.py", line 2, in f
    |     work.wait()
    | RuntimeError: {CLOSED}
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/home/ann/train.py", line 3, in g
    |     raise KeyError('shard b')
    | KeyError: 'shard b'
    +------------------------------------
"""
    found = traceback_in(text)
    assert [one.headline for one in found.earlier] == [f"RuntimeError: {CLOSED}", "KeyError: 'shard b'"]
    assert found.earlier[1].source == "raise KeyError('shard b')"
    assert class_of(*found.chain) is None


def test_a_failure_is_named_by_its_origin_and_shown_whole(tmp_path: Path) -> None:
    text = f"""\
[rank2]: Traceback (most recent call last):
[rank2]:   File "/home/ann/train.py", line 12, in <module>
[rank2]:     try: step()
[rank2]:          ^^^^^^
[rank2]:   File "/home/ann/train.py", line 9, in step
[rank2]:     raise ValueError('bad batch 17')
[rank2]: ValueError: bad batch 17

[rank2]: During handling of the above exception, another exception occurred:

[rank2]: Traceback (most recent call last):
[rank2]:   File "/home/ann/train.py", line 13, in <module>
[rank2]:     finally: dist.barrier()
[rank2]:   File "{SITE}/torch/distributed/distributed_c10d.py", line 4900, in barrier
[rank2]:     work.wait()
[rank2]: RuntimeError: {CLOSED}
"""
    failure = described(tmp_path, text)
    assert (failure.headline, failure.exception_type) == ("ValueError: bad batch 17", "ValueError")
    assert failure.failure_class is FailureClass.ROOT
    assert failure.traceback.endswith(CLOSED)


def test_a_watchdog_of_the_scripts_own_shows_that_a_rank_waited() -> None:
    """The words of a thread that called `os._exit`, and those before `_thread.interrupt_main()` in a collective."""
    assert explain_text("monitor: no progress for 60 s, ending this process\nstep 7\n") is OWN_WATCHDOG
    assert explain_text("training seems to be stuck, aborting") is OWN_WATCHDOG
    assert explain_text("the licence watchdog is on\n") is None
    assert explain_text("cannot open shard 7\nno progress for 60 s\n") is None
    frames = (Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=3, function="barrier"),)
    one = RaisedException(exception_type="KeyboardInterrupt", message="no progress for 60 s", frames=frames)
    assert class_of(one) is SYMPTOM
