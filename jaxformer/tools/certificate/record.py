"""The file certificate.json: its content, its digest, and its signature.

{"format": 1, "run", "versions", "device", "config", "code", "tokenizer", "data", "chain",
"checkpoints", "checks", "replayed", "not_proven", "sha256", "signature"}: "sha256" is the digest of
all entries before it, and "signature" is only there where somebody signed this digest.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from jaxformer.files import ConfigError, read_file, read_object

CERTIFICATE = "certificate.json"  # in a run directory
CERTIFICATE_FORMAT = 1
SOURCES = (".py", ".pyi", ".html", ".css", ".js")  # suffixes of the files of the package
SEALS = ("sha256", "signature")  # the entries that the digest is not of
# What is signed, before the digest: a signature of it is one of a certificate and of nothing else.
SIGNED = b"jaxformer certificate 1 "
NO_PACKAGE = (
    "signatures of certificates need the package cryptography: pip install 'jaxformer[sign]'."
)
RESTORE = "restore it, or write a new one with `jaxformer certify`"

Certificate = dict[str, Any]


class CheckEntry(TypedDict):
    """An entry of "checks". `result` is "proven", "not applicable" or "failed"; `figure` is what
    was measured and `bound` what it may be at most, None where there is no number."""

    name: str
    result: str
    figure: float | None
    bound: float | None
    text: str


# An entry of "replayed": a step, the checkpoint that it was computed from (0: the first state),
# whether its figures equal those of the log ("bitwise", to "rounding", or "no"), and the largest
# difference relative to the logged figure.
ReplayEntry = TypedDict(
    "ReplayEntry", {"step": int, "from": int, "equal": str, "largest_difference": float}
)


def canonical(content: Mapping[str, Any]) -> bytes:
    """An object as the one JSON text that its digest is of: names in order, no spaces, UTF-8.
    Raises ValueError for a number that is not finite."""
    text = json.dumps(
        content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def digest_of(certificate: Mapping[str, Any]) -> str:
    """The SHA-256, in 64 hexadecimal digits, of all of a certificate but its seals."""
    content = {name: value for name, value in certificate.items() if name not in SEALS}
    return hashlib.sha256(canonical(content)).hexdigest()


def sealed(content: Mapping[str, Any], key: Path | None = None) -> Certificate:
    """A certificate with its digest, signed by the private key in the file `key` if one is given.
    Raises ConfigError as `private_key_in` does."""
    entries = {name: value for name, value in content.items() if name not in SEALS}
    digest = digest_of(entries)
    certificate = {**entries, "sha256": digest}
    if key is not None:
        private = private_key_in(key)
        certificate["signature"] = {
            "public_key": private.public_key().public_bytes_raw().hex(),
            "ed25519": private.sign(SIGNED + digest.encode()).hex(),
        }
    return certificate


def read_certificate(path: Path) -> Certificate:
    """The certificate in a file, whose seals `seal_problems` verifies. Raises ConfigError where
    there is none, or one of another format."""
    certificate = read_object(path, RESTORE)
    number = certificate.get("format")
    if number != CERTIFICATE_FORMAT:
        raise ConfigError(
            f"{path} has the format {number!r}, and this jaxformer reads certificates of format"
            f" {CERTIFICATE_FORMAT}: {RESTORE}."
        )
    return certificate


def as_text(certificate: Mapping[str, Any]) -> str:
    """The text of certificate.json."""
    return json.dumps(certificate, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def seal_problems(certificate: Mapping[str, Any], public_key: str = "") -> list[str]:
    """What is wrong with the digest and the signature of a certificate, one sentence each.

    `public_key`, 64 hexadecimal digits, is the key by which it has to be signed; without one, a
    signature only has to be that of the key that it names. Raises ConfigError where a signature is
    to be verified and the package `cryptography` is missing.
    """
    problems = []
    if certificate.get("sha256") != digest_of(certificate):
        problems.append("its content is not what its digest is of, so it was altered.")
    signature = certificate.get("signature")
    if signature is None:
        return [*problems, "it is not signed."] if public_key else problems
    try:
        signer = str(signature["public_key"])
        signed = bytes.fromhex(signature["ed25519"])
        is_signed = _verifies(signer, signed, SIGNED + str(certificate.get("sha256")).encode())
    except (LookupError, TypeError, ValueError):
        return [*problems, "its signature is no public_key and ed25519 in hexadecimal digits."]
    if not is_signed:
        problems.append(f"its signature is not that of the key {signer}.")
    if public_key and signer.lower() != public_key.lower():
        problems.append(f"it is signed by the key {signer}, not by {public_key}.")
    return problems


def _verifies(public_key: str, signature: bytes, signed: bytes) -> bool:
    """Whether a signature is that of a public key (hexadecimal digits). Raises ValueError where the
    digits are no key."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise ConfigError(NO_PACKAGE) from error
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def private_key_in(path: Path) -> Any:
    """The Ed25519 private key in a PEM file without a password. Raises ConfigError for any other
    file, and where the package `cryptography` is missing."""
    make = "`openssl genpkey -algorithm ed25519 -out key.pem` makes one"
    content = read_file(path, make)
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise ConfigError(NO_PACKAGE) from error
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError:
        raise ConfigError(
            f"--sign {path}: the key has a password, which nobody can be asked for here; `openssl"
            f" pkey -in {path} -out plain.pem` writes it without one."
        ) from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"--sign {path} holds no private key in PEM ({error}): give an Ed25519 key; {make}."
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        kind = type(key).__name__.strip("_").removesuffix("PrivateKey")
        raise ConfigError(
            f"--sign {path} holds a key of the kind {kind}, and certificates are signed by Ed25519:"
            f" {make}."
        )
    return key


def public_key_in(path: Path) -> str:
    """The Ed25519 public key in a PEM file, as `openssl pkey -in key.pem -pubout` writes it, in 64
    hexadecimal digits. Raises ConfigError for any other file."""
    advice = "give the public key of an Ed25519 key; `openssl pkey -in key.pem -pubout` writes it"
    content = read_file(path, advice)
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise ConfigError(NO_PACKAGE) from error
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} holds no public key in PEM ({error}): {advice}.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} holds a key of another kind: {advice}.")
    return key.public_bytes_raw().hex()


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file in 64 hexadecimal digits. Raises ConfigError where it cannot be read.
    For small files, which are read at once."""
    return hashlib.sha256(read_file(path)).hexdigest()


@functools.cache
def source_digest() -> str:
    """The SHA-256 over the names and bytes of all source files of the package jaxformer that is
    imported, in 64 hexadecimal digits. It does not depend on where the package is installed."""
    package = Path(__file__).parents[2]
    lines = [
        f"{path.relative_to(package).as_posix()} {file_sha256(path)}"
        for path in package.rglob("*")
        if path.suffix in SOURCES and path.is_file()
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
