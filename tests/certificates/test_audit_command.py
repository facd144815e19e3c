"""Test that an audit finds and names each kind of tampering, and that it accepts an honest run."""

import io
import json
import os
import shutil
import subprocess
import sys

import certificate_files
import certified_runs
import numpy as np
import pytest
from audited_files import (
    CERTIFICATE,
    SIGNER,
    ZEROS,
    Tampering,
    audit_files,
    forge,
    new_key,
    put,
    remove_checkpoints,
    state_at,
)
from certified_runs import audit, chain, train_run, write_data

import mpidl as dl
from mpidl.certificates import checks, command, recording, sources
from mpidl.core import keyed
from mpidl.errors import UserError
from mpidl.report import Console
from mpidl.training import golden
from mpidl.training.files import model_file

pytestmark = pytest.mark.usefixtures("machine")
SLOW = pytest.mark.slow("jobs")


def test_an_honest_run_is_equal(honest):
    result = audit_files(honest)
    assert (result.code, result.differing) == (0, []), result.lines
    verdicts = {line.split("  ")[0]: line[22:].split()[0] for line in result.lines[:-2]}
    segments = [f"iterations {a}-{b}" for a, b in ((0, 4), (4, 8), (8, 12), (12, 15))]
    subjects = "certificate signature software arithmetic model options checkpoints data network"
    names = [*subjects.split(), "initial weights", *segments, "test"]
    assert verdicts == dict.fromkeys(names, "equal")
    assert result.rows("signature")[0][1].startswith(f"{SIGNER} (ED25519 SHA256:")
    (checkpoints,) = result.rows("checkpoints")
    assert checkpoints == ("equal", "5, of iterations 0, 4, 8, 12, 15")
    statement = json.loads((honest / "run" / "certificate.json").read_text())
    head = f"head: {statement['predicate']['head']}"
    assert result.lines[-2:] == [head, "equal: nothing differs, 15 of 15 iterations were replayed"]


# Tampering with the images.


def set_images(change):
    """Return a function that changes the arrays of the auditor's set."""

    def tamper(folder):
        arrays = certified_runs.arrays()
        changed = change(arrays)
        write_data(folder / "set.npz", **(changed or arrays))

    return tamper


def swap(arrays, i, j):
    for name in ("images", "labels"):
        arrays[name][[i, j]] = arrays[name][[j, i]]


def leave_out(arrays, i):
    return arrays | {name: np.delete(arrays[name], i, axis=0) for name in ("images", "labels")}


def add(arrays):
    names = ("images", "labels")
    return arrays | {n: np.concatenate([arrays[n], arrays[n][:1]]) for n in names}


def pixel(arrays):
    arrays["images"][17, 0, 9, 9] += 1


def label(arrays):
    arrays["labels"][17] = (arrays["labels"][17] + 1) % 3


def test_pixel(arrays):
    arrays["images_test"][3, 0, 9, 9] += 1


