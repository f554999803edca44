"""The findings that a person keeps for later submissions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.files import Unreadable
from hpc_elastic.doctor.findings import DoctorFinding, Severity
from hpc_elastic.doctor.slurm_checks import SlurmFacts, check_slurm
from hpc_elastic.errors import UsageError
from hpc_elastic.options import config_files
from hpc_elastic.options.config_files import SITE_VARIABLE
from hpc_elastic.run.index import account_folder, make_account_folder


class SavedFindings(Struct, frozen=True, kw_only=True):
    saved_ns: int
    findings: tuple[DoctorFinding, ...] = ()
    slurm: SlurmFacts | None = None
    """The facts behind them, which are judged again for each run that is submitted."""


_NAME = "doctor.json"
# All of these but slurm.limits, which are the account's.
_OF_THE_SITE = ("slurm.", "partition", "gpu.", "network.", "nodes.memory", "nodes.signals", "nodes.shm")


def save_findings(kept: SavedFindings, *, env: Mapping[str, str], for_site: bool = False) -> Path:
    """Raises UsageError or OSError: there is no such folder, or it refuses."""
    if not for_site:
        path = make_account_folder("doctor", env) / _NAME
        codec.save(path, kept)
        return path
    site = _site_file(env)
    if site is None:
        raise UsageError(f"--save=site: {SITE_VARIABLE} and XDG_CONFIG_DIRS name no folder; use --save")
    found = (each for each in kept.findings if each.check.startswith(_OF_THE_SITE) and each.check != "slurm.limits")
    slurm = replace(kept.slurm, associations=None, qos_limits=None) if kept.slurm is not None else None
    site.parent.mkdir(parents=True, exist_ok=True)
    codec.save(site, replace(kept, findings=tuple(found), slurm=slurm))
    site.chmod(0o644)
    return site


def _site_file(env: Mapping[str, str]) -> Path | None:
    found = [each.path for each in config_files.candidates(env, Path("/")) if each.layer is config_files.Layer.SITE]
    return found[0].parent / _NAME if found else None


def saved_notes(env: Mapping[str, str], **run: Any) -> list[str]:
    """The site's problems come first, then this account's, then new ones for a run with these fields."""
    notes: dict[str, str] = {}
    folder = account_folder("doctor", env)
    for path in (_site_file(env), folder and folder / _NAME):
        saved = codec.load(path, SavedFindings) if path is not None else None
        if saved is None or isinstance(saved, Unreadable):
            continue
        day = time.strftime("%Y-%m-%d", time.localtime(saved.saved_ns / 1e9))
        judged = check_slurm(replace(saved.slurm, **run)) if saved.slurm is not None else ()
        new = [each for each in judged if each.level is not Severity.OK and each not in saved.findings]
        problems = [each for each in saved.findings if each.level is Severity.PROBLEM]
        for each in (*problems, *new):
            notes.setdefault(f"{each.check}: {each.found}; {each.way_out}", f" (found on {day})")
    return [note + day for note, day in notes.items()]
