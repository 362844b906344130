"""Names of an MTP layer's tensors in the checkpoints of each family."""

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


def prefix_of(config: MtpConfig) -> str:
    """Where the names of the layer's tensors begin."""
    return PREFIX[config.family].format(index=config.layer_index)


def stored_name(config: MtpConfig, ours: str) -> str:
    """The checkpoint's name of one of our parameters."""
    before = prefix_of(config)
    if ours.startswith("layers.0."):
        return before + OF_LAYER[config.family] + ours.removeprefix("layers.0.")
    module, _, last = ours.rpartition(".")
    return f"{before}{OTHERS[config.family][OURS.index(module)]}.{last}"
