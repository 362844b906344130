"""What benchmarks/results/ says of what drafts learn, for docs/results.md."""

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]


def engines(result: Json) -> Iterable[tuple[str, str]]:
    for engine, mean in result["mean"].items():
        yield f"acceptance length of drafts trained on {engine}'s hidden states, mean of three seeds", f"{mean:.3f}"
    yield "largest difference between seeds", f"{result['largest_difference_between_seeds_of_one_engine']:.3f}"


def continued(result: Json) -> Iterable[tuple[str, str]]:
    for one in result["seeds"]:
        lengths = [f"{part['length']:.2f} at {part['tokens_share']:.0%}" for part in one["continued"]]
        yield (
            f"seed {one['seed']}: acceptance length of a new draft of a fine-tuned target; of the base's draft, "
            "continued with a share of the tokens",
            f"{one['scratch']['length']:.2f}; {', '.join(lengths)}",
        )


def mtp(result: Json) -> Iterable[tuple[str, str]]:
    names = {
        "before": "before",
        "training_time_test": "by chains",
        "fastmtp": "by FastMTP's objective",
        "chains_of_own_tokens": "by chains with FastMTP's loss",
    }
    lengths, rates = result["mean_length"], result["mean_by_position"]
    names = {name: shown for name, shown in names.items() if name in lengths}
    yield (
        f"acceptance length of a tiny target's own MTP layer at lookahead {result['lookahead']}, before and after "
        f"{result['samples']:,} samples, mean of {len(result['seeds'])} seeds",
        ", ".join(f"{shown} {lengths[name]:.3f}" for name, shown in names.items()),
    )
    for name, shown in names.items():
        yield (
            f"acceptance by position of the tiny target's MTP layer, {shown}",
            " / ".join(f"{rate:.3f}" for rate in rates[name]),
        )


def optimizers(result: Json) -> Iterable[tuple[str, str, Json]]:
    for one in result["comparisons"].values():
        adamw, muon = one["best"]["adamw"], one["best"]["muon"]
        yield (
            f"acceptance length of {one['draft']['method']} on sampled text after {one['training_tokens']:,} tokens "
            f"(recipe {one['recipe']}, lookahead {one['lookahead']}), each at its best learning rate of those tried: "
            "mean (learning rate; each seed)",
            f"AdamW {_with_seeds(one, adamw)}, Muon {_with_seeds(one, muon)}",
            one if "commit" in one else result,
        )
        yield (
            f"training of {one['draft']['method']} (recipe {one['recipe']}) in CPU seconds",
            f"AdamW {adamw['cpu_s']}, Muon {muon['cpu_s']}",
            one if "commit" in one else result,
        )


def _with_seeds(comparison: Json, best: Json) -> str:
    optimizer = next(name for name, one in comparison["best"].items() if one is best)
    tried = {trial["learning_rate"] for trial in comparison["trials"] if trial["optimizer"] == optimizer}
    rate = best["learning_rate"]
    edge = " the only one tried" if len(tried) == 1 else ""
    edge = edge or {min(tried): " the lowest tried", max(tried): " the highest tried"}.get(rate, "")
    return f"{best['drawn']:.3f} ({rate:g}{edge}; {', '.join(f'{one:.3f}' for one in best['seeds'])})"


def float8(result: Json) -> Iterable[tuple[str, str]]:
    sizes, target = result["bytes_per_token"], result["target"]
    for one in result["float8_against_bfloat16"]:
        low, high = one["interval"]
        yield (
            f"acceptance length of {target}'s draft trained on float8 against bfloat16, seed {one['seed']} (95 %)",
            f"{one['relative']:+.1%} ({low:+.1%} to {high:+.1%})",
        )
    yield f"bytes of hidden states per token, float8 / bfloat16 ({target})", f"{sizes['float8']} / {sizes['bfloat16']}"
    yield (
        f"rows of which {target}'s head chooses the same token after rounding to float8",
        f"{result['rounding']['same_top_token']:.1%}",
    )


def learning_curve(result: Json) -> Iterable[tuple[str, str]]:
    short, long = result["samples"]
    yield (
        f"drafts of the tiny target whose gain from {short} to {long:,} samples lay in the band told before (90 %)",
        f"{result['inside']} of {len(result['seeds'])}",
    )
    told = [one for one in result["seeds"] if one["would_be_told"]]
    yield (
        f"of these, drafts of which a run tells the band by default, because it is narrow, at {short} samples; those "
        "whose gain lay in it",
        f"{len(told)}; {sum(bool(one['inside']) for one in told)}",
    )


def regeneration(result: Json) -> Iterable[tuple[str, str]]:
    for one in result["seeds"]:
        for temperature in ("sampled", "greedy"):
            found, ways = one[temperature], ("regenerated text", "given text")
            lengths = [f"{found[way]['length']['4']:.3f}" for way in ways]
            yield (
                f"acceptance length at lookahead 4 of a draft trained on {result['tokens']:,} tokens that the target "
                f"wrote / that are given (recipe {result['recipe']}, {temperature}, seed {one['seed']}); difference "
                "(97.5 % bound)",
                f"{' / '.join(lengths)}; {found['difference']:+.1%} (over {found['lower_bound_97.5']:+.1%})",
            )
