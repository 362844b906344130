"""Keys of Prefect artifacts. Prefect keeps one history per key, so each draft or recipe has keys of its own."""

import re


def artifact_key(kind: str, name: str) -> str:
    """Key of the artifact `kind` of a draft or recipe. Prefect accepts lower-case letters, digits and dashes."""
    return f"{kind}-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
