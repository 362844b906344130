"""The Hugging Face Hub's errors as Refusals."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from infra.refusal import Refusal


def client_error() -> type[Exception]:
    """What huggingface_hub's HTTP client raises, and lets through at times; the Hub's own errors inherit from it.

    It is httpx's in version 1 of huggingface_hub, and httpx2's in version 2.
    """
    # Imported where it is needed: it is slow, and most commands never ask the Hub.
    from huggingface_hub.errors import HfHubHTTPError

    return cast("type[Exception]", HfHubHTTPError.__bases__[0])


@contextmanager
def hub_refusals(
    place: str, name: str, revision: str | None, hint: str = "", offline: str = "give a local file or folder"
) -> Iterator[None]:
    """Raise the Hub's errors as Refusals that start with `place`.

    Args:
        name: Of the repository.
        revision: None means main.
        hint: Ends the message for a repository that the Hub refuses.
        offline: What to do if the Hub cannot be reached, besides checking the network.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except LocalEntryNotFoundError as error:
        raise Refusal(
            f"{place}: {name} is not in the Hugging Face cache, and the Hub cannot be reached: check network and "
            f"proxy, or {offline}"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise Refusal(
            f"{place}: the Hub refused {name} at revision {revision or 'main'}: {error}. Check name and revision; if "
            f"it is gated, accept its terms and run `hf auth login`{hint}"
        ) from error
    except client_error() as error:
        raise Refusal(f"{place}: the Hub cannot be reached ({error}): check network and proxy, or {offline}") from error
