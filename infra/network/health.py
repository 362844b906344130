"""Whether a server answers HTTP."""

import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from urllib.parse import urlsplit


def trouble(url: str, timeout_s: float, direct: bool = False) -> str | None:
    """Why `GET url` does not answer with success within `timeout_s` seconds, in a few words; None when it does.

    Proxies of the environment are used as the servers' own clients use them, unless `direct`.
    """
    return within(timeout_s, lambda: _ask(url, timeout_s, direct))


def within(timeout_s: float, ask: Callable[[], str | None]) -> str | None:
    """What `ask` says is wrong with a server, or that it says nothing within `timeout_s` seconds."""
    answer: list[str | None] = []
    # In a thread: looking up a name may take longer than any socket's timeout.
    asking = threading.Thread(target=lambda: answer.append(ask()), daemon=True)
    asking.start()
    asking.join(timeout_s)
    return answer[0] if answer else f"no answer within {timeout_s:g} s"


def _ask(url: str, timeout_s: float, direct: bool) -> str | None:
    try:
        opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if direct else []))
        with opener.open(url, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        return f"it answers {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, HTTPException, ValueError) as error:
        return str(error) or type(error).__name__


def is_loopback(url: str) -> bool:
    """Whether the address is this machine's own: no proxy stands in between."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def public(url: str) -> str:
    """A URL without the user and password it may hold."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url  # urlunsplit takes two slashes of sqlite:////folder/file away
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
