"""A Python for jobs: the system's interpreter, today's source of this project, and its dependencies, readable by all.

Root's own Python often lies in root's home, where a normal user can't go. So the environment is a virtual one of
/usr/bin/python3. The dependencies (torch is large) are, where they fit, those of the running interpreter, bound into
each host's mount namespace; else they are installed once and kept.
"""

from __future__ import annotations

import compileall
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from hpc_elastic import __version__

from .layout import CACHE_FOLDER, RigError
from .processes import call

SYSTEM_PYTHON = "/usr/bin/python3"
PROJECT = Path(__file__).resolve().parents[3]

MODULES = ("torch", "numpy", "sklearn", "msgspec", "psutil", "filelock", "submitit", "click", "jinja2")
"""What jobs import besides this project."""

REQUIREMENTS = (
    "torch==2.13.0",
    "numpy",
    "scikit-learn",
    "msgspec>=0.19",
    "psutil>=5.9",
    "filelock>=3.20",
    "submitit>=1.5",
    "click>=8.1",
    "jinja2>=3.1",
)
"""The same, for pip: for where the running interpreter has none that fit."""

COPIED = ("hpc_elastic", "sbatch_templates", "docs/examples", "pyproject.toml", "README.md", "LICENSE")
"""What of the project jobs see."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PythonEnvironment:
    """What was made.

    Attributes:
        folder: Holds the rest.
        mounts: Folders that must be bound for it to work: where to → what.
    """

    folder: Path
    mounts: dict[Path, Path]

    @property
    def bin(self) -> Path:
        """Goes in front of PATH: has ``python``, ``python3`` and ``hpc-elastic``."""
        return self.folder / "venv" / "bin"

    @property
    def python(self) -> Path:
        return self.bin / "python"

    @property
    def source(self) -> Path:
        """A copy of the project as it was when the environment was made."""
        return self.folder / "source"

    @property
    def examples(self) -> Path:
        return self.source / "docs" / "examples"


def python_environment(folder: Path) -> PythonEnvironment:
    """Make an environment for jobs in `folder`, which must not exist and whose parents must be open to all."""
    folder.mkdir(mode=0o755, parents=True)
    call([SYSTEM_PYTHON, "-m", "venv", "--without-pip", str(folder / "venv")])
    site_packages = next((folder / "venv" / "lib").glob("python3.*/site-packages"))
    version = site_packages.parent.name.removeprefix("python")
    mounts = {folder / f"packages{number}": path for number, path in enumerate(_borrowed_packages(version) or ())}
    for mount_point in mounts:
        mount_point.mkdir(mode=0o755)
    packages = list(mounts) or [_installed_packages(version)]
    environment = PythonEnvironment(folder=folder, mounts=mounts)
    _copy_source(environment.source)
    paths = "".join(f"{path}\n" for path in (environment.source, *packages))
    (site_packages / "hpc_elastic_rig.pth").write_text(paths)
    _write_metadata(site_packages, environment.bin)
    call(["chmod", "-R", "a+rX", str(folder)])
    return environment


def environment_of_root(folder: Path, root: Path) -> PythonEnvironment:
    """The same for hosts with a root folder of their own, made by hand: of its Python, and what it has installed.

    Args:
        folder: Where; it must not exist, and is at the same place on the hosts.
        root: Has Python and all that jobs need but this project; no torch.
    """
    version = os.readlink(root / SYSTEM_PYTHON.lstrip("/")).removeprefix("python")
    environment = PythonEnvironment(folder=folder, mounts={})
    site_packages = folder / "venv" / "lib" / f"python{version}" / "site-packages"
    for path in (environment.bin, site_packages):
        path.mkdir(parents=True)
    for name in ("python", "python3"):
        (environment.bin / name).symlink_to(SYSTEM_PYTHON)
    told = f"home = {os.path.dirname(SYSTEM_PYTHON)}\ninclude-system-site-packages = true\nversion = {version}\n"
    (folder / "venv" / "pyvenv.cfg").write_text(told)
    _copy_source(environment.source)
    (site_packages / "hpc_elastic_rig.pth").write_text(f"{environment.source}\n")
    _write_metadata(site_packages, environment.bin)
    # Jobs can't write byte code here; the root's Python sees the folder only where it is bound.
    program = (
        'mkdir -p "$1$2"; mount --bind "$2" "$1$2"; exec chroot "$1" "$3" -m compileall -q "$2/source/hpc_elastic"'
    )
    call(["unshare", "--mount", "sh", "-ec", program, "sh", str(root), str(folder), SYSTEM_PYTHON], check=False)
    call(["chmod", "-R", "a+rX", str(folder)])
    return environment


def _copy_source(target: Path) -> None:
    half_written = shutil.ignore_patterns("*.tmp*", "*.pyc.*")
    for name in COPIED:
        source = PROJECT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=half_written, dirs_exist_ok=True)
        elif source.exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    # A normal user can't write byte code here, so without this each agent and worker would compile everything anew.
    if sys.version_info[:2] == _system_version():
        compileall.compile_dir(str(target / "hpc_elastic"), quiet=2)
    else:
        call([SYSTEM_PYTHON, "-m", "compileall", "-q", str(target / "hpc_elastic")], check=False)


def _system_version() -> tuple[int, int]:
    """The system interpreter's version, from what /usr/bin/python3 is a link to."""
    found = re.search(r"python(\d+)\.(\d+)$", os.path.realpath(SYSTEM_PYTHON))
    if found:
        return int(found[1]), int(found[2])
    words = call([SYSTEM_PYTHON, "-c", "import sys; print(*sys.version_info[:2])"]).split()
    return int(words[0]), int(words[1])


