"""Data sets that MLflow's runs name, kept in its artifact store by their content, once for all runs that used them.

Each experiment has one of its own for them, so that who may write the one may write the other. Files lie below its
artifacts, in a folder named after their hash: MLflow keeps the first address of a data set, so what is copied again
must come to the same place. A run there stands for each copy that is whole. The experiments of one SQLite file have
one folder of artifacts, and therefore share files of the same content: the last of these runs takes them with it.
"""

import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Experiment, InputTag, Run
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from infra.files.atomic import sha256_file
from infra.records.data_path import SamplesRecord
from infra.tracking.client import NOTE, active_experiments, connect, experiment_id, pages
from infra.tracking.retention import OURS
from infra.tracking.runs import TrackedRun

ABOUT = (
    "Samples and evaluation prompts of the runs of `{experiment}`, by content. "
    "`clean-up` removes what no run names any more."
)
CONTENT, PRIVATE = "draftsmith.dataset", "draftsmith.private"
CONTEXT = "mlflow.data.context"
HELDOUT, HELD_OUT = "heldout.safetensors", " (held out)"
DIGEST = 36
"""Characters of a hash that MLflow keeps as a data set's digest."""
MIB = 2**20
NEWEST_S = 86_400.0
"""Its run may be about to name it."""


def datasets_of(experiment: str) -> str:
    """Name of the experiment that keeps the data sets of another one's runs."""
    return f"{experiment}-datasets"


def log_samples(run: TrackedRun, name: str, samples: SamplesRecord, *, most_mib: int, private: bool) -> None:
    """Note the samples that a run trains on, and those that it takes its evaluation prompts from.

    Up to `most_mib` are copied to the artifact store, so that they survive the cache; of larger sets the address in the
    cache is noted. `private`: they come from requests of users, and `clean-up` removes them after its `prompt_days`.
    """
    client, folder = connect(run.uri), Path(samples.path)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kept = sum(file.stat().st_size for file in files) <= most_mib * MIB
    experiment = str(client.get_experiment(run.experiment_id).name)
    address = _keep(client, experiment, samples.dataset_hash, folder, private=private) if kept else folder.as_uri()
    profile, heldout = samples.model_dump_json(exclude={"path"}), sha256_file(folder / HELDOUT)
    client.log_inputs(
        run.run_id,
        [
            _input(name, samples.dataset_hash, f"{address}/train.safetensors", "training", profile),
            _input(name + HELD_OUT, heldout, f"{address}/{HELDOUT}", "evaluation", profile),
        ],
    )


def evaluation_set(run: TrackedRun) -> tuple[str | None, str | None]:
    """Name and digest of the held-out samples that a run has noted; None of a run that has noted none."""
    inputs = connect(run.uri).get_run(run.run_id).inputs
    for one in inputs.dataset_inputs if inputs else ():
        if one.dataset.name.endswith(HELD_OUT):
            return str(one.dataset.name), str(one.dataset.digest)
    return None, None


def log_suites(run: TrackedRun, suites: Sequence[tuple[str, str, str]]) -> None:
    """Note further sets of evaluation prompts: name, hash, address."""
    found = [_input(name, content, address, "evaluation", "{}") for name, content, address in suites]
    if found:
        connect(run.uri).log_inputs(run.run_id, found)


def remove_old_datasets(uri: str, experiments: Collection[str], private_days: float) -> int:
    """Remove data sets that no run of these experiments names, and those of users' requests after `private_days`.

    Returns their number.
    """
    client, now, removed = connect(uri), time.time(), 0
    for experiment in active_experiments(client, experiments):
        for place in active_experiments(client, [datasets_of(str(experiment.name))]):
            named, beside = _named_digests(client, experiment), _with_the_same_artifacts(client, place)
            for run in _copies(client, place):
                age_s, content = now - run.info.start_time / 1000, run.data.tags[CONTENT]
                expired = run.data.tags.get(PRIVATE) == "true" and age_s > private_days * 86_400
                if expired or (content[:DIGEST] not in named and age_s > NEWEST_S):
                    if not any(_copies(client, other, content) for other in beside):
                        get_artifact_repository(_address(place, content), client.tracking_uri).delete_artifacts()
                    client.delete_run(run.info.run_id)
                    removed += 1
    return removed


def _with_the_same_artifacts(client: MlflowClient, place: Experiment) -> list[Experiment]:
    """Other experiments whose artifacts are in the same folder."""
    location, own = place.artifact_location, place.experiment_id
    everywhere = pages(client.search_experiments)
    return [one for one in everywhere if one.artifact_location == location and one.experiment_id != own]


def _named_digests(client: MlflowClient, experiment: Experiment) -> set[str]:
    """Digests of the data sets that runs of an experiment name."""
    runs = pages(client.search_runs, experiment_ids=[str(experiment.experiment_id)], filter_string=OURS)
    return {str(one.dataset.digest) for run in runs for one in (run.inputs.dataset_inputs if run.inputs else ())}


def _keep(client: MlflowClient, of: str, content: str, folder: Path, *, private: bool) -> str:
    """Address of a folder's copy in the artifact store, for the runs of the experiment `of`."""
    experiment = client.get_experiment(experiment_id(client, datasets_of(of)))
    if NOTE not in experiment.tags:
        client.set_experiment_tag(str(experiment.experiment_id), NOTE, ABOUT.format(experiment=of))
    address = _address(experiment, content)
    if not _copies(client, experiment, content):
        get_artifact_repository(address, client.tracking_uri).log_artifacts(str(folder))
        # Last: a copy that was interrupted is made again.
        tags = {CONTENT: content, PRIVATE: str(private).lower()}
        made = client.create_run(str(experiment.experiment_id), run_name=content[:12], tags=tags)
        client.set_terminated(made.info.run_id)
    return address


def _address(experiment: Experiment, content: str) -> str:
    return f"{str(experiment.artifact_location).rstrip('/')}/by-content/{content}"


def _copies(client: MlflowClient, experiment: Experiment, content: str | None = None) -> list[Run]:
    query = "" if content is None else f"tags.`{CONTENT}` = '{content}'"
    return list(pages(client.search_runs, experiment_ids=[str(experiment.experiment_id)], filter_string=query))


def _input(name: str, content: str, address: str, context: str, profile: str) -> DatasetInput:
    scheme = urlsplit(address).scheme
    kind = "local" if scheme in {"", "file"} else scheme
    dataset = Dataset(name, content[:DIGEST], kind, json.dumps({"uri": address}), profile=profile)
    return DatasetInput(dataset, [InputTag(CONTEXT, context)])