test_pixel.__test__ = False
IMAGES = {
    "a pixel": (pixel, "with other pixels: image 17"),
    "a label": (label, "with another label: image 17"),
    "two images swapped": (lambda arrays: swap(arrays, 5, 40), "swapped"),
    "an image left out": (lambda arrays: leave_out(arrays, 17), "images is"),
    "an image added": (add, "images is"),
    "the order": (
        lambda arrays: arrays | {n: arrays[n][::-1] for n in ("images", "labels")},
        "images differ",
    ),
    "the names of classes": (
        lambda arrays: arrays | {"classes": np.array(["bar", "dot", "box"])},
        "classes is ['bar', 'dot', 'box'], was ['bar', 'box', 'dot']",
    ),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_other_images_are_named(files, kind):
    change, text = IMAGES[kind]
    set_images(change)(files)
    result = audit_files(files)
    assert (result.code, result.differing) == (1, ["data"]), result.lines
    assert any(v == "DIFFERENT" and text in line for v, line in result.rows("data")), result.lines
    assert result.rows("iterations") == [("unchecked", "not replayed, because the data differ")]


def test_other_test_images_do_not_prevent_replays(files):
    set_images(test_pixel)(files)
    result = audit_files(files)
    assert (result.code, result.differing) == (1, ["data", "test"]) or result.differing == ["data"]
    (line,) = [text for verdict, text in result.rows("data") if verdict == "DIFFERENT"]
    assert line.startswith("test: ") and "with other pixels: image 3" in line
    assert result.rows("iterations 12-15")[0][0] == "equal"


# Tampering with files, and runs that were not trained as they say.


def change_file(path, table, name):
    """Add 1 to a number in an array of a checkpoint or a model, and mend the checksum."""
    arrays, attributes = model_file.read(path)
    arrays[table][name].flat[0] += 1
    for key in ("format", "format_version"):
        del attributes[key]
    path.write_bytes(model_file.pack(arrays, attributes))


def change_checkpoint(table):
    def tamper(folder):
        path = folder / "run" / "checkpoints" / "00000008.h5"
        arrays, _ = model_file.read(path)
        change_file(path, table, next(iter(arrays[table])))

    return tamper


def change_model(folder):
    path = folder / "run" / "model.h5"
    change_file(path, "learnables", "conv1.weight")


def name_model(folder, sha256):
    def change(statement):
        subjects = [x for x in statement["subject"] if x["name"] != "model.h5"]
        if sha256 is not None:
            subjects.append({"name": "model.h5", "digest": {"sha256": sha256}})
        statement["subject"] = subjects

    certificate_files.changed(folder / "run" / "certificate.json", change)


def replace_model(folder):
    """Name the file of other weights in the certificate, whose chain has the true weights."""
    change_model(folder)
    name_model(folder, recording.sha256_of_file(folder / "run" / "model.h5"))


def conceal_model(folder):
    change_model(folder)
    name_model(folder, None)


def rename_classes(folder):
    path = folder / "run" / "model.h5"
    arrays, attributes = model_file.read(path)
    attributes["classes"] = json.dumps(["dot", "bar", "box"])
    for key in ("format", "format_version"):
        del attributes[key]
    path.write_bytes(model_file.pack(arrays, attributes))
    name_model(folder, recording.sha256_of_file(path))


def change_without_mending(*arguments):
    def tamper(folder):
        def change(statement):
            put(*arguments)(statement["predicate"])

        certificate_files.changed(folder / "run" / "certificate.json", change)

    return tamper


def remove_link(folder):
    path = folder / "run" / "certificate.json"
    index = state_at(folder, 6)
    certificate_files.changed(path, lambda s: s["predicate"]["chain"].pop(index))


def remove_link_and_merge(folder):
    """Remove a state, give its losses to the next one, and bind the chain anew."""
    index = state_at(folder, 6)

    def change(predicate):
        losses = predicate["chain"].pop(index)["losses"]
        following = predicate["chain"][index:]
        state = next(link for link in following if link["kind"] == "state")
        state["losses"] = losses + state["losses"]

    forge(folder, change)


def tear_checkpoint(folder):
    path = folder / "run" / "checkpoints" / "00000008.h5"
    path.write_bytes(path.read_bytes()[:-1000])


def another_signer(folder):
    (folder / "run" / "certificate.json.sig").unlink()
    key = new_key(folder / "mallory")
    certificate = folder / "run" / "certificate.json"
    words = ["ssh-keygen", "-Y", "sign", "-n", "mpidl-certificate", "-f", str(key)]
    subprocess.run([*words, str(certificate)], check=True, capture_output=True)


def sign_before_forging(folder):
    signature = (folder / "run" / "certificate.json.sig").read_bytes()
    forge(folder, put("0.02", 0, "options", "learning_rate"))
    (folder / "run" / "certificate.json.sig").write_bytes(signature)


def remove_signature(folder):
    (folder / "run" / "certificate.json.sig").unlink()


def forge_option(folder):
    forge(folder, put("0.02", 0, "options", "learning_rate"))


def forge_layer(folder):
    forge(folder, put(1e-3, 0, "network", "layers", 1, "epsilon"))


def change_manifest(folder):
    path = folder / "run" / "certificate-images.txt"
    lines = path.read_text().splitlines()
    lines[1], lines[2] = lines[2], lines[1]
    path.write_text("\n".join(lines) + "\n")


FILES = {
    "a digest in a link": Tampering(
        change=change_without_mending(ZEROS, 2, "tables", "learnables"),
        subject="certificate",
        text="link 2 (state, iteration 2) is not the link that link 3 confirms",
    ),
    "an option in a link": Tampering(
        change=change_without_mending("1", 0, "options", "seed"),
        subject="certificate",
        text="link 0 (start, iteration 0) is not the link that link 1 confirms",
    ),
    "the sources of the software": Tampering(
        change=change_without_mending(ZEROS, 0, "software", "sources"),
        subject="certificate",
        text="link 0 (start, iteration 0) is not the link that link 1 confirms",
    ),
    "a link removed": Tampering(
        change=remove_link,
        subject="certificate",
        text="is not the link that",
    ),
    "a link removed and the chain mended": Tampering(
        change=remove_link_and_merge,
        subject="iterations 4-8",
        text="from iteration 6 on: the certificate has no state of this iteration",
    ),
    "a weight in a checkpoint": Tampering(
        change=change_checkpoint("learnables"),
        subject="checkpoints",
        text="00000008.h5: learnables differ from the state of iteration 8",
    ),
    "a momentum in a checkpoint": Tampering(
        change=change_checkpoint("optimizer"),
        subject="checkpoints",
        text="00000008.h5: optimizer differ from the state of iteration 8",
    ),
    "a torn checkpoint": Tampering(
        change=tear_checkpoint,
        subject="checkpoints",
        text="00000008.h5: expected a checkpoint",
    ),
    "a weight in the model": Tampering(
        change=change_model,
        subject="model",
        text="model.h5: weights_sha256 is ",
    ),
    "another model, and its digest": Tampering(
        change=replace_model,
        subject="model",
        text="model.h5: weights_sha256 is ",
    ),
    "another model, and no digest": Tampering(
        change=conceal_model,
        subject="model",
        text="model.h5: weights_sha256 is ",
    ),
    "the classes of the model": Tampering(
        change=rename_classes,
        subject="model",
        text="classes is ['dot', 'bar', 'box'], was",
    ),
    "an option, and the checkpoints kept": Tampering(
        change=forge_option,
        subject="options",
        text="--learning-rate is 0.01, in the certificate 0.02",
    ),
    "a layer, and the checkpoints kept": Tampering(
        change=forge_layer,
        subject="network",
        text="layer batchnorm1: epsilon is 1e-05, was 0.001",
    ),
    "the manifest": Tampering(
        change=change_manifest,
        subject="manifest",
        text="in the certificate it is",
    ),
    "a forged signature": Tampering(
        change=sign_before_forging,
        subject="signature",
        text="found: ",
    ),
    "another signer": Tampering(
        change=another_signer,
        subject="signature",
        text="expected a key in ",
    ),
    "a removed signature": Tampering(
        change=remove_signature,
        subject="signature",
        text="the certificate is not signed",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_changed_files_are_named(files, kind):
    change, subject, text = FILES[kind]
    change(files)
    result = audit_files(files)
    assert result.code == 1 and subject in result.differing, result.lines
    assert any(v == "DIFFERENT" and text in line for v, line in result.rows(subject)), result.lines
    # A head that the links do not have must not be compared with a published one.
    has_head = any(line.startswith("head: ") for line in result.lines)
    assert has_head == ("certificate" not in result.differing)


# Hostile certificates and checkpoints.


def change_facts(folder, *keys, value):
    """Change a fact of a checkpoint whose arrays are those of the certificate."""
    path = folder / "run" / "checkpoints" / "00000008.h5"
    arrays, attributes = model_file.read(path)
    facts = json.loads(attributes["facts"])
    place = facts
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    attributes["facts"] = json.dumps(facts)
    for key in ("format", "format_version"):
        del attributes[key]
    path.unlink()  # other checkpoints may be links to the same file
    path.write_bytes(model_file.pack(arrays, attributes))


@pytest.mark.parametrize(
    "value", [[1], *(pytest.param(v, marks=SLOW) for v in ({}, "8", True, None))]
)
def test_a_checkpoint_with_a_hostile_position(files, value):
    change_facts(files, "position", "iteration", value=value)
    result = audit_files(files, "--steps", "9:10")
    assert result.code == 1 and result.differing == ["checkpoints"], result.lines
    assert "expected a checkpoint: " in result.rows("checkpoints")[0][1]


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("validation", "waited"), 10**9),
        pytest.param(("validation",), None, marks=SLOW),
        pytest.param(("optimizer",), ["Other", []], marks=SLOW),
        pytest.param(("fingerprint",), 5, marks=SLOW),
        pytest.param(("run",), {"network": "evil.py:run"}, marks=SLOW),
        pytest.param(("numerics",), 99, marks=SLOW),
    ],
)
def test_facts_of_a_checkpoint_that_an_audit_does_not_use(files, keys, value):
    """Only arrays and a position that the certificate covers, and the options, are used."""
    change_facts(files, *keys, value=value)
    assert audit_files(files, "--steps", "9:10").code == 0


