"""What of in-process restart needs no torch, on the interpreter that runs this: asynchronous exceptions changed from
3.10 to 3.13. Prints one line for each case; the exit code is 1 where one failed."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
package = types.ModuleType("hpc_elastic.inprocess")
package.__path__ = [str(ROOT / "hpc_elastic" / "inprocess")]
sys.modules["hpc_elastic.inprocess"] = package  # its own __init__ imports torch

from hpc_elastic.inprocess.progress_watchdog import (  # noqa: E402
    Interruptible,
    RankShouldRestart,
    SignalHandler,
    _bytecode_probe,
    async_raise,
    reraise_if_unraisable,
)
from tests.rigs.swallowing import LONG, in_c_callback, in_destructor, in_except, in_generator  # noqa: E402


def in_sleep() -> None:
    time.sleep(LONG)


def in_loop() -> None:
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        pass


def in_finally() -> None:
    done = []
    try:
        time.sleep(LONG)
    finally:
        time.sleep(0.2)  # is left alone
        done.append(1)
    assert done


def interrupted(body: Callable[[], None]) -> bool:
    """Whether the main thread gets out of `body` in time."""
    part, stop = Interruptible(), threading.Event()

    def watch() -> None:
        time.sleep(0.05)
        part.interrupt("a test")
        part.insist(stop)

    thread = threading.Thread(target=watch)
    began = time.monotonic()
    try:
        part.run(lambda: (thread.start(), body())[0])
    except RankShouldRestart as error:
        return error.owner is part and time.monotonic() - began < LONG / 2
    finally:
        stop.set()
        thread.join()
        part.close()
    return False


def probe_stands_still_in_a_system_call_alone() -> bool:
    probe, counts = _bytecode_probe(), []

    def look() -> None:
        for _ in range(20):
            counts.append(probe.look())
            time.sleep(0.01)

    def watched(body: Callable[[], None]) -> int:
        counts.clear()
        thread = threading.Thread(target=look)
        thread.start()
        body()
        thread.join()
        return counts[-1] - counts[1]

    def loop() -> None:
        deadline = time.monotonic() + 0.6
        while time.monotonic() < deadline:
            pass

    return watched(loop) > 0 and watched(lambda: time.sleep(0.6)) <= 1


def raised_in_another_thread() -> bool:
    class Planted(Exception):
        pass

    caught: list[bool] = []

    def body() -> None:
        try:
            in_loop()
        except Planted:
            caught.append(True)

    thread = threading.Thread(target=body)
    thread.start()
    async_raise(thread.ident or 0, Planted)
    thread.join()
    return caught == [True]


def raised_again_out_of_a_destructor() -> bool:
    class Planted(Exception):
        pass

    class Raising:
        def __del__(self) -> None:
            raise Planted

    sys.unraisablehook = lambda _: None
    try:
        with reraise_if_unraisable(Planted):
            Raising()
            in_loop()
    except Planted:
        return True
    finally:
        sys.unraisablehook = sys.__unraisablehook__
    return False


def main() -> int:
    bodies = (in_sleep, in_loop, in_destructor, in_except, in_generator, in_c_callback, in_finally)
    checks = (probe_stands_still_in_a_system_call_alone, raised_in_another_thread, raised_again_out_of_a_destructor)
    sys.unraisablehook = lambda _: None
    failed = 0
    with SignalHandler():
        for body in bodies:
            well = interrupted(body)
            failed += not well
            print(f"{body.__name__}: {'ok' if well else 'FAILED'}", flush=True)
    for check in checks:
        well = check()
        failed += not well
        print(f"{check.__name__}: {'ok' if well else 'FAILED'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
