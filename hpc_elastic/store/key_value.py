"""A small database of keys with values and counters, for many writers at once, made of a store's primitives.

Every change of a key is a new numbered version, ``<folder>/<digest of the key>+<number>``, created and never changed:
creating number n + 1 is the compare-and-set on what was read as number n. So no change is lost, whatever the number of
processes and mounts, without a lock. Reading is one listing of the folder, fresh from the server, and one read.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

from msgspec import Struct

from hpc_elastic.base.clock import Clock, pause
from hpc_elastic.base.loop import repeat
from hpc_elastic.store.file_store import Store, StoreError

KEPT_VERSIONS = 1024
"""Versions of each key. A writer that was stopped while that many others wrote gets an error, instead of writing into
the past."""
_PRUNE_EVERY = 256
_FIRST_DELAY = 0.003
_LONGEST_DELAY = 0.1
FAULT_SECONDS = 30.0
"""Seconds for which a filesystem that refuses is asked again before the caller hears of it."""

T = TypeVar("T")


class KeyValueTimeoutError(StoreError):
    """Keys did not come in time: `missing` names them."""

    template = "store {root}: nothing under {missing} after {seconds:g} s"


class _Version(Struct, frozen=True):
    number: int
    value: bytes | None
    """None: deleted, or never written."""
    key: str = ""


class KeyValueStore:
    """Keys and values in `folder` of `store`. Any text is a key, any bytes are a value."""

    def __init__(self, store: Store, folder: str, *, clock: Clock) -> None:
        """`folder` is a key prefix of its own. OSError, as in all methods: the filesystem refused for half a minute."""
        self._store = store
        self._folder = f"{folder}/key"
        self._clock = clock
        self._rng = random.Random()
        self._timeout = 300.0
        self._invalidated_at = clock.monotonic()
        # The folder must be there before anybody looks for something in it: a client may remember for a minute that it
        # is not.
        self._put(f"{self._folder}/open", "open")

    def set(self, key: str, value: bytes) -> None:
        """The last one to write holds."""
        self._change(key, lambda _: value)

    def get(self, key: str) -> bytes | None:
        """The value, or None. Where a server's times are coarse (a second), it may be up to two seconds old."""
        self._freshen()
        return self._newest(_digest(key)).value

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `wait` and `multi_get` wait; 300 s before."""
        self._timeout = timeout.total_seconds()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self.get_waiting(key, self._timeout) for key in keys]

    def get_waiting(self, key: str, timeout: float) -> bytes:
        """The value, waited for. KeyValueTimeoutError: it did not come."""
        found: list[bytes] = []

        def there(until: float) -> bool:
            value = self._newest(_digest(key), until=until).value
            if value is not None:
                found.append(value)
            return bool(found)

        self._wait_until(there, timeout, [key])
        return found[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, kept as decimal text; an absent one counts as 0. ValueError: the value is no number."""

        def decide(old: bytes | None) -> bytes:
            try:
                return b"%d" % (int(old or b"0") + amount)
            except ValueError:
                raise ValueError(f"the value of {key!r} is not a number that can be added to: {old!r:.50}") from None

        changed = self._change(key, decide)
        assert changed is not None
        return int(changed)

    def append(self, key: str, value: bytes) -> None:
        self._change(key, lambda old: (old or b"") + value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set `desired` where the value is `expected`, or where there is none and `expected` is empty. Returns the
        value after this; `expected` where there is none."""

        def decide(old: bytes | None) -> bytes | None:
            return desired if old == expected or (old is None and not expected) else old

        changed = self._change(key, decide, keep_same=True)
        return expected if changed is None else changed

    def delete_key(self, key: str) -> bool:
        """Remove the value. Returns whether there was one."""
        existed = False

        def decide(old: bytes | None) -> None:
            nonlocal existed
            existed = old is not None

        self._change(key, decide, keep_same=True)
        return existed

    def check(self, keys: Iterable[str]) -> bool:
        self._freshen()
        names = self._list()
        return all(self._newest(_digest(key), names).value is not None for key in keys)

    def wait(self, keys: Iterable[str], timeout: float | timedelta | None = None) -> None:
        """Wait until all of them have a value. KeyValueTimeoutError: after `timeout` (in seconds, if a number)."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        left = list(dict.fromkeys(keys))

        def there(until: float) -> bool:
            names = self._list(until)
            left[:] = [key for key in left if self._newest(_digest(key), names, until).value is None]
            return not left

        self._wait_until(there, self._timeout if seconds is None else seconds, left)

    def num_keys(self) -> int:
        return len(self.all_keys())

    def all_keys(self) -> list[str]:
        """All keys that have a value. One read for each."""
        self._freshen()
        names = self._list()
        digests = {name.partition("+")[0] for name in names if "+" in name}
        versions = (self._newest(digest, names) for digest in sorted(digests))
        return sorted(version.key for version in versions if version.value is not None)

    def _change(
        self, key: str, decide: Callable[[bytes | None], bytes | None], *, keep_same: bool = False
    ) -> bytes | None:
        """Write what `decide` makes of the value, until nobody else has written in between."""
        digest = _digest(key)
        delay = _FIRST_DELAY
        lost = 0
        certain = False
        while True:
            old = self._newest(digest)
            if old.number < lost:
                self._store.invalidate(self._folder)  # another process created that number; the listing is older
                pause(self._clock, self._rng.uniform(0, delay))
                continue
            value = decide(old.value)
            if keep_same and value == old.value:
                if certain:
                    return value
                # What a cached listing hides must not decide: no create follows here that would fail on it.
                self._store.invalidate(self._folder)
                certain = True
                continue
            number = old.number + 1
            if self._put(f"{self._folder}/{digest}+{number:012d}", _encode(key, value)):
                self._check_not_past(digest, number, key)
                return value
            lost = number
            pause(self._clock, self._rng.uniform(0, delay))
            delay = min(_LONGEST_DELAY, delay * 1.5)

    def _check_not_past(self, digest: str, number: int, key: str) -> None:
        numbers = _numbers(digest, self._list())
        newest = max(numbers, default=number)
        if newest - number >= KEPT_VERSIONS // 2:
            why = (
                f"{key!r}: this process was stopped while others wrote {newest - number} times; its change may be lost"
            )
            raise StoreError(root=self._folder, why=why)
        if number % _PRUNE_EVERY == 0:
            for old in numbers:
                if old <= number - KEPT_VERSIONS:
                    self._store.delete(f"{self._folder}/{digest}+{old:012d}")

    def _newest(self, digest: str, names: Iterable[str] | None = None, until: float | None = None) -> _Version:
        """The newest version. Listed and not readable yet is waited for: an older one must not pass for it."""
        while True:
            numbers = _numbers(digest, self._list(until) if names is None else names)
            if not numbers:
                return _Version(0, None)
            newest = max(numbers)
            raw = self._read(f"{self._folder}/{digest}+{newest:012d}", until)
            if raw is not None:
                return _decode(newest, raw)
            if until is not None and self._clock.monotonic() > until:
                raise OSError(errno.EIO, f"{self._folder}/{digest}+{newest:012d} is listed and can't be read")
            names = None
            pause(self._clock, self._rng.uniform(0.5, 1) * _FIRST_DELAY)

    def _put(self, key: str, value: str) -> bool:
        return self._steadily(lambda: self._store.put_if_absent(key, value))  # the same once more is the same

    def _read(self, key: str, until: float | None = None) -> str | None:
        return self._steadily(lambda: self._store.get(key), until)

    def _list(self, until: float | None = None) -> list[str]:
        return self._steadily(lambda: self._store.list(self._folder), until)

    def _steadily(self, operation: Callable[[], T], until: float | None = None) -> T:
        """Try an operation that may be repeated until it works; not beyond `until`, when the caller stops waiting."""
        left = FAULT_SECONDS + _LONGEST_DELAY
        left = left if until is None else min(left, until - self._clock.monotonic())
        return repeat(
            operation,
            again=lambda error: isinstance(error, OSError),
            within=left,
            clock=self._clock,
            longer=lambda _: self._rng.uniform(0.5, 1) * _LONGEST_DELAY,
        )

    def _freshen(self) -> None:
        """Make sure that what is polled shows some day: a change within one tick of the server's clock does not show
        in a listing that a client has cached, until the folder changes again."""
        now = self._clock.monotonic()
        if now - self._invalidated_at >= 2:
            self._invalidated_at = now
            self._store.invalidate(self._folder)

    def _wait_until(self, there: Callable[[float], bool], timeout: float, missing: Sequence[str]) -> None:
        """`there` gets the moment until which it may try, on the clock; `missing` is read after it."""
        deadline = self._clock.monotonic() + timeout
        delay = _FIRST_DELAY
        invalidate_after, invalidated_at = 1.0, self._clock.monotonic()
        while not there(deadline):
            now = self._clock.monotonic()
            left = deadline - now
            if now - invalidated_at >= invalidate_after:
                self._store.invalidate(self._folder)  # as in `_freshen`, but ever more rarely
                invalidate_after, invalidated_at = min(30, 2 * invalidate_after), now
            if left <= 0:
                raise KeyValueTimeoutError(root=self._folder, missing=list(missing), seconds=timeout)
            pause(self._clock, min(left, self._rng.uniform(0.7, 1) * delay))
            delay = min(_LONGEST_DELAY, delay * 1.5)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _numbers(digest: str, names: Iterable[str]) -> list[int]:
    prefix = f"{digest}+"
    return [int(name[len(prefix) :]) for name in names if name.startswith(prefix)]


def _encode(key: str, value: bytes | None) -> str:
    body = {"k": key, "v": None if value is None else base64.b64encode(value).decode(), "x": secrets.token_hex(8)}
    return json.dumps(body, separators=(",", ":"))


def _decode(number: int, raw: str) -> _Version:
    body = json.loads(raw)
    return _Version(number, None if body["v"] is None else base64.b64decode(body["v"]), body["k"])
