"""submitit of a version that Spack's own repository does not have yet."""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PySubmitit(PythonPackage):
    """Submit functions to Slurm from Python."""

    homepage = "https://github.com/facebookincubator/submitit"
    pypi = "submitit/submitit-1.5.4.tar.gz"

    license("MIT")

    version("1.5.4", sha256="7100848bd1cdda79c7196e54ee830793ae75fd7adde0c5bef738d72360a07508")

    depends_on("python@3.8:", type=("build", "run"))
    depends_on("py-flit-core@3.2:3", type="build")
    depends_on("py-cloudpickle@1.2.1:", type=("build", "run"))
    depends_on("py-typing-extensions@3.7.4.2:", type=("build", "run"))
