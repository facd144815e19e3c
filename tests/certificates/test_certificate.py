"""Test that certificates are read back, and that other files are refused with one line."""

import hashlib
import json
import sys

import certificate_files
import jsonschema
import pytest

from mpidl.certificates import certificate
from mpidl.errors import UserError


def test_a_certificate_is_read_as_it_was_written(tmp_path):
    path = certificate_files.write(tmp_path)
    result = certificate.read(tmp_path)
    assert result == certificate.read(path)
    assert result.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert result.subjects == {
        "weights": certificate_files.DIGESTS[7],
        "model.h5": certificate_files.DIGESTS[8],
    }
    assert [link["ranks"] for link in result.of_kind("start")] == [2, 3]
    assert result.of_kind("start")[1]["options"] == certificate_files.START["options"]
    assert [link["losses"] for link in result.of_kind("state")] == [[], [2.25, None], [1.0]]
    assert result.end["returned_iteration"] == 2
    assert (result.manifest, result.salt, result.disorder) == (
        certificate_files.DIGESTS[9],
        None,
        None,
    )


def test_any_validator_of_json_schema_accepts_the_file(tmp_path):
    schema = json.loads(open(certificate.SCHEMA).read())
    jsonschema.Draft202012Validator.check_schema(schema)
    statement = json.loads(certificate_files.write(tmp_path).read_text())
    jsonschema.Draft202012Validator(schema).validate(statement)


def test_a_statement_may_have_entries_that_are_not_ours(tmp_path):
    path = certificate_files.write(tmp_path)
    certificate_files.changed(path, lambda statement: statement.update(comment="x"))
    assert certificate.read(path).broken is None


def put(value, *keys):
    def change(statement):
        *before, last = keys
        place = statement["predicate"]["chain"]
        for key in before:
            place = place[key]
        place[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.update(predicateType="urn:other"), "predicateType: expected const urn:mpidl"),
        (lambda s: s.pop("subject"), "the file: expected required"),
        (lambda s: s["predicate"].update(head="A" * 64), "predicate.head: expected pattern"),
        (lambda s: s["predicate"].update(head=f"{'a' * 64}\n"), "predicate.head: expected maxLen"),
        (lambda s: s["predicate"].update(salt="x"), "predicate.salt: expected a SHA-256 or null"),
        (lambda s: s["predicate"]["manifest"].update(name="../x"), "manifest.name: expected const"),
        (lambda s: s["predicate"].update(chain=[]), "predicate.chain: expected minItems 1"),
        (
            put("3", 1, "iteration"),
            "chain[1].iteration: expected type integer, found '3'",
        ),
        (
            put(3.0, 1, "iteration"),
            "chain[1].iteration: expected type integer, found 3.0",
        ),
        (put(True, 1, "iteration"), "predicate.chain[1].iteration: expected type integer"),
        (put(-1, 1, "epoch"), "predicate.chain[1].epoch: expected minimum 0, found -1"),
        (put(1 << 60, 1, "epoch"), "predicate.chain[1].epoch: expected maximum"),
        (put("loop", 1, "kind"), "predicate.chain[1].kind: expected enum"),
        (put({"a": 1}, 1, "tables"), "predicate.chain[1].tables.a: expected type string, found 1"),
        (put(["x"], 2, "losses"), "predicate.chain[2].losses[0]: expected type"),
        (put({"seed": 3}, 0, "options"), "predicate.chain[0].options.seed: expected type string"),
        (put({"layers": []}, 0, "network"), "predicate.chain[0].network"),
        (put(1, 1, "path"), "predicate.chain[1]: expected no other entries, found an object"),
        (put(7, 3), "predicate.chain[3]: expected type object, found 7"),
    ],
)
def test_other_forms_are_refused(tmp_path, change, text):
    path = certificate_files.write(tmp_path)
    certificate_files.changed(path, change)
    with pytest.raises(UserError) as error:
        certificate.read(path)
    assert str(error.value).startswith(f"{path}: not a certificate: ")
    assert text in str(error.value)


