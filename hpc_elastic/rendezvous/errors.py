"""Errors of a rendezvous."""

from __future__ import annotations

from hpc_elastic.errors import HpcElasticError


class RendezvousError(HpcElasticError):
    """The base of all below; nothing else comes out of a rendezvous."""


class RendezvousClosedError(RendezvousError):
    template = "rendezvous of run {run_id!r} is closed: {outcome} ({reason})"


class ClosedRunIdError(RendezvousClosedError):
    template = RendezvousClosedError.template + "; give a new run id, or reopen=on for a new run of this one"


class RendezvousTimeoutError(RendezvousError):
    template = (
        "rendezvous of run {run_id!r}: {missing_count} of {expected} nodes had not joined after {timeout:g} s "
        "({missing}); look for their agent logs, or allow fewer nodes, {fewer}-{expected}"
    )


class NoPlaceError(RendezvousTimeoutError):
    template = (
        "rendezvous of run {run_id!r}: all {places} places were taken for {timeout:g} s, and this node, a spare, "
        "was not needed; allow more nodes, or a longer timeout"
    )


class FilesystemTimeoutError(RendezvousTimeoutError):
    template = "rendezvous of run {run_id!r}: {path} could not be used for {timeout:g} s: {why}"


class ExtraDataTimeoutError(RendezvousTimeoutError):
    template = "rendezvous of run {run_id!r}: nothing stored under {key!r} of version {version} after {timeout:g} s"


class RendezvousStateError(RendezvousError):
    template = "rendezvous of run {run_id!r}: record {number} is {why}"