@pytest.mark.parametrize(
    ("keys", "value", "text"),
    [
        (("options", "learning_rate"), "-1", "--learning-rate must be positive, found -1"),
        (("options", "loss"), "function f", "--loss: expected the function f, which Python"),
        (("options", "checkpoint_keep"), "auto", "--checkpoint-keep must be a whole number"),
        (("options",), {"x": "1"}, "unknown option x"),
        (("inputs",), {"x": "1"}, "unknown input x"),
        (("network", "layers"), [{"type": "Evil"}], "unknown layer type 'Evil'"),
        (("network", "layers"), [{"type": "Dense", "outputs": 10**12}], "cannot be built"),
        (("network", "layers"), [{"type": "Dense", "outputs": []}], "cannot be built"),
        (("network", "input_shape"), [1, 2**32 - 1, 2**32 - 1], "cannot be built"),
        (("optimizer",), ["SGDM", []], "optimizer of a Python program: use dl.audit"),
        (("weights",), {"sha256": ZEROS, "certificate": None}, "--weights: expected the file with"),
    ],
)
def test_hostile_entries_of_a_start(files, keys, value, text):
    """An entry that cannot be used is one line, and code that it names does not run."""
    remove_checkpoints(files)
    forge(files, put(value, 0, *keys))
    with pytest.raises(UserError) as error:
        audit_files(files, signers=False)
    assert text in str(error.value)


