"""Test options: values, sources, the command line, and changes on resume."""

import pickle

import numpy as np
import pytest

from mpidl.cli import arguments, info, predict, verify
from mpidl.data import ArrayDatastore
from mpidl.errors import UserError
from mpidl.training.files import resume_changes
from mpidl.training.options import configuration, training_options
from mpidl.training.options.configuration import resolve
from mpidl.training.options.run_inputs import INPUTS
from mpidl.training.options.training_options import TrainingOptions

# Descriptions of the valid values in error messages, for options with string values.
FACTORS = "a range of factors such as 0.9,1.1"
GPUS = "GPU indices such as 0,2"
SIZE = "HEIGHTxWIDTH such as 224x192, or 224"


def refused(call, *args, **keywords):
    """Return the message of the UserError that the call raises. The message must be one line."""
    with pytest.raises(UserError) as error:
        call(*args, **keywords)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults_are_as_in_matlab():
    options = TrainingOptions()
    assert (options.epochs, options.batch_size, options.shuffle) == (30, 128, "once")
    assert (options.learning_rate, options.momentum, options.l2) == (0.01, 0.9, 1e-4)
    assert options.validation is None and "validation" not in options.as_dict()


def test_arguments_override_the_digits_recipe():
    options = TrainingOptions.from_recipe("digits", momentum=0.5)
    assert (options.epochs, options.l2, options.shuffle, options.momentum) == (
        20,
        0.0,
        "every-epoch",
        0.5,
    )
    assert "digits" in refused(TrainingOptions.from_recipe, "letters")


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("batch_size", 0, "batch_size must be at least 1, found 0"),
        ("batch_size", 10**400, f"batch_size must be at least 1, found {10**400}"),
        (
            "batch_size",
            nested(100_000),
            "batch_size must be a whole number, at least 1, found a list that is nested too deeply",
        ),
        ("batch_size", 2.0, "batch_size must be a whole number, at least 1, found 2.0"),
        ("batch_size", "8", "batch_size must be a whole number, at least 1, found '8'"),
        ("epochs", True, "epochs must be a whole number, at least 1, found True"),
        ("max_iterations", 0, "max_iterations must be at least 1, found 0"),
        ("learning_rate", -0.1, "learning_rate must be positive, found -0.1"),
        ("learning_rate", float("nan"), "learning_rate must be positive, found nan"),
        ("timeout", float("inf"), "timeout must be positive, found inf"),
        ("momentum", 1, "momentum must be at least 0 and below 1, found 1"),
        ("l2", -1e-9, "l2 must be at least 0, found -1e-09"),
        ("l2", "none", "l2 must be a number, at least 0, found 'none'"),  # none is not a default
        ("seed", 2**63, f"seed must be between 0 and 2**63 - 1, found {2**63}"),
        ("seed", -1, "seed must be between 0 and 2**63 - 1, found -1"),
        ("shuffle", "daily", "shuffle must be never, once or every-epoch, found 'daily'"),
        ("device", None, "device must be auto, cpu or gpu, found None"),
        ("checkpoint_every", -1, "checkpoint_every must be at least 0, found -1"),
        ("threads", -1, "threads must be at least 0, found -1"),
        ("winograd", "on", "winograd must be auto, off or fast, found 'on'"),
        ("gpus", "0,", f"gpus must be {GPUS}, found '0,'"),
        ("gpus", 0.5, f"gpus must be {GPUS}, found 0.5"),
        ("gpus", (), f"gpus must be {GPUS}, found ()"),
        ("graphs", "on", "graphs must be auto or off, found 'on'"),
        ("precision", "fp16", "precision must be fp32, bf16 or tf32, found 'fp16'"),
        ("batch_per_rank", 0, "batch_per_rank must be at least 1, found 0"),
        ("batchsize", 8, "unknown option batchsize: did you mean batch_size?"),
        ("colour", 8, "unknown option colour: it is an option of the command line only"),
        ("out", "x", "unknown option out: it is an argument of dl.train"),
        ("validation_data", 8, "unknown option validation_data: did you mean validation?"),
        ("scale", (0.9, "1.1"), f"scale must be {FACTORS}, found (0.9, '1.1')"),
        ("scale", [0.9], f"scale must be {FACTORS}, found [0.9]"),
        ("scale", (True, 2), f"scale must be {FACTORS}, found (True, 2)"),
        ("random_crop", (0, 8), f"random_crop must be {SIZE}, found (0, 8)"),
    ],
)
def test_wrong_values_are_refused(name, value, text):
    assert refused(TrainingOptions, **{name: value}) == text


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("scale", (0.9, 1.1), "0.9,1.1"),
        ("random_crop", [224, 200], "224x200"),
        ("random_crop", np.array([8, 8])[[0, 1]].tolist(), "8x8"),
        ("worker_load", [1, 0.5, 0], "1,0.5,0"),
        ("gpus", (0, 2), "0,2"),
        ("gpus", 1, "1"),
        ("resize", [64, 48], "64x48"),
        ("resize", 64, "64"),
        ("centre_crop", [9, 9], "9x9"),
    ],
)
def test_numbers_are_the_texts_of_the_command_line(tmp_path, name, value, text):
    path = tmp_path / "my.toml"
    path.write_text(f"{name} = {list(value) if isinstance(value, tuple) else value}\n")
    options, run, _ = resolve({}, config=path)
    assert (run[name] if name in run else getattr(options, name)) == text
    if name in training_options.NAMES:
        for same_value in (value, text):
            assert TrainingOptions.from_recipe("digits", **{name: same_value}) == options
    typed = arguments.train([training_options.flag(name), text])
    assert resolve(typed)[:2] == (options, run)


