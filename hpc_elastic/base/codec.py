"""Records to JSON and back: one way for everything that is written to disk, sent, or handed to another process.

Readers are strict about types and tolerant of everything else: unknown keys are ignored, missing ones take the field's
default. The text itself is the standard library's JSON: msgspec's own encoder refuses the lone surrogates of paths that
are not UTF-8.

Digests are made without OpenSSL, which `hashlib` and `hmac` load: 4 MB and 3 ms each time. CPython has the functions
built in; some distributions leave them out, where `hashlib` does the same.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from msgspec import MsgspecError, Struct, ValidationError, convert, to_builtins
from msgspec.json import Decoder
from msgspec.structs import fields

from hpc_elastic.base.files import Unreadable, parse_json, read_json, write_json

VERSION = 1
"""The version of every format here. A change that older readers can't ignore takes the next number."""

R = TypeVar("R", bound=Struct)
_REFUSALS = (ValidationError, UnicodeEncodeError, RecursionError)
"""msgspec's errors; the second for a lone surrogate in a key or an enumeration's value."""


class UnreadableRecordError(ValueError):
    """A value is not the record that it should be: torn, foreign, or of another version."""


def to_json(record: Struct, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Convert any record but an ``array_like`` one to JSON values, leaving out the names in `without`."""
    value: dict[str, Any] = to_builtins(record, enc_hook=_encode)
    for name in without:
        del value[name]
    return value


def from_json(cls: type[R], value: object, **known: Any) -> R:
    """Convert JSON values to a record. The names in `known` have those values whatever `value` says.

    Raises UnreadableRecordError: a field is missing or of another type.
    """
    try:
        merged = {**value, **known} if known and isinstance(value, dict) else value
        decoder(cls)
        return convert(merged, cls, dec_hook=_decode, str_keys=True)
    except _REFUSALS as error:
        raise UnreadableRecordError(str(error)) from None


NOT_DECODED = (MsgspecError, UnicodeError, RecursionError)


@cache
def decoder(cls: type[R]) -> Decoder[R]:
    """A decoder of texts, in a fraction of the time that `json.loads` and `from_json` take, for many of a kind.

    Its results are theirs. It refuses more (`NOT_DECODED`): NaN, lone surrogates, text that is not UTF-8; a text that
    it refuses has to be read by those two. They ask for it first: msgspec looks at a type at its first use, and crashes
    where two threads do so at once (0.22: a segfault).
    """
    with _preparing:
        return Decoder(cls, dec_hook=_decode)


_preparing = threading.Lock()


def _renew_lock() -> None:
    global _preparing
    _preparing = threading.Lock()  # the one that another thread may have held is nobody's here


os.register_at_fork(after_in_child=_renew_lock)


def readable(cls: type[R], value: object) -> R | None:
    try:
        return from_json(cls, value)
    except UnreadableRecordError:
        return None


def readable_fields(cls: type[Struct], value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `value` that have their types, for a record of which any part is better than none.

    A field that is a ``tuple[item, ...]`` keeps its readable items.
    """
    present = [each for each in _fields_of(cls) if each.encode_name in value]
    try:  # all at once, in a fraction of the time
        record = from_json(cls, value)
        return {each.name: getattr(record, each.name) for each in present}
    except UnreadableRecordError:
        pass
    found = {}
    for each in present:
        try:
            found[each.name] = _field(value[each.encode_name], each.type)
        except _REFUSALS:
            pass  # a newer version's, or damaged
    return found


_fields_of = cache(fields)


def _field(value: object, kind: Any) -> object:
    decoder(kind)
    try:
        return convert(value, kind, dec_hook=_decode, str_keys=True)
    except _REFUSALS:
        if get_origin(kind) is not tuple or get_args(kind)[1:] != (...,) or not isinstance(value, list):
            raise
    found = []
    for item in value:
        try:
            found.append(convert(item, get_args(kind)[0], dec_hook=_decode, str_keys=True))
        except _REFUSALS:
            pass
    return tuple(found)


def readable_items(cls: type[R], values: object) -> tuple[R, ...]:
    found = (readable(cls, value) for value in (values if isinstance(values, list) else ()))
    return tuple(record for record in found if record is not None)


def dumps(record: Struct) -> str:
    return json.dumps(to_builtins(record, enc_hook=_encode), separators=(",", ":"))


def loads(cls: type[R], text: str | bytes) -> R:
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableRecordError(str(error)) from None
    return from_json(cls, value)


def save(path: Path, record: Struct, *, durable: bool = False, without: tuple[str, ...] = ()) -> None:
    """Write a file whole or not at all, with its format's version; `without` as in `to_json`. Raises OSError."""
    write_json(path, {"version": VERSION, **to_json(record, without=without)}, durable=durable)


def load(path: Path, cls: type[R], *, limit: int = 16 << 20) -> R | Unreadable:
    """A record from a file of at most `limit` bytes, or why it is unreadable: ``missing``, ``unreadable: …``."""
    value = read_json(path, limit=limit)
    if isinstance(value, str):
        return value
    if problem := version_problem(value):
        return Unreadable(problem)
    try:
        return from_json(cls, value)
    except UnreadableRecordError as error:
        return Unreadable(f"unreadable: {error}")


def version_problem(value: Mapping[str, Any]) -> str:
    """Why a file's format is not the one that this program reads; empty where it is."""
    version = value.get("version")
    return "" if version == VERSION else f"has format version {version!r}; this program reads {VERSION}"


def _encode(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no form in JSON")


def _decode(wanted: type, value: object) -> object:
    if wanted is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"Expected `{wanted.__name__}`, got `{type(value).__name__}`")


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
