"""Read-only queries of the ledger: states and rates of the samples."""

import sqlalchemy as sa

from infra.ledger.answers import Oldest, Quarantined
from infra.ledger.schema import LEASED, PENDING, QUARANTINED, REMAINING, database_now, runs, samples
from infra.ledger.transactions import Transactions
from infra.records.data_path import CaptureRates, SampleProgress


class Questions(Transactions):
    """Reads that never wait for a writer."""

    def progress(self, epoch: int | None = None) -> SampleProgress:
        """Samples per state, bytes held and capture failures so far (`attempts`), of one epoch or of all."""
        here = self._rows() if epoch is None else self._rows(samples.c.epoch == epoch)
        columns = (samples.c.bytes_held, samples.c.failures)
        sums = [sa.func.sum(column) for column in columns]
        query = sa.select(samples.c.state, sa.func.count(), *sums).where(here).group_by(samples.c.state)
        with self._read() as connection:
            rows = [tuple(row) for row in connection.execute(query)]
        counts = {state: count for state, count, _, _ in rows}
        return SampleProgress(**counts, bytes_held=sum(int(r[2]) for r in rows), attempts=sum(int(r[3]) for r in rows))

    def quarantined(self) -> list[Quarantined]:
        """Every quarantined sample with its last error, by epoch and ordinal."""
        columns = (samples.c.epoch, samples.c.ordinal, samples.c.sample, samples.c.error)
        query = sa.select(*columns).where(self._rows(samples.c.state == QUARANTINED)).order_by(*columns[:2])
        with self._read() as connection:
            return [Quarantined(*row) for row in connection.execute(query)]

    def quarantined_samples(self) -> tuple[int, int]:
        """How many of the run's samples are quarantined, and how many samples it has; each counted once."""
        count = sa.select(sa.func.count(sa.distinct(samples.c.sample)))
        with self._read() as connection:
            bad = connection.execute(count.where(self._rows(samples.c.state == QUARANTINED))).scalar_one()
            return bad, connection.execute(count.where(self._rows())).scalar_one()

    def capture_rates(self, window_s: float | None = None) -> CaptureRates:
        """What the generators captured in the last `window_s` seconds, or in the whole run, and how long it took."""
        captured = self._rows(samples.c.prefill_s > 0, samples.c.state.not_in((PENDING, LEASED, QUARANTINED)))
        if window_s is not None:
            captured = sa.and_(captured, samples.c.published > database_now() - window_s)
        sums = [sa.func.coalesce(sa.func.sum(samples.c[name]), 0) for name in ("tokens", "prefill_s", "put_s")]
        query = sa.select(*sums, sa.func.count(sa.distinct(samples.c.owner))).where(captured)
        with self._read() as connection:
            row = tuple(connection.execute(query).one())
        return CaptureRates(tokens=row[0], prefill_s=row[1], put_s=row[2], generators=row[3])

    def oldest(self) -> Oldest | None:
        """The first sample that is not trained yet; None at the end of the last open epoch."""
        held_s = database_now() - (samples.c.lease_expires - runs.c.lease_seconds)
        columns = (samples.c.epoch, samples.c.ordinal, samples.c.state, samples.c.owner, samples.c.tokens, held_s)
        query = (
            sa.select(*columns)
            .join(runs, runs.c.name == samples.c.run)
            .where(self._rows(samples.c.state.in_(REMAINING)))
            .order_by(samples.c.epoch, samples.c.ordinal)
            .limit(1)
        )
        with self._read() as connection:
            row = connection.execute(query).first()
        return Oldest(*row) if row else None

    def since_last_capture(self) -> float | None:
        """Seconds since the last sample was published; None before the first."""
        with self._read() as connection:
            return connection.execute(
                sa.select(database_now() - sa.func.max(samples.c.published)).where(self._rows())
            ).scalar()
