"""Test house.py, and check the repository's names, its test files and their recorded times."""

import collections

import house
import suite

from mpidl.wings import WINGS

SOURCE = '''"""A docstring,
of two lines."""

import numpy as kept  # an alias


def what(how, *, given=1):
    """Another one."""
    # a comment
    found = [at for at in how]

    self.whole = found
    names, _seen = found, (
        given
    )
    return names
'''


def test_vague_bindings_are_counted():
    names = [name for _, name in house.vague_bindings(SOURCE)]
    assert sorted(names) == sorted("kept what how given found at whole _seen".split())


def test_lines_of_code_are_counted(tmp_path):
    python, c = tmp_path / "a.py", tmp_path / "a.c"
    python.write_text(SOURCE)
    assert house.code_lines(python) == 8
    c.write_text("/* a\n   comment */\nint x; // why\n\n// alone\nint y; /* b */\n")
    assert house.code_lines(c) == 2


def test_the_repository_has_few_vague_names():
    paths = [path for path in house.sources(house.ROOT) if path.suffix == ".py"]
    bindings = [
        f"{path.relative_to(house.ROOT)}:{line}: {name}"
        for path in paths
        for line, name in house.vague_bindings(path.read_text())
    ]
    assert len(bindings) <= 5, "\n".join(bindings)


# Tests that do not belong to a single module of the package.
CROSS_CUTTING = {
    "backends/test_conformance.py": "all functions of all backends",
    "backends/test_loss_formulas.py": "losses and counts of all backends, of NaN too",
    "backends/cpu/test_cpu_winograd.py": "kernels/cpu/winograd*, which no single module calls",
    "data/formats/test_fuzz_data.py": "damaged files of all formats",
    "backends/gpu/test_cupy_names.py": "every name of CuPy that mpidl uses",
    "evaluation/test_undefined_scores.py": "metrics of NaN scores and of ignored labels",
    "backends/gpu/test_cupy_on_host.py": "the stand-in for CuPy on host memory",
    "certificates/test_forged_certificates.py": "audits of forged certificates",
    "certificates/test_form.py": "the program in the README of the wing",
    "certificates/test_honest_runs.py": "audits of runs with all kinds of options",
    "core/test_promise.py": "equal bytes on simulated ranks, by the core alone",
    "explanations/test_captum.py": "all methods, compared with captum",
    "explanations/test_precision.py": "all methods without C kernels, and in bfloat16",
    "interchange/test_fuzz_weights.py": "damaged weight files",
    "interchange/test_pretrained.py": "--weights, from the command line to the network",
    "evaluation/test_queue_function.py": "functions of queues, from a custom loop to evaluation",
    "nn/test_gelu.py": "GELU, from its layer to trainings",
    "nn/test_layer_arguments.py": "arguments of layers in other libraries",
    "nn/test_freeze.py": "freezing, from layers to the optimizer",
    "report/test_fuzz_run.py": "damaged files of runs, options and sweeps",
    "training/files/test_old_files.py": "files of earlier versions",
    "training/options/test_options_page.py": "docs/options.md",
    "training/test_step_memory.py": "memory of recorded steps",
    "training/test_stopped_runs.py": "trainings that a stop file ends",
    "training/test_classes.py": "class names in training, files and evaluation",
}
CROSS_CUTTING |= dict.fromkeys(
    (
        *("backends/gpu/test_emulator.py", "backends/gpu/test_gpu_faults.py"),
        "backends/gpu/test_gpu_bf16.py",
        *("backends/gpu/test_gpu_evaluation.py", "backends/gpu/test_gpu_explanations.py"),
        "backends/gpu/test_gpu_graph.py",
        *("backends/gpu/test_gpu_input.py", "backends/gpu/test_gpu_step.py"),
        *("backends/gpu/test_gpu_targets.py", "backends/gpu/test_gpu_training.py"),
    ),
    "steps and trainings on the emulated GPU, and the emulator",
)


def package_tests():
    tests = house.ROOT / "tests"
    paths = [path.relative_to(tests) for path in tests.rglob("test_*.py")]
    outside = ("launch", "slurm", "soak", "support", "benchmarks")
    return [path for path in paths if len(path.parts) > 1 and path.parts[0] not in outside]


def belongs(path):
    """Return whether a test is named after a module of the package or after its own folder."""
    folder = house.ROOT / "mpidl" / path.parent
    name = path.stem.removeprefix("test_").removesuffix("_command")
    wing = WINGS.get(".".join(path.parent.parts))
    name = "command" if wing and wing.command == name else name
    names = {name, *(name.removeprefix(prefix) for prefix in ("cpu_", "gpu_", "reference_"))}
    modules = {module.stem for module in folder.glob("*.py")}
    return bool(names & (modules | {part.name for part in folder.glob("*/")} | {folder.name}))


def test_tests_mirror_the_package():
    misplaced = {path.as_posix() for path in package_tests() if not belongs(path)}
    assert misplaced == set(CROSS_CUTTING)


def test_names_of_test_files_are_unique():
    """Names of test files are unique, because pytest imports them as top-level modules."""
    tests = house.ROOT / "tests"
    names = collections.Counter(path.name for path in tests.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_quick_suite_is_short():
    """The recorded times on two cores are short. Variants of a check belong in the slow parts."""
    seconds = {name: run.expected(name, cores=2) for name, run in suite.QUICK.items()}
    assert sum(seconds.values()) < 480, seconds
