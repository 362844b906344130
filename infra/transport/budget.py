"""How many bytes of hidden states may be between capture and training."""

from infra.config import TransportConfig
from infra.files.run_folder import RunFolder
from infra.records.sharing import read_sharing

LEAST_BUDGET = 512 * 2**20


def memory_budget(config: TransportConfig, needed: int) -> int:
    """The recipe's budget in bytes; by default `needed`, which the samples in flight may take, or `LEAST_BUDGET`."""
    return max(LEAST_BUDGET, needed) if config.budget_mib is None else config.budget_mib * 2**20


def budget_of(config: TransportConfig, run: RunFolder) -> int:
    """The same for a run, as its flow has decided; the least where none has yet."""
    if config.budget_mib is None and run.sharing.is_file():
        return read_sharing(run).budget_bytes
    return memory_budget(config, 0)
