"""The conda recipe, the Spack package and CITATION.cff: right by their tools, and the same as pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import hpc_elastic
from tests.packaging.conftest import ROOT, require_module

INSTALL = ROOT / "docs/install"
CONDA_NAMES = {"msgspec": "msgspec-python"}


def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return found


def required() -> dict[str, str]:
    """Name → least version, of Python, hatchling and what pip installs with this package."""
    listed = [*project()["project"]["dependencies"], *project()["build-system"]["requires"]]
    found = dict(re.match(r"([\w-]+)>=([\d.]+)", one).groups() for one in listed)  # type: ignore[union-attr, misc]
    return {**found, "python": project()["project"]["requires-python"].removeprefix(">=")}


def test_the_conda_recipe_is_read_and_needs_what_pip_installs() -> None:
    require_module("rattler_build", "py-rattler-build")
    import rattler_build

    recipe = rattler_build.Stage0Recipe.from_yaml((INSTALL / "conda/recipe.yaml").read_text())
    (variant,) = recipe.render(rattler_build.VariantConfig())
    found = variant.recipe.to_dict()
    assert found["package"]["version"] == hpc_elastic.__version__
    assert (INSTALL / "conda" / found["source"][0]["path"]).resolve() == ROOT
    needs = [*found["requirements"]["host"], *found["requirements"]["run"]]
    assert {one.split(",")[0] for one in needs} - {"pip"} == {
        f"{CONDA_NAMES.get(name, name)} >={version}" for name, version in required().items()
    }
    (script,) = project()["project"]["scripts"].items()
    assert found["build"]["python"]["entry_points"] == [" = ".join(script)]
    (torch,) = project()["project"]["optional-dependencies"]["torch"]
    assert found["requirements"]["run_constraints"] == [torch.replace("torch", "pytorch ")]


def spack_class(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[type, dict[str, list[tuple[Any, ...]]]]:
    """The class in a package.py, and each directive's calls. Spack itself can't be had by pip."""
    called: dict[str, list[tuple[Any, ...]]] = {}
    package = types.ModuleType("spack.package")
    for name in ("version", "variant", "depends_on", "license", "conflicts", "maintainers"):

        def directive(*args: Any, name: str = name, **facts: Any) -> None:
            called.setdefault(name, []).append((*args, facts))

        setattr(package, name, directive)
    build_systems = types.ModuleType("spack_repo.builtin.build_systems.python")
    build_systems.PythonPackage = type("PythonPackage", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spack", types.ModuleType("spack"))
    monkeypatch.setitem(sys.modules, "spack.package", package)
    for parent in ("spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, build_systems.__name__, build_systems)
    scope: dict[str, Any] = {"__file__": str(path), "__name__": path.parent.name}
    exec(compile(path.read_text(), path, "exec"), scope)
    name = "".join(part.capitalize() for part in path.parent.name.split("_"))
    assert issubclass(scope[name], build_systems.PythonPackage), "Spack finds a package by its folder's name"
    return scope[name], called


def test_the_spack_package_needs_what_pip_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    found, called = spack_class(INSTALL / "spack/packages/py_hpc_elastic/package.py", monkeypatch)
    assert found.git == f"file://{ROOT}"  # type: ignore[attr-defined]
    assert found.__doc__
    assert called["license"][0][0] == project()["project"]["license"]
    needs = {}
    for spec, facts in called["depends_on"]:
        name, _, versions = spec.partition("@")
        assert re.fullmatch(r"[a-z][a-z0-9-]*", name)
        assert re.fullmatch(r"[\d.]+:[\d.]*", versions)
        assert set(facts["type"] if isinstance(facts["type"], tuple) else (facts["type"],)) <= {"build", "run"}
        if facts.get("when") != "+torch":
            needs[name.removeprefix("py-")] = versions.partition(":")[0]
    assert needs == required()
    assert [one[0] for one in called["variant"]] == ["torch"]


def test_what_spack_lacks_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(r"^repo:\n  namespace: \w+\n", (INSTALL / "spack/repo.yaml").read_text())
    _, called = spack_class(INSTALL / "spack/packages/py_submitit/package.py", monkeypatch)
    (version,) = called["version"]
    assert tuple(map(int, version[0].split("."))) >= tuple(map(int, required()["submitit"].split(".")))
    assert re.fullmatch(r"[0-9a-f]{64}", version[1]["sha256"])


def test_the_citation_is_valid_and_of_this_version() -> None:
    require_module("cffconvert")
    argv = [Path(sys.executable).with_name("cffconvert"), "--validate", "-i", "CITATION.cff"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\nversion: {hpc_elastic.__version__}\n" in (ROOT / "CITATION.cff").read_text()
