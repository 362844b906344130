"""The overview of all drafts for Prometheus, over HTTP."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from infra.refusal import Refusal, first_line
from infra.tracking.client import REGISTRY_ERRORS
from tasks.overview import DraftRow, read_drafts

KEEP_S = 30.0
"""How long one reading of registry, traffic and runs is told, or that it failed."""
WAIT_S = 8.0
"""How long a scrape waits for a reading that another one began. Prometheus gives up after ten seconds by default."""
PREFIX = "draftsmith_draft_"
GAUGES: dict[str, tuple[str, Callable[[DraftRow], float | None]]] = {
    "champion_version": ("Version in service by the registry", lambda row: row.champion),
    "benchmarked_acceptance_length": ("Of the champion", lambda row: row.benchmarked),
    "served_acceptance_length": ("Of the champion, over the last windows of traffic", lambda row: row.recent_length),
    "drift_alarms": ("Alarms about the champion", lambda row: row.alarms),
    "gpu_hours": ("Taken by the runs of all its versions", lambda row: row.gpu_hours),
    "gpu_busy_ratio": ("Share of these GPU-hours in which a kernel ran, where measured", lambda row: row.gpu_busy),
    "cost_dollars": ("Of these GPU-hours, where plan.price_per_hour is set", lambda row: row.cost),
    "needs_person": ("Things that wait for a person", lambda row: len(row.wanted)),
    "last_retraining_timestamp_seconds": ("When the last retraining started", lambda row: row.retrained_at),
}
SERVERS = "servers", "Servers by the version that they run, when watch-traffic looked last"
Rows = Callable[[], Sequence[DraftRow]]


class DraftCollector(Collector):
    """Gauges of every draft."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family for each figure; a draft without a figure has no sample of it."""
        rows = self._rows()
        for name, (about, value_of) in GAUGES.items():
            family = GaugeMetricFamily(PREFIX + name, about, labels=["draft", "target"])
            for row in rows:
                if (value := value_of(row)) is not None:
                    family.add_metric([row.draft, row.target], value)
            yield family
        family = GaugeMetricFamily(PREFIX + SERVERS[0], SERVERS[1], labels=["draft", "target", "version"])
        for row in rows:
            for version, count in row.servers.items():
                family.add_metric([row.draft, row.target, version], count)
        yield family

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing: asked at registration, which must not read the registry."""
        return []


def kept(rows: Rows, keep_s: float = KEEP_S, wait_s: float = WAIT_S) -> Rows:
    """The same, read again only when it is older; one reading at a time.

    Raises Refusal where the reading failed, and where another one has not ended within `wait_s` seconds.
    """
    lock, last, why = threading.Lock(), (float("-inf"), list[DraftRow]()), ""

    def read() -> Sequence[DraftRow]:
        nonlocal last, why
        if not lock.acquire(timeout=wait_s):
            raise Refusal("the registry is still being read: look whether MLflow and Prefect answer")
        try:
            if time.monotonic() - last[0] > keep_s:
                try:
                    found, why = list(rows()), ""
                except (*REGISTRY_ERRORS, ValueError) as error:
                    found = []
                    why = f"the registry cannot be read ({first_line(error)}): look whether MLflow answers"
                last = (time.monotonic(), found)
            if why:
                raise Refusal(why)
            return last[1]
        finally:
            lock.release()

    return read


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Prometheus asks every few seconds."""


@contextmanager
def serving_metrics(host: str, port: int, rows: Rows = read_drafts) -> Iterator[str]:
    """Serve `/metrics` until the block ends; gives the address. Raises Refusal for one that is taken."""
    registry = CollectorRegistry()
    registry.register(DraftCollector(kept(rows)))
    metrics = make_wsgi_app(registry)

    def answer(request: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return metrics(request, start_response)
        except Refusal as refusal:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [str(refusal).encode()]

    try:
        server = make_server(host, port, answer, ThreadingWSGIServer, _Quiet)
    except OSError as error:
        raise Refusal(f"{host}:{port} cannot be listened at ({error.strerror}): choose another --port") from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
