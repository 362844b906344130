"""The target's own texts about images, one by one: its family counts positions after an image in a way of its own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from models.decoding.plain import end_of
from models.drafts.sampling import GREEDY, Sampling
from models.targets.model import TargetModel


@torch.no_grad()
def continue_seen(
    target: TargetModel,
    prompt: Tensor,
    seen: Mapping[str, Tensor],
    max_new_tokens: int,
    ends: frozenset[int],
    sampling: Sampling = GREEDY,
) -> list[int]:
    """Continue `prompt` `[P]`, whose images the model reads as `seen` (`ImageProcessor.inputs`).

    `ends` are the tokens that end a text. Those that stand for images must be among them: such a text could not be read
    again, since there is no image.

    By transformers itself, of whose settings for sampling none is used.
    """
    model: Any = target.model
    settings = GenerationConfig(
        do_sample=not sampling.greedy,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=min(ends, default=0),
    )
    own = [] if sampling.greedy else [lambda _tokens, logits: sampling.distribution(logits).log()]
    with torch.random.fork_rng(devices=[] if target.device.type == "cpu" else [target.device]):
        if sampling.generator is not None:
            # transformers draws from torch's own generator.
            drawn = torch.randint(2**62, (1,), generator=sampling.generator, device=sampling.generator.device)
            torch.manual_seed(int(drawn))
        tokens = prompt[None].to(target.device)
        # Otherwise tokens that are equal to the one for padding would be taken for padding.
        whole = torch.ones_like(tokens)
        answer = model.generate(tokens, attention_mask=whole, **seen, generation_config=settings, logits_processor=own)
    return end_of(answer[0, len(prompt) :].tolist(), ends)
