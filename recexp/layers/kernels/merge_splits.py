"""Sum of the partial results that attention left when its keys were split over programs.

    silu:    out = sum_s sums_s / N
    softmax: m = max_s m_s;  out = sum_s 2^(m_s - m) sums_s / sum_s 2^(m_s - m) total_s

Added in the order of s by one program a group of rows: the result does not depend on which program was done first.
"""

import triton
import triton.language as tl

from recexp.layers.kernels.attention import LOWEST, wait_for_previous


@triton.jit(do_not_specialize=["num_rows"])
def merge_splits(
    sums, stats, out, inverse_n, num_rows, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, SOFTMAX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """sums float32 [SPLITS, num_rows, d], stats float32 [SPLITS, num_rows, 2] -> out [num_rows, d]; a row is one
    head's. SPLITS is a constant so that all loads are under way at once."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = row < num_rows
    mask = inside[:, None] & (columns < HEAD_DIM)[None, :]
    address = row[:, None] * HEAD_DIM + columns[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for split in tl.static_range(SPLITS):
        skip = tl.cast(split, tl.int64) * num_rows
        part = tl.load(sums + skip * HEAD_DIM + address, mask=mask, other=0.0)
        if SOFTMAX:
            part_top = tl.load(stats + (skip + row) * 2, mask=inside, other=LOWEST)
            part_total = tl.load(stats + (skip + row) * 2 + 1, mask=inside, other=0.0)
            new_top = tl.maximum(top, part_top)
            kept, added = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
            acc = acc * kept[:, None] + part * added[:, None]
            total = total * kept + part_total * added
            top = new_top
        else:
            acc += part
    scale = 1.0 / tl.where(total > 0, total, 1.0)[:, None] if SOFTMAX else inverse_n
    tl.store(out + address, (acc * scale).to(out.dtype.element_ty), mask=mask)
