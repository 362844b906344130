"""`python -m models.preflight RUN_FOLDER`: refuses a run that would only fail after it has leased GPUs.

It needs the target but no samples, so it runs before regeneration.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import torch
from transformers import PreTrainedTokenizerBase

from infra.doctor.cuda import BFLOAT16
from infra.doctor.cuda import sglang_environment as sglang_on_gpus
from infra.files.run_folder import RunFolder
from infra.ledger.database import check_server
from infra.network.ports import listening_address
from infra.planner.traffic import CHECKPOINT_BYTES_PER_PARAMETER
from infra.pools.gpus import read_gpus
from infra.pools.local import LocalPools
from infra.processes.exit import run_main
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from infra.settings import sglang_environment
from infra.sglang.command import draft_arguments, sglang_version
from infra.transport.mooncake.environment import check_mooncake, choose_protocol
from models.benchmark.counter import why_engine_counts
from models.capture.live_texts import private_data_finder
from models.capture.sglang.model_class import CAPTURED_AS, ask_sglang
from models.capture.sglang.tap import open_tap, wanted_of
from models.config.blocks import BlockConfig
from models.config.division import check_division
from models.config.recipe import RunConfig, read_config
from models.config.rope import OF_TYPE
from models.data.benchmark_prompts import BenchmarkPrompts, read_excluded_prompts
from models.data.conversations import training_documents
from models.data.dialogue import Dialogue, check_answerable
from models.data.images import ImageProcessor
from models.data.outcomes import check_refused
from models.data.prepare import recipe_data
from models.data.prompts import suite_prompts
from models.data.request_log import logged_texts
from models.data.samples import SampleEncoder
from models.data.tokenizer import read_tokenizer
from models.drafts.base import Draft
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.description import FLOATS, start_of
from models.export.served_target import read_served_target
from models.progress_bars import counting
from models.regeneration.engines import recipe_prompter
from models.run import RunWithTarget
from models.targets.architecture import read_model_config, sliding_window
from models.targets.own_layer import OwnLayer
from models.targets.weights import tensor_files
from models.training.start import load_start


def check_settings(run: RunWithTarget) -> None:
    """Raise Refusal for a run that could not train, save checkpoints, or be measured."""
    config, target = run.config, run.target
    if config.transport.kind == "mooncake":
        check_mooncake()
        if config.pools.kind == "local":  # elsewhere the first of the trainer's machines says what it has
            choose_protocol(config.transport.protocol)
        listening_address(config.transport.address)
    check_server(config.ledger.url or run.folder.ledger_url)
    _check_arithmetic(config)
    draft = _draft(config, target)
    place = Path(target.path)
    _check_axes(config, place)
    _tell_of_scaling(config, place)
    _check_lengths(config, place)
    if own := draft.target_tensors(tensor_files(place)):
        OwnLayer.find(place, own)
    _check_disk(run, sum(parameter.numel() for parameter in draft.parameters()))
    _check_precision(run)
    served = config.own_engine == "sglang" and config.benchmark.served_concurrency
    why = why_engine_counts(run, _inference_gpus(config))
    if why and draft.engine_config() is None:
        raise Refusal(
            f"{why}: SGLang would count its acceptance, and it serves no {config.draft.title} drafts that are "
            "configured like this one: choose another draft.method, or a target that one GPU holds"
        )
    speculates = bool((why or served) and draft.engine_config() is not None)
    if speculates:
        config.draft.engine_arguments(config.benchmark.lookahead)
        draft_arguments(run.folder.export)
    elif served and (obstacles := draft.engine_obstacles()):
        # Said before anything is trained: no figure of SGLang's will come.
        exported = "for vLLM, " if draft.speculators_config() is not None else ""
        print(
            f"SGLang does not serve a draft with {', '.join(obstacles)}: it is exported {exported}and measured by the "
            "reference decoder",
            flush=True,
        )
    check_division(config, json.loads((place / "config.json").read_text()))
    if config.own_engine == "sglang":
        _check_kernels(config)
        check_engine(run, speculates)
    if run.folder.start.is_dir():
        load_start(run)
        _tell_of_other_target(run)
    for suite in config.promotion.suites:
        suite_prompts(config, target, suite)
    if config.benchmark.suffix_log is not None:
        logged_texts(config.benchmark.suffix_log)


def check_engine(run: RunWithTarget, speculates: bool) -> None:
    """Raise Refusal for a target that SGLang's own class would not capture, or would compute differently.

    `speculates`: whether SGLang is also to serve the target with the draft.
    """
    path, draft, longest = Path(run.target.path), run.config.draft, run.config.data.max_tokens
    architectures = json.loads((path / "config.json").read_text()).get("architectures") or [run.target.model_type]
    # Of an EAGLE-3 or block draft SGLang would have to serve what it captured.
    captured = architectures[0] if draft.reads_layers else CAPTURED_AS.get(architectures[0], architectures[0])
    kind = ask_sglang(captured)
    if not kind.is_known:
        return
    release, other = f"SGLang {sglang_version()}", "set generator.engine=transformers, or try a newer SGLang"
    if kind.name is None:
        raise Refusal(f"{release} has no model class for the target's architecture {architectures[0]}: {other}")
    if not kind.captures:
        raise Refusal(
            f"{release} cannot capture hidden states of the target's architecture {kind.name}, nor serve an EAGLE-3 "
            f"draft for it (its class has no set_eagle3_layers_to_capture): {other}"
        )
    if speculates and draft.method == "eagle3" and not kind.shares_tables:
        raise Refusal(
            f"{release} serves no EAGLE-3 draft for the target's architecture {kind.name} (its class has no "
            "get_embed_and_head): set benchmark.served_concurrency=[] and benchmark.counted_by=reference"
        )
    if speculates and isinstance(draft, BlockConfig) and (not kind.captures_blocks or kind.scales_embeddings):
        why = "its class has no set_dflash_layers_to_capture"
        if kind.captures_blocks:
            why = "its embedding scales rows, for the draft too, which is trained on unscaled ones"
        raise Refusal(
            f"{release} serves no {draft.title} draft for the target's architecture {kind.name} ({why}): set "
            "draft.method=eagle3, or benchmark.served_concurrency=[] and benchmark.counted_by=reference"
        )
    if run.config.data.images is not None and not ImageProcessor(path).repeats_mark:
        raise Refusal(
            "data.images: SGLang would expand this target's images by its own tokenization of the whole text: set "
            "generator.engine=transformers"
        )
    window = sliding_window(read_model_config(path).get_text_config())
    if window is not None and window < longest and not kind.has_windows:
        raise Refusal(
            f"{release}'s {kind.name} ignores the target's sliding window of {window} tokens, and would compute other "
            f"hidden states of longer samples: set data.max_tokens to at most {window}, or "
            "generator.engine=transformers"
        )


def _check_kernels(config: RunConfig) -> None:
    """Raise Refusal where SGLang would find on this machine's GPUs that it cannot compile its kernels.

    Machines of clusters are not this one.
    """
    leases = config.pools.kind == "local" and config.pools.inference_gpus > 0
    faults = [
        f"{one.name}: {one.found}"
        for one in (sglang_on_gpus(sglang_environment(), read_gpus()) if leases else [])
        if one.verdict == "problem"
    ]
    if faults:
        raise Refusal(
            f"SGLang compiles kernels as it runs, and could not on these GPUs ({'; '.join(faults)}): see `draftsmith "
            "doctor`, or set generator.engine=transformers"
        )


def _check_arithmetic(config: RunConfig) -> None:
    """Raise Refusal for a run in bfloat16 on a machine where no GPU that it may lease computes in it.

    Machines of clusters are not this one.
    """
    dtypes = {"training.precision": config.training_dtype} if config.pools.training_gpus else {}
    if config.pools.inference_gpus:
        dtypes["benchmark.compute_dtype"] = config.benchmark_dtype
        if config.generator.engine != "serving":
            dtypes["generator.compute_dtype"] = config.capture_dtype
    half = [setting for setting, dtype in dtypes.items() if dtype == "bfloat16"]
    inventory = read_gpus() if half and config.pools.kind == "local" else None
    leasable = LocalPools().gpus if inventory else ()
    gpus = [gpu for gpu in inventory.devices if gpu.uuid in leasable] if inventory else []
    if gpus and all(gpu.capability < BFLOAT16 for gpu in gpus):
        gpu, wanted = gpus[0], [f"{setting}=float32" for setting in half]
        if "generator.compute_dtype" in half and config.generator.engine == "sglang":
            wanted.append("generator.engine=transformers")  # SGLang's attention takes half precision only
        raise Refusal(
            f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]}) does not compute in bfloat16, "
            f"the dtype of {', '.join(half)}: set {' '.join(wanted)}"
        )


def _tell_of_other_target(run: RunWithTarget) -> None:
    """Print for which target the start was trained, unless it is this one: shapes do not tell whether it was tuned."""
    start, target = start_of(run), run.target
    if start and start.target_revision not in (None, target.revision):
        print(
            f"training.start_from={start.draft}: that draft was trained for {start.target} "
            f"{start.target_revision[:12]}, and continues for {target.name} {target.revision[:12]}, which has the same "
            "shapes",
            flush=True,
        )
    now = run.config.served_quantization(target.quantization)
    if start and start.precision and start.precision.quantization != now:
        print(
            f"training.start_from={start.draft}: that draft was trained on hidden states in "
            f"{start.precision.quantization or FLOATS}, and continues on hidden states in {now or FLOATS}",
            flush=True,
        )


def _check_precision(run: RunWithTarget) -> None:
    """Raise Refusal for a quantized target whose hidden states would be captured at another precision."""
    quantization = run.target.quantization
    if quantization and run.config.generator.engine == "transformers":
        raise Refusal(
            f"the target is quantized ({quantization}), and generator.engine=transformers computes with dequantized "
            "weights: a draft must learn the hidden states that it will be served, so set generator.engine=sglang"
        )


def _inference_gpus(config: RunConfig) -> list[int]:
    """Memory of the GPUs that inference would lease, as far as this machine knows."""
    inventory = read_gpus() if config.pools.kind == "local" and config.pools.inference_gpus else None
    smallest = min((gpu.total for gpu in inventory.devices), default=0) if inventory else 0
    return [smallest] * config.pools.inference_gpus


def _draft(recipe: RunConfig, target: TargetRecord) -> Draft:
    """Build the draft on the meta device, so that its own checks run."""
    config = recipe.draft
    size = config.vocabulary_size(target.vocab_size)
    vocabulary = DraftVocabulary.by_frequency(torch.zeros(target.vocab_size), size)
    with torch.device("meta"):
        embedding = torch.empty(target.vocab_size, target.hidden_size)
        return build_draft(config, embedding, vocabulary, recipe.target.aux_layer_ids)


def _check_axes(config: RunConfig, target: Path) -> None:
    """Raise Refusal for a draft that counts positions along axes that its target does not have."""
    text = read_model_config(target).get_text_config()
    if getattr(config.draft, "mrope_section", None) and "mrope_section" not in (text.rope_parameters or {}):
        raise Refusal(
            "draft.mrope_section: the target counts positions along one axis (its config.json has no mrope_section): "
            "leave it out"
        )


def _tell_of_scaling(config: RunConfig, target: Path) -> None:
    """Print that the draft lacks its target's scaling of positions, of a kind that drafts do not have."""
    rope = getattr(read_model_config(target).get_text_config(), "rope_parameters", None) or {}
    kind = (rope.get("full_attention", rope) or {}).get("rope_type", "default")  # by layer type (Gemma 3)
    # `proportional` turns a part of each head's dimensions (Gemma 4), and stretches nothing.
    if kind not in ("default", "proportional", *OF_TYPE) and getattr(config.draft, "rope_scaling", kind) is None:
        print(
            f"the target scales positions by {kind}, which drafts do not have: this one's are not scaled, so texts "
            "longer than the target's original context may be predicted worse; draft.rope_scaling sets another kind",
            flush=True,
        )


