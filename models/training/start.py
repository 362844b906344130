"""A warm start: training begins with another draft's weights and draft vocabulary.

The export of a registered version, or what a published draft was made into, lies in RUN/start. The vocabulary is kept
as it is: other tokens would be other rows of the draft's head.
"""

from pathlib import Path

import torch

from infra.refusal import Refusal
from models.drafts.base import Draft
from models.export.description import read_description
from models.export.sglang import load_draft
from models.run import RunWithTarget


def load_start(run: RunWithTarget) -> Draft:
    """The draft that training begins with. Raises Refusal for one of another target or shape."""
    folder = run.folder.start
    _check(run, folder)
    draft = load_draft(folder, Path(run.target.path), torch.float32)
    trained = set(run.config.draft.training_only)
    wanted, found = (config.model_dump(exclude=trained) for config in (run.config.draft, draft.config))
    differing = [
        f"draft.{name} is {found.get(name)}, the recipe's {wanted.get(name)}"
        for name in {**wanted, **found}
        if found.get(name) != wanted.get(name)
    ]
    layers = run.config.target.aux_layer_ids
    if tuple(draft.aux_layer_ids) != tuple(layers):
        differing.append(f"target.aux_layer_ids are {list(draft.aux_layer_ids)}, the recipe's {list(layers)}")
    if differing:
        raise Refusal(
            f"training.start_from={run.config.training.start_from}: that draft has another shape ("
            f"{'; '.join(differing)}): take its settings over, or leave training.start_from out"
        )
    draft.config = run.config.draft
    return draft.train()


def _check(run: RunWithTarget, folder: Path) -> None:
    """A draft of another target loads wherever its sizes agree, and knows nothing."""
    revision = read_description(folder).target_revision
    if revision != run.target.revision:
        raise Refusal(
            f"training.start_from={run.config.training.start_from}: that draft was trained for revision "
            f"{str(revision)[:12]} of its target, this run's target is {run.target.name} {run.target.revision[:12]}: "
            "leave training.start_from out"
        )
