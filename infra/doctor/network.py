"""Checks of servers, proxies and the Hugging Face Hub."""

from urllib.parse import urlsplit

from infra import settings
from infra.doctor.finding import Finding, note, ok, problem
from infra.network.health import public, trouble

ANSWER_S = 0.8
"""Two silent servers leave the whole command under three seconds."""
LOOPBACK = ("127.0.0.1", "localhost")


def check_prefect(url: str | None) -> list[Finding]:
    """The Prefect server that flows report to, if one is set."""
    if not url:
        return [ok("Prefect server", f"none set: each run starts its own over {settings.prefect_home()}/prefect.db")]
    why = trouble(f"{url.rstrip('/')}/health", ANSWER_S)
    if why is None:
        return [ok("Prefect server", f"{public(url)} answers")]
    remedy = "start it (`draftsmith ui` starts one here), or unset PREFECT_API_URL: runs then start their own"
    return [problem("Prefect server", f"{public(url)}: {why}", remedy)]


def check_mlflow(uri: str) -> list[Finding]:
    """The tracking server or database."""
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        why = trouble(f"{uri.rstrip('/')}/health", ANSWER_S)
        if why is None:
            return [ok("MLflow", f"{public(uri)} answers")]
        remedy = "start it, or unset MLFLOW_TRACKING_URI: runs are then kept in a SQLite file"
        return [problem("MLflow", f"{public(uri)}: {why}", remedy)]
    if scheme == "sqlite":
        return [ok("MLflow", f"no server set: runs are kept in {uri.removeprefix('sqlite:///')}")]
    if scheme in ("", "file") and not settings.allows_mlflow_file_store():
        remedy = "unset MLFLOW_TRACKING_URI, or set it to sqlite:////absolute/path.db or to a server's address"
        return [problem("MLflow", f"{uri} names MLflow's old file store, which it refuses", remedy)]
    return [note("MLflow", f"{public(uri)} is not contacted by this check", "see that it is there before you start")]


def check_proxies() -> list[Finding]:
    """Whether a proxy takes what servers on this machine should get."""
    swallowed = [host for host in LOOPBACK if settings.proxy_for(host)]
    if not swallowed:
        return [ok("proxies", "none for servers on this machine")]
    found = f"HTTP to {' and '.join(swallowed)} goes to {public(settings.proxy_for(swallowed[0]) or '')}"
    return [problem("proxies", found, "export no_proxy=127.0.0.1,localhost (added to what it holds), or Prefect hangs")]


def check_hub() -> list[Finding]:
    """Whether targets can come from the Hugging Face Hub; a token is never shown."""
    place = settings.hub_token()
    token = f"a token is in {place}" if place else "no token (only gated targets need one: HF_TOKEN)"
    if settings.hub_offline():
        remedy = "unset HF_HUB_OFFLINE to download a target; the quickstart needs none"
        return [note("Hugging Face Hub", f"offline: targets must be in its cache already; {token}", remedy)]
    return [ok("Hugging Face Hub", f"downloads allowed, not tried; {token}")]