def test_a_state_to_roll_back_to_is_covered(honest, tmp_path):
    """A checkpoint between two kept states also has the earlier one."""
    words = ("--on-nan", "rollback", "--average", "none", "--output-network", "best-validation")
    train_run(honest / "set.npz", tmp_path / "run", *words)
    run = shutil.copytree(tmp_path / "run", tmp_path / "other" / "run")
    assert audit(run, honest / "set.npz").rows("checkpoints")[0][1].startswith("5, of")
    path = run / "checkpoints" / "00000008.h5"
    arrays, _ = model_file.read(path)
    for table in ("rollback_learnables", "rollback_best_learnables"):
        path.unlink()
        shutil.copy(tmp_path / "run" / "checkpoints" / path.name, path)
        change_file(path, table, next(iter(arrays[table])))
        result = audit(run, honest / "set.npz", "--steps", "9:10")
        assert result.differing == ["checkpoints"]
        assert f"{table} differ" in result.rows("checkpoints")[0][1]
    shutil.copy(tmp_path / "run" / "checkpoints" / path.name, path)
    change_facts(tmp_path / "other", "rollback", "position", "loss", value=0.5)
    assert audit(run, honest / "set.npz", "--steps", "9:10").differing == ["checkpoints"]


def test_a_rollback_that_never_comes(honest, tmp_path):
    """A state after the last kept one claims that the run has rolled back."""
    run = train_run(honest / "set.npz", tmp_path / "run", "--on-nan", "rollback")
    claims = {"rollbacks": 1, "tables": {"learnables": ZEROS}, "losses": [0.0]}
    index = state_at(tmp_path, 15)
    remove_checkpoints(tmp_path)
    forge(tmp_path, lambda predicate: predicate["chain"][index].update(claims))
    result = audit(run, honest / "set.npz")
    assert_differs(result, "iterations 0-15", "the run has rolled back 1 times, the replay has not")


