"""The secret that all nodes of a job share, and the TLS identity that proves knowledge of it.

Every node derives the same certificate authority from the secret, makes a key pair of its own, and certifies
it. Both ends of a connection require a certificate of that authority, so only who knows the secret gets
through the TLS handshake, in either direction. The secret itself is never sent.
"""

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.processes.guard import SECRET_VARIABLE
from gpurun.launcher.rundir.claim import create_whole

MIN_SECRET_BYTES = 16
_LEAST_VARIETY = 6
_GOOD_ONE = "a good one: openssl rand -base64 32"
NODE_NAME = "gpurun-node"
"""The name in every node's certificate; nodes have no other, since any of them may be any rank."""
_AUTHORITY_NAME = "gpurun-secret"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The order of the curve P-256. Source: SEC 2, version 2.0, section 2.4.2."""
_BEGIN, _END = datetime(2000, 1, 1), datetime(9999, 12, 31, 23, 59, 59)
"""Certificates are always valid: the nodes' clocks may be wrong."""


@dataclass(frozen=True)
class NodeCertificate:
    """The certificate that a node shows, and those that it demands of the others; all PEM."""

    key: bytes
    certificate: bytes
    authority: bytes


def secret_file(environ: Mapping[str, str]) -> Path:
    """The file with a user's secret, unless the environment has another."""
    base = environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    return Path(base) / "gpurun" / "secret"


def find_secret(environ: Mapping[str, str]) -> bytes:
    """The secret in the environment, or that of the user's file, which is made if it is missing.

    Raises:
        SpecError: the secret is too short.
        MachineError: the file can't be made or read, or others may read it.
    """
    given = environ.get(SECRET_VARIABLE)
    if given is not None:
        return _long_enough(given.strip().encode(), SECRET_VARIABLE)
    where = ""
    try:
        path = secret_file(environ)
        where = f" in {path}"
        if not path.exists():
            _make(path)
        return _long_enough(_read(path), str(path))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        reason = getattr(error, "strerror", None) or error
        raise MachineError(
            f"can't make or read the nodes' secret{where}: {reason}\n"
            f"    set {SECRET_VARIABLE} to the same value on all nodes"
        ) from error


def _long_enough(secret: bytes, source: str) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise SpecError(f"the secret in {source} is shorter than {MIN_SECRET_BYTES} bytes\n    {_GOOD_ONE}")
    if is_guessable(secret):
        raise SpecError(
            f"the secret in {source} follows a simple pattern, and could be guessed\n    {_GOOD_ONE}"
        )
    return secret


def is_guessable(secret: bytes) -> bool:
    """Whether a secret has few different bytes, few different distances between them, or a part twice.

    Chance makes one like that of 16 hexadecimal digits less than once in a thousand times.
    """
    distances = {after - before for before, after in pairwise(secret)}
    is_repeated = (secret + secret).find(secret, 1) < len(secret)
    return is_repeated or min(len(set(secret)), len(distances)) < _LEAST_VARIETY


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise MachineError(f"{path} must belong to you, and no one else may read it: chmod 600 {path}")
        return file.read(4096).strip()


def _make(path: Path) -> None:
    """Makes the file complete or not at all: nodes that share the directory may do so at the same time."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        create_whole(path, f"{secrets.token_urlsafe(32)}\n".encode(), 0o600)


def identity_from(secret: bytes) -> NodeCertificate:
    """A node's key pair, certified by the authority that follows from the secret.

    scrypt makes guessing slow: who connects sees a certificate, against which guesses could be tried.
    """
    derived = hashlib.scrypt(secret, salt=b"gpurun nodes 1", n=2**14, r=8, p=1, dklen=40)
    authority_key = ec.derive_private_key(int.from_bytes(derived) % (_ORDER - 1) + 1, ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    return NodeCertificate(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        _certified(NODE_NAME, key.public_key(), authority_key, is_authority=False),
        _certified(_AUTHORITY_NAME, authority_key.public_key(), authority_key, is_authority=True),
    )


def _certified(
    name: str, key: ec.EllipticCurvePublicKey, authority: ec.EllipticCurvePrivateKey, is_authority: bool
) -> bytes:
    builder = (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(_named(_AUTHORITY_NAME))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
    )
    return builder.sign(authority, SHA256()).public_bytes(Encoding.PEM)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
