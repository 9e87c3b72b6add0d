"""Certificates and keys for tests, made as they are needed."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

DAY = timedelta(days=1)


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in files."""

    cert_file: str
    key_file: str

    @property
    def pem(self) -> bytes:
        return Path(self.cert_file).read_bytes()

    @property
    def serial(self) -> int:
        return x509.load_pem_x509_certificate(self.pem).serial_number


class Authority:
    """Somebody who vouches for others."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = (
            _builder(self._name, self._name, self._key, timedelta(days=10))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = str(folder / f"{name.replace(' ', '-')}.pem")
        self.pem = certificate.public_bytes(Encoding.PEM)
        Path(self.ca_file).write_bytes(self.pem)

    def issue(
        self,
        name: str,
        *,
        common_name: str = "",
        dns: tuple[str, ...] = (),
        uris: tuple[str, ...] = (),
        is_local: bool = False,
        begins: timedelta = -2 * DAY,
        lasts: timedelta = DAY,
        file: str = "",
    ) -> Pair:
        """A certificate in `<file or name>.pem`; `is_local` puts localhost and 127.0.0.1 into it."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)] if common_name else []
        )
        names: list[x509.GeneralName] = [x509.DNSName(each) for each in dns]
        names += [x509.UniformResourceIdentifier(each) for each in uris]
        if is_local:
            names += [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = _builder(subject, self._name, key, lasts, begins)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        stem = file or name
        pair = Pair(str(self._folder / f"{stem}.pem"), str(self._folder / f"{stem}.key"))
        Path(pair.key_file).unlink(missing_ok=True)
        Path(pair.key_file).touch(mode=0o600)
        Path(pair.key_file).write_bytes(pem_of(key))
        Path(pair.cert_file).write_bytes(certificate.public_bytes(Encoding.PEM))
        return pair


def credentials_of(pair: Pair, authority: Authority) -> grpc.ChannelCredentials:
    """Return what a client proves itself with, and whom it trusts."""
    authorities, key, chain = (
        Path(path).read_bytes() for path in (authority.ca_file, pair.key_file, pair.cert_file)
    )
    return grpc.ssl_channel_credentials(authorities, key, chain)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    lasts: timedelta,
    begins: timedelta = -2 * DAY,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + lasts)
    )
