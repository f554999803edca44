"""The key-value store over memory: faults, caches, what is removed. tests/contract has what each operation means."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from hpc_elastic.store import key_value
from hpc_elastic.store.file_store import StoreError
from hpc_elastic.store.key_value import KeyValueStore, KeyValueTimeoutError
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import MemoryStore


class FaultyStore(MemoryStore):
    """Every second operation fails, creates after they have worked: the reply was lost."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.always = False

    def _fail(self) -> None:
        self.turn += 1
        if self.always or self.turn % 2:
            raise OSError(5, "a fault")

    def put_if_absent(self, key: str, value: str) -> bool:
        created = super().put_if_absent(key, value)
        self._fail()
        return created

    def get(self, key: str) -> str | None:
        self._fail()
        return super().get(key)

    def list(self, folder: str) -> list[str]:
        self._fail()
        return super().list(folder)


def values(store: MemoryStore | None = None) -> KeyValueStore:
    return KeyValueStore(store or MemoryStore(), "kv", clock=FakeClock())


@pytest.mark.parametrize("key", ["a", "a/b", "", "ü\n", "k" * 400, "\udc80"])
@pytest.mark.parametrize("value", [b"", b"v", bytes(range(256)) * 40])
def test_any_key_and_any_value(key: str, value: bytes) -> None:
    kv = values()
    assert kv.get(key) is None
    kv.set(key, value)
    assert kv.get(key) == value


def test_it_has_the_methods_of_torchs_stores() -> None:
    kv = values()
    kv.set("a", b"1")
    kv.set("b", b"2")
    assert (kv.num_keys(), kv.multi_get(["b", "a", "b"])) == (2, [b"2", b"1", b"2"])
    kv.set_timeout(timedelta(seconds=0.5))
    for call in (lambda: kv.multi_get(["a", "c"]), lambda: kv.wait(["c"]), lambda: kv.wait(["c"], timedelta(0))):
        with pytest.raises(KeyValueTimeoutError) as caught:
            call()
        assert (caught.value.missing, caught.value.seconds <= 0.5) == (["c"], True)


def test_waiting_ends_in_time_and_names_what_is_missing() -> None:
    kv = values()
    kv.set("there", b"")
    kv.wait(["there"], 0)
    with pytest.raises(KeyValueTimeoutError, match=r"\['missing'\] after 3 s"):
        kv.wait(["there", "missing"], 3)
    with pytest.raises(KeyValueTimeoutError, match="missing"):
        kv.get_waiting("missing", 3)


@pytest.mark.parametrize("wait", [lambda kv: kv.get_waiting("k", 1), lambda kv: kv.wait(["k"], 1)])
def test_a_wait_ends_in_time_where_the_filesystem_refuses(wait: Callable[[KeyValueStore], object]) -> None:
    store = FaultyStore()
    clock = FakeClock()
    kv = KeyValueStore(store, "kv", clock=clock)
    store.always, begun = True, clock.now
    with pytest.raises(OSError, match="a fault"):
        wait(kv)
    assert clock.now - begun < 1.2
    for call in (lambda: kv.set("k", b""), lambda: kv.get("k")):
        begun = clock.now
        with pytest.raises(OSError, match="a fault"):
            call()
        assert clock.now - begun >= key_value.FAULT_SECONDS


def test_passing_faults_and_lost_replies_count_nothing_twice() -> None:
    kv = values(FaultyStore())
    assert [kv.add("n", 1) for _ in range(10)] == list(range(1, 11))


def test_old_versions_are_removed_and_the_past_can_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value, "KEPT_VERSIONS", 32)
    monkeypatch.setattr(key_value, "_PRUNE_EVERY", 8)
    store = MemoryStore()
    kv = values(store)
    for _ in range(64):
        kv.add("n", 1)
    assert kv.get("n") == b"64"
    names = store.list("kv/key")
    assert len(names) <= 32 + 9
    stale = sorted(name for name in names if "+" in name)

    class Stopped(MemoryStore):
        """Shows one long outdated listing, as a process sees that is stopped between looking and writing."""

        def list(self, folder: str) -> list[str]:
            if folder == "kv/key" and not shown:
                shown.append(True)
                return [f"{stale[0].partition('+')[0]}+{9:012d}"]
            return store.list(folder)

        def get(self, key: str) -> str | None:
            return store.get(stale_key) if key.endswith(f"+{9:012d}") else store.get(key)

        def put_if_absent(self, key: str, value: str) -> bool:
            return store.put_if_absent(key, value)

    shown: list[bool] = []
    stale_key = f"kv/key/{stale[0]}"
    with pytest.raises(StoreError, match="stopped while others wrote"):
        values(Stopped()).add("n", 1)
    assert kv.get("n") == b"64"


class CachingClient:
    """A client of a store whose listings stay as they were at the first look, until it changes the folder itself."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._seen: dict[str, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, folder: str) -> list[str]:
        return self._seen.setdefault(folder, self._store.list(folder))

    def put_if_absent(self, key: str, value: str) -> bool:
        self.invalidate(key.rpartition("/")[0])
        return self._store.put_if_absent(key, value)

    def invalidate(self, folder: str) -> None:
        self._seen.pop(folder, None)


def test_what_a_cache_hides_does_not_decide_that_nothing_is_to_be_done() -> None:
    store = MemoryStore()
    here = KeyValueStore(CachingClient(store), "kv", clock=FakeClock())
    there = KeyValueStore(store, "kv", clock=FakeClock())
    here.set("k", b"old")
    assert here.get("k") == b"old"
    there.set("k", b"new")
    assert here.compare_set("k", b"new", b"newest") == b"newest"
    assert there.get("k") == b"newest"
    there.set("other", b"value")
    assert here.delete_key("other") is True
