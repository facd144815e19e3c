# Tested: Spack 1.2.0.dev0 finds all dependencies in its package repository of July 2026, and
# installs mpidl from a checkout. Not tested: dependencies that Spack compiles.
#
#   spack repo add packaging/spack/spack_repo/mpidl
#   spack env create mpidl && spack env activate mpidl
#   spack develop --path CHECKOUT mpidl@=0.1.0
#   spack add mpidl+plots ^mpich && spack install

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class Mpidl(PythonPackage):
    """Deep learning on MPI: the same weights, byte for byte, on any number of ranks."""

    license("Apache-2.0")

    version("0.1.0")  # from a checkout: spack develop

    variant("plots", default=False, description="Draw curves and confusion matrices")
    variant("monitor", default=False, description="Show runs in a browser")
    variant("notebook", default=False, description="Start ranks from a notebook")
    variant("onnx", default=False, description="Read and write ONNX files")
    variant("safetensors", default=False, description="Exchange weights with PyTorch")

    depends_on("c", type="build")  # for the kernels
    depends_on("py-setuptools@70.1:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-numpy@1.26:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-h5py@3.8:")
        depends_on("py-pillow@10.1:")
        depends_on("py-rich@14.1:")
        depends_on("py-threadpoolctl@3.2:")
        depends_on("py-tomli-w@1.0:")
        depends_on("py-tomli@2.0:", when="^python@:3.10")
        depends_on("py-matplotlib@3.7:", when="+plots")
        depends_on("py-bokeh@3.8:", when="+monitor")
        depends_on("py-cloudpickle@3.0:", when="+notebook")
        depends_on("py-onnx@1.17:", when="+onnx")
        depends_on("py-safetensors@0.5:", when="+safetensors")
        depends_on("py-ml-dtypes@0.4:", when="+safetensors")
