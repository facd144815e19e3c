"""Test that packages import a module when a program uses one of its names."""

import operator
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import mpidl as dl

ROOT = Path(__file__).resolve().parents[1]
MOST_MODULES_FOR_HELP = 150


def run(program):
    """Return what a program prints that runs in a new process."""
    words = [sys.executable, "-c", program]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_imports_no_library():
    program = "import mpidl, sys; print([name for name in sys.modules if 'numpy' in name])"
    assert run(program) == "[]\n"


def test_a_name_imports_the_rooms_that_it_needs():
    program = "import mpidl as dl, sys; dl.relu; dl.ReLU\n"
    program += "print({name.split('.')[1] for name in sys.modules if name.startswith('mpidl.')})"
    rooms = eval(run(program))
    assert rooms >= {"backends", "core", "nn", "ops"}
    assert rooms.isdisjoint({"comm", "training", "report", "interchange", "evaluation", "losses"})


def test_the_help_of_train_imports_few_modules():
    program = "import atexit, runpy, sys\n"
    program += "is_ours = lambda name: name.split('.')[0] == 'mpidl'\n"
    program += "atexit.register(lambda: print('modules:', sum(map(is_ours, sys.modules))))\n"
    program += "sys.argv = ['train', '--help']\n"
    program += "runpy.run_module('mpidl.train', run_name='__main__')"
    assert int(run(program).rpartition("modules: ")[2]) <= MOST_MODULES_FOR_HELP


@pytest.mark.parametrize("package", [dl, dl.data, dl.nn, dl.nn.layers, dl.ops])
def test_all_public_names_exist(package):
    names = [name for name in dir(package) if not name.startswith("_")]
    assert set(names) == set(package.__all__)
    assert all(hasattr(package, name) for name in names)


def test_a_star_imports_the_public_names():
    program = "from mpidl import *; print(relu, Conv2D, train, World, UserError, data, keyed, nn)"
    assert "<function train at" in run(program)


def test_an_operator_needs_no_earlier_use_of_an_op():
    program = "import mpidl as dl, numpy as np\n"
    program += "x = dl.from_images(np.ones((4, 1)), dl.share(4, dl.OneRank()))\n"
    program += "print((1 - 2 * x / 4).local().sum(), (np.float32(3) * x + 1).local().sum())\n"
    program += "value, _ = dl.value_and_grad(lambda p: p['w'] * p['w'])({'w': np.float64(3)})\n"
    program += "print(dl.OneRank().gplus(value))"
    assert run(program) == "2.0 16.0\n9.0\n"


def test_an_op_that_is_named_like_its_module():
    """An import of the module `mpidl.ops.dense` does not replace the op `ops.dense`."""
    program = "from mpidl.ops.dense import dense; import mpidl as dl, mpidl.train\n"
    program += "print(dl.ops.dense is dense is dl.dense, dl.train.__module__)"
    assert run(program) == "True mpidl.training.train\n"


def test_a_model_file_finds_the_classes_of_its_layers(tmp_path):
    net = dl.Network([dl.Conv2D(3, 2), dl.BatchNorm(), dl.Dropout(), dl.Dense(2)], (1, 5, 5))
    dl.save_model(tmp_path / "model.h5", net)
    program = f"import mpidl as dl; print(len(dl.load_model({str(tmp_path / 'model.h5')!r})[0]."
    assert run(program + "layers))") == "4\n"


def test_a_package_can_be_pickled():
    assert pickle.loads(pickle.dumps(dl.nn)) is dl.nn


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'mpidl.nn' has no attribute 'Conv5D'"):
        operator.attrgetter("Conv5D")(dl.nn)
    with pytest.raises(AttributeError, match="did you mean conv2d"):
        operator.attrgetter("Conv5D")(dl)
    with pytest.raises(ImportError, match="Conv5D"):
        exec("from mpidl.nn import Conv5D")
