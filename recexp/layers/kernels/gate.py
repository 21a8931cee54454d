"""LayerNorm of the attention's result times the gate u, straight from the parts that split keys left.

    a = sum_s sums_s / N   (or the attention's result as it is)
    y = ((a - mean(a)) / sqrt(var(a) + eps) * weight + bias) * u

Parts are added in the order of s. With this, splitting the keys costs a layer no launch of its own.
"""

import triton
import triton.language as tl

from recexp.layers.kernels.attention import wait_for_previous
from recexp.layers.kernels.layer_norm import normalise


@triton.jit(do_not_specialize=["num_rows"])
def gate(
    attended, sums, u, weight, bias, y, inverse_n, eps, num_rows, u_stride, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """attended [T, WIDTH], or with SPLITS > 1 sums float32 [SPLITS, T, WIDTH]; u by row stride; y [T, WIDTH]."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    if SPLITS > 1:
        a = tl.zeros([COLUMNS], tl.float32)
        for split in tl.static_range(SPLITS):
            a += tl.load(sums + (tl.cast(split, tl.int64) * num_rows + row) * WIDTH + columns, mask=mask, other=0.0)
        a = a * inverse_n
    else:
        a = tl.load(attended + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    gated = normalise(a, columns, weight, bias, eps, WIDTH)
    gated = gated * tl.load(u + row * u_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + columns, gated.to(y.dtype.element_ty), mask=mask)
