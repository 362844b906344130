"""The record of one draft's traffic: what each server runs, and a series of windows for every version that is served.

One JSON file per draft, in a folder or on S3, written whole: a reader sees the old record or the new one.

Counters are differenced per server and start. A server that was restarted counts from zero, and all that it counts
since belongs to the draft it runs now; what it counted between the last look and its restart is lost, because nobody
saw it. So traffic never counts for a version that did not serve it, in a slow rollout and with canaries alike.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid5

import fsspec

from infra.drift.scrape import Counters, Reading, Scrape
from infra.drift.sequential import LEARNED_WINDOWS
from infra.drift.windows import Series, ServedSeries, TrafficWindow
from infra.files.atomic import write_atomically
from infra.records.data_path import Record

KEEP_SERIES = 10
"""The versions that served last keep their series."""
PRIVATE = 0o600


class ServerState(Record):
    """One server at the last look."""

    start: str
    version: int | None
    """None if its draft is unknown."""
    lookahead: int | None
    counters: Counters
    reported: bool = False
    """Whether this start was reported to run an unknown draft."""


class Leading(Record):
    """The version that more than half of the servers run."""

    version: int
    since: float


class TrafficRecord(Record):
    """All that is known of one draft's traffic."""

    draft: str
    servers: Mapping[str, ServerState] = {}
    """Servers by address."""
    series: tuple[Series, ...] = ()
    """Ordered by when they last had traffic, newest last."""
    leading: Leading | None = None

    def version_of(self, server: str, reading: Reading) -> int | None:
        """The version that this start of a server was found to run earlier.

        It is found once per start: a folder whose content is replaced later does not change what was loaded from it.
        """
        state = self.servers.get(server)
        return state.version if state and state.start == reading.draft.start else None

    def observe(
        self, scrape: Scrape, versions: Mapping[str, int | None], traffic: str, now: float, least_steps: int
    ) -> "TrafficRecord":
        """The record after a look.

        Args:
            scrape: what the servers reported. A silent one is waited for; one that is in neither list is forgotten.
            versions: by server, the version that it runs; None: unknown.
            traffic: kind of the requests.
            now: seconds since 1970.
            least_steps: verification steps that close a window.
        """
        servers = {url: state for url, state in self.servers.items() if url in scrape.silent}
        added: dict[ServedSeries, Counters] = {}
        for url, reading in scrape.readings.items():
            state = self._state(url, reading, versions[url])
            servers[url] = state
            if state.version is not None and state.lookahead is not None and not reading.is_tree:
                served = ServedSeries(version=state.version, lookahead=state.lookahead, traffic=traffic)
                added[served] = added.get(served, Counters()).plus(self._counted(url, reading, state))
        series = {one.served: one if one.served in added else one.paused(now) for one in self.series}
        for served, counters in added.items():
            one = series.pop(served, None) or Series(served=served, opened=now, learned=self._learned(served))
            series[served] = one.counting(counters, now, least_steps)
        update = {"servers": servers, "series": tuple(series.values())[-KEEP_SERIES:]}
        return self.model_copy(update={**update, "leading": self._leading(servers, now)})

    def _state(self, url: str, reading: Reading, version: int | None) -> ServerState:
        before = self.servers.get(url)
        same = before is not None and before.start == reading.draft.start
        return ServerState(
            start=reading.draft.start,
            version=version,
            lookahead=reading.lookahead or (before.lookahead if before and same else None),
            counters=reading.counters,
            reported=before.reported if before and same else False,
        )

    def _counted(self, url: str, reading: Reading, state: ServerState) -> Counters:
        """Counts of a server since the previous scrape; zero at the first one."""
        before = self.servers.get(url)
        if before is None:
            return Counters()
        if before.start != state.start:
            return reading.counters
        if before.lookahead not in (None, state.lookahead):
            return Counters()  # some of it at one lookahead, some at another
        return reading.counters.since(before.counters)

    def _learned(self, served: ServedSeries) -> tuple[TrafficWindow, ...]:
        """Windows of the version that served last under the same conditions."""
        others = [one for one in self.series if one.windows and one.served.has_conditions_of(served)]
        return others[-1].windows[-LEARNED_WINDOWS:] if others else ()

    def _leading(self, servers: Mapping[str, ServerState], now: float) -> Leading | None:
        run = [state.version for state in servers.values()]
        for version in set(run) - {None}:
            if version is not None and 2 * run.count(version) > len(run):
                same = self.leading and self.leading.version == version
                return self.leading if same else Leading(version=version, since=now)
        return None

    @property
    def live(self) -> tuple[Series, ...]:
        """The series of versions that a server runs now."""
        run = {(state.version, state.lookahead) for state in self.servers.values()}
        return tuple(one for one in self.series if (one.served.version, one.served.lookahead) in run)

    def with_series(self, series: Series) -> "TrafficRecord":
        """The record with one series in place of that of the same version and conditions."""
        return self.model_copy(
            update={"series": tuple(series if one.served == series.served else one for one in self.series)}
        )

    def with_reported(self, servers: set[str]) -> "TrafficRecord":
        """The record in which these servers were reported to run an unknown draft."""
        states = {
            url: state.model_copy(update={"reported": True}) if url in servers else state
            for url, state in self.servers.items()
        }
        return self.model_copy(update={"servers": states})

    def before_version(self, version: int, served: ServedSeries) -> tuple[TrafficWindow, ...]:
        """What a version is compared with: the windows of the version that it replaced, under the same conditions.

        After an alarm of that version only the windows since: they show what the fallen traffic allows.
        """
        of_version = served.model_copy(update={"version": version})
        series = next((one for one in self.series if one.served == of_version), None)
        if series is None:
            return ()
        since = max(series.announced, default=float("-inf"))
        return tuple(window for window in series.windows if window.ended >= since)

    def event_id(self, *about: object) -> UUID:
        """Id of an event: sent twice, it is one event."""
        return uuid5(NAMESPACE_URL, "/".join(["draftsmith", self.draft, *map(str, about)]))


class TrafficStore:
    """Where traffic records are kept."""

    def __init__(self, folder: str):
        self._files, root = fsspec.core.url_to_fs(folder)
        self._root = root.rstrip("/")
        self._local = "file" in self._files.protocol

    def read(self, draft: str) -> TrafficRecord:
        """The draft's record; empty if there is none yet."""
        # Another process may have written since this one listed the folder.
        self._files.invalidate_cache()
        try:
            return TrafficRecord.model_validate_json(self._files.cat_file(self._path(draft)))
        except FileNotFoundError:
            return TrafficRecord(draft=draft)

    def write(self, record: TrafficRecord) -> None:
        """Whole or not at all: a local file is renamed, an S3 object appears at its end."""
        data = json.dumps(record.model_dump(mode="json"), separators=(",", ":")).encode()
        if self._local:
            write_atomically(Path(self._path(record.draft)), data, PRIVATE)
        else:
            self._files.pipe_file(self._path(record.draft), data)

    def _path(self, draft: str) -> str:
        return f"{self._root}/{draft}/traffic.json"
