"""OpenTelemetry metrics, over OTLP to a collector."""

from typing import Any, final

from evenstep.core.errors import ConfigError
from evenstep.telemetry.events import Event, IterationDone
from evenstep.telemetry.sinks import Points


@final
class OpenTelemetry:
    """Sends gauges such as `evenstep.compute_seconds` and counters of iterations and samples, with the worker's rank.

    The exporter's settings apply, such as `OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_METRIC_EXPORT_INTERVAL`.

    Raises:
        ConfigError: The exporter of OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, name: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
        except ModuleNotFoundError as error:
            raise ConfigError("--opentelemetry needs: pip install opentelemetry-exporter-otlp-proto-http") from error
        self._endpoint, self._taken = endpoint, True
        exporter = OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics")
        export = exporter.export  # The provider only logs what it answers.
        exporter.export = lambda *given, **options: self._answered(export(*given, **options))
        reader = PeriodicExportingMetricReader(exporter)
        resource = Resource.create({"service.name": "evenstep", "evenstep.run": name})
        self._provider = MeterProvider(metric_readers=[reader], resource=resource)
        self._meter = self._provider.get_meter("evenstep")
        self._iterations = self._meter.create_counter("evenstep.iterations")
        self._samples = self._meter.create_counter("evenstep.samples")
        self._gauges: dict[str, Any] = {}
        self._points = Points()

    def record(self, event: Event) -> None:
        """Take in an event of a worker; other events are left out."""
        point = self._points.of(event)
        if point is None:
            return
        rank = {"worker": str(point.worker)}
        if isinstance(event, IterationDone):
            self._iterations.add(1, rank)
            self._samples.add(event.samples, rank)
        for name, value in point.values.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"evenstep.{name.replace('/', '.')}")
            self._gauges[name].set(value, rank)

    def close(self) -> None:
        """Send the last values; ConfigError if the collector does not take them."""
        self._provider.shutdown()
        if not self._taken:
            raise ConfigError(f"no collector at {self._endpoint} took the metrics: start one, or give its address")

    def _answered(self, answer: object) -> object:
        self._taken = getattr(answer, "name", None) == "SUCCESS"
        return answer
