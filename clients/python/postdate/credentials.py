"""Credentials: those by which a client knows the right broker, and those by which it shows who it is itself.

What leaves this module is a channel and the metadata of each call; certificates and tokens are read here only.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

Token = str | Callable[[], str]
"""A bearer token, or what returns the one to use now: it is called for each call and each new stream."""

_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Red Hat
    "/etc/ssl/cert.pem",  # BSD, macOS
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """An encrypted connection to a broker that proves its name. Files are PEM.

    `ca_file` holds the certificates that are trusted to vouch for the broker; None: the system's. `cert_file` and
    `key_file` are the client's own, for brokers that ask for one. `server_name` is the name in the broker's
    certificate, where that is not the host of the address. The files are read once, when the client connects.
    """

    ca_file: str | os.PathLike[str] | None = None
    cert_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("a client certificate needs both cert_file and key_file")


class Credentials:
    """The TLS settings and the token of one client."""

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        token: Token | None = None,
        allow_plaintext_token: bool = False,
    ) -> None:
        self._tls = tls
        self._token = token
        self._allows_plaintext = allow_plaintext_token
        self._given = split_addresses(address)
        for node in self._given:
            self._check(node)

    @property
    def can_renew(self) -> bool:
        """Tell whether the next call may show another token than the last one."""
        return callable(self._token)

    @property
    def is_encrypted(self) -> bool:
        return self._tls is not None

    @property
    def may_go_elsewhere(self) -> bool:
        """Tell whether the token may be shown to whoever listens at an address that was told and not given."""
        return self._token is None or self._tls is not None or self._allows_plaintext

    def open_channel(self, options: Sequence[tuple[str, Any]], address: str = "") -> grpc.aio.Channel:
        """A new channel to an address, or to the first one of those given.

        Raises OSError where a file of certificates cannot be read, ValueError where it holds none, or where the token
        must not be sent.
        """
        address = address or self._given[0]
        check_address(address)
        if address not in self._given and not self.may_go_elsewhere:
            raise ValueError(
                f"a token would be sent without encryption to {address}, which is none of the addresses given: give "
                "it too, or tls=postdate.Tls(...), or allow_plaintext_token=True if the network between is trusted"
            )
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=list(options))
        given = list(options)
        if self._tls.server_name is not None:
            given.append(("grpc.ssl_target_name_override", self._tls.server_name))
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read(self._tls.ca_file) if self._tls.ca_file is not None else _system_roots(),
            private_key=_read(self._tls.key_file),
            certificate_chain=_read(self._tls.cert_file),
        )
        _check_files(self._tls)
        return grpc.aio.secure_channel(address, credentials, options=given)

    def _check(self, address: str) -> None:
        """Raise ValueError unless this is an address to which the token may be sent if it is given."""
        if self.may_go_elsewhere or _is_loopback(address):
            return
        raise ValueError(
            f"a token for {address} would be sent without encryption: give tls=postdate.Tls(...), "
            "or allow_plaintext_token=True if the network between is trusted"
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that goes with the next call."""
        if self._token is None:
            return ()
        token = (self._token() if callable(self._token) else self._token).strip()
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            # It is not shown: what is almost a token is almost a secret.
            raise ValueError("the token is empty, or contains characters that are not allowed")
        return (("authorization", f"Bearer {token}"),)


def split_addresses(address: str) -> list[str]:
    """The addresses of the nodes of a cluster, separated by commas; most often one. Raises ValueError."""
    addresses = [node.strip() for node in address.split(",")]
    for node in addresses:
        check_address(node)
    return list(dict.fromkeys(addresses))


def check_address(address: str) -> None:
    """Raise ValueError unless this is host:port, or the path of a socket.

    gRPC itself takes a port modulo 65,536 and a name without one for a port of its own choice: for another broker.
    """
    if address.startswith("unix:"):
        return
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16
    if not is_port or not host or any(each.isspace() for each in address):
        raise ValueError(f"{address!r} is not an address: give host:port, for example 127.0.0.1:7650")


def _read(path: str | os.PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()


def _check_files(tls: Tls) -> None:
    """Raise ValueError for what gRPC would never connect with: it says so in its own log alone, at each attempt."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # whether a key is long enough is for the broker to say
    if tls.ca_file is not None:
        try:
            context.load_verify_locations(cafile=tls.ca_file)
        except ssl.SSLError:
            raise ValueError(f"{os.fspath(tls.ca_file)} holds no certificate in PEM") from None
    if tls.cert_file is not None:
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file, password="")
        except ssl.SSLError:
            pair = f"{os.fspath(tls.cert_file)} and {os.fspath(tls.key_file or '')}"
            raise ValueError(f"{pair} are no certificate and its key without a password, in PEM") from None


def _system_roots() -> bytes | None:
    """The certificates that this machine trusts; None leaves gRPC to its own list."""
    paths = (os.environ.get("SSL_CERT_FILE"), ssl.get_default_verify_paths().cafile, *_BUNDLES)
    return next((_read(path) for path in paths if path and os.path.isfile(path)), None)


def _is_loopback(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
