"""Why a server gave no report: by its own fault, or by that of something between it and the follower."""

import errno
import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

import httpx

from infra.network.health import public
from infra.network.http import CertificateFileError, is_proxied
from infra.refusal import first_line

GATEWAYS = (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)
"""SGLang answers neither; what stands in front of a server does."""
BREAKS = (httpx.TimeoutException, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""The connection was made, or nobody took it, and no answer came."""


@dataclass(frozen=True)
class ReportFailure:
    """A server without a report."""

    kind: Literal["refused", "failing", "unreachable"]
    """`refused`: nothing listens at its port. `failing`: it hangs, breaks off, says at /health that it is unhealthy, or
    its host seems to be gone. `unreachable`: the answer, or its absence, says nothing about the server."""
    words: str
    """For people; with the remedy where it is unreachable."""


def read_failure(error: httpx.HTTPError | json.JSONDecodeError, url: str, has_restart: bool) -> ReportFailure:
    """What an error of `ServerClient.report` says about the server at `url`.

    Where `has_restart`, another supervisor runs the server, perhaps in a container or on a host that has stopped: then
    its name is not found, or it has no route.
    """
    causes, words = [*_causes(error)], first_line(error)

    def has(kind: type[Exception]) -> bool:
        return any(isinstance(cause, kind) for cause in causes)

    if isinstance(error, httpx.HTTPStatusError):
        return _read_status(error.response, url)
    breaks = has(ssl.SSLEOFError) or (isinstance(error, BREAKS) and not has(ssl.SSLError))
    obstacles = (
        (has(json.JSONDecodeError), "its pages are not SGLang's, give the server's own address"),
        (has(CertificateFileError), "put back the file, with certificates in PEM, or unset $SSL_CERT_FILE"),
        (has(ssl.SSLError) and not breaks, "renew its certificate, or put that of its authority into $SSL_CERT_FILE"),
        (is_proxied(url), "a proxy of the environment is asked, name the server's host in $NO_PROXY"),
        (has(socket.gaierror) and not has_restart, "see to the resolution of names, or give an address in numbers"),
    )
    remedy = next((remedy for stands, remedy in obstacles if stands), None)
    has_no_route = any(isinstance(cause, OSError) and cause.errno == errno.EHOSTUNREACH for cause in causes)
    is_gone = has_restart and (has(socket.gaierror) or has_no_route)
    if remedy is None and has(ConnectionRefusedError):
        return ReportFailure("refused", words)
    if remedy is None and (is_gone or breaks):
        return ReportFailure("failing", words)
    return _unreachable(url, words, remedy or "see to the network between the follower and the server")


def _read_status(response: httpx.Response, url: str) -> ReportFailure:
    """SGLang's own 503 has no text (0.5.23, entrypoints/http_server.py); a proxy's has one."""
    path, status = response.request.url.path, response.status_code
    words = f"{path} answers {status} {response.reason_phrase}".rstrip()
    foreign = status in GATEWAYS or (status == HTTPStatus.SERVICE_UNAVAILABLE and response.content)
    if path.endswith("/health") and response.is_server_error and not foreign:
        return ReportFailure("failing", words)
    remedy = "see its log, and that of any proxy in front of it; with a proxy, give the server's own address"
    return _unreachable(url, words, remedy)


def _unreachable(url: str, words: str, remedy: str) -> ReportFailure:
    return ReportFailure("unreachable", f"{public(url)} cannot be judged and is left as it is ({words}): {remedy}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
