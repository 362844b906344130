"""The one exception for input that a person must change."""

from infra.redaction import redacted


class Refusal(ValueError):
    """Input, settings or surroundings that cannot work; the message names the place, the fault and the remedy.

    Every `main` turns it into one line on stderr and exit status 2, and nothing is retried. Any other exception,
    ValueError included, is a fault of the program or of the machine: it keeps its traceback, and a supervised process
    is started again. It derives from ValueError because pydantic's validators report those.

    The message is redacted here, because it reaches terminals, logs and Prefect's server.
    """

    def __init__(self, message: str):
        super().__init__(redacted(message))


def first_line(error: BaseException) -> str:
    """What an error says first; its type where it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
