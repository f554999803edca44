"""What is built and installed: whole, described as pyproject.toml says, and able to train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT, require_module
from tests.rigs.pythons import pythons

VERSIONS = {version: path for version, path in pythons().items() if path != sys.executable}


def test_twine_accepts_both_and_they_are_whole(built: dict[str, Path]) -> None:
    require_module("twine")
    argv = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.values())]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    with tarfile.open(built["sdist"]) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(built["wheel"]) as wheel:
        installed = set(wheel.namelist())
        (info,) = (name for name in installed if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(wheel.read(info).decode())
    listed = subprocess.run(["git", "ls-files", "hpc_elastic"], cwd=ROOT, capture_output=True, text=True)
    package = set(listed.stdout.split())
    assert "hpc_elastic/py.typed" in package
    assert not package - sources
    assert not package - installed
    assert {"LICENSE", "README.md", "CITATION.cff", "pyproject.toml", "docs/examples/train_digits.py"} <= sources
    assert "hpc_elastic/sbatch_templates/elastic.sbatch" in installed
    assert info.replace("METADATA", "licenses/LICENSE") in installed
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"


def environment(python: str, folder: Path, *wanted: str) -> Path:
    """The Python of a new, empty environment in which pip has installed `wanted`."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    new = folder / "bin/python"
    done = subprocess.run([new, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return new


@pytest.mark.parametrize("kind", ["wheel", pytest.param("sdist", marks=pytest.mark.slow)])
def test_in_an_empty_environment_it_trains(built: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """torch and scikit-learn are this environment's; they come when the rest has been seen to need none."""
    python = environment(sys.executable, tmp_path / "env", str(built[kind]))
    code = (
        "import hpc_elastic.cli.submit, hpc_elastic.cli.report, hpc_elastic.report.render_html, hpc_elastic.submission"
    )
    outside = {**os.environ, "PYTHONPATH": "", "PATH": f"{tmp_path}/env/bin:{os.environ['PATH']}"}
    for argv in ([python, "-m", "pip", "check"], [python, "-c", code]):
        done = subprocess.run(argv, cwd=tmp_path, env=outside, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "torch_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.copy(ROOT / "docs/examples/train_digits.py", tmp_path)
    argv = ["hpc-elastic", "run", "--cluster", "local", "--nproc-per-node", "1", "train_digits.py", "--epochs", "2"]
    done = subprocess.run(argv, cwd=tmp_path, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "final: epoch=2" in done.stdout
    (run,) = (tmp_path / "runs").glob("*/run.json")
    assert (run.parent / "attempt-000/report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_unit_tier_passes_with_each_python(built: dict[str, Path], tmp_path: Path, version: str) -> None:
    """Without torch: what needs it is skipped."""
    python = environment(VERSIONS[version], tmp_path / "env", f"{built['wheel']}[test]")
    argv = [python, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", "-p", "no:cacheprovider", "tests/unit"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