def test_mini_batches_that_an_epoch_does_not_have(files):
    forge(files, put("64", 0, "options", "batch_size"))
    result = audit_files(files, "--steps", "9:10", signers=False)
    assert "the state is after mini-batch 3 of epoch 2, which has 2" in "".join(result.lines)
    assert "; cause: the options" in "".join(result.lines)


# Runs that were not trained as their certificates say.


@pytest.fixture
def train_dishonestly(honest, tmp_path):
    """Return a function that trains like the honest run, and audits the result.

    `permutation` replaces `keyed.permutation` while it trains.
    """

    def train_and_audit(data="set.npz", claimed=None, permutation=keyed.permutation):
        folder = tmp_path / "dishonest"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keyed, "permutation", permutation)
            train_run(honest / data, folder / "run")
        shutil.copy(honest / "set.npz", folder)
        if claimed is not None:
            claimed(folder)
        return audit_files(folder, signers=False)

    return train_and_audit


def assert_differs(result, segment, text):
    assert result.code == 1 and segment in result.differing, result.lines
    verdict, line = result.rows(segment)[0]
    assert verdict == "DIFFERENT" and text in line, line


def test_an_honest_second_run_is_equal(train_dishonestly):
    """Control of the next tests."""
    assert train_dishonestly().code == 0


def test_a_segment_trained_twice(train_dishonestly):
    """The second epoch repeats the images of the first one. Its states are recorded honestly."""
    permutation = keyed.permutation

    def repeated(n, seed, purpose, *, epoch=0):
        first = 1 if purpose == "shuffle" and epoch == 2 else epoch
        return permutation(n, seed, purpose, epoch=first)

    result = train_dishonestly(permutation=repeated)
    assert_differs(result, "iterations 4-8", "from iteration 6 on: the loss is ")
    assert CERTIFICATE in result.rows("iterations 4-8")[0][1]
    assert result.rows("iterations 0-4")[0][0] == "equal"


def test_another_order_of_mini_batches(train_dishonestly):
    permutation = keyed.permutation

    def reversed_order(n, seed, purpose, *, epoch=0):
        order = permutation(n, seed, purpose, epoch=epoch)
        return order[::-1] if purpose == "shuffle" else order

    result = train_dishonestly(permutation=reversed_order)
    assert_differs(result, "iterations 0-4", "from iteration 1 on: the loss is ")


def test_another_certificate_beside_the_model(files, tmp_path):
    train_run(files / "set.npz", tmp_path / "other", "--seed", "1")
    for name in ("certificate.json", "certificate-images.txt"):
        shutil.copy(tmp_path / "other" / name, files / "run" / name)
    result = audit_files(files, signers=False)
    assert result.code == 1 and {"model", "checkpoints"} <= {*result.differing}, result.lines
    assert "model.h5: weights_sha256 is " in result.rows("model")[0][1]
    assert result.rows("iterations 0-15")[0][0] == "equal"


