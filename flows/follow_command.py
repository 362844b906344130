"""`draftsmith serve-follow`: keeps SGLang servers at the version that the registry names."""

import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from infra.files.locks import LockHeldError, hold
from infra.processes.exit import told_to_stop
from infra.refusal import Refusal
from infra.settings import tracking_uri

if TYPE_CHECKING:
    from infra.serving.config import FollowConfig


def serve_follow(
    settings: Annotated[Path, typer.Argument(help="A YAML file: draft, folder, servers. See docs/rollout.md.")],
    once: Annotated[bool, typer.Option("--once", metavar="", help="End when all servers run the champion.")] = False,
    stop_servers: Annotated[
        bool, typer.Option("--stop-servers", metavar="", help="Stop the servers that it started, and end.")
    ] = False,
) -> None:
    """Roll out what is promoted, and take back what does not hold: canaries first, one server at a time.

    Servers that it starts go on when it ends, and it finds them again.
    """
    from flows.drafts_command import draft_in_service
    from infra.serving.follower import BY, Follower
    from infra.tracking.client import give_up_soon

    config = _read(settings)
    give_up_soon()
    uri = config.tracking_uri or tracking_uri()

    def withdraw(version: int, reason: str) -> None:
        draft_in_service(config.draft, uri).withdraw(version, by=BY, reason=reason)

    def say(line: str) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)

    if not stop_servers:
        _check_folder(Path(config.folder), settings)
    lock = Path(config.folder) / "lock"
    try:
        with hold(lock), told_to_stop() as stop:
            follower = Follower(config, uri, withdraw, say)
            if stop_servers:
                follower.stop_servers()
                return
            while not stop.is_set():
                if follower.round() and once:
                    return
                stop.wait(config.poll_s)
    except LockHeldError:
        raise Refusal(f"another follower uses {config.folder}: each needs a folder of its own") from None


def _check_folder(folder: Path, settings: Path) -> None:
    """Raise Refusal where the follower cannot keep its files in `folder`, which is created if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refusal(
            f"`folder` of {settings} is {folder}, and nothing can be written there ({error.strerror}): name a folder "
            "that this user may write to"
        ) from error


def _read(settings: Path) -> "FollowConfig":
    from pydantic import ValidationError

    from infra.files.yaml_file import read_yaml
    from infra.serving.config import FollowConfig

    tree = read_yaml(settings, "follower's configuration", "with draft, folder and servers")
    try:
        config = FollowConfig.model_validate(tree)
    except ValidationError as error:
        problems = [
            (".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")) for one in error.errors()
        ]
        lines = "".join(f"\n  {f'{place}: ' if place else ''}{message}" for place, message in problems)
        raise Refusal(f"{settings} is not valid; correct these settings:{lines}") from error
    # The paths that servers report are compared with this one.
    return config.model_copy(update={"folder": str(Path(config.folder).expanduser().absolute())})
