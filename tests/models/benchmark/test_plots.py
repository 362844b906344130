"""What a plot leaves out."""

import json
from pathlib import Path

import matplotlib.image as mpimg

from infra.records.acceptance import Acceptance
from infra.records.data_path import Histogram, MoreData, SamplesRecord
from models.benchmark.plots import averaged, plot_heldout, plot_samples, plot_timeline, plot_training, well_supported


def test_positions_that_were_hardly_offered_are_not_shown():
    acceptance = Acceptance(
        conversations=2, length={1: 1.5, 4: 1.6}, steps={1: 120, 4: 100}, by_position=(0.5, 0.4, 0.9, 1.0)
    )
    # Offered 100, 50, 20 and 18 times.
    assert well_supported(acceptance) == [0.5, 0.4, 0.9]
    none = acceptance.model_copy(update={"by_position": (0.0, None, None, None)})
    assert well_supported(none) == [0.0]


def test_a_single_step_is_drawn(tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    row = {"step": 1, "tokens": 500, "loss": 5.0, "acceptance_by_position": [0.1]}
    metrics.write_text(json.dumps(row) + "\n")
    plot_training(metrics, tmp_path / "training.png")
    assert dark_pixels(tmp_path / "training.png") > 20


def dark_pixels(picture: Path) -> int:
    """In the middle, where the one point is and neither axes nor words are."""
    image = mpimg.imread(picture)
    height, width = image.shape[:2]
    middle = image[height // 3 : height // 2, width * 2 // 5 : width // 2 + width // 10, :3]
    return int((middle.max(axis=2) < 0.3).sum())


def test_thousands_of_steps_are_averaged():
    steps = [float(step) for step in range(1, 5001)]
    means = averaged(steps)
    assert len(means) == 200
    assert (means[0], means[-1]) == (13.0, 4988.0)
    assert averaged([3.0]) == [3.0]
    assert averaged([]) == []


def test_the_timeline_needs_rates(tmp_path: Path):
    metrics, plot = tmp_path / "metrics.jsonl", tmp_path / "timeline.png"
    metrics.write_text('{"step": 1, "tokens": 5, "loss": 1.0}\n')
    plot_timeline(metrics, plot)
    assert not plot.exists()
    row = {"seconds": 60, "tokens_per_s": 50.0, "data_wait_share": 0.2, "rates": {"inference": 100.0}}
    metrics.write_text(json.dumps(row) + "\n")
    plot_timeline(metrics, plot)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_learning_curve_shows_what_is_known_of_more_data(tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    row = {"step": 5, "acceptance_by_position": [0.5], "heldout_acceptance_length": 1.4}
    metrics.write_text(json.dumps(row) + "\n")
    drawn = []
    for name, more in (("none", None), ("unknown", MoreData(why="scatter")), ("known", MoreData(lower=0.1, upper=0.2))):
        plot_heldout(metrics, tmp_path / f"{name}.png", more)
        drawn.append((tmp_path / f"{name}.png").read_bytes())
    assert drawn[0] == drawn[1] != drawn[2]


def test_samples_of_older_sets_have_nothing_to_draw(tmp_path: Path):
    record = SamplesRecord(
        path="", dataset_hash="", template_hash="", train_samples=3, heldout_samples=1, train_tokens=60, longest=30,
        supervised_share=1.0, dropped=0, truncated=0, unusable=0,
    )  # fmt: skip
    assert plot_samples(record, tmp_path / "samples.png") is None
    spread = Histogram(width=1, first=1, counts=(2, 0, 1))
    drawn = plot_samples(record.model_copy(update={"lengths": spread, "turns": spread}), tmp_path / "samples.png")
    assert drawn is not None
    assert drawn.read_bytes().startswith(b"\x89PNG")
