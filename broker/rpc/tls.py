"""The broker's certificate, and whom it trusts to vouch for clients: checked when read, served anew when changed."""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from broker.config import BrokerConfig
from broker.observe.metrics import BrokerCounters
from broker.rpc.watched_file import Watched
from broker.settings import ConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

OpenChannel: TypeAlias = Callable[[Sequence[tuple[str, Any]]], grpc.aio.Channel]
"""Opens a channel with these options."""


class ServerCertificates:
    """Certificates that the port proves itself with. gRPC asks at each handshake, from a thread of its own."""

    def __init__(self, config: BrokerConfig, counters: BrokerCounters) -> None:
        """Raises ConfigError where the files cannot be used."""
        self._config = config
        self._counters = counters
        paths = [config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file]
        self.watched: Watched[Any] = Watched("tls", paths, self._read, counters)
        self._served = self.watched.value

    def credentials(self) -> grpc.ServerCredentials:
        """For one port. TLS 1.2 and 1.3, which is gRPC's own choice."""
        return grpc.dynamic_ssl_server_credentials(
            self._served,
            self._next,
            require_client_authentication=bool(self._config.tls_client_ca_file),
        )

    def _next(self) -> Any:
        """Return what to serve from now on; None: what is served already."""
        certificates = self.watched.value
        if certificates is self._served:
            return None
        self._served = certificates
        return certificates

    def _read(self) -> Any:
        """Return what gRPC takes: one reading of the files, checked to fit together."""
        config = self._config
        chain, key = _read("tls_cert_file", config.tls_cert_file), _read_key(config.tls_key_file)
        certificate = _certificates("tls_cert_file", config.tls_cert_file, chain)[0]
        _check_pair(config, certificate, key)
        authorities: bytes | None = None
        if config.tls_client_ca_file:
            authorities = _read("tls_client_ca_file", config.tls_client_ca_file)
            _certificates("tls_client_ca_file", config.tls_client_ca_file, authorities)
        self._counters.tls_expires_at_seconds = int(certificate.not_valid_after_utc.timestamp())
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authorities)


def channel_to_node(config: BrokerConfig, address: str) -> OpenChannel:
    """Return what opens channels to another node, which proves itself with a certificate where this one does.

    Trusted are the system's authorities, those that vouch for clients, and what is in the file of the own certificate:
    its chain, or a certificate that all nodes share. The files are read for each channel, as they are replaced from
    time to time; that raises ConfigError where one cannot be read.
    """
    if not config.tls_cert_file:
        return lambda options: grpc.aio.insecure_channel(address, options=options)
    return lambda options: grpc.aio.secure_channel(address, _node_credentials(config), options=options)


def _node_credentials(config: BrokerConfig) -> grpc.ChannelCredentials:
    chain = _read("tls_cert_file", config.tls_cert_file)
    roots = [chain]
    if config.tls_client_ca_file:
        roots.append(_read("tls_client_ca_file", config.tls_client_ca_file))
    system = ssl.get_default_verify_paths().cafile
    if system is not None:
        roots.append(_read("SSL_CERT_FILE", system))
    return grpc.ssl_channel_credentials(
        root_certificates=b"\n".join(roots),
        private_key=_read_key(config.tls_key_file),
        certificate_chain=chain,
    )


def _check_pair(config: BrokerConfig, certificate: Certificate, key: bytes) -> None:
    # Loaded where there is TLS: it takes a tenth of a start.
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    try:
        public = serialization.load_pem_private_key(key, password=None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it is encrypted
        raise ConfigError(f"tls_key_file: {config.tls_key_file} is not an unencrypted private key") from error
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise ConfigError(f"tls_key_file: {config.tls_key_file} is not the key of {config.tls_cert_file}")
    now = datetime.now(UTC)
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
        raise ConfigError(
            f"tls_cert_file: {config.tls_cert_file} is valid only from {certificate.not_valid_before_utc} to "
            f"{certificate.not_valid_after_utc}"
        )


def _certificates(setting: str, path: str, pem: bytes) -> list[Certificate]:
    from cryptography import x509  # noqa: PLC0415 - as above

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{setting}: {path} holds no certificate in PEM") from error


def _read_key(path: str) -> bytes:
    pem = _read("tls_key_file", path)
    if os.stat(path).st_mode & stat.S_IROTH:
        raise ConfigError(f"tls_key_file: {path} is readable by all users: run chmod o-r on it")
    return pem


def _read(setting: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from error
