"""The HSTU layer (Zhai et al., ICML 2024, arXiv 2402.17152): pointwise SiLU attention, gated, without softmax.

y       = LayerNorm(x)
u,v,q,k = split(SiLU(y W_uvqk + b_uvqk))
a       = sum_j SiLU(q·k_j / sqrt(d)) / scaling_seqlen * v_j       over visible j
out     = (LayerNorm(a) * u) W_proj + x
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from recexp.layers.attention import KV, Attention
from recexp.layers.backbone import register_backbone
from recexp.layers.fused import fused_hstu_layer
from recexp.layers.linear import Linear, rowwise
from recexp.layers.paged_kv import append_kv

if TYPE_CHECKING:
    from recexp.config import ModelConfig


class HSTULayer(nn.Module):
    """One layer, [T, hidden_size] → [T, hidden_size]. Weights as in nn.Linear; uvqk's rows in the order u, v, q, k."""

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int, *, scaling_seqlen: float, residual: bool = True,
        eps: float = 1e-5, dropout: float = 0.0, backend: str = "reference", fused: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads, self.head_dim, self.residual, self.fused = num_heads, head_dim, residual, fused
        self.input_norm = nn.LayerNorm(hidden_size, eps=eps)
        self.uvqk = Linear(hidden_size, 4 * num_heads * head_dim)
        self.attention = Attention("silu", head_dim**-0.5, scaling_seqlen, backend)
        self.output_norm = nn.LayerNorm(num_heads * head_dim, eps=eps)
        self.dropout = nn.Dropout(dropout)
        self.proj = Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(
        self, x: Tensor, seq_offsets: Tensor, num_candidates: Tensor, max_seqlen: int | None = None,
        kv: KV | None = None,
    ) -> Tensor:  # fmt: skip
        """x: [T, hidden_size]; seq_offsets, num_candidates, max_seqlen, kv: as in ``attend``. kv: appended to.

        With ``fused`` and without gradients, the kernels of ``recexp.layers.fused``, or a ValueError that says why not.
        """
        if self.fused and not torch.is_grad_enabled():
            return fused_hstu_layer(self, x, seq_offsets, num_candidates, max_seqlen, kv)
        uvqk = rowwise(silu, self.uvqk(self.input_norm(x))).unflatten(-1, (4, self.num_heads, self.head_dim))
        u, v, q, k = uvqk.unbind(dim=1)  # each [T, H, d], strided rows
        if kv is not None:
            append_kv(*kv, k, v, seq_offsets)
        a = self.attention(q, k, v, seq_offsets, num_candidates, max_seqlen=max_seqlen, kv=kv)
        out = self.proj(self.dropout(self.output_norm(a.flatten(1)) * u.flatten(1)))
        return out + x if self.residual else out


@register_backbone("hstu")
def build(config: ModelConfig) -> nn.Module:
    return HSTULayer(
        config.hidden_size, config.num_heads, config.head_dim, scaling_seqlen=config.scaling_seqlen,
        residual=config.residual, dropout=config.dropout, backend=config.attention_backend, fused=config.fused_layers,
    )  # fmt: skip