DEEP = 100_000


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "Expecting value"),
        (b"[]", "the file: expected type object, found a list"),
        (b"null", "the file: expected type object, found null"),
        (b'{"a": 1', "Expecting ',' delimiter"),
        (b'{"a": 1, "a": 2}', "the entry a occurs twice"),
        (b'{"a": NaN}', "expected finite numbers, found NaN"),
        (b'{"a": -Infinity}', "expected finite numbers, found -Infinity"),
        (b'{"a": 1e999}', "expected finite numbers, found 1e999"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "integer string conversion"),
        (b"[" * DEEP + b"]" * DEEP, "nested too deeply"),
        (b'{"a":' * DEEP + b"1" + b"}" * DEEP, "nested too deeply"),
        (b"\xff\xfe{\0}\0", "it is not a text"),
        (b"\x89HDF\r\n\x1a\n", "it is not a text"),
    ],
)
def test_damaged_and_hostile_files_are_refused(tmp_path, content, text):
    path = tmp_path / "certificate.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        certificate.read(path)
    message = str(error.value)
    assert text in message and "\n" not in message and len(message) < 1000


def test_layers_that_are_nested_deeply_are_refused(tmp_path):
    path = certificate_files.write(tmp_path)
    depth = sys.getrecursionlimit() // 2
    nested = "[" * depth + "]" * depth
    text = path.read_text().replace('"type": "Dense"', f'"type": {nested}')
    path.write_text(text)
    result = certificate.read(path)  # if it is accepted, its digests are compared
    assert result.broken and result.broken.startswith("link 0 ")


def test_missing_files_pipes_and_large_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no such file"):
        certificate.read(tmp_path)
    with pytest.raises(UserError, match="expected a file, found a device or a pipe"):
        certificate.read("/dev/null")
    path = certificate_files.write(tmp_path)
    monkeypatch.setattr(certificate, "MAX_BYTES", 1 << 10)
    with pytest.raises(UserError, match="expected a certificate of at most"):
        certificate.read(path)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    path = certificate_files.write(tmp_path)
    monkeypatch.setitem(sys.modules, "jsonschema.validators", None)
    with pytest.raises(UserError, match=r"expected the package jsonschema.*\[audit\]"):
        certificate.read(path)


def test_a_changed_link_is_a_finding(tmp_path):
    path = certificate_files.write(tmp_path)
    certificate_files.changed(path, put(1, 2, "epoch"))
    assert certificate.read(path).broken is None  # the value is the same
    certificate_files.changed(path, put(2, 2, "epoch"))
    result = certificate.read(path).broken
    assert result == "link 2 (state, iteration 2) is not the link that link 3 confirms"
    certificate_files.changed(path, put(certificate_files.DIGESTS[0], 6, "weights"))
    certificate_files.changed(path, put(1, 2, "epoch"))
    result = certificate.read(path).broken
    assert result == "link 6 (end, iteration 3) is not the link that the head confirms"


def losses_of(count):
    return lambda predicate: predicate["chain"][2].update(losses=[1.0] * count)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: p["chain"].pop(0), "link 0: expected a start with all entries, found state"),
        (lambda p: p["chain"][0].pop("data"), "link 0: expected a start with all entries"),
        (lambda p: p["chain"].pop(1), "expected states from iteration 0 on"),
        (lambda p: p["chain"].pop(2), "(state, iteration 3): expected 3 losses, found 1"),
        (lambda p: p["chain"].insert(3, p["chain"][2] | {"losses": []}), "one per iteration"),
        (lambda p: p["chain"].insert(5, p["chain"].pop(3)), "an iteration of at least"),
        (lambda p: p["chain"].pop(5), "(end, iteration 3): expected a state at this iteration"),
        (lambda p: p["chain"].insert(2, dict(p["chain"][-1])), "expected one end"),
        (losses_of(3), "(state, iteration 2): expected 2 losses, found 3"),
    ],
)
def test_a_chain_that_was_bound_anew_must_have_the_order_of_a_run(tmp_path, change, text):
    path = certificate_files.write(tmp_path)
    certificate_files.forge(path, lambda predicate: None)
    assert certificate.read(path).disorder is None
    certificate_files.forge(path, change)
    assert certificate.read(path).broken is None
    assert text in certificate.read(path).disorder
