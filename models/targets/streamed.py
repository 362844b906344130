"""A target that is larger than this machine's memory: its weights stay on disk."""

from pathlib import Path

import torch
import transformers

from models.targets.architecture import check_loaded, model_class, read_model_config


def load_streamed(folder: Path, dtype: torch.dtype, converted: Path) -> "transformers.PreTrainedModel":
    """Load a target whose weights stay on disk; accelerate reads a module's weights when it runs.

    Experts that are stored one by one are first stacked and written to the folder `converted`. Raises Refusal where
    weights are missing.
    """
    config = read_model_config(folder)
    options = {"device_map": {"": "disk"}, "offload_folder": str(converted), "output_loading_info": True}
    model, info = model_class(config).from_pretrained(folder, config=config, dtype=dtype, **options)
    check_loaded(folder, model, info)
    if getattr(config.get_text_config(), "hidden_size_per_layer_input", None):
        # Gemma 4 reads a row of this weight itself, which accelerate 1.15 does not see: it stays in memory.
        from accelerate.hooks import remove_hook_from_module  # imports modelling code

        table = model.get_input_embeddings()
        table._hf_hook.pre_forward(table)
        remove_hook_from_module(table)
    return model
