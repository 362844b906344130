"""A tiny Llama, trained in a minute or two on Python's own documentation: a real target for tests."""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from infra.files.cached_folder import build_once
from infra.settings import cache_folder
from models.config.target import TinyRecipe
from models.data import python_docs
from models.muon import MuonAndAdamW, orthogonalised

BOS, EOS = "<s>", "</s>"
WEIGHT_DECAY = 0.1
"""Of the layers' matrices."""


def trained_tiny(name: str, recipe: TinyRecipe | None = None) -> Path:
    """The tiny target's folder. The first training takes a minute or two of one core."""
    recipe = recipe or TinyRecipe()
    parts = json.dumps([asdict(recipe), sys.version_info[:2]])
    folder = cache_folder() / "targets" / f"{name}-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"

    def build(aside: Path) -> None:
        texts = [text for _, text in python_docs.documents()]
        tokenizer = train_tokenizer(texts, recipe)
        with one_thread():
            model = train_model(_stream(tokenizer, texts[:: recipe.every]), recipe)
        model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, do_sample=False)
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)

    build_once(folder, build)
    return folder


@contextmanager
def one_thread() -> Iterator[None]:
    """More threads gain little on matrices this small, and are 50 times slower where other processes want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train_tokenizer(texts: list[str], recipe: TinyRecipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE that prepends `<s>`, like Llama's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=1024)


def _stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """`[N]` int64: all documents concatenated, each with a final `</s>`."""
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (*ids, 1)])  # type: ignore[union-attr]


def train_model(stream: Tensor, recipe: TinyRecipe) -> "transformers.LlamaForCausalLM":
    """Train from scratch on random crops of `stream`, each after a `<s>`; deterministic for a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = transformers.LlamaForCausalLM(_llama(recipe))
    optimizers = _optimizers(model, recipe)
    schedules = [LambdaLR(optimizer, lambda step: _rate(step, recipe)) for optimizer in optimizers]
    losses = []
    console = Console(stderr=True)
    for batch in track(_crops(stream, recipe), "training the tiny target", recipe.steps, console=console):
        logits = model(input_ids=batch[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        losses.append(loss.item())
    last = losses[-20:]
    console.print(f"tiny target: trained {recipe.steps} steps, loss {sum(last) / len(last):.2f} nats per token")
    return model.eval()


def _optimizers(model: "transformers.LlamaForCausalLM", recipe: TinyRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices (a third of AdamW's steps for the same loss), AdamW for the rest."""
    named, betas = list(model.named_parameters()), (0.9, 0.95)
    matrices = [weight for name, weight in named if "layers" in name and weight.ndim == 2]
    others = [weight for name, weight in named if "layers" not in name or weight.ndim != 2]
    return [
        MuonAndAdamW(matrices, [], recipe.matrix_learning_rate, betas, WEIGHT_DECAY, orthogonalised),
        torch.optim.AdamW(others, lr=recipe.learning_rate, betas=betas, weight_decay=0.0),
    ]


def _rate(step: int, recipe: TinyRecipe) -> float:
    """Linear warm-up, constant, linear decay."""
    rise = (step + 1) / recipe.warmup
    fall = (recipe.steps - step) / (recipe.steps * recipe.decay_share)
    return min(1.0, rise, fall)


def _crops(stream: Tensor, recipe: TinyRecipe) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(recipe.seed)
    offsets = torch.arange(recipe.length)
    for _ in range(recipe.steps):
        starts = torch.randint(0, len(stream) - recipe.length, (recipe.batch, 1), generator=generator)
        yield functional.pad(stream[starts + offsets], (1, 0), value=0)


def _llama(recipe: TinyRecipe) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
