"""What is known of prompts that were taken from request logs."""

from collections.abc import Mapping

from infra.records.data_path import Record


class PromptsRecord(Record):
    """`prompts.json`: fresh prompts taken from request logs."""

    path: str
    """JSONL that a recipe's `data.source` may name."""
    sha256: str
    prompts: int
    lines: int
    """Lines of the logs."""
    searched: int
    """Requests that were searched for private data."""
    dropped: Mapping[str, int]
    """Requests dropped, by reason; one request may count under several kinds of private data."""
    sampled: str
    """When (ISO 8601)."""

    @property
    def summary(self) -> str:
        """One line for people."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        return f"{self.prompts} prompts from {self.lines} logged requests, left out: {reasons or 'none'}; {self.path}"
