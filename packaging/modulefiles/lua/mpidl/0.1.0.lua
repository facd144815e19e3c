-- Tested: Lmod 8.6 loads and unloads this file, also in jobs of Slurm. Copy this file to a folder
-- of MODULEPATH. Set `root` to the checkout that has the environment of run/install.

local root = "/apps/mpidl/0.1.0"

whatis("Deep learning on MPI: the same weights, byte for byte, on any number of ranks")
help("Commands: mpidl --help. Job scripts: sbatch " .. root .. "/run/train.slurm")

-- With `run/install --system-mpi`, name the module of the MPI here:
-- depends_on("openmpi/5.0")

prepend_path("PATH", pathJoin(root, ".venv/bin"))
setenv("MPIDL_VENV", pathJoin(root, ".venv"))
