"""Mixtures of experts in a layer of the target's kind: sizes and routing."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from infra.config import Count, StrictConfig
from infra.refusal import Refusal

COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
"""What families call the number of experts."""


class Experts(StrictConfig):
    """A row is read by the few experts that a router chooses for it, and by the shared ones."""

    count: Count = Field(description="Experts to choose from.")
    per_token: Count = Field(description="Experts that read a row.")
    intermediate_size: Count = Field(description="Hidden size of an expert.")
    shared_size: int = Field(
        default=0, ge=0, le=2**22, description="Hidden size of the experts that read every row, together; 0: none."
    )
    scoring: Literal["softmax", "sigmoid"] = Field(
        description="`softmax`: an expert's score is its share among all (Qwen). `sigmoid`: it is its own, and a bias "
        "that is not trained has a part in the choice (DeepSeek-V3, GLM)."
    )
    groups: Count = Field(default=1, description="Equal groups of experts, of which the best are chosen first.")
    groups_per_token: Count = Field(default=1, description="Groups that a row's experts are chosen from.")
    normed: bool = Field(default=True, description="Whether the chosen experts' scores are divided by their sum.")
    scaling: float = Field(default=1.0, gt=0, le=1_000_000, description="Scaling factor of the routed experts' output.")

    @model_validator(mode="after")
    def _can_choose(self) -> "Experts":
        size, rest = divmod(self.count, self.groups)
        if rest or self.groups_per_token > self.groups or self.per_token > size * self.groups_per_token:
            raise Refusal(
                f"{self.per_token} of {self.count} experts in {self.groups_per_token} of {self.groups} groups cannot "
                "be chosen: correct draft.experts"
            )
        if self.groups > 1 and size < 2:
            raise Refusal(f"{self.groups} groups of {self.count} experts: a group has two or more, lower draft.experts")
        return self

    def chosen_weights(self, hidden: int) -> int:
        """Of matrices that a row passes: the router, its experts, the shared ones."""
        active = self.per_token * self.intermediate_size + self.shared_size
        return hidden * (self.count + 3 * active + self.gates_shared)

    def idle_weights(self, hidden: int) -> int:
        """Of experts that a row does not pass."""
        return 3 * hidden * (self.count - self.per_token) * self.intermediate_size

    @property
    def gates_shared(self) -> bool:
        """Whether a sigmoid of the row scales what the shared experts give (Qwen)."""
        return self.scoring == "softmax" and self.shared_size > 0

    @property
    def frozen(self) -> int:
        """Elements of the bias that has a part in the choice."""
        return self.count if self.scoring == "sigmoid" else 0

    def kept(self, hidden: int, item: int) -> int:
        """Bytes of a row that stay for the backward pass, beside its input and its output."""
        # Gate and up projection of each expert; scores of all experts; the chosen ones, their shares and their order.
        projections = 2 * (self.per_token * self.intermediate_size + self.shared_size) * item
        routing = 4 * self.count + 28 * self.per_token
        return projections + routing + self.gates_shared * (hidden * item + 4)

    def inner(self, hidden: int, item: int) -> int:
        """Bytes of a row while its experts are computed."""
        return self.per_token * (2 * hidden + 4 * self.intermediate_size) * item


def target_experts(text: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """The mixture in the layers of a target whose `config.json` says `text`; None for a target without one.

    `kind` is its model type. Raises KeyError for a size that it does not say, Refusal for another routing.
    """
    count = next((text[name] for name in COUNTS if text.get(name)), None)
    if count is None:
        return None
    size = text["moe_intermediate_size"]
    found = {"count": count, "per_token": text["num_experts_per_tok"], "intermediate_size": size}
    found["normed"] = bool(text.get("norm_topk_prob", True))
    if kind.startswith("qwen"):
        return found | {"scoring": "softmax", "shared_size": text.get("shared_expert_intermediate_size") or 0}
    if text.get("scoring_func", "sigmoid") != "sigmoid" or text.get("topk_method", "noaux_tc") != "noaux_tc":
        raise Refusal(
            f"draft.method=mtp: the experts of this {kind} are chosen by {text.get('scoring_func')}, "
            f"{text.get('topk_method')}, which is not supported: choose another draft.method"
        )
    return found | {
        "scoring": "sigmoid",
        "shared_size": text.get("n_shared_experts", 1) * size,
        "groups": text.get("n_group") or 1,
        "groups_per_token": text.get("topk_group") or 1,
        "scaling": float(text.get("routed_scaling_factor", 1.0)),
    }
