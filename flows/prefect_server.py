"""Whether the Prefect server that is set answers, and lets this user in."""

from http import HTTPStatus

from infra.network.health import public
from infra.refusal import Refusal
from infra.settings import prefect_api_url, prefect_is_private


def check_prefect() -> None:
    """Raise Refusal where it does not. It is asked by Prefect's own client, with its credentials and certificates."""
    url = prefect_api_url()
    if url is None or prefect_is_private():
        return
    import httpx
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            client.api_version()
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            remedy = "set $PREFECT_API_AUTH_STRING (or $PREFECT_API_KEY) to its credential"
        else:
            remedy = "correct $PREFECT_API_URL, which ends in /api"
        status = f"{error.response.status_code} {error.response.reason_phrase}"
        raise Refusal(f"Prefect at {public(url)} answers {status}: {remedy}") from error
    except (httpx.TransportError, ValueError) as error:
        raise Refusal(
            f"Prefect at {public(url)} does not answer ({error}): start it, correct $PREFECT_API_URL, or unset it, and "
            "each run starts a server of its own"
        ) from error
