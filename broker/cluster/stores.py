"""Object stores by URL."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from broker.cluster.file_store import FileStore
from broker.cluster.object_store import ObjectStore
from broker.cluster.remote_store import AttemptTime, RemoteStore
from broker.settings import ConfigError

ATTEMPT = AttemptTime(seconds=10, seconds_per_mib=1)
"""Time for an attempt of which nothing else waits: backups and bases."""

_CLIENT_TIMEOUT = "1h"  # only a backstop: every call has a time of its own


class _Kind(NamedTuple):
    """A kind of store, its class in the library, and the library's names of the options that its URLs may have."""

    store: str
    options: dict[str, str]
    needs_bucket: bool = True


_KINDS = {
    "s3": _Kind("S3Store", {"endpoint": "endpoint", "region": "region"}),
    "gs": _Kind("GCSStore", {"endpoint": "base_url"}),
    "az": _Kind("AzureStore", {"endpoint": "endpoint", "account": "account_name"}),
    "memory": _Kind("MemoryStore", {}, needs_bucket=False),
}


def is_store_url(text: str) -> bool:
    """Return whether a text is the URL of an object store and not a path."""
    return "://" in text


def costs_money(url: str) -> bool:
    """Return whether each object that is stored there costs money."""
    return urlsplit(url).scheme in ("s3", "gs", "az")


def open_store(url: str, attempt: AttemptTime = ATTEMPT) -> ObjectStore:
    """Return the store of a URL such as `s3://bucket/prefix?endpoint=http://host:9000`; nothing is asked of it yet.

    Credentials come from the environment, by the names that the provider's own tools use. Raises ConfigError.
    """
    parts = _split(url)
    if parts.scheme == "file":
        return FileStore(_file_root(parts))
    kind = _KINDS.get(parts.scheme)
    if kind is None:
        raise ConfigError(
            f"{_shown(parts)}: the URL of an object store must begin with s3://, gs://, az:// or file:///"
        )
    if parts.username or parts.password:
        raise ConfigError(
            f"{_shown(parts)}: remove the credentials from the URL; they are read from the environment"
        )
    if kind.needs_bucket and not parts.hostname:
        raise ConfigError(f"{_shown(parts)}: the bucket is missing")
    if ":" in parts.netloc:
        raise ConfigError(
            f"{_shown(parts)}: a bucket has no port; name a server with ?endpoint=http://host:port"
        )
    options = _options(parts, kind)
    return _open_remote(kind, parts, options, attempt)


def _open_remote(
    kind: _Kind, parts: SplitResult, options: dict[str, str], attempt: AttemptTime
) -> ObjectStore:
    try:
        import obstore  # noqa: PLC0415 - an extra; a broker without a store does without it
        import obstore.exceptions  # noqa: PLC0415
        import obstore.store  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"{_shown(parts)}: needs the package obstore: pip install 'postdate[cluster]'"
        ) from error
    if not kind.needs_bucket:
        return RemoteStore(obstore, obstore.store.MemoryStore(), _shown(parts), attempt)
    make = getattr(obstore.store, kind.store)
    is_plain = any(value.startswith("http://") for value in options.values())
    try:
        store = make(
            parts.netloc,
            prefix=unquote(parts.path.strip("/")) or None,
            config=options,
            client_options={"timeout": _CLIENT_TIMEOUT, "connect_timeout": "2s", "allow_http": is_plain},
            retry_config={"max_retries": 0},
        )
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise ConfigError(f"{_shown(parts)}: {str(error).partition(chr(10))[0]}") from error
    return RemoteStore(obstore, store, _shown(parts), attempt)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError as error:  # the URL is not shown: nobody knows what in it is a password
        raise ConfigError(f"Not the URL of an object store: {error}") from error
    if parts.fragment:
        raise ConfigError(
            f"{_shown(parts)}: the part after # names a backup, but this command takes the URL of a store; write a "
            "# in a path as %23"
        )
    return parts


def _file_root(parts: SplitResult) -> str:
    if parts.netloc or parts.query or not parts.path.startswith("/"):
        raise ConfigError(
            f"{_shown(parts)}: the URL of a folder must be file:///path, without a host and options"
        )
    return unquote(parts.path)


def _options(parts: SplitResult, kind: _Kind) -> dict[str, str]:
    options = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in kind.options:
            known = ", ".join(kind.options) or "none"
            raise ConfigError(f"{_shown(parts)}: unknown option {name!r}; known options: {known}")
        if name == "endpoint":
            _check_endpoint(value, parts)
        options[kind.options[name]] = value
    return options


def _check_endpoint(endpoint: str, parts: SplitResult) -> None:
    try:
        server = urlsplit(endpoint)
        is_sound = server.scheme in ("http", "https") and bool(server.hostname)
        _ = server.port  # raises ValueError for what is no number
    except ValueError:
        is_sound = False
    if is_sound and "@" in server.netloc:
        raise ConfigError(
            f"{_shown(parts)}: remove the credentials from the endpoint; they are read from the environment"
        )
    if not is_sound:
        raise ConfigError(f"{_shown(parts)}: an endpoint must be http://host:port or https://host:port")


def _shown(parts: SplitResult) -> str:
    """Return the URL as messages show it, without a password that somebody put there."""
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