def test_options_have_their_types_and_can_be_pickled():
    options = TrainingOptions(learning_rate=1, l2=0, max_iterations=None)
    assert [type(v) for v in (options.learning_rate, options.l2)] == [float, float]
    assert pickle.loads(pickle.dumps(options)) == options


def test_each_value_comes_from_the_first_source_that_sets_it(tmp_path):
    config = tmp_path / "my.toml"
    config.write_text("batch_size = 32\nepochs = 7\n[run]\ndata = 'images'\n")
    resumed = {
        "options": {**TrainingOptions().as_dict(), "seed": 9, "epochs": 3},
        "run": {"network": "digits", "data": "digits", "test_data": None},
    }
    options, run, sources = resolve({"epochs": 5, "out": "x"}, config=config)
    assert (options.epochs, options.batch_size, options.shuffle) == (5, 32, "every-epoch")
    assert run == {name: f.default for name, f in INPUTS.items()} | {"data": "images"}
    assert sources["epochs"] == "command line"
    assert sources["batch_size"] == sources["data"] == f"config {config}"
    assert sources["shuffle"] == "recipe digits"
    assert sources["seed"] == sources["network"] == "default"
    assert set(sources) == {*training_options.NAMES, *INPUTS}

    options, _, sources = resolve({}, config=config, resumed=resumed)
    assert (options.epochs, options.seed, options.shuffle) == (7, 9, "once")
    assert sources["seed"] == sources["shuffle"] == "resumed run"


def test_a_batch_size_for_each_rank():
    options = TrainingOptions(batch_per_rank=32)
    assert options.for_ranks(3).batch_size == 96 and options.for_ranks(3).batch_per_rank == 32
    assert TrainingOptions().for_ranks(3).batch_size == 128
    assert options.for_ranks(3).for_ranks(2).batch_size == 64


