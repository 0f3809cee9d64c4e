"""Metrics for Prometheus over HTTP, on this host only unless another address is given."""

from typing import Any, final

from evenstep.core.errors import ConfigError
from evenstep.telemetry.events import Event, Failed, IterationDone, Left
from evenstep.telemetry.sinks import Points


@final
class Prometheus:
    """Serves each worker's latest values as gauges and its totals as counters, at `/metrics`.

    Attributes:
        url: The address of the metrics.

    Raises:
        ConfigError: prometheus-client is not installed, or the address is in use.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
        except ModuleNotFoundError as error:
            raise ConfigError("--prometheus needs prometheus-client: pip install prometheus-client") from error
        self._registry, self._gauge = CollectorRegistry(), Gauge
        self._gauges: dict[str, Any] = {}
        self._points = Points()
        self._iterations = Counter("evenstep_iterations", "Iterations done", ["worker"], registry=self._registry)
        self._samples = Counter("evenstep_samples", "Samples trained on", ["worker"], registry=self._registry)
        self._left = Counter("evenstep_workers_left", "Workers that left", registry=self._registry)
        self._failed = Counter("evenstep_workers_failed", "Workers that an error ended", registry=self._registry)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be listened on ({error.strerror}): give another port") from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def record(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case IterationDone():
                self._iterations.labels(str(event.worker)).inc()
                self._samples.labels(str(event.worker)).inc(event.samples)
            case Left():
                self._left.inc()
            case Failed():
                self._failed.inc()
        if (point := self._points.of(event)) is None:
            return
        for name, value in point.values.items():
            safe = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)
            if safe not in self._gauges:
                told = f"{name} of the latest iteration"
                self._gauges[safe] = self._gauge(f"evenstep_{safe}", told, ["worker"], registry=self._registry)
            self._gauges[safe].labels(str(point.worker)).set(value)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
