"""Probes of servers and the Hugging Face Hub."""

from pathlib import Path
from urllib.parse import urlsplit

from infra import settings
from infra.doctor.finding import Finding, judge
from infra.files.sqlite_file import check_writable
from infra.network.health import public, trouble
from infra.refusal import Refusal

ANSWER_S = 0.8
"""Two silent servers leave the whole command under three seconds."""


def prefect(url: str | None) -> Finding:
    """The Prefect server that flows report to, if one is set."""
    if not url:
        database = settings.prefect_home() / "prefect.db"
        return _database(database, f"none set: each run starts its own over {database}")
    return _server(url)


def mlflow(uri: str) -> Finding:
    """The tracking server or database."""
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        return _tracking_server(uri)
    if scheme == "sqlite":
        database = Path(uri.removeprefix("sqlite:///"))
        found = f"no server set: runs are kept in {database}"
        return _database(database, found) if database.name else judge(found)
    if scheme in ("", "file") and not settings.allows_mlflow_file_store():
        return judge(f"{uri} names MLflow's old file store, which it refuses", problem=True)
    return judge(
        f"{public(uri)} is not contacted by this check", note=True, remedy="see that it is there before you start"
    )


def mlflow_registry(uri: str | None, tracking: str) -> Finding | list[Finding]:
    """A registry of its own, which MLflow's own functions would use."""
    if uri in (None, tracking):
        return []
    return judge(f"$MLFLOW_REGISTRY_URI names {public(uri)}, drafts are registered in {public(tracking)}", note=True)


def _database(file: Path, found: str) -> Finding:
    try:
        check_writable(file)
    except Refusal as error:
        return judge(f"{file} is not writable", problem=True, remedy=str(error))
    return judge(found)


def _server(url: str) -> Finding:
    why = trouble(f"{url.rstrip('/')}/health", ANSWER_S)
    return judge(f"{public(url)}: {why}" if why else f"{public(url)} answers", problem=bool(why))


def _tracking_server(url: str) -> Finding:
    finding = _server(url)
    if finding.verdict == "ok":
        return finding
    # MLflow, which takes seconds to import, has credentials and certificates of its own.
    from infra.tracking.client import why_silent

    return finding if why_silent(url, ANSWER_S) else judge(f"{public(url)} answers")


def hub() -> Finding:
    """Whether targets can come from the Hugging Face Hub; a token is never shown."""
    place, offline = settings.hub_token(), settings.hub_offline()
    token = f"a token is in {place}" if place else "no token (only gated targets need one: HF_TOKEN)"
    way = "offline: targets must be in its cache already" if offline else "downloads allowed, not tried"
    return judge(f"{way}; {token}", note=offline)