def test_a_batch_size_and_one_for_each_rank(tmp_path):
    """--batch-per-rank overrides a config file's batch size. Other conflicts are errors."""
    config, both = tmp_path / "size.toml", {"batch_per_rank": 8, "batch_size": 64}
    config.write_text("batch_size = 32\n")
    assert resolve({"batch_per_rank": 8}, config=config).options.batch_per_rank == 8
    text = refused(resolve, both)
    assert text == (
        "--batch-size 64 (command line) and --batch-per-rank 8 (command line): expected at most "
        "one of them"
    )
    resolve(both | {"batch_per_rank": None})
    config.write_text("batch_per_rank = 32\n")
    assert "(command line) and --batch-per-rank 32 (config" in refused(
        resolve, {"batch_size": 64}, config=config
    )
    saved = {"options": TrainingOptions(**both).as_dict()}
    assert resolve({}, resumed=saved).options.for_ranks(2).batch_size == 16


def test_options_toml_of_a_batch_size_for_each_rank(tmp_path):
    path = str(tmp_path / "options.toml")
    configuration.write_options(path, resolve({"batch_per_rank": 8, "gpus": "1,0"}), {})
    options = resolve({}, config=path).options
    assert (options.batch_per_rank, options.gpus) == (8, "1,0")


def test_another_network_has_no_recipe():
    options, run, sources = resolve({"network": "my.py:net"})
    assert options == TrainingOptions() and run["network"] == "my.py:net"
    assert set(sources.values()) == {"command line", "default"}


def test_options_toml_is_a_config_file_again(tmp_path):
    path = str(tmp_path / "options.toml")
    first = resolve({"learning_rate": 0.1 + 0.2, "seed": 2**63 - 1})
    versions = configuration.versions_of("MPICH Version: 5.0\nand more")
    configuration.write_options(path, first, versions)
    text = (tmp_path / "options.toml").read_text()
    assert 'learning_rate = "command line"' in text and 'mpi = "MPICH Version: 5.0"' in text
    assert 'max_iterations = "none"' in text and "numpy = " in text
    second = resolve({}, config=path)
    assert second.options == first.options and second.run == first.run


@pytest.mark.parametrize(
    "content, text",
    [
        ("batchsize = 3", "unknown option batchsize: did you mean batch_size?"),
        ("batch_size = '3'", "batch_size must be a whole number, at least 1, found '3'"),
        ("resize = ['8', 8]", f"resize must be {SIZE}"),
        ("colour = 'grey'", "colour must be gray or rgb, found 'grey'"),
        ("[options]\nepochs = 0", "epochs must be at least 1, found 0"),
        ("network = 3", "network must be a text, found 3"),
        ("options = 3", "[options] must be a table, found 3"),
        ("epochs = ", "not a TOML file"),
        ("[option]\nepochs = 3", "unknown table [option]: expected [options] or [run]"),
    ],
)
def test_wrong_config_files_are_refused(tmp_path, content, text):
    path = tmp_path / "my.toml"
    path.write_text(content)
    message = refused(resolve, {}, config=path)
    assert text in message and str(path) in message


def test_a_missing_config_file_is_refused(tmp_path):
    assert "nothing.toml" in refused(resolve, {}, config=tmp_path / "nothing.toml")


def resumable(**changes):
    """Return the facts of a run of 10 epochs, with the given options changed."""
    return {
        "options": {**TrainingOptions(epochs=10).as_dict(), **changes},
        "network": [{"type": "Conv2D", "name": "conv1", "filters": 20, "size": [5, 5]}],
        "fingerprint": "0123456789abcdef",
    }


def test_what_may_change_at_resume():
    now = resumable(threads=7, device="cpu", timeout=5.0, checkpoint_every=3, epochs=12)
    now["options"].update(gpus="0", graphs="off")
    now["options"]["max_iterations"] = 7
    now["network"][0]["size"] = (5, 5)
    resume_changes.refuse_changes(resumable(), now)


