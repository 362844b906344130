"""Decoding with a target's own MTP layer: lossless, as simulated, and beside a draft that reads target layers."""

import sys
from pathlib import Path

import pytest
import torch

from infra.refusal import Refusal
from models.benchmark.contestants import load_contestants
from models.config.draft import parse_draft_config
from models.config.recipe import as_recipe
from models.decoding.plain import continue_greedily
from models.decoding.simulated import features, simulate
from models.decoding.speculative import speculate
from models.drafts.base import Draft
from models.drafts.registry import build_draft
from models.drafts.sampling import Sampling
from models.drafts.trees import DynamicTree
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import read_served_target
from models.export.sglang import load_draft, write_export
from models.export.stitched import stitch
from models.targets.model import TargetModel
from models.targets.own_layer import OwnLayer
from models.targets.weights import read_target_head, tensor_files

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

from mimo import write_mimo

SIZES = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 32, "intermediate_size": 512}
MTP = SIZES | {"method": "mtp", "family": "mimo", "attention_bias": True}
EAGLE3 = SIZES | {"method": "eagle3", "vocab_size": None}
PROMPT, MOST = [0, 40, 51, 60, 33, 71, 300], 40


@pytest.fixture(scope="module")
def mimo(tiny_target, tmp_path_factory) -> Path:
    return write_mimo(Path(tiny_target.path), tmp_path_factory.mktemp("targets") / "mimo")


def export(target: Path, folder: Path, settings: dict, layers: tuple[int, ...]) -> Draft:
    torch.manual_seed(0)
    head = read_target_head(target, torch.float32)
    every = DraftVocabulary(torch.arange(len(head.head)), len(head.head))
    draft = build_draft(parse_draft_config(settings), head.embedding, every, layers)
    draft.start_from(head.head)
    if own := draft.target_tensors(tensor_files(target)):
        OwnLayer.find(target, own).load(own)
    write_export(draft, folder, {}, read_served_target(target))
    return draft


@pytest.fixture(scope="module")
def exports(mimo, tmp_path_factory) -> tuple[Path, Path]:
    """Of an MTP layer, and of an EAGLE-3 draft."""
    folders = tmp_path_factory.mktemp("mtp"), tmp_path_factory.mktemp("eagle3")
    export(mimo, folders[0], MTP, ())
    export(mimo, folders[1], EAGLE3, (0, 2))
    return folders


def test_decoding_is_lossless_and_counts_are_the_simulated_ones(mimo, exports):
    target, draft = TargetModel.load(mimo, (), torch.float32), load_draft(exports[0], mimo, torch.float32)
    own = continue_greedily(target, PROMPT, MOST, frozenset())
    read = features(target, [*PROMPT, *own])
    assert torch.equal(read, target.forward(torch.tensor([[*PROMPT, *own][:-1]])).last[0])
    for lookahead in (1, 3):
        decoded = speculate(target, draft, PROMPT, lookahead, MOST, frozenset())
        assert list(decoded.tokens) == own
        assert decoded.counts == simulate(draft, PROMPT, own, read, lookahead, eos_ids=frozenset())[-1]
        sure = Sampling(1.3, 1e-9, generator=torch.Generator().manual_seed(0))
        assert speculate(target, draft, PROMPT, lookahead, MOST, frozenset(), sampling=sure) == decoded
    tree = speculate(target, draft, PROMPT, DynamicTree(3, 2, 6), MOST, frozenset())
    assert list(tree.tokens) == own


def test_beside_a_draft_that_reads_layers_each_reads_its_own(mimo, exports):
    together = load_contestants(mimo, exports, torch.float32)
    for source, folder in zip(together.drafts, exports, strict=True):
        alone = load_contestants(mimo, [folder], torch.float32)
        found, expected = (
            speculate(loaded.target, one, PROMPT, 3, MOST, frozenset())
            for loaded, one in ((together, source), (alone, alone.draft))
        )
        assert found == expected
    assert together.target.with_last


@pytest.mark.parametrize(("method", "layers", "why"), [("mtp", [0], "read none"), ("medusa", [], "name at least one")])
def test_layers_are_named_for_the_drafts_that_read_some(method, layers, why, mimo):
    tree = {"name": "x", "target": {"name": str(mimo), "aux_layer_ids": layers}, "draft": {"method": method}}
    with pytest.raises(Refusal, match=why):
        as_recipe(tree, "here")


def test_only_a_layer_of_the_target_is_stitched_into_it(mimo, exports, tmp_path):
    with pytest.raises(Refusal, match="no part of their target's checkpoint"):
        stitch(load_draft(exports[1], mimo, torch.float32), mimo, tmp_path / "stitched")
