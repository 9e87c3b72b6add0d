"""Settings of spans: the standard variables of OpenTelemetry, and the beginning and the end of what they ask for.

Without such a variable nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import SplitResult, urlsplit

from broker.observe import spans
from broker.observe.logs import get_logger
from broker.settings import ConfigError

log = get_logger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_ENDPOINT = "http://localhost:4318"
"""The default of OTEL_EXPORTER_OTLP_ENDPOINT."""
_SAMPLER, _RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
_SAMPLERS = ("always_on", "always_off", "traceidratio")


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
    spans.tracing = OtelSpans(environ, shard)
    try:
        receiver = _receiver(environ)
        log.info("Spans are sent", receiver=f"{receiver.scheme}://{receiver.netloc.rpartition('@')[2]}")
        yield
    finally:
        make_no_spans()


def make_no_spans() -> None:
    """End what sends spans, such as in a process that only starts others: what is asked for is checked by then."""
    own, spans.tracing = spans.tracing, None
    if own is not None:
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
    receiver = _receiver(environ)
    if receiver.scheme not in ("http", "https") or not receiver.netloc:
        raise ConfigError(f"{_endpoint_of(environ)[0]}: must be a URL such as {_ENDPOINT}")
    _check_sampler(environ)
    return True


def _endpoint_of(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable that names the receiver, and its value."""
    return next(((name, value) for name in _ENDPOINTS if (value := environ.get(name))), ("", _ENDPOINT))


def _receiver(environ: Mapping[str, str]) -> SplitResult:
    try:
        return urlsplit(_endpoint_of(environ)[1])
    except ValueError:
        return urlsplit("")


def _check_sampler(environ: Mapping[str, str]) -> None:
    """Refuse what OpenTelemetry's SDK would pass over with a warning, and then sample everything."""
    sampler = environ.get(_SAMPLER, "").strip().lower()
    known = [*_SAMPLERS, *(f"parentbased_{each}" for each in _SAMPLERS)]
    if sampler and sampler not in known:
        raise ConfigError(f"{_SAMPLER}: must be one of {', '.join(known)}, not {sampler!r}")
    ratio = environ.get(_RATIO, "").strip()
    if sampler.endswith("traceidratio") and ratio:
        try:
            is_ratio = 0 <= float(ratio) <= 1
        except ValueError:
            is_ratio = False
        if not is_ratio:
            raise ConfigError(f"{_RATIO}: must be a number from 0 to 1, not {ratio!r}")
