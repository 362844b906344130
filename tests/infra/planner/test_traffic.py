"""What docs/scale.md says of 8, 64 and 256 GPUs is what the formulas give."""

from pathlib import Path

import pytest

from infra.planner.traffic import samples_in_flight, stored_bytes_per_token, traffic

DOCS = (Path(__file__).parents[3] / "docs" / "scale.md").read_text()
TOKEN = stored_bytes_per_token(3, 4096, "bfloat16", top_token=False)


def column(row: str, index: int) -> str:
    """A cell of the table row that begins with `row`."""
    (line,) = (line for line in DOCS.splitlines() if line.startswith(f"| {row}"))
    return line.split("|")[index + 2].strip()


def number(text: str) -> float:
    return float(text.split(maxsplit=1)[0].replace(",", ""))


@pytest.mark.parametrize(("index", "generators", "ranks"), [(0, 1, 7), (1, 8, 56), (2, 32, 224)])
def test_the_figures_of_the_documentation(index: int, generators: int, ranks: int) -> None:
    flow = traffic(50 * generators, 550, TOKEN, generators, ranks)
    assert flow.tokens_per_s == pytest.approx(number(column("tokens/s", index)), rel=0.01)
    assert flow.wire_bytes_per_s / 1e9 == pytest.approx(number(column("bytes/s", index)), rel=0.02)
    assert flow.samples_per_s == number(column("samples/s of 550", index))
    assert flow.ledger_transactions_per_s == pytest.approx(number(column("ledger transactions/s", index)), rel=0.01)
    slots = generators * (max(8, min(32, generators)) + 32)
    short = samples_in_flight(8 * ranks, ranks, 2, slots) * 550 * TOKEN / 2**30
    assert short == pytest.approx(number(column("550 tokens, 8", index)), rel=0.01)
    unit = 2**40 if "TiB" in column("100K tokens, 1", index) else 2**30
    long = samples_in_flight(ranks, ranks, 2, slots) * 100_000 * TOKEN / unit
    assert long == pytest.approx(number(column("100K tokens, 1", index)), rel=0.02)


def test_bytes_per_token_of_published_targets() -> None:
    assert TOKEN == 32 * 1024
    assert stored_bytes_per_token(3, 7168, "bfloat16", top_token=False) == 56 * 1024
    assert stored_bytes_per_token(3, 7168, "bfloat16", top_token=True) == 56 * 1024 + 4
