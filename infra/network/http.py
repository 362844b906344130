"""HTTP clients of SGLang servers."""

import ssl
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from infra.network.health import is_loopback
from infra.settings import sglang_api_key


class CertificateFileError(httpx.ConnectError):
    """The certificates of $SSL_CERT_FILE cannot be read."""


def open_client(url: str, timeout: httpx.Timeout | float, direct: bool = False) -> httpx.Client:
    """A client of the server at `url`, with $DRAFTSMITH_SGLANG_API_KEY and the certificates of $SSL_CERT_FILE.

    No proxy of the environment stands in front of a loopback address, nor of any where `direct`. Raises
    CertificateFileError where the address is one of https and the certificates cannot be read.
    """
    key = sglang_api_key()
    return httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=timeout,
        # A connection for every request: one that idled may be closed by the server just as the next request leaves.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        # Over http none is needed; should TLS be spoken after all, the empty context trusts nobody.
        verify=_trusted() if urlsplit(url).scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        trust_env=not (direct or is_loopback(url)),
    )


def is_proxied(url: str) -> bool:
    """Whether `open_client` asks the server at `url` through a proxy of the environment."""
    place = urlsplit(url)
    has_proxy = not {place.scheme, "all"}.isdisjoint(getproxies())
    return has_proxy and not is_loopback(url) and not proxy_bypass(place.netloc)


def _trusted() -> ssl.SSLContext:
    paths = ssl.get_default_verify_paths()
    try:
        stat = Path(paths.cafile).stat() if paths.cafile else None
        return _read_trusted(paths, stat and (stat.st_ino, stat.st_mtime_ns, stat.st_size))
    except OSError as error:
        raise CertificateFileError(f"the certificates of $SSL_CERT_FILE cannot be read: {error}") from error


@lru_cache(maxsize=1)
def _read_trusted(paths: ssl.DefaultVerifyPaths, file: tuple[int, int, int] | None) -> ssl.SSLContext:
    """Made again when the file has changed; it takes 30 ms. httpx itself would not read $SSL_CERT_FILE where it uses no
    proxies."""
    return httpx.create_ssl_context()
