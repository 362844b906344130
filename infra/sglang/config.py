"""How SGLang servers are started."""

from pydantic import ConfigDict, Field

from infra.config import StrictConfig


class SGLangConfig(StrictConfig):
    """One server per generator. What is None is left to SGLang."""

    model_config = ConfigDict(title="SGLang")

    requests_in_flight: int = Field(default=4, ge=1, le=4096, description="Requests that a generator keeps in flight.")
    tensor_parallel: int | None = Field(
        default=None, ge=1, le=4096, description="Default: the generator's GPUs; 1 on the CPU."
    )
    data_parallel: int = Field(default=1, ge=1, le=4096, description="Copies of the target behind one server.")
    quantization: str | None = Field(default=None, description="As SGLang names it, for instance fp8.")
    memory_fraction: float | None = Field(
        default=None, gt=0, lt=1, description="Share of the memory for weights and KV cache."
    )
    context_length: int | None = Field(default=None, ge=1, le=2**24, description="Default: the target's own.")
    chunked_prefill_tokens: int | None = Field(
        default=None, ge=1, le=2**24, description="Longer prompts are prefilled in chunks of so many tokens."
    )
    attention_backend: str | None = Field(default=None, description="As SGLang names it.")
    arguments: tuple[str, ...] = Field(default=(), description="More for sglang.launch_server, as it is.")
    start_timeout_s: float = Field(
        default=900.0, gt=0, le=86_400, description="A server not ready by then is given up."
    )
    request_timeout_s: float = Field(
        default=300.0, gt=0, le=86_400, description="A server silent for so long is started again."
    )
