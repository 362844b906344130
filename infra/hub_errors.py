"""The Hugging Face Hub's errors as Refusals."""

from collections.abc import Iterator
from contextlib import contextmanager

from infra.refusal import Refusal


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
    # Importing it takes a while, which commands that never ask the Hub need not wait.
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except LocalEntryNotFoundError as error:
        raise Refusal(
            f"{place}: {name} is not in the Hugging Face cache, and the Hub cannot be reached: check the network, or "
            f"{offline}"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise Refusal(
            f"{place}: the Hub refused {name} at revision {revision or 'main'}: {error}. Check name and revision; if "
            f"it is gated, accept its terms and run `hf auth login`{hint}"
        ) from error
