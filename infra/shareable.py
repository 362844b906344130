"""What of a run's settings may be shown to others. Used by the flow's process."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):[^/@\s]*(?=@)|(?<=[?&])(password)=[^&#\s]+")
NO_PASSWORD = r"^(?!.*(://[^/@\s]*:[^/@\s]*@|[?&]password=))"
"""The same as a JSON schema's pattern: matches what holds none."""


def without_passwords(setting: Any) -> Any:
    """The same text, list or mapping with every password inside a URL shown as `***`."""
    if isinstance(setting, str):
        return PASSWORD.sub(lambda found: f"{found[2]}=***" if found[2] else f"{found[1]}:***", setting)
    if isinstance(setting, Mapping):
        return {key: without_passwords(value) for key, value in setting.items()}
    if isinstance(setting, Sequence):
        return [without_passwords(value) for value in setting]
    return setting
