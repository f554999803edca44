from __future__ import annotations

import hashlib
import hmac
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.base import codec
from hpc_elastic.base.codec import Mac, sha1, sha256


@given(st.binary(max_size=200))
def test_digests_are_those_of_hashlib(data: bytes) -> None:
    assert sha256(data) == hashlib.sha256(data).digest()
    assert sha1(data) == hashlib.sha1(data, usedforsecurity=False).digest()


@given(st.binary(max_size=150), st.binary(max_size=700))
def test_codes_are_those_of_hmac(key: bytes, message: bytes) -> None:
    mac = Mac(key)
    assert mac.of(message) == mac.of(message) == hmac.digest(key, message, "sha256")


def test_only_the_right_code_verifies() -> None:
    mac, code = Mac(b"key"), Mac(b"key").of(b"message")
    assert mac.verifies(code, b"message")
    for wrong in (b"", code[:-1], code + b"\0", bytes([code[0] ^ 1]) + code[1:], Mac(b"kez").of(b"message")):
        assert not mac.verifies(wrong, b"message")
    assert not mac.verifies(code, b"messagf")


def test_threads_do_not_disturb_each_other() -> None:
    mac, wrong = Mac(b"key"), []

    def work(message: bytes) -> None:
        expected = hmac.digest(b"key", message, "sha256")
        wrong.extend(1 for _ in range(300) if mac.of(message) != expected)

    threads = [threading.Thread(target=work, args=(bytes([n]) * 3000,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_python_without_its_own_sha256_takes_that_of_hashlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_sha2", "_sha256"):
        monkeypatch.setitem(sys.modules, name, None)
    found = codec._find("sha256", "_sha2", "_sha256")
    assert found(b"x").digest() == sha256(b"x")
    assert found is hashlib.sha256
