"""The user that this process runs as."""

import os
from getpass import getuser


def user_name() -> str:
    """The user's name, or the uid as text: a container's user may have no entry in the password database."""
    try:
        return getuser()
    except (KeyError, OSError):  # OSError from Python 3.13
        return str(os.getuid())
