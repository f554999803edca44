"""Spack package of this clone: ``spack repo add docs/install/spack``, then ``spack install py-hpc-elastic``."""

from pathlib import Path

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpcElastic(PythonPackage):
    """Fault-tolerant, elastic PyTorch training on Slurm: one command, no server, the first failure named."""

    git = f"file://{Path(__file__).resolve().parents[5]}"

    license("MIT", checked_by="hpc_elastic")

    version("main", branch="main")

    variant("torch", default=False, description="With Spack's PyTorch; without it the one that is active is used")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-hatchling@1.21:1", type="build")
    depends_on("py-msgspec@0.19:", type=("build", "run"))
    depends_on("py-psutil@5.9:", type=("build", "run"))
    depends_on("py-filelock@3.20:", type=("build", "run"))
    depends_on("py-submitit@1.5:", type=("build", "run"))
    depends_on("py-tomli@2:", when="^python@:3.10", type=("build", "run"))
    depends_on("py-click@8.1:", type=("build", "run"))
    depends_on("py-cloudpickle@2:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-torch@2.4:", when="+torch", type=("build", "run"))
