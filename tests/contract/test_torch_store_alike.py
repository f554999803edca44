"""One suite for torch's own ``TCPStore`` and for ours in a folder: what works with one works with the other."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

KINDS = (
    "TCPStore",
    "FileSystemStore",
    "PrefixStore over TCPStore",
    "prefixed FileSystemStore",
    "PrefixStore over FileSystemStore",
)
KEYS = ["a", "a/b/../c", "/", "", "grüße 東京 🎉", "k" * 300, "new\nline", "nul\0byte", "A", ".", "%s{}"]
NOT_FORWARDED = ("delete_key", "num_keys", "list_keys")
"""By torch 2.13's PrefixStore, to a store written in Python. Where this list gets shorter, so does the one in docs/."""
SHORT = timedelta(seconds=0.2)


def opener(kind: str, folder: Path) -> Callable[[], Any]:
    """Opens the same, fresh store for one client after another."""
    dist = pytest.importorskip("torch.distributed")
    from hpc_elastic.pytorch.file_system_store import FileSystemStore

    seconds = timedelta(seconds=20)
    if "TCPStore" in kind:
        server = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False, timeout=seconds)
        clients = iter([server])  # the server's own client first: a second connection may take seconds

        def plain() -> Any:
            found = next(clients, None)
            return found or dist.TCPStore("localhost", server.port, None, False, timeout=seconds)
    else:

        def plain() -> Any:
            return FileSystemStore(folder / "store", timeout=seconds)

    if kind.startswith("PrefixStore"):
        return lambda: dist.PrefixStore("pre", plain())
    if kind.startswith("prefixed"):
        return lambda: plain().prefixed("pre")
    return plain


@pytest.fixture(params=KINDS)
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    return opener(request.param, tmp_path)


