"""The seals of certificate.json: an altered entry is noticed, and a signature is of one key."""

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from jaxformer.files import ConfigError
from jaxformer.tools.certificate.record import (
    as_text,
    public_key_in,
    read_certificate,
    seal_problems,
    sealed,
    source_digest,
)

CONTENT = {
    "format": 1,
    "run": {"seed": 0, "name": "Ω"},
    "config": "ab" * 32,
    "checks": [{"name": "a", "result": "proven", "figure": 1e-7, "bound": 1e-5, "text": "b"}],
    "not_proven": ["c"],
}


def write_key(path: Path, key: Any, password: bytes = b"") -> Path:
    locked = serialization.BestAvailableEncryption(password) if password else None
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            locked or serialization.NoEncryption(),
        )
    )
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return write_key(tmp_path / "key.pem", Ed25519PrivateKey.generate())


def test_a_certificate_is_read_as_it_was_written(tmp_path: Path, key: Path) -> None:
    path = tmp_path / "certificate.json"
    for certificate in (sealed(CONTENT), sealed(CONTENT, key)):
        path.write_text(as_text(certificate), encoding="utf-8")
        assert read_certificate(path) == certificate
        assert seal_problems(certificate) == []


@pytest.mark.parametrize("name", CONTENT)
def test_an_altered_entry_is_noticed(name: str, key: Path) -> None:
    certificate = sealed(CONTENT, key)
    certificate[name] = "other"
    assert any("was altered" in problem for problem in seal_problems(certificate))


def test_a_new_digest_does_not_mend_a_signature(key: Path) -> None:
    signed = sealed(CONTENT, key)
    forged = sealed({**CONTENT, "config": "cd" * 32}) | {"signature": signed["signature"]}
    assert any("its signature is not that of" in problem for problem in seal_problems(forged))


def test_a_signature_by_another_key_is_noticed(tmp_path: Path, key: Path) -> None:
    trusted = Ed25519PrivateKey.generate()
    public = tmp_path / "public.pem"
    public.write_bytes(
        trusted.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    expected = public_key_in(public)
    assert any("not by" in problem for problem in seal_problems(sealed(CONTENT, key), expected))
    assert seal_problems(sealed(CONTENT), expected) == ["it is not signed."]
    trusted_path = write_key(tmp_path / "trusted.pem", trusted)
    assert seal_problems(sealed(CONTENT, trusted_path), expected) == []


def test_a_torn_signature_is_noticed(key: Path) -> None:
    certificate = sealed(CONTENT, key)
    certificate["signature"] = {"public_key": "zz"}
    assert any("hexadecimal digits" in problem for problem in seal_problems(certificate))


def test_keys_of_another_kind_are_refused(tmp_path: Path) -> None:
    other = write_key(tmp_path / "ec.pem", generate_private_key(SECP256R1()))
    with pytest.raises(ConfigError, match="signed by Ed25519"):
        sealed(CONTENT, other)
    locked = write_key(tmp_path / "locked.pem", Ed25519PrivateKey.generate(), b"secret")
    with pytest.raises(ConfigError, match="has a password"):
        sealed(CONTENT, locked)
    text = tmp_path / "text.pem"
    text.write_text("no key")
    with pytest.raises(ConfigError, match="no private key in PEM"):
        sealed(CONTENT, text)
    with pytest.raises(ConfigError, match="does not exist: `openssl genpkey"):
        sealed(CONTENT, tmp_path / "missing.pem")


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    path.write_text('{"format": 2}')
    with pytest.raises(ConfigError, match="format 2"):
        read_certificate(path)


def test_the_digest_of_the_source_is_one_of_bytes() -> None:
    assert source_digest() == source_digest()
    assert len(bytes.fromhex(source_digest())) == 32
