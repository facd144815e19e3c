"""Compile the kernels into the package; setup.cfg has all other settings.

The package is also built without a compiler; NumPy then does the arithmetic. The kernels do not use
the Python API, so that one wheel serves every Python.
"""

import os
import platform
import runpy
import shutil
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = os.path.join("mpidl", "kernels", "lib")
kernels = runpy.run_path(os.path.join(HERE, "kernels", "build.py"))


class Build(build_py):
    """Compiles the kernels: in place for an editable install, else into the build's folder."""

    def run(self):
        super().run()
        if self.editable_mode:
            compile_kernels(kernels["LIB"])
        else:
            folder = os.path.join(self.build_lib, KERNELS)
            shutil.rmtree(folder, ignore_errors=True)  # remove libraries of an earlier build
            compile_kernels(folder)

    def find_package_modules(self, package, folder):
        # kernels/build.py is useless without the sources
        return [] if package == "mpidl.kernels" else super().find_package_modules(package, folder)


class Wheel(bdist_wheel):
    """One wheel for all Python versions: for the kernels' platform, else for any."""

    def get_tag(self):
        built = os.path.join(self.get_finalized_command("build").build_lib, KERNELS)
        if not (os.path.isdir(built) and os.listdir(built)):
            return "py3", "none", "any"
        target = kernels["machine"](kernels["find_compiler"]())  # of a cross compiler
        return "py3", "none", super().get_tag()[2].replace(platform.machine(), target)


class Platform(Distribution):
    """The build result belongs to a platform."""

    def has_ext_modules(self):
        return True


def compile_kernels(folder):
    """Compile all builds into a folder, and print which builds failed, and why."""
    try:
        compiler = kernels["find_compiler"]()
        failed = kernels["compile_builds"](kernels["builds"](compiler), folder, compiler)
        missing = "; ".join(f"{build}: {text}" for build, text in failed.items())
    except (kernels["Failed"], OSError) as error:
        missing = str(error)
    if missing:
        print(f"mpidl: kernels that are not compiled: {missing}", file=sys.stderr)


setup(distclass=Platform, cmdclass={"build_py": Build, "bdist_wheel": Wheel})
