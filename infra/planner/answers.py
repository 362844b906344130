"""How long the target takes to answer the prompts (data.regeneration).

A step of decoding reads the weights and the KV cache of its requests once, and computes one token of each. The slower
of memory and arithmetic decides.
"""

from infra.planner.devices import Device
from infra.planner.shapes import ITEM_BYTES, Precision, TargetShape, prefill_flops
from infra.records.data_path import Record

FREE_SHARE = 0.85
"""Share of a device's memory for weights and KV cache in transformers. Assumed."""


class Answers(Record):
    """What is asked of the target, and on how many devices."""

    prompt_tokens: int
    """Mean."""
    answer_tokens: int
    """Mean."""
    copies: int
    """Of the target."""
    devices_per_copy: int
    most_requests: int
    """At a time, on each copy."""
    bandwidth_share: float
    """Share of the memory bandwidth that decoding reaches."""
    memory_share: float = FREE_SHARE
    """Share of a device's memory for weights and KV cache."""
    before: float = 1.0
    """Share of the answers that are generated before the training; the others while they are captured."""

    def requests(self, target: TargetShape, precision: Precision, device: Device) -> int:
        """Those whose KV cache fits beside the weights of a copy."""
        if not device.memory_bytes:
            return self.most_requests
        item, tokens = ITEM_BYTES[precision], self.prompt_tokens + self.answer_tokens
        room = self.memory_share * device.memory_bytes * self.devices_per_copy - target.weight_bytes(precision)
        return max(1, min(self.most_requests, int(room / (tokens * target.cache_per_token * item))))

    def tokens_per_s(self, target: TargetShape, precision: Precision, device: Device, compute_share: float) -> float:
        """Generated tokens per second of all copies, prefill of the prompts included."""
        requests, item = self.requests(target, precision, device), ITEM_BYTES[precision]
        flops_per_s = device.peak[precision] * compute_share * self.devices_per_copy
        bytes_per_s = device.bandwidth * self.bandwidth_share * self.devices_per_copy
        cached = requests * (self.prompt_tokens + self.answer_tokens / 2) * target.cache_per_token
        head = target.hidden_size * target.vocab_size
        step_s = max(
            (target.weight_bytes(precision) + cached * item) / bytes_per_s,
            requests * 2 * (target.active_parameters + head) / flops_per_s,
        )
        prefill_s = prefill_flops(target, self.prompt_tokens, top_token=False) / flops_per_s
        return self.copies / (step_s / requests + prefill_s / self.answer_tokens)
