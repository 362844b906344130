"""`sharing.json`: how generators and trainer share the devices of a run."""

from typing import Literal

from infra.files.run_folder import RunFolder
from infra.records.data_path import Record

SharingMode = Literal["apart", "alternate", "share"]


class Sharing(Record):
    """Decided by the flow before it leases devices, and read by every process of the run."""

    mode: SharingMode
    """`apart`: two pools. `alternate`: generators and trainer take turns on the same devices. `share`: both at once."""
    why: str
    budget_bytes: int
    """Most bytes of hidden states at once: between capture and training, or of a round."""
    on_disk: bool = False
    """Whether they lie in the run folder: rounds, which must survive the flow, or what shared memory has no room for.

    A run's ledger keeps the budget of its rounds, so they stay there also where it is resumed with two pools."""
    generator_bytes: int | None = None
    """Memory of each shared GPU that a generator may use, with `share`."""
    static_bytes: int | None = None
    """The part of it for an engine's weights and KV cache."""
    cache_tokens: int | None = None
    """Tokens in that cache."""
    trainer_bytes: int | None = None
    """Memory of each shared GPU that a trainer rank may use, with `share`."""


def alternates(run: RunFolder) -> bool:
    """Whether generators and trainer of this run take turns."""
    return run.sharing.is_file() and read_sharing(run).mode == "alternate"


def read_sharing(run: RunFolder) -> Sharing:
    """What the flow has decided."""
    return Sharing.read(run.sharing)