@pytest.mark.parametrize(
    "name, value",
    [
        ("batch_size", 64),
        ("seed", 1),
        ("learning_rate", 0.02),
        ("momentum", 0.8),
        ("l2", 0.0),
        ("shuffle", "never"),
        ("batchnorm", "local"),
        ("winograd", "off"),
        ("precision", "tf32"),
        ("precision", "bf16"),
        ("epochs", 9),
    ],
)
def test_what_may_not_change_at_resume(name, value):
    old = resumable()["options"][name]
    text = refused(resume_changes.refuse_changes, resumable(), resumable(**{name: value}))
    assert f"{training_options.flag(name)} was {old}, is {value}" in text


def test_an_option_that_a_checkpoint_lacks_has_its_default():
    saved = resumable(solver="adam", learning_rate=0.001, squared_gradient_decay_factor=0.999)
    now = resumable(**saved["options"])
    for name in ("precision", "squared_gradient_decay_factor", "l2"):
        del saved["options"][name]
    resume_changes.refuse_changes(saved, now)
    now["options"]["precision"] = "tf32"
    text = refused(resume_changes.refuse_changes, saved, now)
    assert "--precision was fp32, is tf32" in text


def test_other_ranks_at_resume_with_a_batch_size_for_each_rank():
    saved, now = resumable(batch_per_rank=32), resumable(batch_per_rank=32, batch_size=64)
    text = refused(resume_changes.refuse_changes, saved, now)
    assert "--batch-size was 128, is 64 (--batch-per-rank 32; none keeps it)" in text
    resume_changes.refuse_changes(saved, resumable(batch_per_rank=None))


def test_another_network_or_data_set_at_resume():
    now = resumable()
    now["network"][0]["filters"] = 21
    now["fingerprint"] = "fedcba9876543210"
    text = refused(resume_changes.refuse_changes, resumable(), now, "runs/digits")
    assert "--network: layer conv1 differs in filters" in text and "--data" in text
    assert text.startswith("--resume: runs/digits cannot continue")
    now["network"].append(now["network"][0])
    now["network"][0] = resumable()["network"][0]
    assert "1 layers" in refused(resume_changes.refuse_changes, resumable(), now)


def test_other_images_to_validate_on_at_resume():
    images = ArrayDatastore(np.zeros((4, 1, 2, 2), np.uint8), [0, 1, 0, 1])
    other_images = ArrayDatastore(np.ones((4, 1, 2, 2), np.uint8), [0, 1, 0, 1])
    saved = {**resumable(), "validation": {"fingerprint": images.fingerprint()}}
    resume_changes.refuse_changes(saved, saved)
    for new in (other_images.fingerprint(), None):
        now = {**resumable(), "validation": {"fingerprint": new}}
        text = refused(resume_changes.refuse_changes, saved, now)
        assert f"was {images.fingerprint()[:12]}, is {str(new or 'none')[:12]}" in text
        assert "--validation-data: the images are not those of the run" in text
        resume_changes.refuse_changes({**saved, "validation": {}}, now)


def test_shares_may_not_change_in_the_middle_of_an_epoch():
    def partitioned(batch, ranks, **changes):
        options = TrainingOptions(sampling="partition", **changes)
        return {
            **resumable(sampling="partition"),
            "shares": resume_changes.shares(options, ranks),
            "position": {"batch": batch},
        }

    middle = partitioned(1, 2)
    text = refused(resume_changes.refuse_changes, middle, partitioned(0, 3))
    assert "an epoch: the images were partitioned among 2 rank(s), now among 3" in text
    weighted = partitioned(0, 2, worker_load="1,0.5")
    text = refused(resume_changes.refuse_changes, middle, weighted)
    assert "among 2 rank(s), now among 2 rank(s) by --worker-load 1,0.5" in text
    resume_changes.refuse_changes(partitioned(0, 2), partitioned(0, 3))
    resume_changes.refuse_changes(middle, partitioned(0, 2))
    now = {**partitioned(0, 3), **resumable()}
    resume_changes.refuse_changes({**middle, **resumable()}, now)


