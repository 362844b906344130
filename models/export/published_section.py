"""A part of a published draft's `config.json`, of which every setting has to be taken."""

from collections.abc import Mapping
from typing import Any

from infra.refusal import Refusal

Settings = Mapping[str, Any]

PASSED_OVER = frozenset(
    name
    for line in (
        # Who wrote the file and for whom.
        "_name_or_path auto_map transformers_version model_type target_model_type speculators_version verifier",
        "speculators_config has_no_defaults_at_init num_target_layers target_num_hidden_layers",
        # Which layers have experts, of targets that have some.
        "decoder_sparse_step mlp_only_layers",
        # Precision, cache, training; the weights are there.
        "dtype torch_dtype use_cache use_bfloat16 torchscript initializer_range attention_dropout hidden_dropout",
        "pretraining_tp embed_requires_grad reuse_target_lm_head max_window_layers max_position_embeddings",
        # Tokens and texts.
        "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix",
        # What older versions of transformers wrote into every configuration.
        "add_cross_attention architectures bad_words_ids begin_suppress_tokens chunk_size_feed_forward",
        "cross_attention_hidden_size diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder",
        "is_encoder_decoder label2id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups",
        "num_beams num_return_sequences output_attentions output_hidden_states output_scores problem_type pruned_heads",
        "remove_invalid_values repetition_penalty return_dict return_dict_in_generate suppress_tokens",
        "task_specific_params temperature tf_legacy_loss tie_encoder_decoder top_k top_p typical_p",
    )
    for name in line.split()
)
"""Settings that change nothing of what a draft proposes."""


class Section:
    """A part of the file, of which every setting has to be taken."""

    def __init__(self, settings: Settings, place: str = ""):
        self.left, self.place = dict(settings), place

    def take(self, name: str, default: Any = None) -> Any:
        """The setting, or the default where it is missing or null."""
        value = self.left.pop(name, None)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """The setting. Raises KeyError where it is missing or null."""
        if self.left.get(name) is None:
            raise KeyError(name)
        return self.left.pop(name)

    def section(self, name: str) -> "Section":
        return Section(self.take(name, {}), f"{self.place}{name}.")

    def expect(self, **values: Any) -> None:
        """Raise Refusal unless each setting is missing or has this value."""
        for name, value in values.items():
            found = self.take(name, value)
            if found != value:
                raise Refusal(f"its {self.place}{name} is {found!r}, drafts here have {value!r}: give another draft")

    def all_taken(self) -> None:
        """Raise Refusal for a setting that nobody asked for, unless it changes nothing, or is null."""
        for name, value in self.left.items():
            if name not in PASSED_OVER and value not in (None, {}, []):
                raise Refusal(
                    f"its {self.place}{name} is {value!r}, a setting that drafts here do not have: give another draft"
                )
