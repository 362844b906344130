"""What SGLang's metrics say, from a text that a real server gave."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infra.drift.scrape import SWAPPED, Counters, Reading, read_metrics, read_server_info, scrape
from infra.refusal import Refusal

TEXT = (Path(__file__).parent / "sglang_metrics.txt").read_text()
ANSWER_S = 120.0

INFO = json.loads((Path(__file__).parent / "sglang_server_info.json").read_text())
DRAFT = read_server_info(INFO)


class Server(ThreadingHTTPServer):
    """Gives the recorded pages; `restart` changes what it says of its start, `key` protects it."""

    info = INFO
    key: str | None = None
    restart_between = False
    page: str | None = None
    """Given in place of every page."""
    status = 200
    """Of that page."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def restart(self, **changed: object) -> None:
        self.info = self.info | {"startup_time": {"tokenizer_e2e": time.perf_counter()}} | changed


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        if server.page is not None:
            return self.answer(server.status, server.page)
        if self.path == "/metrics":
            if server.restart_between:
                server.restart()
            return self.answer(200, TEXT)
        if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
            return self.answer(401, "Unauthorized")
        pages = {"/server_info": server.info, "/model_info": {"weight_version": server.info["weight_version"]}}
        return self.answer(200, json.dumps(pages[self.path])) if self.path in pages else self.answer(404, "")

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_page_without_metrics_is_refused():
    with pytest.raises(Refusal, match="--enable-metrics"):
        read_metrics("# HELP up x\n# TYPE up gauge\nup 1\n", "http://a", DRAFT)


def test_a_web_page_is_no_metrics():
    with pytest.raises(Refusal, match="gateway"):
        read_metrics("<!DOCTYPE html>\n<html><body>Sign in</body></html>", "http://a", DRAFT)


def test_counters_with_other_names_are_not_taken_for_silence():
    assert read_metrics("# TYPE sglang:x gauge\nsglang:x 1\n", "http://a", DRAFT).counters == Counters()
    with pytest.raises(Refusal, match="spec_verify_calls_total"):
        read_metrics(
            TEXT.replace("sglang:spec_verify_calls_total", "sglang:spec_verifications_total"), "http://a", DRAFT
        )


def test_a_page_of_something_else_hides_no_other_server(server: Server):
    gateway = Server(("127.0.0.1", 0), Handler)
    gateway.page = "[1]"
    threading.Thread(target=gateway.serve_forever, daemon=True).start()
    try:
        found = scrape([gateway.url, server.url], ANSWER_S)
        assert (list(found.readings), list(found.silent)) == ([server.url], [gateway.url])
        with pytest.raises(Refusal, match="gateway"):
            scrape([gateway.url], ANSWER_S)
    finally:
        gateway.shutdown()
        gateway.server_close()


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (429, ConnectionError, "429 Too Many Requests"), (408, ConnectionError, "408"), (503, ConnectionError, "503"),
        (404, Refusal, "answers 404 Not Found: start SGLang"), (302, Refusal, "gateway"), (403, Refusal, "_API_KEY"),
    ],
)  # fmt: skip
def test_what_passes_is_waited_for_and_what_stays_is_refused(
    server: Server, status: int, kind: type[Exception], said: str
):
    server.page, server.status = "busy", status
    with pytest.raises(kind, match=said) as raised:
        scrape([server.url], ANSWER_S)
    assert isinstance(raised.value, Refusal) == (kind is Refusal)


def test_labels_are_summed():
    text = "# TYPE sglang:num_requests_total counter\n"
    text += 'sglang:num_requests_total{is_streaming="true"} 3\nsglang:num_requests_total{is_streaming="false"} 4\n'
    assert read_metrics(text, "http://a", DRAFT).counters.requests == 7


def test_a_silent_server_is_named(server: Server):
    found = scrape([server.url, "http://127.0.0.1:9"], ANSWER_S)
    assert list(found.readings) == [server.url]
    assert list(found.silent) == ["http://127.0.0.1:9"]
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
        scrape(["http://127.0.0.1:9"], ANSWER_S)


