"""What doctor's probes make of real interpreters, images and (a stand-in for) NVML, and its job on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_elastic.doctor.host import PythonFacts, look_at_python
from hpc_elastic.run.spec import Container, ContainerImage, ContainerMount, Runtime
from tests.rigs.container_image import interpreters_folders, make_image, require_charliecloud
from tests.rigs.fake_nvml import build_nvml
from tests.rigs.local_run import ROOT

_TORCH = """
import time
print("a banner on stdout")
time.sleep(0.2)
__version__ = "9.9.9"
"""
ENV = {"PATH": os.environ["PATH"], "HOME": "/tmp"}


def look(python: str, folder: Path, **more: object) -> PythonFacts:
    return look_at_python(python, {**ENV, "PYTHONPATH": str(folder)}, cwd=str(folder), **more)  # type: ignore[arg-type]


def test_an_interpreter_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(_TORCH)
    (tmp_path / "json.py").write_text("a user's")  # in the working directory, and on PYTHONPATH further down
    facts = look_at_python(sys.executable, {**ENV, "PYTHONPATH": str(tmp_path / "none")}, cwd=str(tmp_path))
    assert facts.version == ".".join(map(str, sys.version_info[:3]))
    (tmp_path / "json.py").unlink()
    facts = look(sys.executable, tmp_path)
    assert (facts.torch, facts.error) == ("9.9.9", "")
    assert facts.seconds >= 0.2


def test_what_is_no_interpreter_or_has_no_torch_is_a_fact(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    broken = look(sys.executable, tmp_path)
    assert broken.torch_error == "ImportError: libcudart.so.13: cannot open shared object file"
    assert broken.version
    assert look("/bin/true", tmp_path).error == "/bin/true is no Python"
    assert look("/none/python", tmp_path).error == "/none/python: No such file or directory"
    (tmp_path / "torch/__init__.py").write_text("import time; time.sleep(60)")
    assert look(sys.executable, tmp_path, limit=0.5).error == f"{sys.executable} has not answered for 0.5 s"


def test_an_image_is_asked_through_the_runtime(tmp_path: Path) -> None:
    require_charliecloud()
    folders = interpreters_folders()
    image = make_image(tmp_path / "image", mounted_at=[*folders, str(tmp_path)])
    container = Container(
        image=ContainerImage(runtime=Runtime.CHARLIECLOUD, image=str(image)),
        mounts=tuple(ContainerMount(source=folder, target=folder) for folder in folders),
    )
    inside = look(sys.executable, tmp_path, container=container)
    assert not inside.error
    assert inside.version
    gone = Container(image=ContainerImage(runtime=Runtime.CHARLIECLOUD, image=str(tmp_path / "gone")))
    why = look(sys.executable, tmp_path, container=gone).error
    assert str(tmp_path / "gone") in why
    assert look(sys.executable, tmp_path, container=gone).error == why, "each node gives the same reason"
    enroot = Container(image=ContainerImage(runtime=Runtime.ENROOT, image="torch"))
    assert look(sys.executable, tmp_path, container=enroot).error == "enroot: No such file or directory"


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_nvml(tmp_path_factory.mktemp("nvml"))


def test_the_nodes_software_and_gpus_are_compared(tmp_path: Path, nvml: str) -> None:
    env = {**ENV, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": nvml}
    env |= {"FAKE_NVML": "0:h100=1;1:h100=1,ecc=3", "FAKE_NVML_DRIVER": "550.54"}
    command = [sys.executable, "-m", "hpc_elastic", "doctor", "--cluster", "local", "--nodes", "2", "--json"]
    command += ["--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    shown = json.loads(done.stdout)
    found = {each["check"]: (each["level"], each["found"]) for each in shown["findings"]}
    assert found["nodes.python"][0] == "ok", found
    assert found["nodes.torch"][0] == "ok", found
    assert found["gpu.count"] == ("ok", "2 × NVIDIA H100 80GB HBM3, driver 550.54 on node[0-1]")
    assert found["gpu.errors"] == ("problem", "GPU 1 has 3 uncorrectable ECC errors on node[0-1]")
    assert [len(node["gpus"]["nvml"]["devices"]) for node in shown["nodes"]] == [2, 2]
    assert not any(node["failed"] for node in shown["nodes"])
