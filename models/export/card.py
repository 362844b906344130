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
from infra.records.drafts import BLOCK, CONFIG, CapturePrecision
from infra.templates import render
from models.config.recipe import RunConfig
from models.export.description import vllm_method
from models.export.serving_settings import GOODPUT, SERVING, served_lookahead, sglang_as_benchmarked
from models.run import PreparedRun

CARD, CHAT_TEMPLATE = "README.md", "chat_template.jinja"
TEMPLATE = Path(__file__).with_name("card.md.jinja")
SGLANG_SINCE, VLLM_SINCE = "0.5.23", "0.32.0"
"""The oldest versions that such files were served by."""


def write_card(run: PreparedRun, result: BenchmarkResult | None) -> None:
    """Write the card of the run's export, in place of the one that is there."""
    export, config, target = run.folder.export, run.config, run.target
    settings = json.loads((export / CONFIG).read_text())
    block, sglang = settings[BLOCK], list[str]()
    quantization, loading = config.served_quantization(target.quantization), config.generator.sglang.quantization
    if block["served_by"]:
        sglang = sglang_as_benchmarked(run, settings["dtype"])["arguments"]
        sglang += ["--quantization", loading] if quantization and loading else []
    method = vllm_method(settings)
    vllm = {"model": "DRAFT", "method": method, "num_speculative_tokens": served_lookahead(run)}
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
        has_goodput=(export / SERVING / GOODPUT).is_file(),
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