@pytest.fixture(params=KINDS[:-1])
def open_whole(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Of the stores that have all methods."""
    return opener(request.param, tmp_path)


def store_error() -> type[Exception]:
    import torch.distributed as dist

    return dist.DistStoreError  # type: ignore[no-any-return]


def test_what_is_set_comes_back_as_bytes(open_store: Callable[[], Any]) -> None:
    writer, reader = open_store(), open_store()
    for value in ("text", "", "grüße", b"\xff\x00", bytearray(b"ab"), b"z" * (1 << 20)):
        assert writer.set("key", value) is None
        assert writer.get("key") == (value.encode() if isinstance(value, str) else bytes(value))
        assert reader.get("key") == writer.get("key")
        assert isinstance(reader.get("key"), bytes)


def test_any_text_is_a_key_of_its_own(open_store: Callable[[], Any]) -> None:
    store = open_store()
    for number, key in enumerate(KEYS):
        assert not store.check([key]), key
        store.set(key, str(number))
        assert store.check([key])
    assert store.multi_get(KEYS) == [b"%d" % number for number in range(len(KEYS))]


@pytest.mark.parametrize("wrong", [3, None, "\udcff"], ids=repr)
def test_a_key_or_a_value_of_another_type_is_a_type_error(open_store: Callable[[], Any], wrong: Any) -> None:
    store = open_store()
    calls: list[Callable[[], Any]] = [
        lambda: store.set("key", wrong),
        lambda: store.set(wrong, "value"),
        lambda: store.get(wrong),
        lambda: store.add(wrong, 1),
        lambda: store.append("key", wrong),
        lambda: store.compare_set("key", wrong, "new"),
        lambda: store.compare_set("key", "old", wrong),
        lambda: store.multi_set(["key"], [wrong]),
        lambda: store.check([wrong]),
        lambda: store.wait([wrong]),
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()
    assert not store.check(["key"])


@pytest.mark.parametrize("amount", [1.5, "1", 2**63, -(2**63) - 1, None])
def test_an_amount_that_is_no_64_bit_number_is_a_type_error(open_store: Callable[[], Any], amount: Any) -> None:
    store = open_store()
    with pytest.raises(TypeError):
        store.add("key", amount)
    assert not store.check(["key"])


def test_a_counter_is_text(open_store: Callable[[], Any]) -> None:
    store = open_store()
    assert [store.add("n", 2), store.add("n", -5), store.add("n", 0), store.add("n", True)] == [2, -3, -3, -2]
    assert store.get("n") == b"-2"
    store.set("n", "7")
    assert store.add("n", 1) == 8
    assert store.add("other", 0) == 0
    assert store.get("other") == b"0", "adding nothing makes a value too"
    assert store.add("n", 2**62) == 2**62 + 8


def test_increments_from_many_threads_are_all_counted(open_store: Callable[[], Any]) -> None:
    stores = [open_store() for _ in range(3)]

    def work(store: Any) -> list[int]:
        return [store.add("n", 1) for _ in range(15)]

    with ThreadPoolExecutor(3) as pool:
        sums = [number for found in pool.map(work, stores) for number in found]
    assert sorted(sums) == list(range(1, 46))


def test_one_store_may_be_used_from_many_threads(open_store: Callable[[], Any]) -> None:
    store = open_store()
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda _: store.add("n", 1), range(40)))
    assert sorted(sums) == list(range(1, 41))


def test_compare_set_tells_what_is_there(open_store: Callable[[], Any]) -> None:
    store = open_store()
    assert store.compare_set("k", "none", "new") == b"none"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "a") == b"a"
    assert store.compare_set("k", "b", "c") == b"a"
    assert store.compare_set("k", "", "c") == b"a"
    assert store.compare_set("k", b"a", b"\xff") == b"\xff"
    assert store.compare_set("k", b"\xff", "") == b""
    assert store.get("k") == b""
    assert store.compare_set("k", "", "after an empty one") == b"after an empty one"


def test_compare_set_has_one_winner(open_store: Callable[[], Any]) -> None:
    stores = [open_store() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda number: stores[number].compare_set("k", "", str(number)), range(3)))
    assert len(set(found)) == 1


def test_appending_puts_behind(open_store: Callable[[], Any]) -> None:
    store = open_store()
    store.append("k", "a")
    store.append("k", b"\xff")
    assert store.get("k") == b"a\xff"
    store.append("empty", "")
    assert store.check(["empty"])


def test_many_at_once(open_store: Callable[[], Any]) -> None:
    store = open_store()
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["b", "a", "b"]) == [b"2", b"1", b"2"]
    assert store.multi_get([]) == []
    assert store.multi_set([], []) is None
    for keys, values in ((["x", "y"], ["1"]), (["x"], ["1", "2"])):
        with pytest.raises(store_error(), match="multiSet keys and values vectors must be of same size"):
            store.multi_set(keys, values)
    assert not store.check(["x"])
    assert store.has_extended_api()


def test_check_is_about_all_of_them(open_store: Callable[[], Any]) -> None:
    store = open_store()
    store.set("there", "")
    assert store.check([])
    assert store.check(["there"])
    assert not store.check(["there", "missing"])
    for wrong in ("there", None):
        with pytest.raises(TypeError):
            store.check(wrong)


def test_waiting_ends_with_the_time_and_names_the_key(open_store: Callable[[], Any]) -> None:
    store = open_store()
    store.set("there", "")
    store.wait([])
    store.wait(["there"])
    store.wait(["there"], timedelta(seconds=5))
    for call, limit in (
        (lambda: store.wait(["missing"], timedelta(seconds=0.3)), 300),
        (lambda: store.wait(["there", "missing"], SHORT), 200),
        (lambda: store.wait(["missing"], timedelta(0)), 0),
    ):
        begun = time.monotonic()
        with pytest.raises(store_error(), match=rf"^wait timeout after {limit}ms, keys: .*/?missing"):
            call()
        assert limit / 1000 <= time.monotonic() - begun < limit / 1000 + 15
    for wrong in (1, "1"):
        with pytest.raises(TypeError):
            store.wait(["there"], wrong)
    with pytest.raises(TypeError):
        store.wait("there")


def test_the_store_s_timeout_is_for_get_and_wait(open_store: Callable[[], Any]) -> None:
    store = open_store()
    assert store.timeout == timedelta(seconds=20)
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    for call in (lambda: store.get("missing"), lambda: store.wait(["missing"]), lambda: store.multi_get(["missing"])):
        with pytest.raises(store_error(), match=r"^wait timeout after 200ms, keys: .*missing"):
            call()
    with pytest.raises(TypeError):
        store.set_timeout(5)


def test_what_is_waited_for_comes(open_store: Callable[[], Any]) -> None:
    waiting, writer = open_store(), open_store()
    with ThreadPoolExecutor(2) as pool:
        value = pool.submit(waiting.get, "late")
        threading.Event().wait(0.05)
        writer.set("late", "v")
        assert value.result(20) == b"v"


def test_a_clone_is_the_same_store(open_store: Callable[[], Any]) -> None:
    store = open_store()
    store.set("k", "v")
    clone = store.clone()
    assert (clone.get("k"), clone.timeout, type(clone)) == (b"v", store.timeout, type(store))


def test_a_store_of_ours_pickles(tmp_path: Path) -> None:
    store = opener("prefixed FileSystemStore", tmp_path)()
    store.set("k", "v")
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.get("k"), copy.timeout, copy.has_extended_api()) == (b"v", timedelta(seconds=20), True)


def test_a_barrier_of_torch_s_own(open_store: Callable[[], Any]) -> None:
    store = open_store()
    if not hasattr(store, "barrier"):
        pytest.skip("torch has none")
    with ThreadPoolExecutor(2) as pool:
        other = open_store()
        list(pool.map(lambda each: each.barrier("b", 2, timedelta(seconds=20)), (store, other)))
    with pytest.raises(store_error(), match="timeout"):
        store.barrier("alone", 2, SHORT)


def test_what_is_deleted_is_gone(open_whole: Callable[[], Any]) -> None:
    store = open_whole()
    assert not store.delete_key("k")
    store.set("k", "v")
    before = store.num_keys()
    assert store.delete_key("k") is True
    assert store.delete_key("k") is False
    assert not store.check(["k"])
    assert store.num_keys() == before - 1
    assert store.add("k", 1) == 1, "and may come again"


def test_keys_are_counted_and_listed(open_whole: Callable[[], Any]) -> None:
    store = open_whole()
    before = store.num_keys()
    store.set("b", "")
    store.add("a/b", 1)
    store.append("c", "")
    store.set("b", "again")
    assert store.num_keys() == before + 3
    assert {"b", "a/b", "c"} <= set(store.list_keys())


def test_a_prefix_keeps_stores_apart(open_whole: Callable[[], Any]) -> None:
    import torch.distributed as dist

    store = open_whole()
    prefixed = store.prefixed("in") if hasattr(store, "prefixed") else dist.PrefixStore("in", store)
    prefixed.set("k", "inside")
    assert not store.check(["k"])
    assert store.get("in/k") == b"inside"
    assert prefixed.list_keys() == ["k"] or "in/k" in prefixed.list_keys()
    assert prefixed.delete_key("k")
    assert not store.check(["in/k"])


def test_a_store_lives_as_long_as_torch_holds_it(open_whole: Callable[[], Any]) -> None:
    import torch.distributed as dist

    behind = [dist.PrefixStore(str(number), open_whole()) for number in range(3)]
    gc.collect()
    assert [store.add("n", 1) for store in behind] == [1, 1, 1]


@pytest.mark.parametrize("method", NOT_FORWARDED)
def test_what_torch_s_prefix_store_does_not_hand_on(tmp_path: Path, method: str) -> None:
    arguments = ("k",) if method == "delete_key" else ()
    behind = opener("PrefixStore over FileSystemStore", tmp_path)()
    if not hasattr(behind, method):
        pytest.skip("torch has no such method")
    with pytest.raises((RuntimeError, NotImplementedError), match=r"pure virtual|not implemented"):
        getattr(behind, method)(*arguments)
    getattr(opener("prefixed FileSystemStore", tmp_path)(), method)(*arguments)


def test_a_value_that_is_no_number_is_told(tmp_path: Path) -> None:
    """Where TCPStore drops the connection."""
    store = opener("FileSystemStore", tmp_path)()
    store.set("k", "text")
    with pytest.raises(ValueError, match="'k' is not a number that can be added to: b'text'"):
        store.add("k", 1)
    assert store.get("k") == b"text"


def test_a_folder_that_refuses_is_torch_s_error_and_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_elastic.store import key_value
    from hpc_elastic.store.file_store import FileStore

    store = opener("FileSystemStore", tmp_path)()
    store.set_timeout(SHORT)
    monkeypatch.setattr(key_value, "FAULT_SECONDS", 0.2)

    def refuse(*_: object) -> None:
        raise OSError(5, "refused for a test")

    for name in ("list", "put_if_absent"):
        monkeypatch.setattr(FileStore, name, refuse)
    for call in (
        lambda: store.set("k", "v"),
        lambda: store.get("k"),
        lambda: store.add("k", 1),
        lambda: store.append("k", "v"),
        lambda: store.compare_set("k", "", "v"),
        lambda: store.wait(["k"]),
        lambda: store.check(["k"]),
        lambda: store.delete_key("k"),
        lambda: store.num_keys(),
        lambda: store.multi_set(["k"], ["v"]),
    ):
        begun = time.monotonic()
        with pytest.raises(store_error(), match="refused for a test"):
            call()
        assert time.monotonic() - begun < 15
    monkeypatch.setattr(key_value, "FAULT_SECONDS", 30.0)
    begun = time.monotonic()
    for call in (lambda: store.get("k"), lambda: store.wait(["k"])):
        with pytest.raises(store_error()):
            call()
    assert time.monotonic() - begun < 20, "whoever waits for 0.2 s does not wait for a fault of half a minute"
