"""How retraining from Python ends."""

import pytest

from flows.from_python import _Interruptible


def interrupted(chained: bool) -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        raise ValueError("Task run is not set") from (error if chained else None)


@pytest.mark.parametrize("chained", [True, False])
def test_an_error_on_the_way_from_ctrl_c_is_ctrl_c(chained: bool) -> None:
    with pytest.raises(KeyboardInterrupt), _Interruptible():
        interrupted(chained)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match=r"^other$"), _Interruptible():
        raise ValueError("other")
    with pytest.raises(KeyboardInterrupt) as found, _Interruptible():
        raise KeyboardInterrupt
    assert found.value.__cause__ is None
    with _Interruptible():
        pass
