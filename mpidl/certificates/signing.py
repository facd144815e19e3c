"""Sign certificates with SSH keys, and check signatures, by the program ssh-keygen.

Anyone can check a signature without mpidl: `ssh-keygen -Y verify -n mpidl-certificate -f
allowed_signers -I NAME -s certificate.json.sig < certificate.json`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from typing import NamedTuple

from mpidl.errors import UserError
from mpidl.files import open_for_reading, reason, unreadable, write_whole
from mpidl.text import name_list, printable

NAMESPACE = "mpidl-certificate"  # in every signature, so it is valid for no other purpose
ENDING = ".sig"  # of the name of a signature
PATIENCE = 60.0  # seconds; an agent may ask its user to confirm, who may not be there
LARGEST = 1 << 16  # bytes of a signature
KEY_TYPES = (b"ssh-", b"ecdsa-", b"sk-")  # how the line of a public key begins
NOISE = ("Signing ", "Could not verify signature", "@")  # lines that do not give a reason
GOOD = re.compile(r'^Good "[^"]*" signature .*with (\S+) key (\S+)$', re.MULTILINE)


class Signer(NamedTuple):
    """The key that made a signature, and whose key it is.

    Attributes
    ----------
    principal : str or None
        Name of the signer in the file of allowed signers. None without such a file: then nobody
        vouches for the key.
    key_type : str
        Type of the key, such as ED25519.
    fingerprint : str
        Fingerprint of the key, such as SHA256:fAST2Flu..., as `ssh-keygen -l` prints it.
    """

    principal: str | None
    key_type: str
    fingerprint: str


def check_key(key: str | os.PathLike[str]) -> None:
    """Raise UserError if ssh-keygen cannot sign with a key without asking anybody.

    Parameters
    ----------
    key : path
        File of a private key, or of a public key whose private key is in ssh-agent.
    """
    _signature(b"Is this key usable?", key)


def sign(path: str | os.PathLike[str], key: str | os.PathLike[str]) -> str:
    """Write the signature of a file beside the file, and return the path of the signature.

    Raises
    ------
    UserError
        If the key is unusable (see `check_key`), or a file cannot be read or written.
    """
    try:
        with open_for_reading(path) as file:
            content = file.read()
    except OSError as error:
        raise unreadable(path, error) from None
    signature = f"{os.fspath(path)}{ENDING}"
    write_whole(signature, _signature(content, key))
    return signature


def _signature(content, key):
    """Return the signature of bytes. They are in a file, because stdin is for passphrases."""
    label = f"--certify-key {printable(key)}"
    if not os.path.isfile(key):
        raise UserError(f"{label}: expected the file of an SSH key, found none")
    try:
        with tempfile.TemporaryDirectory(prefix="mpidl-") as folder:
            path = os.path.join(folder, "content")
            with open(path, "wb") as file:
                file.write(content)
            result = _ssh_keygen("sign", "-n", NAMESPACE, "-f", os.path.abspath(key), path)
            if result.returncode == 0:
                with open(path + ENDING, "rb") as file:
                    return file.read()
    except OSError as error:
        raise UserError(f"{tempfile.gettempdir()}: cannot be written: {reason(error)}") from None
    if "passphrase" in result.stderr:
        raise UserError(
            f"{label}: expected a key without a passphrase, or one that ssh-agent holds "
            "(ssh-add FILE), found a key with a passphrase"
        )
    raise UserError(f"{label}: expected a usable SSH key, found: {_reason(result)}")


def verify(
    path: str | os.PathLike[str],
    signature: str | os.PathLike[str],
    allowed_signers: str | os.PathLike[str] | None = None,
    identity: str | None = None,
) -> Signer:
    """Check the signature of a file, and return the signer.

    Parameters
    ----------
    path, signature : path
        The signed file, and the file of its signature.
    allowed_signers : path, optional
        File with the names and keys of those who may sign, as `man ssh-keygen` describes it, or
        with public keys alone, such as id_ed25519.pub; its name then is the signer's.
    identity : str, optional
        The name in `allowed_signers` that must have signed; by default, any name.

    Raises
    ------
    UserError
        If the signature is damaged or is one of another file, or if its key is not that of an
        allowed signer.
    """
    label = printable(signature)
    _check_size(signature)
    result = _checked("check-novalidate", path, signature)
    good = GOOD.search(result.stdout)
    if result.returncode or good is None:
        text = f"{label}: expected a signature of {printable(path)} for {NAMESPACE}"
        raise UserError(f"{text}, found: {_reason(result)}")
    signer = Signer(None, *good.groups())
    if allowed_signers is None:
        return signer
    with _with_names(allowed_signers) as rules:
        names = _principals(signature, rules)
        for name in names if identity is None else [identity]:
            result = _checked("verify", path, signature, "-f", rules, "-I", name)
            if result.returncode == 0:
                return signer._replace(principal=name)
    expected = f"a key in {printable(allowed_signers)}"
    expected += "" if identity is None else f" for {identity}"
    owners = f", the key of {name_list(names)}: {_reason(result)}" if names else ""
    raise UserError(f"{label}: expected {expected}, found {signer.fingerprint}{owners}")


def _checked(action, path, signature, *arguments):
    """Run a check of the signature of a file."""
    rules = ("-n", NAMESPACE, "-s", signature, *arguments)
    try:
        with open_for_reading(path) as file:
            return _ssh_keygen(action, *rules, stdin=file)
    except OSError as error:
        raise unreadable(path, error) from None


def _check_size(signature):
    """Raise UserError unless a file can be a signature; ssh-keygen would read any file."""
    try:
        with open_for_reading(signature) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise unreadable(signature, error) from None
    if size > LARGEST:
        raise UserError(
            f"{printable(signature)}: expected a signature of at most {LARGEST} bytes, found {size}"
        )


@contextlib.contextmanager
def _with_names(allowed_signers):
    """Yield a file of allowed signers; public keys without names get the name of their file."""
    try:
        with open_for_reading(allowed_signers) as file:
            lines = file.read(LARGEST).splitlines()
    except OSError as error:
        raise unreadable(allowed_signers, error) from None
    lines = [line for line in lines if line.strip() and not line.lstrip().startswith(b"#")]
    if not lines or not all(line.startswith(KEY_TYPES) for line in lines):
        yield allowed_signers
        return
    name = re.sub(r"[^\w.@+-]", "_", os.path.basename(allowed_signers), flags=re.ASCII)
    with tempfile.TemporaryDirectory(prefix="mpidl-") as folder:
        path = os.path.join(folder, "allowed_signers")
        with open(path, "wb") as file:
            file.writelines(name.encode() + b" " + line + b"\n" for line in lines)
        yield path


def _principals(signature, allowed_signers):
    """Return the names in a file of allowed signers whose key made a signature."""
    result = _ssh_keygen("find-principals", "-s", signature, "-f", allowed_signers)
    return [] if result.returncode else result.stdout.splitlines()


def _ssh_keygen(action, *arguments, stdin=subprocess.DEVNULL):
    """Run `ssh-keygen -Y ACTION` and return the completed process.

    It has no terminal and no window, so it never waits for a passphrase.
    """
    program = shutil.which("ssh-keygen")
    if program is None:
        raise UserError("ssh-keygen: expected this program of OpenSSH for signatures, found none")
    variables = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "SSH_ASKPASS")}
    command = [program, "-Y", action, *map(os.fspath, arguments)]
    try:
        return subprocess.run(
            command,
            stdin=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            start_new_session=True,
            env={**variables, "SSH_ASKPASS_REQUIRE": "never"},
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"ssh-keygen -Y {action}: no answer within {PATIENCE:g} s") from None
    except OSError as error:
        raise unreadable(program, error) from None


def _reason(result):
    """Return the first line of ssh-keygen's messages that says why it failed."""
    lines = result.stderr.splitlines()
    return next((line for line in lines if line and not line.startswith(NOISE)), "refused")
