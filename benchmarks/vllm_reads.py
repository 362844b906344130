# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""`python vllm_reads.py TARGET EXPORT...`, in vLLM's environment: what vLLM makes of exported drafts.

Prints JSON, for each EXPORT: the settings that vLLM's own code has resolved for a server with default arguments.
"""

import json
import sys
from pathlib import Path
from typing import Any

import vllm.config.vllm
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.qwen3_dflash import _resolve_layer_attention
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

HEADS = {
    "DFlash2DraftModel": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "Qwen3DSparkModel": (
        "sample_from_anchor",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    ),
}
"""What vLLM's model of each architecture reads of a draft's heads: DFlash 2's in `dflash_config`, DSpark's outside."""


def read(target: str, export: Path) -> dict[str, Any]:
    given = json.loads((export / "speculative.json").read_text())
    config = EngineArgs(model=target, speculative_config=given | {"model": str(export)}).create_engine_config()
    speculation = config.speculative_config
    assert speculation is not None
    draft, settings = speculation.draft_model_config, speculation.draft_model_config.hf_config
    with set_current_vllm_config(config):
        if speculation.method in ("dflash", "dspark"):
            attention = [_resolve_layer_attention(settings, layer) for layer in range(settings.num_hidden_layers)]
        else:
            attention = [(None, True)] * settings.num_hidden_layers
    block = getattr(settings, "dflash_config", None) or {}
    heads = {
        name: block[name] if "DFlash2DraftModel" in draft.architectures else getattr(settings, name)
        for architecture in draft.architectures
        for name in HEADS.get(architecture, ())
    }
    aux_layers = get_eagle3_aux_layers_from_config(speculation)
    return {
        "method": speculation.method,
        "architectures": draft.architectures,
        "tokens": speculation.num_speculative_tokens,
        "dtype": [str(config.model_config.dtype), str(draft.dtype)],
        "length": [config.model_config.max_model_len, draft.max_model_len],
        # vLLM counts layers by their inputs.
        "aux_layer_ids": [layer - 1 for layer in aux_layers or ()],
        "features": getattr(settings, "num_aux_hidden_states", None) or len(aux_layers or ()),
        "vocabulary": getattr(settings, "draft_vocab_size", None) or settings.vocab_size,
        "attention": [{"window": window, "causal": causal} for window, causal in attention],
        "heads": heads,
        "mask_token_id": block.get("mask_token_id", getattr(settings, "mask_token_id", None)),
        "norms": [bool(getattr(settings, name, False)) for name in ("fc_norm", "norm_before_fc", "norm_output")],
    }


if __name__ == "__main__":
    # With Triton, as on a GPU, it takes its second model runner; the first one refuses layers of both types.
    vllm.config.vllm.HAS_TRITON = True
    print(json.dumps([read(sys.argv[1], Path(argument)) for argument in sys.argv[2:]]))
