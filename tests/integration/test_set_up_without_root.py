"""The set-up: the torch that is there, and Debian's Python and pip unpacked beside the code where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
TOOLS = ("bash", "basename", "cat", "cp", "dirname", "head", "ln", "mkdir", "rm", "tail", "uname", "chmod")
APT_GET = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$FAKES/apt-get.log"
for word; do
    case $word in
        Dir::Cache=*) cache=${word#*=} ;;
        fails) echo "E: Unable to locate package fails" >&2; exit 100 ;;
        install) : >"$cache/archives/some.deb" ;;
    esac
done
"""
DPKG_DEB = """#!/usr/bin/env bash
[ -f "$2" ] || exit 2
bin=$3/usr/bin
mkdir -p "$bin" && cp "$FAKES/python3.11" "$FAKES/patchelf" "$bin/" && ln -sf python3.11 "$bin/python3"
"""
PATCHELF = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$FAKES/patchelf.log"
"""


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with a space in its name, on a system with apt-get and no Python."""
    fakes = tmp_path / "fakes"
    fakes.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (fakes / name).symlink_to(found)
    for name, text in (
        ("apt-get", APT_GET),
        ("dpkg-deb", DPKG_DEB),
        ("patchelf", PATCHELF),
        ("python3.11", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'),
    ):
        (fakes / name).write_text(text.replace("/usr/bin/env bash", str(shutil.which("bash"))))
        (fakes / name).chmod(0o755)
    folder = tmp_path / "a folder"
    folder.mkdir()
    return folder


def call(bare: Path, command: str) -> subprocess.CompletedProcess[str]:
    fakes = bare.parent / "fakes"
    script = f"set -u; say() {{ printf '%s\\n' \"$*\"; }}; . '{EXAMPLES}/debian-python.sh'; {command}"
    return subprocess.run(
        [str(fakes / "bash"), "-c", script],
        cwd=bare,
        env={"PATH": str(fakes), "FAKES": str(fakes), "HOME": os.devnull},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_python_is_unpacked_that_finds_its_libraries(bare: Path) -> None:
    done = call(bare, "debian_python")
    assert done.returncode == 0, done.stderr
    assert f"unpacking Debian's into {bare}/.python" in done.stdout
    asked = (bare.parent / "fakes" / "apt-get.log").read_text().splitlines()
    assert len(asked) == 2
    assert all(f"Dir::State={bare}/.python/apt" in line for line in asked), "nothing of the system's is written"
    assert asked[1].endswith("python3 python3-pip-whl patchelf")
    (patched,) = (bare.parent / "fakes" / "patchelf.log").read_text().splitlines()
    assert "$ORIGIN/../lib/" in patched
    assert patched.endswith(".python/usr/bin/python3.11")
    assert not (bare / ".python" / "apt").exists()


def test_what_apt_get_says_is_shown_and_nothing_stays(bare: Path) -> None:
    done = call(bare, "debian_unpack fails")
    assert done.returncode == 1
    assert done.stderr == "E: Unable to locate package fails\n"
    assert not (bare / ".python" / "apt").exists()


def test_elsewhere_it_fails_quietly(bare: Path) -> None:
    (bare.parent / "fakes" / "dpkg-deb").unlink()
    done = call(bare, "debian_unpack python3")
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("version", "wanted", "shared"), [("2.4.0a0+nv", "", True), ("2.3.1", "", False), ("2.9.0", "torch==2.8", False)]
)
def test_the_active_environments_torch_is_used_where_it_is_new_enough(
    tmp_path: Path, version: str, wanted: str, shared: bool
) -> None:
    active = tmp_path / "active"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(active)], check=True)
    (site,) = active.glob("lib/python*/site-packages")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text(f"__version__ = '{version}'\n")
    script = f"""
cd '{EXAMPLES.parents[1]}' && . docs/examples/setup-venv.sh && cd '{tmp_path}'
python=$(find_python) && "$python" -m venv --without-pip .venv
[ -n "${{HPC_ELASTIC_TORCH:-}}" ] || share_torch "$python"
echo "$python"; .venv/bin/python -c 'import torch; print(torch.__file__)'
"""
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{active}/bin:{os.environ['PATH']}", "HPC_ELASTIC_TORCH": wanted},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert ("ModuleNotFoundError" in done.stderr) == (not shared), done.stderr
    assert lines[1:] == ([f"{site}/torch/__init__.py"] if shared else [])
    if shared or wanted:
        assert lines[0] == f"{active}/bin/python"
