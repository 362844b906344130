"""Memory of a run's Mooncake store."""

from infra.config import TransportConfig

SLACK = 1.5
"""Factor on the byte budget, because objects of different sizes leave gaps."""
BEYOND_BUDGET = 64 * 2**20


def store_bytes(config: TransportConfig) -> int:
    """Size of the store's segment."""
    return int(config.budget_mib * 2**20 * SLACK) + BEYOND_BUDGET
