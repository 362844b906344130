"""How retraining from Python begins and ends."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.from_python import _Interruptible
from flows.prefect_server import check_prefect
from infra.refusal import Refusal
from infra.servers.local import prefect_api


def interrupted(chained: bool) -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        raise ValueError("Task run is not set") from (error if chained else None)


@pytest.mark.parametrize("chained", [True, False])
def test_an_error_on_the_way_from_ctrl_c_is_ctrl_c(chained: bool) -> None:
    with pytest.raises(KeyboardInterrupt), _Interruptible():
        interrupted(chained)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match=r"^other$"), _Interruptible():
        raise ValueError("other")
    with pytest.raises(KeyboardInterrupt) as found, _Interruptible():
        raise KeyboardInterrupt
    assert found.value.__cause__ is None
    with _Interruptible():
        pass


class Stranger(BaseHTTPRequestHandler):
    """A server that does not know who asks."""

    def do_GET(self) -> None:
        self.send_response(int(self.path.split("/")[1]))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("401", r"answers 401 Unauthorized: set \$PREFECT_API_AUTH_STRING"),
        ("404", r"answers 404 Not Found: correct \$PREFECT_API_URL, which ends in /api"),
        (None, r"does not answer .*: start it"),
    ],
)
def test_a_prefect_server_that_is_away_or_does_not_let_in_is_named(
    path: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{path}" if path else "http://127.0.0.1:9/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        monkeypatch.delenv("DRAFTSMITH_PRIVATE_PREFECT", raising=False)
        with temporary_settings({PREFECT_API_URL: url}), pytest.raises(Refusal, match=said):
            check_prefect()
        server.shutdown()


def test_prefect_needs_a_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", "/sys/prefect")  # not even root may
    with pytest.raises(Refusal, match=r"/sys/prefect cannot be created .*\$PREFECT_HOME"), prefect_api():
        pass
    monkeypatch.setenv("PREFECT_HOME", "/proc/sys")
    with pytest.raises(Refusal, match=r"/proc/sys, which is not writable: set \$PREFECT_HOME"), prefect_api():
        pass
