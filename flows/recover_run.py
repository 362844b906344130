"""The recover flow: resumes a run whose flow run died. It has a work pool of its own."""

from prefect import flow

from tasks.recovery import look_at, start_again


@flow(name="recover")
def recover(flow_run: str) -> str | None:
    """Start a run again whose flow run has crashed or fell silent, at most three times at the same checkpoint.

    Args:
        flow_run: id of the dead flow run, or its name in events ("prefect.flow-run.ID").

    Returns the id of the flow run that resumes it, if any.
    """
    dead = look_at(flow_run.rpartition(".")[2])
    return start_again(dead) if dead else None
