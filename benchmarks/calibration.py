"""Do a draft's confidences say how often its proposals are accepted, once a temperature per position is fitted?

    python benchmarks/calibration.py [RECIPE] --draft EXPORT [--prompts 512] [--max-new-tokens 128] [--top-p 1.0]

Three ways to decode with a DSpark draft of the recipe's target: text sampled at temperature 1 with proposals drawn from
the draft's distribution (what the confidence head is trained for, and the default of its engines), and, with a quarter
of the prompts, the same law with the draft's likeliest tokens as proposals, and greedy text. Temperatures are fitted to
every second group of texts and judged by the others. The expected calibration error of n steps is above 0 even for
chances that are exact; `by_chance` is what it would be then, by drawing from the chances. Standard errors are over
resampled groups.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware
from infra.records.acceptance import Conditions
from infra.records.data_path import Record
from models.benchmark.conditions import Counter, conditions
from models.benchmark.contestants import Contestants, draft_of, load_contestants
from models.config.benchmark import BenchmarkConfig
from models.config.recipe import load_recipe
from models.data.conversations import source_hash
from models.data.prompts import read_prompts
from models.decoding.calibration import decoded_confidences, errors_by_position, expected_error, fit_temperatures
from models.decoding.plain import prefill
from models.drafts.certain import ProposesCertainly
from models.drafts.sampling import GREEDY, Sampling
from models.targets.prepare import prepare_target

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TOGETHER = 8
"""Texts that are decoded together, and are fitted to, judged by and resampled together."""
SEED, RESAMPLES, DRAWS = 1, 200, 100


class Calibrated(Record):
    """One way to decode; tuples are by position."""

    way: str
    texts: int
    """Half of them for fitting."""
    steps_fitted: int
    steps_judged: int
    acceptance_length: float
    temperatures: tuple[float, ...]
    reached: tuple[float, ...]
    """Share of judged steps that reach and accept each position."""
    said: tuple[float, ...]
    """The mean chance of that, after fitting."""
    errors_before: tuple[float, ...]
    errors_after: tuple[float, ...]
    standard_errors: tuple[float, ...]
    """Of `errors_after`."""
    by_chance: tuple[float, ...]


class CalibrationResult(Record):
    """What is committed."""

    commit: str
    date: str
    hardware: str
    conditions: Conditions
    max_new_tokens: int
    ways: tuple[Calibrated, ...]
    wall_s: float


Steps = tuple[Tensor, Tensor]
"""Of a group of texts: logits `[n, S]`, accepted `[n]`."""


def decode(
    loaded: Contestants, prompts: list[list[int]], law: Sampling, new_tokens: int, *, certain: bool
) -> list[Steps]:
    """The steps of groups of `TOGETHER` texts."""
    source = ProposesCertainly(loaded.draft) if certain else loaded.draft
    lookahead, found = draft_of(loaded.draft).config.lookaheads(64)[-1], list[Steps]()
    for first in range(0, len(prompts), TOGETHER):
        group = prompts[first : first + TOGETHER]
        laws = [law.seeded(SEED + first + row, loaded.target.device) for row in range(len(group))]
        texts = [(prefill(loaded.target, prompt, own), own) for prompt, own in zip(group, laws, strict=True)]
        found.append(decoded_confidences(source, texts, lookahead, new_tokens, loaded.target, loaded.eos_ids))
    return found


def joined(groups: list[Steps]) -> Steps:
    logits, accepted = zip(*groups, strict=True)
    return torch.cat(logits), torch.cat(accepted)


def judge(way: str, groups: list[Steps], texts: int) -> Calibrated:
    """Fit to every second group, judge by the others."""
    fitted, judged = joined(groups[::2]), joined(groups[1::2])
    temperatures, (logits, accepted) = fit_temperatures(*fitted), judged
    chances = (logits / torch.tensor(temperatures, dtype=torch.double)).sigmoid().cumprod(-1)
    generator = torch.Generator().manual_seed(SEED)
    resampled, own = [], groups[1::2]
    for _ in range(RESAMPLES):
        chosen = torch.randint(len(own), (len(own),), generator=generator).tolist()
        resampled.append(errors_by_position(*joined([own[index] for index in chosen]), temperatures))
    by_chance = [
        sum(expected_error(column, torch.rand(len(column), generator=generator) < column) for _ in range(DRAWS)) / DRAWS
        for column in chances.unbind(1)
    ]
    positions = range(logits.shape[1])
    return Calibrated(
        way=way,
        texts=texts,
        steps_fitted=len(fitted[1]),
        steps_judged=len(accepted),
        acceptance_length=1 + float(accepted.double().mean()),
        temperatures=tuple(temperatures),
        reached=tuple(float((accepted > at).double().mean()) for at in positions),
        said=tuple(chances.mean(0).tolist()),
        errors_before=tuple(errors_by_position(logits, accepted, [1.0] * len(positions))),
        errors_after=tuple(errors_by_position(logits, accepted, temperatures)),
        standard_errors=tuple(torch.tensor(resampled, dtype=torch.double).std(0).tolist()),
        by_chance=tuple(by_chance),
    )


def measure(options: argparse.Namespace) -> CalibrationResult:
    begun, commit, recipe = time.perf_counter(), git_sha(), load_recipe(options.recipe)
    target = prepare_target(recipe.target)
    config = recipe.benchmark.model_copy(
        update={"prompts": options.prompts, "max_new_tokens": options.max_new_tokens, "sampled_proposals": "drawn"}
    )
    config = BenchmarkConfig.model_validate(config.model_dump())
    prompts, template_hash = read_prompts(recipe.data.source, target, config, "none", recipe.target.add_bos)
    loaded = load_contestants(Path(target.path), [options.draft], torch.float32)
    law, ways = Sampling(1.0, options.top_p), []
    for way, own, certain, share in (
        ("sampled, drawn proposals", law, False, 1),
        ("sampled, likeliest proposals", law, True, 4),
        ("greedy", GREEDY, False, 4),
    ):
        chosen = prompts[: len(prompts) // share]
        groups = decode(loaded, chosen, own, options.max_new_tokens, certain=certain)
        ways.append(judge(way, groups, len(chosen)))
        print(ways[-1].model_dump_json(indent=1), flush=True)
    under = conditions(
        config, Counter.reference(loaded.target), target=target, draft=options.draft,
        dataset_hash=source_hash(recipe.data.source), template_hash=template_hash, prompts=len(prompts),
    )  # fmt: skip
    return CalibrationResult(
        commit=commit, date=time.strftime("%Y-%m-%d"), hardware=hardware(), conditions=under,
        max_new_tokens=options.max_new_tokens, ways=tuple(ways), wall_s=time.perf_counter() - begun,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=ROOT / "recipes" / "tiny.yaml")
    parser.add_argument("--draft", type=Path, required=True, help="exported draft for its target")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "calibration.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(options)
    write_atomically(options.out, result)
    print(f"{result.wall_s:.0f} s: {options.out}")


if __name__ == "__main__":
    run_main(main)
