"""Generators that come and go while a run trains, and that are replaced where their machine is lost.

The run begins with some on the inference pool. Each one that comes later has devices leased for it alone.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from infra.data_plane.bottleneck import Elasticity, in_words
from infra.files.atomic import write_atomically
from infra.files.lines import last_object
from infra.files.run_folder import RunFolder
from infra.pools.base import Pool, PoolBusyError, ReleaseError
from infra.pools.run_pools import SinglePools
from infra.processes.exit import REFUSED
from infra.processes.keep_running import STEADY_S, Generators, KeptProcess, OnLine
from infra.processes.process import ProcessFailedError
from infra.records.data_path import GeneratorsChange, SideRates, generators_changes
from infra.refusal import Refusal

LOOK_S = 2.0
"""Between looks at the trainer's metrics, and at a request for devices."""
ASK_S = 300.0
"""Timeout of a request for one more generator. A cluster that grows on demand needs minutes."""
PLACES = 3
"""Replacements of a generator that never ran steadily."""

Start = Callable[[Pool, int], KeptProcess]


def generator_role(index: int) -> str:
    """Name of generator `index`: of its log, and of its leases in the ledger."""
    return f"generator-{index}"


@dataclass
class _GeneratorPlace:
    """A generator that runs."""

    index: int
    kept: KeptProcess
    began: float
    replaced: int
    """How many before it did not run steadily."""


@dataclass
class _Wanted:
    """A generator that waits for devices."""

    index: int
    why: str
    asked: float
    failure: ProcessFailedError | None = None
    """The failure of the generator that it replaces."""
    replaced: int = 0


class ElasticGenerators(Generators):
    """As many generators as the bottleneck wants, within the bounds. Its creator closes it."""

    def __init__(
        self,
        folder: RunFolder,
        started: Sequence[KeptProcess],
        start: Start,
        pools: SinglePools,
        elasticity: Elasticity,
        replaces: bool,
    ) -> None:
        """`start` starts a generator on its own devices; `replaces`: these may be on another machine."""
        super().__init__(started)
        self._folder, self._start, self._pools, self._elasticity = folder, start, pools, elasticity
        self._replaces = replaces
        now = time.monotonic()
        self._places = [_GeneratorPlace(index, kept, now, 0) for index, kept in enumerate(started)]
        self._wanted: list[_Wanted] = []
        self._looked, self._seen, self._refused = now, last_object(folder.metrics), ""
        self._record("as the run begins")

    def tend(self, on_line: OnLine, on_event: OnLine) -> None:
        """Start again what has crashed, replace what cannot be, and add or remove where the bottleneck says so.

        Raises ProcessFailedError when no generator is left and none can take its place.
        """
        super().tend(on_line, on_event)
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        for wanted in list(self._wanted):
            self._ask(wanted, on_line, on_event)
        if not self._wanted:
            self._look(now, on_line, on_event)

    def close(self) -> None:
        """Stop all of them, and give back what was leased for them alone."""
        with ExitStack() as stack:
            stack.callback(self._pools.close)
            for place in self._places:
                stack.callback(place.kept.close)

    def _look(self, now: float, on_line: OnLine, on_event: OnLine) -> None:
        rule = self._elasticity
        if rule.max_count == rule.count:
            return
        line = last_object(self._folder.metrics)
        if line is None or line == self._seen:
            return
        self._seen = line
        rates = SideRates.model_validate(line["rates"])
        self._elasticity = rule = rule.after(now, rates, len(self.going))
        if rule.change:
            self._elasticity = rule.afresh()
            if rule.change > 0:
                wanted = _Wanted(self._free_index(), in_words(rates), now)
                self._wanted.append(wanted)
                self._ask(wanted, on_line, on_event)
            else:
                self._remove(in_words(rates), on_line, on_event)

    def _free_index(self) -> int:
        used, index = {place.index for place in self._places}, self._elasticity.count
        while index in used:
            index += 1
        return index

    def _remove(self, why: str, on_line: OnLine, on_event: OnLine) -> None:
        """Drain and stop the newest added generator. Those that the run began with are never stopped here."""
        place = next(one for one in reversed(self._places) if one.index >= self._elasticity.count)
        self._places.remove(place)
        self.going.remove(place.kept)
        place.kept.close()
        role = generator_role(place.index)
        self._release(role, on_event)
        self._record(f"{role} is removed: {why}", on_line)

    def _ask(self, wanted: _Wanted, on_line: OnLine, on_event: OnLine) -> None:
        role = generator_role(wanted.index)
        try:
            pool = self._pools.acquire(role)
        except Refusal as error:
            self._elasticity = self._elasticity.without_one()
            self._give_up(wanted, f"can have no devices: {error}", on_event, error)
        except (PoolBusyError, ProcessFailedError) as error:
            waited = time.monotonic() - wanted.asked
            if waited > ASK_S and (wanted.failure is None or not self.going):
                self._give_up(wanted, f"found no devices within {waited:.0f} s: {error}", on_event, error)
        else:
            self._wanted.remove(wanted)
            place = _GeneratorPlace(wanted.index, self._start(pool, wanted.index), time.monotonic(), wanted.replaced)
            self._places.append(place)
            self.going.append(place.kept)
            self._refused = ""
            where = f" on {', '.join(pool.gpus)}" if pool.gpus else ""
            done = "added" if wanted.failure is None else "replaced"
            self._record(f"{role} is {done}{where}: {wanted.why}", on_line)

    def _give_up(self, wanted: _Wanted, why: str, on_event: OnLine, error: Exception) -> None:
        role = generator_role(wanted.index)
        self._wanted.remove(wanted)
        self._release(role, on_event)
        if wanted.failure is not None and not self.going:
            raise wanted.failure from error
        kind = f"{role} {type(error).__name__}"
        if kind != self._refused:  # it will be asked for again, and not said again
            on_event(f"{role} {why}; still going: {len(self.going)}")
        self._refused = kind

    def _failed(self, generator: KeptProcess, failure: ProcessFailedError, on_event: OnLine) -> None:
        (place,) = (one for one in self._places if one.kept is generator)
        self._places.remove(place)
        role = generator_role(place.index)
        self._release(role, on_event)
        self._elasticity = self._elasticity.afresh()
        now = time.monotonic()
        replaced = 0 if now - place.began > STEADY_S else place.replaced
        if not self._replaces or failure.exit_code == REFUSED or replaced == PLACES:
            if not self.going and all(wanted.failure is None for wanted in self._wanted):
                raise failure
            self._elasticity = self._elasticity.without_one()
            tried = f", as {replaced} before it did," if replaced else ""
            self._record(f"{failure.headline}{tried} and is left out; still going: {len(self.going)}", on_event)
            return
        self._wanted.append(_Wanted(place.index, failure.headline, now, failure, replaced + 1))
        self._record(f"{failure.headline}; other devices are asked for; still going: {len(self.going)}", on_event)

    def _release(self, role: str, on_event: OnLine) -> None:
        try:
            self._pools.release(role)
        except ReleaseError as error:
            on_event(f"the devices of {role} are given back at the end of the run: {error}")

    def _record(self, why: str, say: OnLine | None = None) -> None:
        change = GeneratorsChange(at=time.time(), generators=len(self.going), why=why)
        changes = (*generators_changes(self._folder.generators), change)
        write_atomically(self._folder.generators, "".join(f"{one.model_dump_json()}\n" for one in changes))
        if say is not None:
            say(f"{why}; generators: {len(self.going)}")
