"""A receiver of spans, as a collector of OpenTelemetry is one: over HTTP, in a thread."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span


class Receiver:
    """Keeps what came."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def spans(self, name: str = "") -> list[Span]:
        """Return all of them, or those of a name, in the order in which they came."""
        scopes = [scope for each in self.resource_spans() for scope in each.scope_spans]
        return [span for scope in scopes for span in scope.spans if not name or span.name == name]

    def resource_spans(self) -> list[ResourceSpans]:
        return [each for request in list(self.requests) for each in request.resource_spans]

    def resources(self) -> list[dict[str, Any]]:
        """Return the attributes of the processes that sent them, once for each time."""
        return [attributes_of(each.resource) for each in self.resource_spans()]


def attributes_of(holder: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes}