def _check_lengths(config: RunConfig, target: Path) -> None:
    """Raise Refusal for texts longer than the target's context, beyond which its hidden states mean nothing, and for
    continuations too short for a step that accepts everything."""
    context = max(read_served_target(target).context_length, config.generator.sglang.context_length or 0)
    benchmark = config.benchmark
    lengths = {
        "data.max_tokens": config.data.max_tokens,
        "benchmark.prompt_tokens + benchmark.max_new_tokens": benchmark.prompt_tokens + benchmark.max_new_tokens,
    }
    for name, length in lengths.items():
        if length > context:
            raise Refusal(f"{name} is {length}, and the target's context ends at {context} tokens: lower it to that")
    # The first token is the prefill's, and the last one closes the step. Counting only steps that reject misleads.
    whole = benchmark.lookahead + 2
    if benchmark.max_new_tokens < whole:
        raise Refusal(
            f"benchmark.max_new_tokens is {benchmark.max_new_tokens}, and a step in which all of "
            f"benchmark.lookahead={benchmark.lookahead} tokens are accepted needs {whole}: raise it"
        )


def _check_disk(run: RunWithTarget, parameters: int) -> None:
    # One more than is kept, because a new checkpoint is complete before the oldest is removed. The export and its
    # copies in the registry take less than another one.
    kept = run.config.training.keep_checkpoints
    needed = (kept + 2) * parameters * CHECKPOINT_BYTES_PER_PARAMETER
    free = shutil.disk_usage(run.folder.path).free
    if free < needed:
        raise Refusal(
            f"the disk of {run.folder.path} has {free / 2**30:.1f} GiB free, and {kept} "
            f"checkpoints of a draft with {parameters / 1e6:.0f} million parameters, with its export, take "
            f"{needed / 2**30:.1f} GiB: free some, put runs elsewhere ($DRAFTSMITH_RUNS), or lower "
            "training.keep_checkpoints"
        )


