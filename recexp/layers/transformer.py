"""The Pre-LN Transformer layer, with the same visibility rule as HSTU.

x = x + W_o softmax_j(q·k_j / sqrt(d)) v_j + b_o          q,k,v from LayerNorm(x) W_qkv + b_qkv
x = x + W_2 GELU(W_1 LayerNorm(x) + b_1) + b_2             exact (erf) GELU
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from recexp.layers.attention import KV, Attention
from recexp.layers.backbone import register_backbone
from recexp.layers.linear import GELU, Linear
from recexp.layers.paged_kv import append_kv

if TYPE_CHECKING:
    from recexp.config import ModelConfig


class TransformerLayer(nn.Module):
    """One layer, [T, hidden_size] → [T, hidden_size]; ffn_size is 4 * hidden_size unless set.

    ``residual=False`` drops both additions.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int, ffn_size: int | None = None, *, residual: bool = True,
        eps: float = 1e-5, dropout: float = 0.0, backend: str = "reference",
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads, self.head_dim, self.residual = num_heads, head_dim, residual
        ffn_size = ffn_size or 4 * hidden_size
        self.input_norm = nn.LayerNorm(hidden_size, eps=eps)
        self.qkv = Linear(hidden_size, 3 * num_heads * head_dim)
        self.attention = Attention("softmax", head_dim**-0.5, 1.0, backend)
        self.proj = Linear(num_heads * head_dim, hidden_size)
        self.ffn_norm = nn.LayerNorm(hidden_size, eps=eps)
        self.ffn = nn.Sequential(Linear(hidden_size, ffn_size), GELU(), Linear(ffn_size, hidden_size))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, seq_offsets: Tensor, num_candidates: Tensor, max_seqlen: int | None = None,
        kv: KV | None = None,
    ) -> Tensor:  # fmt: skip
        """x: [T, hidden_size]; seq_offsets, num_candidates, max_seqlen, kv: as in ``attend``. kv: appended to."""
        q, k, v = self.qkv(self.input_norm(x)).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(dim=1)
        if kv is not None:
            append_kv(*kv, k, v, seq_offsets)
        a = self.attention(q, k, v, seq_offsets, num_candidates, max_seqlen=max_seqlen, kv=kv)
        out = self.dropout(self.proj(a.flatten(1)))
        x = out + x if self.residual else out
        out = self.dropout(self.ffn(self.ffn_norm(x)))
        return out + x if self.residual else out


@register_backbone("transformer")
def build(config: ModelConfig) -> nn.Module:
    return TransformerLayer(
        config.hidden_size, config.num_heads, config.head_dim, config.ffn_size, residual=config.residual,
        dropout=config.dropout, backend=config.attention_backend,
    )  # fmt: skip
