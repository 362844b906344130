"""What the target's `config.json` decides of a recipe: shape, layers to read, sizes of the draft's layers.

Reads local files or the Hub's small JSON files, no weights, and imports no torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infra.hub_errors import client_error, hub_refusals
from infra.planner.shapes import TargetShape, target_shape
from infra.planner.target_files import MODELOPT_FILE, read_target_config, with_modelopt
from infra.refusal import Refusal
from infra.settings import cache_folder, expanded
from models.config.benchmark import BenchmarkConfig
from models.config.draft import METHODS, parse_draft_config
from models.config.draft_base import LayerShape, MethodConfig
from models.config.latent import LatentAttention
from models.config.mtp import own_layer
from models.config.rope import OF_TYPE
from models.config.target import TargetConfig, TinyRecipe

HUB_S = 2.0
"""For the Hub's first answer."""
WIDTH_MULTIPLE = 128
"""Where the target names no feed-forward size, the chosen one is a multiple of this."""
HEAD_DIM, HEADS_MULTIPLE, KV_HEADS = 128, 16, 8
"""Where the target's heads do not suit a draft: the size of its heads, what their number is a multiple of, so that
tensor parallelism can divide them, and the number of key-value heads."""
LARGEST_HEAD = 256
"""Largest head of common attention kernels."""
CHAT_PROMPT_TOKENS = 512
"""Longest prompt of the benchmark where text is rendered by a chat template, unless samples are shorter."""
Tree = dict[str, Any]


def read_settings(target: TargetConfig, hint: str = "") -> Tree:
    """The target's `config.json`. Raises Refusal, which `hint` ends, if it is neither here nor on the Hub."""
    if target.source == "tiny":
        tiny = TinyRecipe()
        return {
            "hidden_size": tiny.hidden_size,
            "num_hidden_layers": tiny.layers,
            "vocab_size": tiny.vocab_size,
            "num_attention_heads": tiny.heads,
            "num_key_value_heads": tiny.kv_heads,
            "intermediate_size": tiny.intermediate_size,
        }
    return read_target_config(_config_file(target, hint))


def _config_file(target: TargetConfig, hint: str = "") -> Path:
    """`hint`: another remedy, of a caller that wants no more than a part."""
    return _converted(target.name, hint) if target.source == "gguf-package" else _huggingface(target, hint)


def read_shape(target: TargetConfig) -> TargetShape:
    """The target's shape. Raises Refusal if it cannot be found out."""
    if target.source == "tiny":
        tree = read_settings(target)
    else:
        file = _config_file(target, ", or give the shape by plan.target")
        tree = read_target_config(file)
        if not tree.get("quantization_config"):
            tree = with_modelopt(tree, _modelopt_file(target, file))
    try:
        return target_shape(tree)
    except (KeyError, TypeError) as error:
        raise Refusal(
            f"the config.json of {target.name} does not say {error}: the planner reads Llama-like configurations; give "
            "the target's shape by plan.target"
        ) from error


def _converted(package: str, hint: str) -> Path:
    found = sorted((cache_folder() / "targets").glob(f"{package}-*/config.json"))
    if not found:
        raise Refusal(
            f"{package} is not converted yet, so its config.json is not known: run a recipe that has "
            f"target.aux_layer_ids, the draft's sizes and draft.rope_theta, as recipes/quickstart.yaml, once{hint}"
        )
    return found[-1]


def _huggingface(target: TargetConfig, hint: str) -> Path:
    folder = expanded("target.name", target.name)
    if folder.is_dir():
        return folder / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    offline = f"name a local folder{hint}"
    try:
        cached = try_to_load_from_cache(target.name, "config.json", revision=target.revision)
        if isinstance(cached, str):
            return Path(cached)
        with hub_refusals("target.name", target.name, target.revision, hint, offline):
            return _from_hub(target.name, "config.json", target.revision)
    except HFValidationError as error:
        reason = f"target.name {target.name!r} is neither a folder nor an id of the Hub"
        raise Refusal(f"{reason}: correct it{hint}") from error


