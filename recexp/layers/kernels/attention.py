"""Attention over contiguous or paged history keys, in plain Triton: any SM, and Triton's interpreter on the CPU.

Row i of a user (new history rows first, then candidates) sees the keys j < limit(i) of the user's history, and a
candidate also its own key. With h tokens of history, n of them in this call (n = h without a cache):

    limit(i) = min(h - n + i + 1, h)
    silu:      out_i = (sum_{j < limit(i)} SiLU(alpha q_i·k_j) v_j  +  [i >= n] SiLU(alpha q_i·k_i) v_i) / N
    softmax:   the same sum with exp(alpha q_i·k_j - m_i) for SiLU and its own total for N

A candidate's own term is a product of rows, so it is where the accumulator starts, and no block of candidates is
ever multiplied by another. Blocks of keys that every row of the tile sees come first and need no mask.

A program takes one tile of ROWS rows, one head and one of ``num_splits`` equal shares of the tile's key blocks.
Which user a tile belongs to is found on the device (``find_user``), so a launch serves every split of its rows
between users. With one share it writes the result, with more it writes float32 sums for ``merge_splits``. Rows
behind the last user (a padded graph bucket) become 0. Slots of a page at or behind the user's history are never
read. Row numbers times strides are int64.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # running maximum before the first key; finite, so that a row without keys makes no NaN


@triton.jit
def wait_for_previous(OVERLAP):
    """With programmatic dependent launch (SM90 on) a kernel is set up while the one before still runs; what that wrote
    may be read behind this line only. Letting the next one start early too (launch_dependents) was slower on an H200.
    """
    if OVERLAP:
        gdc_wait()


@triton.jit
def silu(x, APPROXIMATE):
    """x * sigmoid(x); the approximate form is one tanh instruction, 2^-11 relative, and exists on the GPU only."""
    if APPROXIMATE:
        half = 0.5 * x
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1
        )
        return half * tanh + half
    return x / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def find_user(seq_offsets, num_users, tile, ROWS):
    """The user of a row tile, by binary search. User b owns tiles (seq_offsets[b] + b (ROWS - 1)) // ROWS and on, at
    least ceil(rows / ROWS) of them; user ``num_users`` stands for the padding behind everybody."""
    low = 0
    high = num_users
    while low < high:
        middle = (low + high + 1) // 2
        if (tl.load(seq_offsets + middle) + middle * (ROWS - 1)) // ROWS <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def key_rows(first, keys, limit, origin, pages, page_size, PAGED, WHOLE, MASKED):
    """Rows of keys first + keys: behind ``origin`` in k, or in the table seen as rows (a page is page_size rows of K,
    then as many of V). WHOLE: page_size is a multiple of the block, which then lies in one page."""
    position = first + keys
    if not PAGED:
        rows = origin + position
    elif WHOLE:
        page = tl.load(pages + first // page_size).to(tl.int64)
        rows = page * 2 * page_size + first % page_size + keys
    else:
        if MASKED:
            page = tl.load(pages + position // page_size, mask=position < limit, other=0).to(tl.int64)
        else:
            page = tl.load(pages + position // page_size).to(tl.int64)
        rows = page * 2 * page_size + position % page_size
    return rows


@triton.jit
def load_rows(base, rows, stride, columns, row_mask, column_mask, MASKED):
    """[rows, columns] of a row-major tensor; masked elements are 0 and not read."""
    address = base + rows[:, None] * stride + columns[None, :]
    if MASKED:
        return tl.load(address, mask=row_mask[:, None] & column_mask[None, :], other=0.0)
    return tl.load(address)


@triton.jit
def add_keys(
    acc, top, total, q, first, limit, history, k, v, k_stride, v_stride, origin, pages, page_size, value_rows,
    columns, column_mask, alpha, KEYS, PAGED, WHOLE, PAD, SOFTMAX, APPROXIMATE, MASKED,
):  # fmt: skip
    """One block of KEYS keys into the accumulator [ROWS, d] and, for softmax, its running maximum and total [ROWS]."""
    keys = tl.arange(0, KEYS)
    written = first + keys < history
    rows = key_rows(first, keys, history, origin, pages, page_size, PAGED, WHOLE, MASKED)
    key = load_rows(k, rows, k_stride, columns, written, column_mask, MASKED or PAD)
    scores = tl.dot(q, tl.trans(key), input_precision="ieee")
    value = load_rows(v, rows + value_rows, v_stride, columns, written, column_mask, MASKED or PAD)
    if SOFTMAX:
        if MASKED:
            scores = tl.where((first + keys)[None, :] < limit[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * (alpha * LOG2E))
        weights = tl.exp2(scores * (alpha * LOG2E) - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        top = new_top
    else:
        if MASKED:
            scores = tl.where((first + keys)[None, :] < limit[:, None], scores, 0.0)  # SiLU(0) = 0
        weights = silu(scores * alpha, APPROXIMATE)
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    return acc, top, total


@triton.jit(do_not_specialize=["num_users", "num_rows", "num_splits", "page_size"])
def attention(
    q, k, v, k_history, v_history, out, sums, stats, seq_offsets, num_candidates, history_lengths, kv_indptr,
    kv_indices, q_stride, k_stride, v_stride, k_history_stride, v_history_stride, alpha, inverse_n, num_users,
    num_rows, num_splits, page_size, num_heads: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGED: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr,
    SOFTMAX: tl.constexpr, APPROXIMATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """q, k, v [T, H, d] with row strides; k_history, v_history: k and v again, or the table [pages, 2, page_size, H, d]
    twice. out [T, H, d]; with SPLIT instead sums float32 [num_splits, T, H, d], and for softmax stats float32
    [num_splits, T, H, 2] (maximum in units of log2, total). history_lengths, kv_indptr, kv_indices: None unless PAGED.
    COLUMNS: d rounded up to a power of two. alpha > 0. Grid: (T + (B + 1) (ROWS - 1)) // ROWS * H * num_splits.
    """
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    split = program % num_splits
    head = program // num_splits % num_heads
    tile = program // (num_splits * num_heads)

    user = find_user(seq_offsets, num_users, tile, ROWS)
    real = user < num_users
    begin = tl.load(seq_offsets + user)
    end = tl.load(seq_offsets + user + 1, mask=real, other=num_rows)
    tile_in_user = tile - (begin + user * (ROWS - 1)) // ROWS
    num_tiles = tl.cdiv(end - begin, ROWS)
    if tile_in_user >= num_tiles:
        return
    first_row = (num_tiles - 1 - tile_in_user) * ROWS  # the last rows see most keys: they start first
    new = end - begin - tl.load(num_candidates + user, mask=real, other=0)
    origin = begin.to(tl.int64)
    if PAGED:
        history = tl.load(history_lengths + user, mask=real, other=0)
        pages = kv_indices + tl.load(kv_indptr + user)
        value_rows = page_size
    else:
        history = tl.where(real, new, 0)
        pages = kv_indices
        value_rows = 0

    row = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    column_mask = columns < HEAD_DIM
    PAD: tl.constexpr = COLUMNS != HEAD_DIM
    inside = begin + row < end
    rows = origin + row
    limit = tl.minimum(history - new + row + 1, history)
    seen_by_all = tl.maximum(tl.minimum(history - new + first_row + 1, history), 0)
    seen_by_any = tl.maximum(tl.minimum(history - new + tl.minimum(first_row + ROWS, end - begin), history), 0)
    share = tl.cdiv(tl.cdiv(seen_by_any, KEYS), num_splits) * KEYS
    low = split * share
    high = tl.minimum(low + share, seen_by_any)
    full = tl.maximum(tl.minimum(seen_by_all // KEYS * KEYS, high), low)  # blocks before this need no mask

    query = load_rows(q + head * HEAD_DIM, rows, q_stride, columns, inside, column_mask, True)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if (split == 0) & (first_row + ROWS > new):
        candidate = inside & (row >= new)
        own_key = load_rows(k + head * HEAD_DIM, rows, k_stride, columns, candidate, column_mask, True)
        own_value = load_rows(v + head * HEAD_DIM, rows, v_stride, columns, candidate, column_mask, True)
        own = tl.where(candidate, tl.sum(query.to(tl.float32) * own_key.to(tl.float32), 1) * alpha, 0.0)
        if SOFTMAX:
            top = tl.where(candidate, own * LOG2E, LOWEST)
            total = candidate.to(tl.float32)
            acc = own_value.to(tl.float32)
        else:
            acc = silu(own, False)[:, None] * own_value.to(tl.float32)

    key, value = k_history + head * HEAD_DIM, v_history + head * HEAD_DIM
    for first in tl.range(low, full, KEYS):
        acc, top, total = add_keys(
            acc, top, total, query, first, limit, history, key, value, k_history_stride, v_history_stride, origin,
            pages, page_size, value_rows, columns, column_mask, alpha, KEYS, PAGED, WHOLE, PAD, SOFTMAX, APPROXIMATE,
            False,
        )  # fmt: skip
    for first in tl.range(full, high, KEYS, num_stages=1):
        acc, top, total = add_keys(
            acc, top, total, query, first, limit, history, key, value, k_history_stride, v_history_stride, origin,
            pages, page_size, value_rows, columns, column_mask, alpha, KEYS, PAGED, WHOLE, PAD, SOFTMAX, APPROXIMATE,
            True,
        )  # fmt: skip

    at = rows * num_heads + head
    mask = inside[:, None] & column_mask[None, :]
    if SPLIT:
        at += split.to(tl.int64) * num_rows * num_heads
        tl.store(sums + at[:, None] * HEAD_DIM + columns[None, :], acc, mask=mask)
        if SOFTMAX:
            tl.store(stats + at * 2, top, mask=inside)
            tl.store(stats + at * 2 + 1, total, mask=inside)
    else:
        scale = 1.0 / tl.where(total > 0, total, 1.0)[:, None] if SOFTMAX else inverse_n
        tl.store(out + at[:, None] * HEAD_DIM + columns[None, :], (acc * scale).to(out.dtype.element_ty), mask=mask)
