"""Pools of one generator each, which a run leases while it trains."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace

from infra.pools.base import Pool, PoolProvider, PoolSpec
from infra.processes.process import Owner


@dataclass
class SinglePools:
    """Leases in the names of a run's generators. Nothing here waits longer than one look of the provider's."""

    provider: PoolProvider
    spec: PoolSpec
    owner: Owner
    queue: Callable[[], AbstractContextManager[object]] = nullcontext
    """A queue slot that is held with the devices; entering raises PoolBusyError if there is none now."""
    _asked: dict[str, ExitStack] = field(default_factory=dict)

    def acquire(self, role: str) -> Pool:
        """Devices for the generator of that role.

        Raises PoolBusyError: ask again, or release, since an engine's queue keeps the request. Raises Refusal for
        what can never fit, and ProcessFailedError where the engine failed.
        """
        owner = self._owner(role)
        with ExitStack() as stack:
            stack.enter_context(self.queue())
            self._asked.setdefault(role, ExitStack())
            (pool,) = self.provider.acquire([self.spec], owner)
            self._asked[role] = stack.pop_all()
        return pool

    def release(self, role: str) -> None:
        """Give back what the generator has, or asked for, if anything. Raises as the provider does."""
        stack = self._asked.get(role)
        if stack is not None:
            with stack:
                self.provider.release(self._owner(role).name)
            del self._asked[role]

    def close(self) -> None:
        """Give everything back."""
        with ExitStack() as stack:
            for role in list(self._asked):
                stack.callback(self.release, role)

    def _owner(self, role: str) -> Owner:
        return replace(self.owner, name=f"{self.owner.name}-{role}")
