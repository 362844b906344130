"""Retraining and regenerating from Python, with the same settings as from the command line.

from pathlib import Path
from flows.from_python import retrain
from models.config.recipe import load_recipe

folder = retrain(load_recipe(Path("recipes/quickstart.yaml")))
"""

import codecs
import gc
import locale
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from flows.prefect_server import check_prefect
from infra.refusal import Refusal

if TYPE_CHECKING:
    from models.config.recipe import RunConfig


def retrain(config: "RunConfig", run: str | None = None) -> str:
    """Train a draft, prove it, and promote it if it earned that; returns the run folder's path.

    Args:
        config: the recipe, as `models.config.recipe.load_recipe` reads it.
        run: name or folder of a run to resume; a new one where None.
    """
    with _ready_for_flows():
        from flows.retrain_draft import retrain as flow

    with _Interruptible():
        return flow(config, run)


def regenerate(config: "RunConfig") -> str:
    """Let the target answer the recipe's prompts; returns the path of the text."""
    with _ready_for_flows():
        from flows.regenerate_text import regenerate as flow

    with _Interruptible():
        return flow(config)


class _Interruptible(AbstractContextManager[None]):
    """Ctrl-C while Prefect 3.8 starts a task ends in an error of its own ("Task run is not set")."""

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        before = error
        while before is not None:
            if isinstance(before, KeyboardInterrupt) and before is not error:
                raise KeyboardInterrupt from error
            before = before.__cause__ or before.__context__


@contextmanager
def _ready_for_flows() -> Iterator[None]:
    """Check versions, quiet the log, and start a Prefect server while the body imports the flow.

    Without a server of its own, Prefect starts a temporary one with telemetry whose database several processes lock.
    """
    from infra.servers.local import prefect_api
    from infra.settings import reach_loopback_directly, use_heartbeats

    _refuse_clashes()
    _refuse_other_encodings()
    use_heartbeats()
    reach_loopback_directly()
    for logger in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(logger).addFilter(_without_traceback)
    with _never_searched_for_garbage(), prefect_api():
        yield
    check_prefect()


@contextmanager
def _never_searched_for_garbage() -> Iterator[None]:
    """For what the body imports: a third of the time that Prefect and MLflow take."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _refuse_clashes() -> None:
    """Versions that are known to break a run break it here, with the remedy."""
    from infra.doctor.software import clashes, installed

    for finding in clashes(installed()):
        if finding.verdict == "problem":
            raise Refusal(f"{finding.found}. Mend it with: {finding.remedy}")


def _refuse_other_encodings() -> None:
    """Texts, records and reports are UTF-8, whoever of a run's processes writes or reads them."""
    encoding = locale.getpreferredencoding(do_setlocale=False)
    if codecs.lookup(encoding).name != "utf-8":
        raise Refusal(
            f"the locale's encoding is {encoding}, and a run's files are in UTF-8: set $PYTHONUTF8 to 1, or $LC_ALL to "
            "C.UTF-8"
        )


def _without_traceback(record: logging.LogRecord) -> bool:
    """A refusal is for people: the flow's log names it, without the way it took through the code."""
    if record.exc_info and isinstance(record.exc_info[1], Refusal):
        record.exc_info = None
    return True
