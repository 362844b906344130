"""What a plot leaves out."""

from infra.results import Acceptance
from models.benchmark.plots import well_supported


def test_positions_that_were_hardly_offered_are_not_shown():
    acceptance = Acceptance(
        conversations=2, length={1: 1.5, 4: 1.6}, steps={1: 120, 4: 100}, by_position=(0.5, 0.4, 0.9, 1.0)
    )
    # Offered 100, 50, 20 and 18 times.
    assert well_supported(acceptance) == [0.5, 0.4, 0.9]
    none = acceptance.model_copy(update={"by_position": (0.0, None, None, None)})
    assert well_supported(none) == [0.0]
