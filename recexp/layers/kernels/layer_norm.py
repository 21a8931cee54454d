"""LayerNorm of rows, and beside it where in the paged table each row's keys and values belong.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias            sums in float32
    slot = table row of the token's key: page(p) * 2 * page_size + p % page_size, p = history - new + row;  -1: none

The projection that follows writes keys and values to their slots itself; finding them here, where a row has a
program of its own that waits for memory anyway, saves a launch a layer. Candidates and rows behind the last user
have no slot.
"""

import triton
import triton.language as tl

from recexp.layers.kernels.attention import wait_for_previous


@triton.jit
def normalise(x, columns, weight, bias, eps, WIDTH):
    """x float32 [columns], zero behind WIDTH."""
    mean = tl.sum(x, 0) / WIDTH
    centred = tl.where(columns < WIDTH, x - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    w = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    b = tl.load(bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    return centred * scale * w + b


@triton.jit(do_not_specialize=["num_users", "page_size"])
def layer_norm(
    x, weight, bias, y, slots, seq_offsets, num_candidates, history_lengths, kv_indptr, kv_indices, eps, num_users,
    page_size, x_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PAGED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x [T, WIDTH] -> y [T, WIDTH]; with PAGED slots int64 [T], else slots to kv_indices are None."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    value = tl.load(x + row.to(tl.int64) * x_stride + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    out = normalise(value, columns, weight, bias, eps, WIDTH)
    tl.store(y + row.to(tl.int64) * WIDTH + columns, out.to(y.dtype.element_ty), mask=columns < WIDTH)
    if PAGED:
        low = 0
        high = num_users
        while low < high:  # the last user that starts at or before the row: empty users before it share its start
            middle = (low + high + 1) // 2
            if tl.load(seq_offsets + middle) <= row:
                low = middle
            else:
                high = middle - 1
        real = low < num_users
        begin = tl.load(seq_offsets + low)
        end = tl.load(seq_offsets + low + 1, mask=real, other=0)
        new = end - begin - tl.load(num_candidates + low, mask=real, other=0)
        stored = real & (row - begin < new)
        position = tl.load(history_lengths + low, mask=real, other=0) - new + row - begin
        page = tl.load(kv_indices + tl.load(kv_indptr + low) + position // page_size, mask=stored, other=0).to(tl.int64)
        tl.store(slots + row, tl.where(stored, page * 2 * page_size + position % page_size, -1))
