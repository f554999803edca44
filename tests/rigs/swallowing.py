"""Places of a function where what interrupts it is dropped at first. Standard library alone."""

from __future__ import annotations

import ctypes
import time
from typing import Any

LONG = 60.0
"""Seconds: whoever waits them out has failed."""


class Lasting:
    """Its destructor lasts until it is interrupted, and what is raised in it is dropped."""

    def __del__(self) -> None:
        time.sleep(LONG)


def in_destructor() -> None:
    Lasting()
    time.sleep(LONG)


def in_except() -> None:
    for _ in range(3):
        try:
            time.sleep(LONG)
        except BaseException:  # what some programs do around everything
            pass
    time.sleep(LONG)


def in_generator() -> None:
    def numbers() -> Any:
        for _ in range(4):
            try:
                yield 1
                time.sleep(LONG)
            except BaseException:
                continue

    for _ in numbers():
        pass
    time.sleep(LONG)


def in_c_callback() -> None:
    calls: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def compare(_one: object, _other: object) -> int:
        calls.append(1)
        if len(calls) == 1:
            time.sleep(LONG)  # what is raised here, ctypes prints and drops
        return 0

    values = (ctypes.c_int * 2)()
    ctypes.CDLL(None).qsort(values, 2, ctypes.sizeof(ctypes.c_int), compare)
    time.sleep(LONG)
