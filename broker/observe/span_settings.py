"""Settings of spans: the standard variables of OpenTelemetry, and the beginning and the end of what they ask for.

Without such a variable nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from broker.observe import spans
from broker.settings import ConfigError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


@contextmanager
def traced(environ: Mapping[str, str], *, shard: int | None = None) -> Iterator[None]:
    """Make spans for as long as this lasts, if the environment asks for them. Raises ConfigError.

    `shard`: number of the shard that this process serves.
    """
    if not wants_spans(environ):
        yield
        return
    try:
        from broker.observe.otel_spans import OtelSpans  # noqa: PLC0415 - only if it is asked for
    except ImportError as missing:
        raise ConfigError(
            f"Spans are asked for by an OTEL_* variable, and a package is missing ({missing}): install it with "
            "`pip install 'postdate[broker,spans]'`, or set OTEL_TRACES_EXPORTER=none"
        ) from missing
    spans.tracing = own = OtelSpans(environ, shard)
    try:
        yield
    finally:
        spans.tracing = None
        own.shut_down()


def wants_spans(environ: Mapping[str, str]) -> bool:
    """Return whether the standard variables of OpenTelemetry ask for spans. Raises ConfigError if for other ones than
    the broker makes."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    if exporter == "none" or not (exporter or any(environ.get(name) for name in _ENDPOINTS)):
        return False
    if exporter not in ("", "otlp"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER: must be otlp or none, not {exporter!r}")
    for name in _PROTOCOLS:
        if protocol := environ.get(name):
            if protocol != _PROTOCOL:
                raise ConfigError(
                    f"{name}: must be {_PROTOCOL}, not {protocol!r}: the broker sends spans over HTTP, usually to "
                    "port 4318"
                )
            break
    return True