def _from_hub(repository: str, name: str, revision: str | None) -> Path:
    """The file in the cache, downloaded. Raises LocalEntryNotFoundError if the Hub does not answer."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    is_away = False
    try:
        # hf_hub_download itself would try a Hub that is away six times, with longer timeouts and 23 s of pauses.
        get_hf_file_metadata(hf_hub_url(repository, name, revision=revision), timeout=HUB_S)
    except HfHubHTTPError:
        pass  # hf_hub_download raises it again, and notes in the cache that there is no such file
    except (OfflineModeIsEnabled, client_error()):
        is_away = True
    return Path(hf_hub_download(repository, name, revision=revision, etag_timeout=HUB_S, local_files_only=is_away))


def _modelopt_file(target: TargetConfig, config: Path) -> Path | None:
    """ModelOpt's file beside `config`, or on the Hub. None if there is none, or the Hub does not give it."""
    beside = config.with_name(MODELOPT_FILE)
    if beside.is_file() or target.source == "gguf-package" or expanded("target.name", target.name).is_dir():
        return beside
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    commit = config.parent.name  # of the snapshot in the cache, so that both files are of one revision
    try:
        # The cache remembers that a commit has no such file, which spares the next plan the request.
        if try_to_load_from_cache(target.name, MODELOPT_FILE, revision=commit) is not None:
            return None
        return _from_hub(target.name, MODELOPT_FILE, commit)
    except (client_error(), LocalEntryNotFoundError):
        return None  # most targets are not quantized: a plan without a network is worth more than this file


LATENT_FIELDS = tuple(LatentAttention.model_fields)
LAYER_FIELDS = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size")


def _of_method(draft: Tree) -> Tree:
    """How an engine serves such a draft by default: how many tokens it proposes, and how for sampled text."""
    try:
        config = parse_draft_config(draft)
    except ValidationError:
        return {}  # validation says what is wrong
    fields = BenchmarkConfig.model_fields
    lookahead = config.lookaheads(fields["lookahead"].default)[-1]
    most = max(lookahead, fields["max_lookahead"].default)
    return {"lookahead": lookahead, "max_lookahead": most, "sampled_proposals": config.engine_proposals}


def completed(tree: Tree) -> Tree:
    """A recipe's tree with what the target decides where the recipe is silent.

    That is `target.aux_layer_ids`, method and sizes of the draft, and of the benchmark the longest prompt and how an
    engine proposes with the method. The target's configuration is read only where a setting of it is missing. Raises
    Refusal if it cannot be read then.
    """
    if not _is_section(tree, "target") or not _is_section(tree, "draft") or "name" not in tree.get("target", {}):
        return tree  # validation says what is wrong
    draft = {"method": "eagle3"} | tree.get("draft", {})
    method = METHODS.get(str(draft["method"]), MethodConfig)
    has_layers = issubclass(method, LayerShape)
    wanted = LAYER_FIELDS if has_layers else ()
    if draft["method"] == "mtp":
        wanted = (*LAYER_FIELDS, "family")
    if wanted and draft.get("mla") is not None:
        wanted = ("num_heads", "intermediate_size", "mla")
    target = tree["target"]
    has_sizes = "aux_layer_ids" in target and all(draft.get(name) not in (None, {}) for name in wanted)
    # The default is another base than the target's, with which a draft trains without complaint.
    if not has_sizes or (has_layers and "rope_theta" not in draft):
        try:
            known = TargetConfig.model_validate(target | {"aux_layer_ids": [0]})
        except ValidationError:
            return tree
        settings = read_settings(known, ", or set draft.rope_theta (and draft.rope_scaling)" if has_sizes else "")
        text = settings.get("text_config") or settings
        try:
            if has_sizes:
                draft = _positions(text, draft) | draft
            else:
                layers = default_layers(text["num_hidden_layers"]) if method.reads_layers else []
                target = target | {"aux_layer_ids": target.get("aux_layer_ids", layers)}
                draft = {"method": draft["method"]} | (_layer(text, draft, method) if wanted else draft)
        except (KeyError, TypeError) as error:
            raise Refusal(
                f"the config.json of {target['name']} does not say {error}: set target.aux_layer_ids and "
                f"{', '.join(f'draft.{name}' for name in (*wanted, *(['rope_theta'] if has_layers else [])))} in the "
                "recipe"
            ) from error
    tree = tree | {"target": target, "draft": draft}
    if _is_section(tree, "benchmark"):
        tree = tree | {"benchmark": _of_method(draft) | tree.get("benchmark", {})}
    data = tree.get("data") or {}
    if _is_section(tree, "benchmark") and isinstance(data, dict) and data.get("chat_template") != "none":
        longest = min(CHAT_PROMPT_TOKENS, data.get("max_tokens", CHAT_PROMPT_TOKENS))
        tree["benchmark"] = {"prompt_tokens": longest} | (tree.get("benchmark") or {})
    return tree


