"""The decorator of tasks that change something outside their process, and the keys of what they show in Prefect."""

import hashlib
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from infra.refusal import Refusal

P = ParamSpec("P")
R = TypeVar("R")
RETRY_DELAY_S = 5


def side_effect(name: str, retries: int = 2) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A Prefect task that is never cached, and is retried unless a person has to change something first."""
    return task(
        name=name,
        retries=retries,
        retry_delay_seconds=RETRY_DELAY_S,
        retry_condition_fn=_worth_retrying,
        cache_policy=NO_CACHE,
    )


def _worth_retrying(_task: Task[Any, Any], _run: TaskRun, state: State) -> bool:
    return not isinstance(state.result(raise_on_failure=False), Refusal)


def draft_tag(draft: str) -> str:
    """What a registered draft's own deployments and the flow runs that are about it are tagged with."""
    return f"draft:{draft}"


def artifact_key(kind: str, name: str) -> str:
    """Key of the artifact `kind` of a draft or recipe. Prefect accepts lower-case letters, digits and dashes.

    Names that differ in other characters have different keys, too.
    """
    key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{kind}-{key}" + ("" if key == name else f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}")