def check_prompts(run: RunWithTarget) -> None:
    """Read all prompts for regeneration. Raises Refusal for those that would stop the run later."""
    data = recipe_data(run.config)
    prompts = list(read_excluded_prompts(data.exclude))
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(run.target.path)
    SampleEncoder(tokenizer, data, run.config.target.add_bos, excluded=BenchmarkPrompts(prompts))
    documents, refusals = 0, list[str]()
    with TemporaryDirectory() as images:
        prompter = recipe_prompter(run, Path(images))
        for document in counting(training_documents(data), "checking prompts"):
            check_answerable(document)
            documents += 1
            dialogue = Dialogue(document, data.images is not None)
            if prompter.next(dialogue) is None:
                refusals.append(dialogue.fault)
    check_refused(refusals, documents, data)
    if documents < 2:
        raise Refusal(f"data.source {data.source} holds {documents} documents: give at least two, one is held out")


def check_live(run: RunWithTarget) -> None:
    """Raise Refusal unless every server of the recipe can be learned from, and private data can be searched for.

    A server that is restarted is waited for, as long as one may take to start.
    """
    live = run.config.generator.live
    assert live is not None, "called for runs that learn from servers"
    private_data_finder()
    size, whole = run.config.draft.vocabulary_size(run.target.vocab_size), run.target.vocab_size
    if size < whole and not run.folder.start.is_dir():
        raise Refusal(
            f"{run.config.draft_name} has no champion to start from, and {size:,} of the target's {whole:,} tokens "
            "would be chosen by the first few requests: train a first draft on other text, or set draft.vocab_size to "
            f"{whole}"
        )
    deadline = time.monotonic() + run.config.generator.sglang.start_timeout_s
    for server in live.servers:
        tap = open_tap(server, wanted_of(run), Event(), deadline - time.monotonic())
        assert tap is not None, "nobody stops this wait"
        tap.close()
    print(f"learning from users of {len(live.servers)} servers: {live.consent}", flush=True)


def main() -> None:
    folder = RunFolder(Path(sys.argv[1]).absolute())
    run = RunWithTarget(folder, read_config(folder.config), TargetRecord.read(folder.target))
    check_settings(run)
    if run.config.data.regeneration is not None:
        check_prompts(run)
    if run.config.generator.live is not None:
        check_live(run)


if __name__ == "__main__":
    run_main(main)
