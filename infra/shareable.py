"""What of a run's settings may be shown to others. Used by the flow's process."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):[^/@\s]*(?=@)")


def without_passwords(setting: Any) -> Any:
    """The same text, list or mapping with every password inside a URL shown as `***`."""
    if isinstance(setting, str):
        return PASSWORD.sub(r"\1:***", setting)
    if isinstance(setting, Mapping):
        return {key: without_passwords(value) for key, value in setting.items()}
    if isinstance(setting, Sequence):
        return [without_passwords(value) for value in setting]
    return setting
