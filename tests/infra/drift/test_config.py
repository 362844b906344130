"""Settings of the watch."""

import pytest

from infra.drift.config import WatchConfig


def test_each_server_is_watched_once() -> None:
    assert WatchConfig(draft="d", servers=("http://a/", "http://b")).servers == ("http://a", "http://b")
    with pytest.raises(ValueError, match="http://a is named more than once"):
        WatchConfig(draft="d", servers=("http://a", "http://b", "http://a/"))
