"""The model card of an exported draft: `README.md` beside its weights.

Until the draft is benchmarked its card says so in place of figures. Names of folders, never their paths: cards are
published.
"""

import json
from pathlib import Path

from infra.files.atomic import sha256_file, write_atomically
from infra.provenance import git_sha
from infra.records.acceptance import BenchmarkResult
from infra.records.benchmark_text import acceptance_tables, findings, text_of
from infra.records.data_path import TargetRecord
from infra.records.drafts import BLOCK, CONFIG, CapturePrecision
from infra.templates import render
from models.config.recipe import RunConfig
from models.export.description import UNQUANTIZED_DRAFT, vllm_method
from models.export.serving_settings import SERVING
from models.run import PreparedRun

CARD, CHAT_TEMPLATE = "README.md", "chat_template.jinja"
TEMPLATE = Path(__file__).with_name("card.md.jinja")
SGLANG_SINCE, VLLM_SINCE = "0.5.23", "0.32.0"
"""The oldest versions that such files were served by."""


def write_card(run: PreparedRun, result: BenchmarkResult | None) -> None:
    """Write the card of the run's export, in place of the one that is there."""
    export, config, target = run.folder.export, run.config, run.target
    settings = json.loads((export / CONFIG).read_text())
    block, lookahead, sglang = settings[BLOCK], config.benchmark.lookahead, []
    if block["served_by"]:
        # A block is served whole, whatever lookahead it was measured at.
        lookahead = config.draft.lookaheads(lookahead)[-1]
        sglang = [*config.draft.engine_arguments(lookahead), *config.draft.dtype_arguments(settings["dtype"])]
        sglang += unquantized_draft(config, target)
    quantization = config.served_quantization(target.quantization)
    method = vllm_method(settings)
    vllm: dict[str, object] = {"model": "DRAFT", "method": method, "num_speculative_tokens": lookahead}
    if quantization:
        vllm["quantization"] = None  # otherwise vLLM too would take the target's for the draft
    paths = (path for path in sorted(export.rglob("*")) if path.is_file() and path != export / CARD)
    card = render(
        TEMPLATE,
        config=config,
        target=target,
        samples=run.samples,
        hub_id=config.target.hub_id,
        name=config.target.hub_id or Path(target.name).name,
        licence_name=json.dumps(target.licence),
        proposed=config.draft.vocabulary_size(target.vocab_size),
        run=run.folder.name,
        commit=git_sha(),
        block=block,
        reads=_read_of_target(config),
        result=result,
        acceptance=acceptance_tables(result) if result else {},
        judged=text_of(result) if result else "",
        lossless=findings(result)["Lossless"] if result else "",
        gate=findings(result)["Gate"] if result else "",
        sglang=sglang,
        quantization=quantization,
        precision=CapturePrecision.read(run.folder.precision) if quantization else None,
        sglang_since=SGLANG_SINCE,
        vllm_since=VLLM_SINCE,
        vllm=json.dumps(vllm) if method else None,
        has_serving=(export / SERVING).is_dir(),
        chat_template=["--chat-template", f"DRAFT/{CHAT_TEMPLATE}"] if (export / CHAT_TEMPLATE).is_file() else [],
        template_arguments=json.dumps(config.data.template_arguments) if config.data.template_arguments else None,
        files={str(path.relative_to(export)): sha256_file(path) for path in paths},
    )
    write_atomically(export / CARD, card)


def _read_of_target(config: RunConfig) -> str:
    """Which outputs of the target the draft reads."""
    layers = config.draft.layers_read(config.target.aux_layer_ids)
    if not layers:
        return "the target's last hidden state, after the final norm,"
    outputs = "output of the target's layer" if len(layers) == 1 else "outputs of the target's layers"
    return f"the {outputs} {', '.join(map(str, layers))} (counted from 0)"


def unquantized_draft(config: RunConfig, target: TargetRecord) -> list[str]:
    """SGLang's further arguments where the target is quantized: the draft is not."""
    if config.served_quantization(target.quantization) is None:
        return []
    loading = config.generator.sglang.quantization
    return [*UNQUANTIZED_DRAFT, *(["--quantization", loading] if loading else [])]