def test_images_that_the_certificate_does_not_claim(honest, train_dishonestly, tmp_path):
    """The run was trained on an image that the certificate replaces with another one."""
    arrays = certified_runs.arrays()
    pixel(arrays)
    write_data(honest / "other.npz", **arrays)

    def claim(folder):
        links = chain(honest / "run")
        path = folder / "run" / "certificate-images.txt"
        shutil.copy(honest / "run" / "certificate-images.txt", path)
        start, end = links[0], links[-1]
        forge(
            folder,
            put(start["data"], 0, "data"),
            put(end["test"]["data"], -1, "test", "data"),
            lambda predicate: predicate["manifest"].update(sha256=recording.sha256_of_file(path)),
        )

    result = train_dishonestly(data="other.npz", claimed=claim)
    assert result.rows("data")[0][0] == "equal"
    assert_differs(result, "iterations 0-4", CERTIFICATE)


@pytest.mark.parametrize("build", [pytest.param("numpy", marks=SLOW), "generic"])
def test_other_kernels(honest, tmp_path, build):
    """The cause is the arithmetic; if the certificate conceals it, it is the certificate."""
    folder = tmp_path / "generic"
    words = ["--network", certified_runs.NETWORK, "--data", honest / "set.npz"]
    words += ["--out", folder / "run", "--certify", "public", *certified_runs.OPTIONS]
    subprocess.run(
        [sys.executable, "-m", "mpidl.train", *map(str, words)],
        env=os.environ | {"MPIDL_CPU": build},
        check=True,
        capture_output=True,
    )
    shutil.copy(honest / "set.npz", folder)
    result = audit_files(folder, signers=False)
    (arithmetic,) = result.rows("arithmetic")
    assert (
        arithmetic[0] == "other"
        and f"replay it with --device cpu and MPIDL_CPU={build})" in arithmetic[1]
    )
    assert_differs(result, "iterations 0-4", "cause: the arithmetic of this machine")
    current = sources.arithmetic(dl.World())
    forge(folder, put(current, 0, "arithmetic"))
    assert_differs(audit_files(folder, signers=False), "iterations 0-4", CERTIFICATE)


def test_a_machine_that_computes_differently(files, monkeypatch):
    """Golden hashes tell a faulty machine from an untrue certificate."""
    outcomes = [golden.Outcome("digits", "aa", "bb"), golden.Outcome("resnet-20", "cc", "cc")]
    monkeypatch.setattr(golden, "check", lambda: outcomes)
    forge(files, put("0.02", 0, "options", "learning_rate"))
    remove_checkpoints(files)
    text = "cause: the arithmetic of this machine: golden hashes differ (digits)"
    assert_differs(audit_files(files, signers=False), "iterations 0-15", text)


def test_other_sources_explain_a_difference_but_are_none(files):
    forge(files, put(ZEROS, 0, "software", "sources"))
    result = audit_files(files, signers=False)
    assert result.code == 0 and result.rows("software")[0][0] == "other", result.lines
    forge(files, put("0.02", 0, "options", "learning_rate"))
    remove_checkpoints(files)
    text = "from this data and these options, or other sources of mpidl"
    assert_differs(audit_files(files, signers=False), "iterations 0-15", text)


# Segments, arguments, Python.


def test_steps_and_samples(honest):
    for steps, segment in (("5:9", "4-10"), ("8:8", "4-8"), ("15:15", "12-15"), ("0:0", "0-0")):
        result = audit_files(honest, "--steps", steps)
        assert result.code == 0 and result.rows(f"iterations {segment}")[0][0] == "equal"
        assert bool(result.rows("test")) == (segment == "12-15")
    samples = []
    for seed in (0, 1, 2, 0):
        result = audit_files(honest, "--sample", 2, "--seed", seed)
        (sample,) = result.rows("sample")
        segments = [x.split()[1] for x in result.lines if x.startswith("iterations")]
        is_added = sample[1].endswith(", and 1 in which the result was formed")
        assert sample[1].startswith(f"2 of 4 segments, drawn by --seed {seed}")
        assert len(segments) == 2 + is_added and segments[-1] == "12-15" and result.code == 0
        samples.append(segments)
    assert samples[0] == samples[-1] and len(set(map(tuple, samples))) > 1
    first, second = (audit_files(honest, "--sample", 1).rows("sample")[0][1] for _ in range(2))
    assert first != second  # the default is a new seed


