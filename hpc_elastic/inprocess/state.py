"""What a hook is given: this rank's place in the current iteration."""

from __future__ import annotations

import enum
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_elastic.inprocess.store import StoreMixin


class Status(enum.Enum):
    """What this rank is doing in the current iteration."""

    INITIALIZED = enum.auto()
    ACTIVE = enum.auto()
    """It calls the function."""
    INACTIVE = enum.auto()
    """A spare: it waits."""
    ABORTING = enum.auto()
    ABORTED = enum.auto()


class State:
    """Mutable, as in NVIDIA's 0.2: hooks change it and give it back.

    Attributes:
        rank, world_size: In the current iteration, spares included.
        active_world_size: Ranks that call the function; what ``WORLD_SIZE`` says.
        initial_rank, initial_world_size: As the call began.
        iteration: 0 for the first.
        status: See `Status`.
        store: The ring's store: while an iteration lasts, the part of it that is this iteration's own.
    """

    store: StoreMixin

    def __init__(self) -> None:
        """Reads RANK and WORLD_SIZE; without them this is rank 0 of 1."""
        self.get_distributed_vars()
        self.iteration = 0
        self.initial_rank = self.rank
        self.initial_world_size = self.world_size
        self.active_world_size = self.world_size
        self.status = Status.INITIALIZED

    @classmethod
    def from_env(cls) -> State:
        """As ``State()``; so NVIDIA's 0.4 has it."""
        return cls()

    def __repr__(self) -> str:
        shown = ("rank", "world_size", "active_world_size", "initial_rank", "initial_world_size", "iteration", "status")
        return f"State({', '.join(f'{name}={getattr(self, name)}' for name in shown)})"

    def get_distributed_vars(self) -> None:
        """Take rank and world size from the environment."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))

    def set_distributed_vars(self) -> None:
        """Export RANK and WORLD_SIZE (that of active ranks), for the function."""
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(self.active_world_size)

    def activate_all_ranks(self) -> None:
        """Every rank calls the function, until a filter says otherwise."""
        self.status = Status.ACTIVE
        self.active_world_size = self.world_size

    def advance(self) -> None:
        """Go on to the next iteration."""
        self.iteration += 1
