"""DFlash 2's convolutions inside a block, around every attention and every feed-forward."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.refusal import Refusal
from models.config.dflash2 import DFlash2Config
from models.drafts.blocks.layers import BlockAttention, BlockLayer
from models.drafts.row_functions import Tables


class BlockConvolution(nn.Module):
    """Depthwise convolutions over the rows of a block, before and after a sublayer, with kernels by each row's input.

    `out[i] = sum over t of (base[t] + delta[i, t, group]) * x[i - t]`; no tap reaches another block. At the start it
    changes nothing.
    """

    def __init__(self, config: DFlash2Config, hidden_size: int):
        super().__init__()
        if hidden_size % config.conv_group_size:
            raise Refusal(
                f"draft.conv_group_size {config.conv_group_size} does not divide the target's hidden size "
                f"{hidden_size}: choose a divisor"
            )
        self.block_size, self.taps, self.group = config.block_size, config.conv_kernel_size, config.conv_group_size
        base = torch.zeros(2, self.taps, hidden_size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(hidden_size, 2 * self.taps * (hidden_size // self.group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input from rows `[A*B, H]`, and the kernels `[A*B, taps, groups]` for its output."""
        deltas = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return self._convolve(x, deltas[:, 0], 0), deltas[:, 1]

    def after(self, x: Tensor, deltas: Tensor) -> Tensor:
        """The sublayer's output `[A*B, H]`, convolved."""
        return self._convolve(x, deltas, 1)

    def _convolve(self, x: Tensor, deltas: Tensor, side: int) -> Tensor:
        rows = x.unflatten(-1, (-1, self.group)).unflatten(0, (-1, self.block_size))
        base, found = self.base_kernel[side].unflatten(-1, (-1, self.group)), torch.zeros_like(rows.flatten(0, 1))
        for tap in range(min(self.taps, self.block_size)):
            earlier = rows if not tap else F.pad(rows[:, :-tap], (0, 0, 0, 0, tap, 0))
            earlier = earlier.flatten(0, 1)
            # Apart: a sum of both kernels of all rows would be kept for the backward pass.
            found = found + base[tap] * earlier + deltas[:, tap].unsqueeze(-1) * earlier
        return found.flatten(-2).to(x.dtype)


class ConvolvedLayer(BlockLayer):
    """A block layer with convolutions around both sublayers."""

    def __init__(self, config: DFlash2Config, hidden_size: int):
        super().__init__(config, hidden_size)
        self.attention_conv = BlockConvolution(config, hidden_size)
        self.mlp_conv = BlockConvolution(config, hidden_size)

    def forward(self, hidden: Tensor, tables: Tables, attention: BlockAttention) -> Tensor:
        x, deltas = self.attention_conv.before(self.input_layernorm(hidden))
        hidden = hidden + self.attention_conv.after(self.self_attn(x, tables, attention), deltas)
        x, deltas = self.mlp_conv.before(self.post_attention_layernorm(hidden))
        out = self.mlp.weights().add_to(torch.zeros_like(hidden), x)
        return hidden + self.mlp_conv.after(out, deltas)
