"""Asks the Prefect server of a stack, with its credential and a token against cross-site requests."""

import os
from typing import Any

import httpx

CLIENT = "draftsmith-benchmark"
TIMEOUT_S = 60.0


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """`POST` with a body, `GET` without one; the answer's JSON. Raises HTTPStatusError."""
    user, _, password = os.environ["PREFECT_API_AUTH_STRING"].partition(":")
    with httpx.Client(base_url=os.environ["PREFECT_API_URL"], auth=(user, password), timeout=TIMEOUT_S) as client:
        if body is None:
            return client.get(path).raise_for_status().json()
        token = client.get("csrf-token", params={"client": CLIENT}).raise_for_status().json()["token"]
        headers = {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": CLIENT}
        return client.post(path, json=body, headers=headers).raise_for_status().json()
