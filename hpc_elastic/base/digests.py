"""SHA-1, SHA-256 and HMAC-SHA256 (RFC 2104) without OpenSSL, which `hashlib` and `hmac` load: 4 MB and 3 ms each time.

CPython has the functions built in; some distributions leave them out, where `hashlib` does the same.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_BLOCK_BYTES = 64


def _find(name: str, *modules: str) -> Any:
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            pass
    return getattr(import_module("hashlib"), name)


_sha1 = _find("sha1", "_sha1")
_sha256 = _find("sha256", "_sha2", "_sha256")  # from Python 3.12 on; before it
_compare_digest = import_module("_operator")._compare_digest  # where `hmac` has it from, without OpenSSL


def sha1(data: bytes) -> bytes:
    """A 20-byte digest: a short name for something, not against an adversary."""
    digest: bytes = _sha1(data, usedforsecurity=False).digest()
    return digest


def sha256(data: bytes) -> bytes:
    digest: bytes = _sha256(data).digest()
    return digest


class Mac:
    def __init__(self, key: bytes) -> None:
        key = sha256(key) if len(key) > _BLOCK_BYTES else key
        key = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = _sha256(bytes(byte ^ 0x36 for byte in key))
        self._outer = _sha256(bytes(byte ^ 0x5C for byte in key))

    def of(self, message: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        code: bytes = outer.digest()
        return code

    def verifies(self, code: bytes, message: bytes) -> bool:
        """Compare `code` with that of `message`, in a time that does not depend on where they differ."""
        return bool(_compare_digest(code, self.of(message)))
