"""The modules that a run's fork servers import: given by the user, learned from workers, left out; `preload.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.files import Unreadable
from hpc_elastic.run.spec import AUTO


class Preload(Struct, frozen=True, kw_only=True):
    modules: tuple[str, ...]
    """Given by the user; torch for ``auto``."""
    learned: tuple[str, ...] = ()
    """Imports that workers of earlier rounds were seen to make."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Module → why it can't be shared."""
    is_auto: bool = False

    def without(self, module: str, why: str) -> Preload:
        return replace(self, left_out={**self.left_out, module: why})

    def with_learned(self, modules: Sequence[str]) -> Preload:
        return replace(self, learned=tuple(dict.fromkeys((*self.learned, *modules))))

    def merged(self, other: Preload) -> Preload:
        learned = self.with_learned(other.learned)
        return replace(learned, left_out={**other.left_out, **self.left_out})

    @property
    def wanted(self) -> list[str]:
        return [name for name in dict.fromkeys((*self.modules, *self.learned)) if name not in self.left_out]

    def save(self, path: Path) -> None:
        codec.save(path, self, durable=False)


def load_preload(path: Path) -> Preload | None:
    kept = codec.load(path, Preload)
    return None if isinstance(kept, Unreadable) else kept


def preload_for(modules: Sequence[str], path: Path) -> Preload:
    """The modules of ``--preload MODULES``, with those that preload.json keeps from earlier attempts."""
    is_auto = AUTO in modules
    names = tuple("torch" if name == AUTO else name for name in modules)
    kept = load_preload(path)
    if not is_auto or kept is None:
        return Preload(modules=names, is_auto=is_auto)
    return replace(kept, modules=names, is_auto=True)
