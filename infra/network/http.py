"""HTTP clients of SGLang servers."""

import httpx

from infra.network.health import is_loopback
from infra.settings import sglang_api_key


def open_client(url: str, timeout: httpx.Timeout | float, direct: bool = False) -> httpx.Client:
    """A client of the server at `url`, with $DRAFTSMITH_SGLANG_API_KEY and the certificates of $SSL_CERT_FILE.

    No proxy of the environment stands in front of a loopback address, nor of any where `direct`.
    """
    key = sglang_api_key()
    return httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=timeout,
        # A connection for every request: one that idled may be closed by the server just as the next request leaves.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        verify=httpx.create_ssl_context(),  # which httpx would make without $SSL_CERT_FILE for trust_env=False
        trust_env=not (direct or is_loopback(url)),
    )
