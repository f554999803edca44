"""SHA-256 and HMAC-SHA256 (RFC 2104) without OpenSSL, which `hashlib` and `hmac` load: 4 MB in each agent, and 3 ms.

CPython has the function built in; some distributions leave it out (those that want all of it to come from OpenSSL).
There `hashlib` does the same.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_BLOCK_BYTES = 64


def _find_sha256() -> Any:
    for module in ("_sha2", "_sha256"):  # from Python 3.12 on; before it
        try:
            return import_module(module).sha256
        except (ImportError, AttributeError):
            pass
    return import_module("hashlib").sha256


_sha256 = _find_sha256()
_compare_digest = import_module("_operator")._compare_digest  # where `hmac` has it from, without OpenSSL


def sha256(data: bytes) -> bytes:
    """The digest, 32 bytes."""
    digest: bytes = _sha256(data).digest()
    return digest


class Mac:
    """HMAC-SHA256 with one key. Safe for several threads."""

    def __init__(self, key: bytes) -> None:
        key = sha256(key) if len(key) > _BLOCK_BYTES else key
        key = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = _sha256(bytes(byte ^ 0x36 for byte in key))
        self._outer = _sha256(bytes(byte ^ 0x5C for byte in key))

    def of(self, message: bytes) -> bytes:
        """The code for `message`, 32 bytes."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        code: bytes = outer.digest()
        return code

    def verifies(self, code: bytes, message: bytes) -> bool:
        """Whether `code` is that of `message`, in a time that does not tell where they differ."""
        return bool(_compare_digest(code, self.of(message)))
