"""Names of an MTP layer's tensors in the checkpoints of each family."""

from collections.abc import Collection, Iterator

from torch import Tensor

from models.config.mtp import MtpConfig

PREFIX = {"mimo": "model.mtp_layers.0.", "qwen": "mtp.", "deepseek": "model.layers.{index}."}
OF_LAYER = {"mimo": "", "qwen": "layers.0.", "deepseek": ""}
"""What comes before the decoder layer's own names."""
OTHERS = {
    "mimo": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
    "qwen": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "deepseek": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
}
OURS = ("fc", "embedding_norm", "hidden_norm", "norm")
SHARED = {"deepseek": ("mlp.shared_expert.", "mlp.shared_experts.")}
"""Ours, and a family's other name of the experts that read every row."""
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def prefix_of(config: MtpConfig) -> str:
    """Where the names of the layer's tensors begin."""
    return PREFIX[config.family].format(index=config.layer_index)


def stored_name(config: MtpConfig, ours: str) -> str:
    """The checkpoint's name of one of our parameters; of all experts' together, the one that Qwen3.6 has."""
    before = prefix_of(config)
    if ours.startswith("layers.0."):
        name = ours.removeprefix("layers.0.").replace(*SHARED.get(config.family, ("", "")))
        return before + OF_LAYER[config.family] + name
    module, _, last = ours.rpartition(".")
    return f"{before}{OTHERS[config.family][OURS.index(module)]}.{last}"


def stored_tensors(config: MtpConfig, ours: str, tensor: Tensor, held: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """One of our tensors as a checkpoint that holds the names `held` has it: whole, or a view for each expert.

    Qwen3.6 has all experts' weights in one tensor, under two names; others a tensor for each.
    """
    name = stored_name(config, ours)
    if not ours.endswith(STACKS) or name in held:
        yield name, tensor
        return
    before, _, kind = name.rpartition(".")
    for number, matrix in enumerate(tensor.unbind()):
        parts = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
        for projection, part in zip(kind.removesuffix("_proj").split("_"), parts, strict=True):
            yield f"{before}.{number}.{projection}_proj.weight", part
