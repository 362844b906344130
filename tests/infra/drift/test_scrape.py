"""What SGLang's metrics say, from a text that a real server gave."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infra.drift.scrape import Counters, Reading, Scrape, read_metrics, scrape

TEXT = (Path(__file__).parent / "sglang_metrics.txt").read_text()


@pytest.fixture
def served() -> Iterator[str]:
    """A server that gives the recorded text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(TEXT.encode() if self.path == "/metrics" else b"")

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_that_does_not_count_is_refused():
    with pytest.raises(ValueError, match="--enable-metrics"):
        read_metrics("# HELP up x\n# TYPE up gauge\nup 1\n", "http://a")
    plain = '# TYPE sglang:{0}_total counter\nsglang:{0}_total{{m="t"}} {1}\n'
    with pytest.raises(ValueError, match="without a draft"):
        read_metrics(plain.format("generation_tokens", 900) + plain.format("num_requests", 9), "http://a")


def test_labels_are_summed():
    text = "# TYPE sglang:num_requests_total counter\n"
    text += 'sglang:num_requests_total{is_streaming="true"} 3\nsglang:num_requests_total{is_streaming="false"} 4\n'
    assert read_metrics(text, "http://a").counters.requests == 7


def test_a_silent_server_is_named(served: str):
    found = scrape([served, "http://127.0.0.1:9"], 5.0)
    assert list(found.readings) == [served]
    assert list(found.silent) == ["http://127.0.0.1:9"]
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
        scrape(["http://127.0.0.1:9"], 5.0)


def reading(lookahead: int | None, draft_tokens: int | None) -> Reading:
    return Reading(counters=Counters(), lookahead=lookahead, draft_tokens=draft_tokens)


def test_the_served_lookahead():
    assert Scrape(readings={"http://a": reading(None, None), "http://b": reading(3, 4)}).lookahead() == 3
    assert Scrape(readings={"http://a": reading(None, None)}).lookahead() is None
    with pytest.raises(ValueError, match="different lookaheads"):
        Scrape(readings={"http://a": reading(4, 5), "http://b": reading(3, 4)}).lookahead()
    with pytest.raises(ValueError, match="a tree"):
        Scrape(readings={"http://a": reading(4, 16)}).lookahead()


def test_a_real_servers_counters():
    """24 requests of 128 tokens: what verification steps emitted, whatever the gauge says of the last few of them."""
    found = read_metrics(TEXT, "http://a")
    assert found == Reading(counters=Counters(generated=3072, requests=24, steps=1217), lookahead=4, draft_tokens=5)
    assert found.counters.tokens / found.counters.steps == pytest.approx(2.50, abs=0.01)
    assert "\nsglang:spec_accept_length{" in TEXT
    (gauge,) = (line for line in TEXT.splitlines() if line.startswith("sglang:spec_accept_length{"))
    assert gauge.endswith(" 1.0"), "the gauge covers the last steps of the last request"
