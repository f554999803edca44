"""The two words that every failure gets: whose it is, and who has to do something about it."""

from __future__ import annotations

from enum import Enum


class FailureClass(str, Enum):
    """Whose failure it is."""

    ROOT = "root"
    SYMPTOM = "symptom"
    STOPPED_BY_US = "stopped_by_us"
    HANG = "hang"
    """It gave no sign of life any more, and was ended for that. Never by `classify`: its end alone does not say so."""
    INFRASTRUCTURE = "infrastructure"


class Category(str, Enum):
    """Who has to do something about it."""

    INPUT = "input"
    """The user's call or environment: a script that can't be compiled, a wrong option, a module that isn't there."""
    WORKER = "worker"
    """The user's code, while it ran."""
    PLATFORM = "platform"
    """This package: its agent or supervisor failed."""
    INFRASTRUCTURE = "infrastructure"
    """The node, the network, the filesystem, the memory limit."""
