"""People get one message; defects keep their traceback."""

import pytest

from infra.exit import run_main


def test_a_refusal_is_one_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise ValueError("data.source: no such file")

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: data.source: no such file\n"


def test_a_defect_is_not_hidden() -> None:
    def main() -> None:
        raise KeyError("defect")

    with pytest.raises(KeyError):
        run_main(main)
