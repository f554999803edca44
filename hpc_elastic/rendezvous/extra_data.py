"""Extra data of a round: JSON values under keys, written by anybody, read by anybody, kept with the round's number."""

from __future__ import annotations

import json
from typing import Any

from hpc_elastic.clock import Clock
from hpc_elastic.store.base import Store
from hpc_elastic.store.key_value import KeyValueStore


class ExtraData:
    """All rounds' extra data in one store. Writers of different keys lose nothing; the last write of a key holds."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._values = KeyValueStore(store, "extra", clock=clock)

    def store(self, version: int, key: str, value: Any) -> None:
        """Keep `value`.

        Raises:
            TypeError, ValueError: it can't be written as JSON.
        """
        self._values.set(f"{version}/{key}", json.dumps(value).encode())

    def load(self, version: int, key: str, timeout: float) -> Any:
        """The value, waited for up to `timeout` seconds.

        Raises:
            KeyValueTimeoutError: it did not come.
        """
        return json.loads(self._values.get_waiting(f"{version}/{key}", timeout))
