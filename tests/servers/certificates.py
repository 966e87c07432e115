"""A throw-away certificate authority and a certificate of it for 127.0.0.1, for tests of TLS."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """PEM files."""

    authority: Path
    public: Path
    private: Path


def make(folder: Path) -> Certificate:
    """A new authority, and a server's certificate signed by it."""
    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _builder("reflux test authority", "reflux test authority", authority_key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    server = _builder("127.0.0.1", "reflux test authority", server_key.public_key()).add_extension(
        x509.SubjectAlternativeName([loopback]), critical=False
    )
    files = Certificate(authority=folder / "ca.pem", public=folder / "server.pem", private=folder / "server.key")
    folder.mkdir(parents=True, exist_ok=True)
    files.authority.write_bytes(_signed(authority, authority_key))
    files.public.write_bytes(_signed(server, authority_key))
    files.private.write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return files


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
