"""Every rank's loss and gradients of every case; started by `test_context.py`: `context_ranks.py FOLDER`.

The first rank computes every case alone, which is what the others are compared with; then the first two share it, then
all three.
"""

import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from models.config.draft import parse_draft_config
from models.drafts.base import Draft, PackedSamples, TargetProjection
from models.drafts.context import ContextShare
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary

RANKS = 3
HIDDEN, VOCABULARY, AUX = 12, 40, (0, 2)
EAGLE3 = {"method": "eagle3", "vocab_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ttt_steps": 4}
EAGLE3 |= {"intermediate_size": 20}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "qk_norm": True}
MEDUSA = {"method": "medusa", "vocab_size": 24, "heads": 3}
LENGTHS = ((64,), (37, 22), (1, 2, 3, 5, 9), (1,))
"""Shorter ones than there are runs of rows too: some ranks have nothing to do."""
CASES = {
    f"{name}-{'-'.join(map(str, lengths))}": (config, recompute, lengths, name == "images")
    for name, config, recompute in (
        ("eagle3", EAGLE3, False),
        ("eagle3.1", EAGLE3 | {"fc_norm": True, "norm_output": True, "loss": "lk_alpha"}, False),
        ("recompute", EAGLE3, True),
        ("sliding", EAGLE3 | SLIDING, False),
        ("sliding-recompute", EAGLE3 | SLIDING, True),
        ("medusa", MEDUSA, False),
        ("images", EAGLE3 | {"mrope_section": [2, 1, 1]}, False),
    )
    for lengths in LENGTHS
}


def make_draft(config: dict) -> Draft:
    torch.manual_seed(0)
    ids = torch.randperm(VOCABULARY)[:24].sort().values
    embedding = torch.randn(VOCABULARY, HIDDEN)
    draft = build_draft(parse_draft_config(config), embedding, DraftVocabulary(ids, VOCABULARY), AUX)
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    return draft


def make_batch(lengths: tuple[int, ...], group: dist.ProcessGroup | None, reach: int, images: bool) -> PackedSamples:
    count = sum(lengths)
    tokens, mask = torch.randint(VOCABULARY, (count,)), torch.rand(count) < 0.7
    aux, last = torch.randn(count, len(AUX) * HIDDEN), torch.randn(count, HIDDEN)
    top = torch.randint(VOCABULARY, (count,), dtype=torch.int32)
    embedded = torch.randn(count, HIDDEN) if images else None
    shown = torch.rand(count) < 0.4 if images else None
    places = torch.randint(30, (count, 3), dtype=torch.int32) if images else None
    if group is None:
        return PackedSamples(tokens, mask, aux, last, lengths, top, None, embedded, shown, places)
    share = ContextShare(lengths, dist.get_world_size(group), dist.get_rank(group), reach, group)
    here, states = ([run.packed for run in runs] for runs in (share.runs, share.states))
    parts = ((aux, here), (last, states), (top, states))
    aux, last, top = (torch.cat([x[:0], *(x[part] for part in there)]) for x, there in parts)
    if embedded is not None and places is not None:
        embedded = torch.cat([embedded[:0], *(embedded[part] for part in states)])
        places = torch.cat([places[:0], *(places[part] for part in here)])
    return PackedSamples(tokens, mask, aux, last, lengths, top, share, embedded, shown, places)


def outcome(
    config: dict, recompute: bool, lengths: tuple[int, ...], images: bool, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    draft = make_draft(config)
    draft.recompute = recompute
    head = torch.randn(VOCABULARY, HIDDEN)
    whole = head if draft.config.needs_mass else None
    target = TargetProjection(head[draft.vocabulary.target_ids], whole, 1.2, None)
    found = draft.loss(make_batch(lengths, group, draft.positions, images), target, 13, 8)
    found.loss.backward()
    gradients = {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}
    counts = {name: torch.tensor(getattr(found, name)) for name in ("supervised", "covered")}
    return {**found._asdict(), **counts, "loss": found.loss.detach(), **gradients}


def compute(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", world_size=RANKS, rank=rank)
    for size in range(1, RANKS + 1):
        group = dist.new_group(list(range(size)))
        if rank < size:
            shared = None if size == 1 else group
            found = {name: outcome(*case, shared) for name, case in CASES.items()}
            torch.save(found, folder / f"{size}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # a rank need not import everything once more
    ranks = [fork.Process(target=compute, args=(Path(sys.argv[1]), rank)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(any(one.exitcode for one in ranks))