def test_the_command_line_sets_only_typed_options():
    assert arguments.train([]) == {}
    typed = arguments.train("--epochs 3 --l2=0 --data x --out y --max-iterations none".split())
    assert typed == {"epochs": 3, "l2": 0.0, "data": "x", "out": "y", "max_iterations": None}
    assert arguments.train(arguments.as_flags(typed)) == typed


@pytest.mark.parametrize(
    "line, text",
    [
        ("--batch-size 0", "--batch-size must be at least 1, found 0"),
        ("--batch-size ten", "--batch-size must be a whole number, at least 1, found ten"),
        ("--learning-rate -0.1", "--learning-rate must be positive, found -0.1"),
        ("--shuffle no", "--shuffle must be never, once or every-epoch, found no"),
        ("--gpus a", f"--gpus must be {GPUS}, found a"),
        ("--preview a.jpg", "--preview a.jpg: the picture is written as .png"),
        ("--colour grey", "--colour must be gray or rgb, found grey"),
        *(
            (f"--{name}=3x", f"--{name} must be {SIZE}, found 3x")
            for name in ("resize", "cover", "centre-crop", "random-crop")
        ),
        ("--batchsize 8", "unknown option --batchsize: did you mean --batch-size?"),
        ("--ep=4", "unknown option --ep: did you mean --epochs?"),
        ("--zzz", "unknown option --zzz"),
        ("--epochs", "--epochs: expected one argument"),
        ("digits", "unexpected argument digits (--help lists the options)"),
    ],
)
def test_wrong_command_lines_are_refused(line, text):
    assert refused(arguments.train, line.split()) == text


def test_the_other_commands():
    options = predict.parse("--model m.h5 --data x --batch-size 7".split())
    assert (options.model, options.data, options.out, options.batch_size) == ("m.h5", "x", None, 7)
    assert "--model" in refused(predict.parse, [])
    options = verify.parse("--ranks 1,3 --seed 4".split())
    assert options.ranks == [1, 3] and options.options == {"seed": 4, "max_iterations": 5}
    assert "--ranks must be" in refused(verify.parse, ["--ranks", "1,x"])
    assert set(vars(info.parse([])).values()) == {None}
    assert refused(info.parse, ["--data", "a.h5"]) == "unknown option --data"
    both = ["--model", "a.h5", "--network", "digits"]
    assert refused(info.parse, both).startswith("--model and --network: expected at most")
    for words in (["--layers", "a.py"], ["--classes", "3", "--model", "a.h5"]):
        assert f"{words[0]}: expected --" in refused(info.parse, words)
    assert info.parse(["--model", "a.onnx", "--batch-size", "8"]).batch_size == 8
    assert info.parse(["--json"]).json and info.parse(["--threads", "3"]).threads == 3
    for words in (["--json"], ["--threads", "3"]):
        text = f"{words[0]}: expected neither --network nor --model with it"
        assert refused(info.parse, [*words, "--network", "digits"]) == text
    options = info.parse("--network alexnet --input-shape 3,227,227 --classes 5".split())
    assert (options.network, options.input_shape, options.classes) == ("alexnet", (3, 227, 227), 5)
    assert "such as 3,227,227" in refused(info.parse, "--network x --input-shape 3,8".split())
    assert "expected --network NAME with it" in refused(info.parse, ["--classes", "5"])


def test_help_names_every_option_on_one_rank_only(capsys):
    with pytest.raises(SystemExit) as exit:
        arguments.train(["--help"])
    output = capsys.readouterr().out
    assert exit.value.code == 0
    command_options = "out", "resume", "overwrite", "config"
    for name in (*training_options.NAMES, *INPUTS, *command_options):
        assert training_options.flag(name) in output
    with pytest.raises(SystemExit):
        arguments.train(["--help"], quiet=True)
    assert capsys.readouterr().out == ""