def test_the_server_says_which_draft_it_runs(server: Server):
    """As a real SGLang 0.5.23 does; a restart is another start, the same start is the same."""
    first, again = (scrape([server.url], ANSWER_S).readings[server.url] for _ in range(2))
    assert first == again
    assert first.draft.path == "/drafts/draft-tiny/3"
    assert "default" in first.draft.labels
    server.restart(speculative_draft_model_path=None)
    after = scrape([server.url], ANSWER_S).readings[server.url].draft
    assert after.path is None
    assert after.start != first.draft.start


def test_a_swap_is_the_same_start_with_another_draft(server: Server):
    before = scrape([server.url], ANSWER_S).readings[server.url].draft
    server.info = server.info | {"weight_version": f"{SWAPPED}draft-tiny@4"}
    after = scrape([server.url], ANSWER_S).readings[server.url].draft
    assert (before.swapped, after.swapped) == (None, "draft-tiny@4")
    assert (before.start, before.path) == (after.start, after.path)
    assert not any("draft-tiny@4" in label for label in after.labels)


def test_counters_and_draft_of_one_reading_are_of_one_start(server: Server):
    server.restart_between = True
    with pytest.raises(ConnectionError, match="restarted, or got another draft"):
        scrape([server.url], ANSWER_S)


def test_a_protected_server_is_asked_with_its_key(server: Server, monkeypatch: pytest.MonkeyPatch):
    server.key = "secret"
    monkeypatch.delenv("DRAFTSMITH_SGLANG_API_KEY", raising=False)
    with pytest.raises(Refusal, match=r"401 Unauthorized: set \$DRAFTSMITH_SGLANG_API_KEY"):
        scrape([server.url], ANSWER_S)
    monkeypatch.setenv("DRAFTSMITH_SGLANG_API_KEY", "secret")
    assert server.url in scrape([server.url], ANSWER_S).readings


def test_a_tree_is_told_from_a_chain():
    def reading(lookahead: int | None, draft_tokens: int | None) -> Reading:
        return Reading(counters=Counters(), lookahead=lookahead, draft_tokens=draft_tokens, draft=DRAFT)

    assert reading(4, 16).is_tree
    assert not reading(4, 5).is_tree
    assert not reading(None, None).is_tree


def test_a_server_that_changes_its_lookahead_is_told_from_one_that_does_not():
    """Its gauge holds the lookahead of the moment, its counters what was decoded at all of them, none included."""
    adaptive = read_server_info(INFO | {"speculative_adaptive": True})
    found = read_metrics(TEXT, "http://a", adaptive).uncounted
    assert found.startswith("it changes its lookahead with the load (--speculative-adaptive)")
    assert read_metrics(TEXT, "http://a", read_server_info(INFO | {"speculative_adaptive": False})).uncounted == ""


def test_requests_that_may_have_generated_nothing_are_counted():
    """SGLang times each token of the requests that ended with two tokens at least."""
    timed = "sglang:request_time_per_output_token_seconds"
    text = TEXT + f"# TYPE {timed} histogram\n" + f'{timed}_bucket{{le="+Inf"}} 14\n{timed}_count 14\n{timed}_sum 2.5\n'
    found = read_metrics(text, "http://a", DRAFT).counters
    assert found == Counters(generated=3072, requests=24, steps=1217, unsure=10)
    assert found.is_sure, "ten in three thousand tokens"
    assert not Counters(generated=64, requests=12, steps=52, unsure=10).is_sure
    assert not Counters(requests=8, unsure=8).is_sure
    assert Counters().is_sure
    before = found.model_copy(update={"unsure": 11})  # read between two counters of one request
    assert found.since(before) == Counters()
    earlier = Counters(generated=3000, requests=20, steps=1190)  # when these were not told apart
    assert found.since(earlier).unsure == 4


def test_a_real_servers_counters():
    """24 requests of 128 tokens: what verification steps emitted, whatever the gauge says of the last few of them."""
    found = read_metrics(TEXT, "http://a", DRAFT)
    expected = Counters(generated=3072, requests=24, steps=1217)
    assert found == Reading(counters=expected, lookahead=4, draft_tokens=5, draft=DRAFT)
    assert found.counters.tokens / found.counters.steps == pytest.approx(2.50, abs=0.01)
    assert "\nsglang:spec_accept_length{" in TEXT
    (gauge,) = (line for line in TEXT.splitlines() if line.startswith("sglang:spec_accept_length{"))
    assert gauge.endswith(" 1.0"), "the gauge covers the last steps of the last request"
