"""How a process ends when a person has to act: one clear message and exit status 2. Used by every main."""

import sys
from collections.abc import Callable


def run_main(main: Callable[[], None]) -> None:
    """Run `main`; a ValueError (wrong input, with its remedy) becomes one message on stderr and exit status 2.

    Everything else is a defect and keeps its traceback.
    """
    try:
        main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
