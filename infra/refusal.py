"""The one exception for input that a person must change."""


class Refusal(ValueError):
    """Input, settings or surroundings that cannot work; the message names the place, the fault and the remedy.

    Every `main` turns it into one line on stderr and exit status 2, and nothing is retried. Any other exception,
    ValueError included, is a fault of the program or of the machine: it keeps its traceback, and a supervised process
    is started again. It derives from ValueError because pydantic's validators report those.
    """