def _is_section(tree: Tree, name: str) -> bool:
    return isinstance(tree.get(name, {}), dict)


def default_layers(num_layers: int) -> list[int]:
    """The second layer, the middle one and the fourth from the end, as EAGLE-3's authors; spread in a small target."""
    chosen = [1, num_layers // 2 - 1, num_layers - 4]
    if num_layers < 8:
        chosen = [0, (num_layers - 1) // 2, num_layers - 1]
    return sorted(set(chosen))


def _heads(text: Mapping[str, Any], as_targets: bool) -> Tree:
    """The target's heads, or usual ones where its own are of a kind that only its attention has.

    Latent attention has many heads of sizes that follow from it, and others (DeepSeek-V4, MiMo-V2) have sizes for which
    engines have no common kernel. `as_targets`: the target's in any case.
    """
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    size = text.get("head_dim") or hidden // heads
    latent, values = text.get("kv_lora_rank"), text.get("v_head_dim") or size
    if not latent and (as_targets or (size <= LARGEST_HEAD and values == size)):
        return {"num_heads": heads, "num_kv_heads": text.get("num_key_value_heads") or heads, "head_dim": size}
    if as_targets or hidden < HEADS_MULTIPLE * HEAD_DIM:
        return {"num_heads": heads, "num_kv_heads": heads, "head_dim": hidden // heads}
    several = -(-hidden // HEAD_DIM // HEADS_MULTIPLE) * HEADS_MULTIPLE
    return {"num_heads": several, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}


def _width(text: Mapping[str, Any], least: int) -> int:
    """The target's feed-forward size; a usual one where it names none, or one below `least`, as of a single expert."""
    hidden, named = text["hidden_size"], text.get("intermediate_size") or 0
    return named if named >= least else -(-8 * hidden // 3 // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _positions(text: Mapping[str, Any], draft: Tree) -> Tree:
    """The target's base and scaling of the rotary embedding."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)  # by layer type (Gemma 3)
    theta = float(rope.get("rope_theta") or text.get("rope_theta") or 10_000.0)
    kind, scaling = rope.get("rope_type", rope.get("type")), None
    # Engines ignore the scaling where there are sections.
    if kind in OF_TYPE and not draft.get("mrope_section"):
        original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
        known = rope | ({"original_max_position_embeddings": original} if original else {})
        names = ("factor", *OF_TYPE[kind])
        scaling = {"rope_type": kind} | {name: known[name] for name in names if known.get(name) is not None}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _layer(text: Mapping[str, Any], draft: Tree, method: type[MethodConfig]) -> Tree:
    """The draft's settings, completed by a layer like the target's. KeyError names what the target does not say."""
    hidden, latent = text["hidden_size"], text.get("kv_lora_rank")
    # An MTP layer is one of the target's.
    as_targets = draft["method"] == "mtp" or isinstance(draft.get("mla"), dict)
    layer = _heads(text, as_targets) | {
        "intermediate_size": _width(text, 1 if as_targets else 2 * hidden),
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
    }
    layer |= _positions(text, draft)
    if str(text.get("model_type", "")).startswith("gemma"):
        layer["fc_norm"] = True  # its residual stream grows a lot
    if draft["method"] == "mtp":
        layer |= own_layer(text)
    if draft["method"] == "eagle3" and text["vocab_size"] <= 32_000:
        layer["vocab_size"] = None
    layer = {name: value for name, value in layer.items() if name in method.model_fields}
    if isinstance(mla := draft.get("mla"), dict):
        own = {name: text[name] for name in LATENT_FIELDS if name in text} if latent else {}
        grouped = ("num_kv_heads", "head_dim")  # they follow from mla
        return {name: value for name, value in layer.items() if name not in grouped} | draft | {"mla": own | mla}
    return layer | draft
