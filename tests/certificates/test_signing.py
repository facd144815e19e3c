"""Test signatures of certificates by ssh-keygen, also without mpidl, and unusable keys."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpidl.certificates import signing
from mpidl.errors import UserError


def ssh_keygen(*arguments, **keywords):
    """Run ssh-keygen as a user would."""
    command = ["ssh-keygen", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, **keywords).stdout


def new_key(folder, name, passphrase="", kind="ed25519"):
    path = folder / name
    ssh_keygen("-q", "-t", kind, "-N", passphrase, "-C", "", "-f", path)
    return path


def allowed(folder, *lines):
    """Write a file of allowed signers. A line is (names and options, key)."""
    path = folder / "allowed_signers"
    texts = [f"{names} {key.with_suffix('.pub').read_text()}" for names, key in lines]
    path.write_text("".join(texts))
    return path


@pytest.fixture
def key(tmp_path):
    return new_key(tmp_path, "key")


@pytest.fixture
def certificate(tmp_path):
    path = tmp_path / "certificate.json"
    path.write_text('{"_type": "https://in-toto.io/Statement/v1"}\n' * 3000)
    return path


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_ssh_keygen_alone_verifies_a_signature(tmp_path, certificate, kind):
    key = new_key(tmp_path, "alice", kind=kind)
    signing.check_key(key)
    signature = signing.sign(certificate, key)
    assert signature == f"{certificate}.sig"
    signers = allowed(tmp_path, ("alice@example.com", key))
    rules = ("-n", "mpidl-certificate", "-f", signers, "-I", "alice@example.com")
    with open(certificate) as file:
        text = ssh_keygen("-Y", "verify", *rules, "-s", signature, stdin=file)
    assert text.startswith('Good "mpidl-certificate" signature for alice@example.com')


def test_verify_names_the_signer_and_the_key(tmp_path, certificate, key):
    other = new_key(tmp_path, "other")
    signature = signing.sign(certificate, key)
    fingerprint = ssh_keygen("-l", "-f", key).split()[1]
    unknown = signing.verify(certificate, signature)
    assert unknown == (None, "ED25519", fingerprint)
    signers = allowed(tmp_path, ("bob", other), ("alice,carol", key))
    assert signing.verify(certificate, signature, signers) == ("alice", "ED25519", fingerprint)
    assert signing.verify(certificate, signature, signers, "carol").principal == "carol"
    message = f"for bob, found {re.escape(fingerprint)}, the key of alice, carol"
    with pytest.raises(UserError, match=message):
        signing.verify(certificate, signature, signers, "bob")


def test_allowed_signers_may_be_patterns(tmp_path, certificate, key):
    signature = signing.sign(certificate, key)
    signers = allowed(tmp_path, ("*@example.com", key))
    for identity in (None, "alice@example.com"):
        principal = signing.verify(certificate, signature, signers, identity).principal
        assert principal == (identity or "*@example.com")
    with pytest.raises(UserError, match="for alice@example.org, found SHA256"):
        signing.verify(certificate, signature, signers, "alice@example.org")


def test_public_keys_alone_may_sign_by_the_name_of_their_file(tmp_path, certificate, key):
    signature, other = signing.sign(certificate, key), new_key(tmp_path, "other")
    keys = tmp_path / "alice's keys"
    keys.write_text("".join(Path(f"{path}.pub").read_text() for path in (other, key)))
    assert signing.verify(certificate, signature, keys).principal == "alice_s_keys"
    with pytest.raises(UserError, match=r"expected a key in .*other\.pub, found SHA256:"):
        signing.verify(certificate, signature, f"{other}.pub")


def test_a_second_signature_replaces_the_first(tmp_path, certificate, key):
    signing.sign(certificate, new_key(tmp_path, "old"))
    signature = signing.sign(certificate, key)
    assert signing.verify(certificate, signature).fingerprint in ssh_keygen("-l", "-f", key)


def test_what_a_signature_does_not_cover_is_refused(tmp_path, certificate, key):
    signature = signing.sign(certificate, key)
    signers = allowed(tmp_path, ("alice", key))
    signing.verify(certificate, signature, signers)  # the control
    content = certificate.read_bytes()
    certificate.write_bytes(content.replace(b"v1", b"v2", 1))
    for rules in ((), (signers,), (signers, "alice")):
        with pytest.raises(UserError, match="incorrect signature"):
            signing.verify(certificate, signature, *rules)
    certificate.write_bytes(content)
    strangers = allowed(tmp_path, ("bob", new_key(tmp_path, "other")))
    for rules in ((strangers,), (strangers, "alice"), (strangers, "bob")):
        with pytest.raises(UserError, match="expected a key in .*allowed_signers.*, found SHA256:"):
            signing.verify(certificate, signature, *rules)


def test_a_signature_for_another_purpose_is_refused(tmp_path, certificate, key):
    ssh_keygen("-Y", "sign", "-n", "git", "-f", key, certificate)
    with pytest.raises(UserError, match="namespace does not match"):
        signing.verify(certificate, f"{certificate}.sig")


@pytest.mark.parametrize("option", ['namespaces="git"', 'valid-before="20010101"'])
def test_rules_of_the_allowed_signers_hold(tmp_path, certificate, key, option):
    signature = signing.sign(certificate, key)
    with pytest.raises(UserError, match="allowed_signers"):
        signing.verify(certificate, signature, allowed(tmp_path, (f"alice {option}", key)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "missing header"),
        (b"\x1b[2J\xff\0" * 9, "missing header"),
        (b"-----BEGIN SSH SIGNATURE-----\nAAAA\n", "missing footer"),
        (b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n", "invalid format"),
        (b"-" * (1 << 17), "at most 65536 bytes, found 131072"),
    ],
)
def test_a_damaged_signature_is_one_line(tmp_path, certificate, content, message):
    path = tmp_path / "certificate.json.sig"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        signing.verify(certificate, path)
    assert str(error.value).isprintable()


def test_missing_files_are_named(tmp_path, certificate, key):
    signature = signing.sign(certificate, key)
    missing = tmp_path / "missing"
    for arguments in (
        (missing, signature),
        (certificate, missing),
        (certificate, signature, missing),
    ):
        with pytest.raises(UserError, match="missing: no such file"):
            signing.verify(*arguments)
    for function in (signing.check_key, lambda key: signing.sign(certificate, key)):
        with pytest.raises(UserError, match="--certify-key .*missing: expected the file of an SSH"):
            function(missing)


def unusable_keys(folder):
    """Yield (key, error message) for keys with which nothing can be signed."""
    yield new_key(folder, "secret", passphrase="secret"), "found a key with a passphrase"
    open_to_all = new_key(folder, "open")
    open_to_all.chmod(0o644)
    yield open_to_all, "Permissions 0644 for .* are too open"
    public = new_key(folder, "half").with_suffix(".pub")
    (folder / "half").unlink()
    yield public, "No private key found"
    text = folder / "text"
    text.write_text("not a key\n")
    text.chmod(0o600)
    yield text, "expected a usable SSH key, found: "
    yield folder, "expected the file of an SSH key, found none"


def test_unusable_keys_are_refused_before_a_run(tmp_path, certificate):
    for key, message in unusable_keys(tmp_path):
        for function in (signing.check_key, lambda key: signing.sign(certificate, key)):
            with pytest.raises(UserError, match=message) as error:
                function(key)
            assert str(key) in str(error.value)
    assert not os.path.exists(f"{certificate}.sig")


def test_a_passphrase_is_not_asked_for_in_a_terminal_or_a_window(tmp_path):
    """A process with a terminal, whose keys `SSH_ASKPASS` could ask for, ends with one line."""
    key = new_key(tmp_path, "secret", passphrase="secret")
    was_asked = tmp_path / "was_asked"
    program = tmp_path / "askpass"
    program.write_text(f"#!/bin/sh\ntouch {was_asked}\necho secret\n")
    program.chmod(0o700)
    code = f"from mpidl.certificates import signing; signing.check_key({str(key)!r})"
    controller, terminal = os.openpty()
    os.write(controller, b"secret\n")  # what a user would type
    variables = {**os.environ, "DISPLAY": ":0", "SSH_ASKPASS": str(program)}
    result = subprocess.run(
        ["setsid", "--ctty", sys.executable, "-c", code],
        stdin=terminal,
        env={**variables, "SSH_ASKPASS_REQUIRE": "force"},
        capture_output=True,
        text=True,
    )
    os.close(controller)
    os.close(terminal)
    assert result.returncode and "found a key with a passphrase" in result.stderr
    assert not was_asked.exists()


def test_an_agent_signs_with_a_key_that_has_a_passphrase(tmp_path, certificate, monkeypatch):
    key = new_key(tmp_path, "secret", passphrase="secret")
    program = tmp_path / "askpass"
    program.write_text("#!/bin/sh\necho secret\n")
    program.chmod(0o700)
    socket = str(tmp_path / "agent")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.PIPE)
    try:
        agent.stdout.readline()  # the agent listens
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)
        with pytest.raises(UserError, match="with a passphrase"):
            signing.check_key(key)  # the control: the agent does not have the key yet
        variables = {**os.environ, "SSH_ASKPASS": str(program), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(["ssh-add", "-q", str(key)], env=variables, check=True)
        for path in (key, key.with_suffix(".pub")):
            signing.check_key(path)
            signature = signing.sign(certificate, path)
            assert signing.verify(certificate, signature).key_type == "ED25519"
    finally:
        agent.terminate()
        agent.wait()
        agent.stdout.close()


def test_without_ssh_keygen_the_program_is_named(tmp_path, key, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="ssh-keygen: expected this program of OpenSSH"):
        signing.check_key(key)


def test_an_agent_that_does_not_answer_ends_in_an_error(tmp_path, key, monkeypatch):
    program = tmp_path / "bin" / "ssh-keygen"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(signing, "PATIENCE", 0.2)
    with pytest.raises(UserError, match="ssh-keygen -Y sign: no answer within 0.2 s"):
        signing.check_key(key)