def _write_metadata(site_packages: Path, bin_folder: Path) -> None:
    """Write what an installation of the project would: its metadata, entry points and console scripts."""
    table = _pyproject()["project"]
    info = site_packages / f"hpc_elastic-{__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hpc_elastic\nVersion: {__version__}\n")
    groups = {"console_scripts": table.get("scripts", {}), **table.get("entry-points", {})}
    lines = [line for group in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in groups[group].items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, what in groups["console_scripts"].items():
        module, _, function = what.partition(":")
        script = bin_folder / name
        script.write_text(
            f"#!{bin_folder}/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        script.chmod(0o755)


def _pyproject() -> dict[str, Any]:
    """pyproject.toml, read by the system's Python where the running one has no tomllib (new in 3.11)."""
    program = "import json, sys, tomllib; json.dump(tomllib.load(open(sys.argv[1], 'rb')), sys.stdout)"
    interpreter = sys.executable if sys.version_info >= (3, 11) else SYSTEM_PYTHON
    parsed: dict[str, Any] = json.loads(call([interpreter, "-S", "-c", program, str(PROJECT / "pyproject.toml")]))
    return parsed


# The dependencies ----------------------------------------------------------------------------------------------------


def _borrowed_packages(version: str) -> list[Path] | None:
    """The running interpreter's package folders, or ``None`` where jobs can't use them."""
    if version != f"{sys.version_info[0]}.{sys.version_info[1]}":
        return None  # compiled modules fit one minor version
    folders: list[Path] = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not _readable_by_all(Path(spec.origin)):
            return None
        folder = Path(spec.origin).parents[1]
        if folder not in folders:
            folders.append(folder)
    return folders


def _readable_by_all(module: Path) -> bool:
    """Whether a package's own files are (the folders above it don't matter: it is bound elsewhere)."""
    folders = (module.parent, module.parents[1])
    return bool(module.stat().st_mode & stat.S_IROTH) and all(
        folder.stat().st_mode & stat.S_IROTH and folder.stat().st_mode & stat.S_IXOTH for folder in folders
    )


def _installed_packages(version: str) -> Path:
    """Install the dependencies for the system's Python, once, and return their folder."""
    key = hashlib.sha256("\n".join((version, *REQUIREMENTS)).encode()).hexdigest()[:12]
    folder = CACHE_FOLDER / f"python-{key}"
    packages = folder / "lib" / f"python{version}" / "site-packages"
    complete = folder / "complete"
    CACHE_FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    with open(CACHE_FOLDER / "python.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two rigs that start together install once
        if complete.exists():
            return packages
        print(f"rig: installing the jobs' Python packages into {folder}, once …", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        call([SYSTEM_PYTHON, "-m", "venv", str(folder)])
        done = subprocess.run(
            [str(folder / "bin" / "pip"), "install", "--quiet", *REQUIREMENTS],
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )
        if done.returncode != 0:
            raise RigError(f"pip could not install {' '.join(REQUIREMENTS)}: {done.stderr.strip()[-2000:]}")
        call(["chmod", "-R", "a+rX", str(folder)])
        complete.touch()
    return packages
