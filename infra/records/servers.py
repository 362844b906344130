"""SGLang servers that extend over several machines."""

from pathlib import Path

from infra.records.data_path import Record


class ServerMachines(Record):
    """The machines of a server, as the process on the first of them is told."""

    meeting: Path
    """Where they meet: a folder that all of them see."""
    count: int
    address: str
    """Of the flow's machine, in their private network."""


class ServerOrder(Record):
    """What the first machine has the others start. It holds for as long as its file exists."""

    serial: int
    role: str
    command: tuple[str, ...]
    environment: dict[str, str]
    start_timeout_s: float
    ranks_at: str
    """HOST:PORT on the first machine, where the ranks find each other."""