def test_a_checkpoint_that_was_changed_is_not_a_start(files):
    change_checkpoint("learnables")(files)
    result = audit_files(files, "--steps", "9:10")
    assert result.differing == ["checkpoints"]
    assert result.rows("iterations 4-10")[0][0] == "equal"


def test_the_certificate_alone(honest, tmp_path):
    shutil.copy(honest / "run" / "certificate.json", tmp_path)
    result = audit(tmp_path / "certificate.json", honest / "set.npz")
    assert result.code == 0, result.lines
    for subject in ("signature", "model", "checkpoints", "manifest"):
        assert result.rows(subject)[0][0] == "unchecked"
    assert result.rows("iterations 0-15")[0][0] == "equal"
    assert result.lines[-1].endswith("; unchecked: signature, model, checkpoints, manifest")
    result = audit(
        tmp_path / "certificate.json", honest / "set.npz", "--checkpoints", honest / "run"
    )
    assert result.rows("iterations 4-8")[0][0] == "equal"


def test_private_digests_need_the_salt(honest, tmp_path):
    run = train_run(honest / "set.npz", tmp_path / "run", certify="private")
    assert audit(run, honest / "set.npz").code == 0
    salt = (run / "certificate-salt.txt").rename(tmp_path / "salt.txt")
    with pytest.raises(UserError, match="expected the salt of the digests"):
        audit(run, honest / "set.npz")
    assert audit(run, honest / "set.npz", "--salt", salt).code == 0
    salt.write_text("0" * 64)
    with pytest.raises(UserError, match="expected the salt with sha256"):
        audit(run, honest / "set.npz", "--salt", salt)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--steps", "9:5"), "--steps must be A:B with A <= B, such as 400:450, found 9:5"),
        (("--steps", "x"), "--steps must be A:B with A <= B, such as 400:450, found x"),
        (("--steps", "0:16"), "--steps 0:16: expected at most 15"),
        (("--sample", "2", "--steps", "1:2"), "--steps and --sample: expected at most one"),
        (("--largest", "2", "--steps", "1:2"), "--steps and --largest: expected at most one"),
        (("--largest", "0"), "--largest must be at least 1, found 0"),
        (("--seed", "2"), "--seed 2: expected --sample with it"),
        (("--weights", "a.h5"), "--weights a.h5: the run did not start from weights"),
        (("--checkpoints", "none"), "--checkpoints none: no such folder"),
        (("--signers", "none"), "none: no such file"),
    ],
)
def test_unusable_arguments(honest, words, text):
    with pytest.raises(UserError) as error:
        audit(honest / "run", honest / "set.npz", *words)
    assert text in str(error.value)


def test_a_terminal_gets_short_lines_and_a_pipe_one_line_per_finding(monkeypatch):
    digests = "0" * 64, "f" * 64
    text = f"model.h5: weights_sha256 is {digests[0]}, in the certificate it is {digests[1]}"
    finding = checks.Finding("model", "DIFFERENT", text)
    lines = {}
    for stream in ("terminal", "pipe"):
        output = io.StringIO()
        monkeypatch.setattr(sys, "stdout", output)
        on_terminal = output if stream == "terminal" else io.StringIO()
        command.print_line(Console(stream=on_terminal, width=90), finding)
        lines[stream] = output.getvalue().splitlines()
    assert lines["pipe"] == [str(finding)]
    assert len(lines["terminal"]) > 1 and max(map(len, lines["terminal"])) <= 90
    assert "".join(lines["terminal"]).split() == str(finding).split()
    assert all(line.startswith(" " * 22) for line in lines["terminal"][1:])


def test_images_that_a_certificate_does_not_name(honest):
    with pytest.raises(UserError, match=r"--data: expected the images of the run \(train: 66\)"):
        audit(honest / "run", None)
