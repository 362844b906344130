"""Quantities as people read them, each with its unit."""

from collections.abc import Sequence

SECONDS = ((48 * 3600, 86_400, "days", 3600, "h"), (3600, 3600, "h", 60, "min"), (60, 60, "min", 1, "s"))
"""From how many seconds on which two units are shown: (from, seconds of the larger, its name, ...the smaller)."""


def figure(value: float) -> str:
    """Three significant digits, or the whole number: `0.123`, `12.3`, `1,234`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def byte_size(size: float) -> str:
    """Bytes by the largest binary unit that fits: `32 KiB`, `23.5 GiB`."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def si(value: float, unit: str) -> str:
    """A quantity by the largest decimal prefix that fits: `45 TFLOP`."""
    return _scaled(value, 1000, [prefix + unit for prefix in ("", "k", "M", "G", "T", "P")])


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if value < base:
            return f"{figure(value)} {unit}"
        value /= base
    return f"{figure(value)} {units[-1]}"


def signed(value: float) -> str:
    """A relative difference: `+60.4%`."""
    return f"{round(value, 3) + 0.0:+.1%}".replace("-", "−")


def duration(seconds: float) -> str:
    """At most two units: `4.2 s`, `5 min 11 s`, `3 h 7 min`, `5 days 2 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for least, large, name, small, smaller in SECONDS:
        if whole >= least:
            return f"{whole // large} {name} {whole % large // small} {smaller}"
    return f"{whole} s"


def numbers(text: str) -> list[int]:
    """Numbers and ranges, as Linux and Slurm write them: `0-2,5` -> 0, 1, 2, 5."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]


def enumerated(items: Sequence[str], word: str) -> str:
    """`a, b and c`, for the word `and`."""
    *first, last = items
    return f"{', '.join(first)} {word} {last}" if first else last


def plural(number: int, noun: str) -> str:
    """`1 sample`, `1,234 samples`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
