"""Settings of SGLang servers."""

from typing import Self

from pydantic import ConfigDict, Field, model_validator

from infra.config import Count, Seconds, StrictConfig, Tokens
from infra.refusal import Refusal

LARGE_GPU_BYTES = 64 * 2**30
SLOWEST_TOKEN_S = 0.25
"""An answer arrives whole, so that a request waits for all of its tokens, beside those of all other requests."""


def decoding_requests(memory_bytes: int) -> int:
    """Requests that a copy of the target decodes at a time on GPUs with this memory; more gain little."""
    return 256 if memory_bytes >= LARGE_GPU_BYTES else 128


class SGLangConfig(StrictConfig):
    """One server per generator. SGLang chooses what is not set."""

    model_config = ConfigDict(title="SGLang")

    requests_in_flight: Count = Field(default=32, description="Requests that a generator keeps in flight.")
    tensor_parallel: Count | None = Field(
        default=None,
        description="Tensor-parallel size, over all machines of a generator; default: its GPUs, or 1 on the CPU.",
    )
    data_parallel: Count = Field(default=1, description="Copies of the target behind one server.")
    attention_data_parallel: Count = Field(
        default=1,
        description="Groups of the tensor-parallel ranks that compute attention for requests of their own, each with "
        "its own cache; with latent attention (DeepSeek, Kimi), whose cache every rank would otherwise hold whole.",
    )
    expert_parallel: Count | None = Field(
        default=None, description="Ranks over which a layer's experts are dealt out; default: every expert is divided."
    )
    quantization: str | None = Field(default=None, description="SGLang's name of a quantization, for instance fp8.")
    memory_fraction: float | None = Field(default=None, gt=0, lt=1, description="Memory share of weights and KV cache.")
    context_length: Tokens | None = Field(default=None, description="Longest request in tokens; default: the target's.")
    chunked_prefill_tokens: Tokens | None = Field(
        default=None, description="Chunk size of prefill, in tokens; longer prompts take several chunks."
    )
    attention_backend: str | None = Field(default=None, description="SGLang's name of an attention backend.")
    arguments: tuple[str, ...] = Field(
        default=(),
        description="More arguments for sglang.launch_server. Text that was regenerated with others is not used again.",
    )
    start_timeout_s: Seconds = Field(
        default=900.0,
        description="Seconds until a server must be ready, and then until its first answer, for which it compiles "
        "kernels on a new GPU.",
    )
    request_timeout_s: Seconds = Field(default=300.0, description="Seconds without an answer before a restart.")

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.attention_data_parallel > 1 and self.data_parallel > 1:
            raise Refusal(
                f"data_parallel is {self.data_parallel} and attention_data_parallel {self.attention_data_parallel}: "
                "SGLang takes one of them; set the other to 1"
            )
        return self

    def check_gpu_dtype(self, dtype: str, setting: str) -> None:
        """Raise Refusal for float32 on GPUs, where the attention that SGLang chooses takes half precision only."""
        if dtype == "float32" and self.attention_backend is None:
            raise Refusal(
                f"{setting}=float32: SGLang's attention on GPUs takes half precision only; set bfloat16, "
                "or generator.sglang.attention_backend to one that takes float32, such as torch_native"
            )
