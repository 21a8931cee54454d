"""A linear layer with what surrounds it: bias and SiLU, or a residual, and the append of new keys and values to their
pages.

    out = f(x W^T + bias)        f = SiLU or nothing;  or  out = x W^T + residual

With slots, columns [v | k] of out's four parts u, v, q, k also go to the paged table: row t's key to table row
slots[t], its value page_size rows behind it, where slots[t] >= 0. Products are added in float32 (IEEE for float32
inputs). Tiles of one group of rows follow each other, so that the weight stays in the L2 cache.
"""

import triton
import triton.language as tl

from recexp.layers.kernels.attention import silu, wait_for_previous


@triton.jit(do_not_specialize=["num_rows", "page_size"])
def projection(
    x, weight, bias, residual, out, table, slots, num_rows, page_size, x_stride, residual_stride, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    SILU: tl.constexpr, APPEND: tl.constexpr, APPROXIMATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x [T, DEPTH] by row stride, weight [WIDTH, DEPTH], out [T, WIDTH]; bias, residual, table, slots may be None.
    APPEND needs COLUMNS to divide a quarter of WIDTH."""
    wait_for_previous(OVERLAP)
    tile = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(WIDTH, COLUMNS)
    group = tile // (GROUP * column_tiles)
    in_group = tl.minimum(row_tiles - group * GROUP, GROUP)
    row_tile = group * GROUP + tile % (GROUP * column_tiles) % in_group
    column_tile = tile % (GROUP * column_tiles) // in_group
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, STEP)
    safe_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)  # outside: the last one again, and not stored
    safe_columns = tl.minimum(columns, WIDTH - 1)
    x_at = x + safe_rows[:, None] * x_stride + depth[None, :]
    weight_at = weight + safe_columns[None, :] * DEPTH + depth[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, DEPTH, STEP):
        if DEPTH % STEP == 0:
            a, b = tl.load(x_at), tl.load(weight_at)
        else:
            a = tl.load(x_at, mask=(first + depth < DEPTH)[None, :], other=0.0)
            b = tl.load(weight_at, mask=(first + depth < DEPTH)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        x_at += STEP
        weight_at += STEP
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    at = rows.to(tl.int64)[:, None]
    if bias is not None:
        acc += tl.load(bias + safe_columns).to(tl.float32)[None, :]
    if residual is not None:
        acc += tl.load(residual + at * residual_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if SILU:
        acc = silu(acc, APPROXIMATE)
    result = acc.to(out.dtype.element_ty)
    tl.store(out + at * WIDTH + columns[None, :], result, mask=inside)
    if APPEND:
        QUARTER: tl.constexpr = WIDTH // 4
        part = column_tile * COLUMNS // QUARTER  # 0 u, 1 v, 2 q, 3 k
        if part % 2 == 1:
            slot = tl.load(slots + rows, mask=rows < num_rows, other=-1)
            target = slot + tl.where(part == 1, page_size, 0)
            to = table + target[:, None] * QUARTER + (columns - part * QUARTER)[None, :]
            tl.store(to, result, mask=inside & (slot >= 0)[:, None])
