"""Variables that ask for spans, and what a broker without them does not import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from broker.observe import spans
from broker.observe.span_settings import traced, wants_spans
from broker.settings import ConfigError

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
RATIO = "OTEL_TRACES_SAMPLER"


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({ENDPOINT: ""}, False),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, False),
        ({ENDPOINT: "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", ENDPOINT: "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", ENDPOINT: "http://c:4318"}, False),
        ({ENDPOINT: "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
        # The one for traces counts.
        (
            {
                ENDPOINT: "http://c:4318",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            True,
        ),
    ],
)
def test_spans_are_made_where_a_standard_variable_asks_for_them(environ, wanted):
    assert wants_spans(environ) is wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"OTEL_TRACES_EXPORTER": "console"}, "must be otlp or none, not 'console'"),
        (
            {ENDPOINT: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "over HTTP, usually to port 4318",
        ),
        ({ENDPOINT: "http://c:4318", "OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "many"),
        ({ENDPOINT: "http://c:4318", "OTEL_BSP_MAX_QUEUE_SIZE": "5"}, "max_queue_size"),
        ({ENDPOINT: "http://[::1"}, "must be a URL such as http"),
        ({ENDPOINT: "c:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT: must be a URL such as http"),
        ({ENDPOINT: "http://c:4318", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http:///"}, "_TRACES_ENDPOINT"),
        ({ENDPOINT: "http://c:4318", "OTEL_TRACES_SAMPLER": "half"}, "parentbased_traceidratio, not 'half'"),
        (
            {
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_TRACES_SAMPLER": "traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": "2",
            },
            "OTEL_TRACES_SAMPLER_ARG: must be a number from 0 to 1, not '2'",
        ),
        (
            {ENDPOINT: "http://c:4318", RATIO: "parentbased_traceidratio", f"{RATIO}_ARG": "a tenth"},
            "a tenth",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_refused(environ, told):
    with pytest.raises(ConfigError, match=told), traced(environ):
        pytest.fail("it was begun")
    assert spans.tracing is None


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "broker.observe.otel_spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'postdate\[broker,spans\]'"),
        traced({ENDPOINT: "http://c:4318"}),
    ):
        pytest.fail("it was begun")


@pytest.mark.slow
def test_without_a_variable_nothing_of_opentelemetry_is_imported():
    program = (
        "import sys, os, broker.server, broker.cli\n"
        "from broker.observe import span_settings, spans\n"
        "with span_settings.traced(os.environ):\n"
        "    assert spans.tracing is None\n"
        "    assert not [each for each in sys.modules if each.startswith(('opentelemetry', 'requests'))]\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", program], check=True, env=environ)


@pytest.mark.slow
def test_the_receiver_is_logged_without_what_may_be_secret(caplog):
    caplog.set_level("INFO")
    with traced({ENDPOINT: "http://user:secret@127.0.0.1:9/?key=secret"}):
        assert spans.tracing is not None
    [record] = [each for each in caplog.records if each.name == "broker.observe.span_settings"]
    assert record.__dict__["fields"] == {"receiver": "http://127.0.0.1:9"}


@pytest.mark.slow
def test_a_supervisor_of_shards_has_nothing_that_sends_spans_when_it_forks(tmp_path):
    program = """
import threading
from broker.cli import main
from broker.observe import spans
from broker.shards import supervisor

class Supervisor:
    def __init__(self, *_, **__): pass
    async def run(self):
        print(spans.tracing, *[each.name for each in threading.enumerate() if "Span" in each.name])
        return 7

supervisor.ShardSupervisor = Supervisor
main(["serve", "--shards", "2", "--data-dir", "data"])
"""
    environ = {**os.environ, ENDPOINT: "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "None\n"), done.stderr
