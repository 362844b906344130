"""Where traffic is kept."""

from types import SimpleNamespace
from typing import Any, cast

from tasks.drift import watch_folders


def test_the_folder_of_each_watch_is_its_deployment_s() -> None:
    def deployment(flow: str, **config: Any) -> SimpleNamespace:
        return SimpleNamespace(entrypoint=f"flows.{flow}", parameters={"config": config})

    deployed = [
        deployment("watch_traffic.watch_traffic", draft="draft-a", folder="s3://traffic"),
        deployment("watch_traffic.watch_traffic", draft="draft-b"),
        deployment("retrain_draft.retrain", name="c"),
    ]
    client = SimpleNamespace(read_deployments=lambda limit, offset: deployed[offset:])
    assert watch_folders(cast(Any, client)) == {"draft-a": "s3://traffic", "draft-b": None}
