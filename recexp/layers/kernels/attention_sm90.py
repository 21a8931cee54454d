"""Attention over contiguous or paged history keys for Hopper, in Gluon: one warp copies, two or three warpgroups
multiply.

The mathematics, the order of tiles and the shares of keys are those of recexp.layers.kernels.attention. What is
different is how one tile is done. A producer warp feeds a ring of key and value tiles through the bulk copy engine
(TMA), page by page; each consumer warpgroup owns 64 rows and issues the product for its next scores before it waits
for the last values, so that

    tensor cores:  S(t) = q k_t      P(t-1) v_(t-1)     S(t+1) = q k_(t+1)  ...
    other units:                SiLU(S(t)) or exp(S(t))  ...

overlap, which plain Triton cannot express here (it waits for every product). Key blocks run from the last to the
first: the masked ones come first and the loop over the others has no mask. A box of the copy engine is BOX rows: a
whole block where the page size is a multiple of KEYS, else the largest power of two that divides both, so that no
box crosses a page. Rows of the last value tile that no token was written to may hold NaN, and 0 * NaN is NaN: they
are zeroed in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from recexp.layers.kernels import attention as plain
from recexp.layers.kernels.gluon_interface import copy_in, reinterpret, thread_barrier

LOG2E, LOWEST = plain.LOG2E, plain.LOWEST
WARPGROUP = gl.constexpr(64)  # rows of one consumer
SLAB = gl.constexpr(64)  # columns of one 128-byte swizzled slab of a tile
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))

find_user, silu = gluon.jit(plain.find_user.fn), gluon.jit(plain.silu.fn)
wait_for_previous = gluon.jit(plain.wait_for_previous.fn)


@gluon.jit
def table_row(number, pages, page_size, which, BOX, EXACT):
    """First table row of the user's box ``number``. EXACT: pages are boxes; the lone warp is spared a division."""
    if EXACT:
        return (gl.load(pages + number) * 2 + which) * BOX
    else:
        page = number * BOX // page_size
        return (gl.load(pages + page) * 2 + which - page) * page_size + number * BOX


@gluon.jit
def copy_block(descriptor, tile, filled, block, which, paging, origin, head, D, KEYS, BOX, EXACT, PAGED):
    """Start the copy of a block of keys (which = 0) or values (1) into ``tile`` [KEYS, D]; ``filled`` tells its end."""
    pages, num_boxes, page_size = paging
    mbarrier.expect(filled, KEYS * D * 2)
    if not PAGED:
        copy_in(descriptor, [origin + block * KEYS, head * D], filled, tile)
    elif BOX == KEYS:
        copy_in(descriptor, [table_row(block, pages, page_size, which, BOX, EXACT), head * D], filled, tile)
    else:
        NUM: gl.constexpr = KEYS // BOX
        boxes = reinterpret(tile, [D // SLAB * NUM, BOX, SLAB], TILE)
        for box in gl.static_range(NUM):
            number = gl.minimum(block * NUM + box, num_boxes - 1)  # behind the last: hidden, then zeroed
            row = table_row(number, pages, page_size, which, BOX, EXACT)
            for slab in gl.static_range(D // SLAB):
                copy_in(descriptor, [row, head * D + slab * SLAB], filled, boxes.index(slab * NUM + box))


@gluon.jit
def produce(descriptors, shared, paging, tile, CONSUMERS, D, KEYS, BOX, EXACT, STAGES, PAGED):
    """The producer warp: the query tile, then blocks high - 1 .. low. Stage s: keys in tile 2s, values in 2s + 1."""
    q_desc, k_desc, v_desc = descriptors
    q_tiles, tiles, q_filled, filled, freed = shared
    origin, first_row, head, low, high = tile
    if high > low:
        mbarrier.expect(q_filled.index(0), CONSUMERS * WARPGROUP * D * 2)
        for w in gl.static_range(CONSUMERS):
            at = [origin + first_row + w * WARPGROUP, head * D]
            copy_in(q_desc, at, q_filled.index(0), q_tiles.index(w))
    for t in range(0, high - low):
        stage = t % STAGES
        phase = ((t // STAGES) & 1) ^ 1
        block = high - 1 - t
        for which in gl.static_range(2):  # 0: keys, 1: values
            slot = 2 * stage + which
            mbarrier.wait(freed.index(slot), phase)
            copy_block(
                k_desc if which == 0 else v_desc, tiles.index(slot), filled.index(slot), block, which, paging, origin,
                head, D, KEYS, BOX, EXACT, PAGED,
            )  # fmt: skip


@gluon.jit
def zero_unwritten(tile, written, D, KEYS):
    """Zero the rows from ``written`` on of a value tile. Every consumer does it; all of them write the same bytes."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slabs = reinterpret(tile, [D // SLAB, KEYS, SLAB], TILE)
    inside = gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT)) < written
    for slab in gl.static_range(D // SLAB):
        x = slabs.index(slab).load(LAYOUT)
        slabs.index(slab).store(gl.where(inside[:, None], x, 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def weigh(scores, top, total, first, limit, alpha, SOFTMAX, MASKED, KEYS, S):
    """Scores [64, KEYS] to weights, and by how much softmax shrinks what was summed before."""
    if MASKED:
        hidden = (first + gl.arange(0, KEYS, gl.SliceLayout(0, S)))[None, :] >= limit[:, None]
        scores = gl.where(hidden, float("-inf") if SOFTMAX else 0.0, scores)  # SiLU(0) = 0
    if SOFTMAX:
        new_top = gl.maximum(top, gl.max(scores, 1) * (alpha * LOG2E))
        weights = gl.exp2(scores * (alpha * LOG2E) - new_top[:, None])
        shrink = gl.exp2(top - new_top)
        return weights, new_top, total * shrink + gl.sum(weights, 1), shrink
    return silu(scores * alpha, True), top, total, total


@gluon.jit
def overlap(
    acc, weights, top, total, q_tile, tiles, filled, freed, begin, end, high, limit, alpha, D, KEYS, STAGES, SOFTMAX,
    MASKED, S, A, P,
):  # fmt: skip
    """Steps begin .. end: the scores of step t are made while the values of step t - 1 are being added."""
    for t in range(begin, end):
        stage, phase = t % STAGES, (t // STAGES) & 1
        last, last_phase = (t - 1) % STAGES, ((t - 1) // STAGES) & 1
        mbarrier.wait(filled.index(2 * stage), phase)
        zero = gl.zeros([WARPGROUP, KEYS], gl.float32, S)
        pending = warpgroup_mma(q_tile, tiles.index(2 * stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(filled.index(2 * last + 1), last_phase)
        acc = warpgroup_mma(weights, tiles.index(2 * last + 1), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(pending,))
        thread_barrier()
        mbarrier.arrive(freed.index(2 * stage), count=1)
        next_weights, top, total, shrink = weigh(
            scores, top, total, (high - 1 - t) * KEYS, limit, alpha, SOFTMAX, MASKED, KEYS, S
        )
        next_weights = next_weights.to(q_tile.dtype)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        thread_barrier()
        mbarrier.arrive(freed.index(2 * last + 1), count=1)
        if SOFTMAX:
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, A))[:, None]
        weights = gl.convert_layout(next_weights, P)
    return acc, weights, top, total


@gluon.jit
def consume(W, tensors, shared, tile, sizes, H, D, KEYS, STAGES, SPLIT, SOFTMAX):
    """A consumer warpgroup: rows first_row + 64 W and on of the user whose first row is ``origin``."""
    q, k, v, out, sums, stats = tensors
    q_tiles, tiles, q_filled, filled, freed = shared
    origin, first_row, num_rows, new, history, head, low, high, split = tile
    all_rows, q_stride, k_stride, v_stride, alpha, inverse_n = sizes
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=A, k_width=2)
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row0 = first_row + W * WARPGROUP
    a_row = row0 + gl.arange(0, WARPGROUP, gl.SliceLayout(1, A))
    s_row = row0 + gl.arange(0, WARPGROUP, gl.SliceLayout(1, S))
    a_column = gl.arange(0, D, gl.SliceLayout(0, A))
    acc = gl.zeros([WARPGROUP, D], gl.float32, A)
    top = gl.full([WARPGROUP], LOWEST, gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros([WARPGROUP], gl.float32, gl.SliceLayout(1, S))
    if (split == 0) & (row0 + WARPGROUP > new):  # the candidates' own term starts the accumulator
        row = row0 + gl.arange(0, WARPGROUP, gl.SliceLayout(1, ROW))
        column = gl.arange(0, D, gl.SliceLayout(0, ROW))
        mask = ((row >= new) & (row < num_rows))[:, None]
        at = (origin + row).to(gl.int64)[:, None]
        query = gl.load(q + at * q_stride + head * D + column[None, :], mask=mask, other=0.0).to(gl.float32)
        key = gl.load(k + at * k_stride + head * D + column[None, :], mask=mask, other=0.0).to(gl.float32)
        own = gl.sum(query * key, 1) * alpha
        mask = ((a_row >= new) & (a_row < num_rows))[:, None]
        at = (origin + a_row).to(gl.int64)[:, None]
        acc = gl.load(v + at * v_stride + head * D + a_column[None, :], mask=mask, other=0.0).to(gl.float32)
        if SOFTMAX:
            candidate = (s_row >= new) & (s_row < num_rows)
            top = gl.where(candidate, gl.convert_layout(own, gl.SliceLayout(1, S)) * LOG2E, LOWEST)
            total = gl.where(candidate, 1.0, 0.0)
        else:
            acc = acc * gl.convert_layout(silu(own, False), gl.SliceLayout(1, A))[:, None]
    steps = high - low
    if steps > 0:
        limit = gl.minimum(history - new + s_row + 1, history)
        seen_by_all = gl.maximum(gl.minimum(history - new + row0 + 1, history), 0)
        masked = gl.minimum(gl.maximum(high - seen_by_all // KEYS, 1), steps)  # steps with a mask: the first at least
        q_tile = q_tiles.index(W)
        mbarrier.wait(q_filled.index(0), 0)
        mbarrier.wait(filled.index(0), 0)
        zero = gl.zeros([WARPGROUP, KEYS], gl.float32, S)
        scores = warpgroup_mma(q_tile, tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        thread_barrier()
        mbarrier.arrive(freed.index(0), count=1)
        weights, top, total, shrink = weigh(scores, top, total, (high - 1) * KEYS, limit, alpha, SOFTMAX, True, KEYS, S)
        if SOFTMAX:
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, A))[:, None]
        weights = gl.convert_layout(weights.to(q_tile.dtype), P)
        if high * KEYS > history:
            mbarrier.wait(filled.index(1), 0)
            zero_unwritten(tiles.index(1), history - (high - 1) * KEYS, D, KEYS)
        acc, weights, top, total = overlap(
            acc, weights, top, total, q_tile, tiles, filled, freed, 1, masked, high, limit, alpha,
            D, KEYS, STAGES, SOFTMAX, True, S, A, P,
        )  # fmt: skip
        acc, weights, top, total = overlap(
            acc, weights, top, total, q_tile, tiles, filled, freed, masked, steps, high, limit, alpha,
            D, KEYS, STAGES, SOFTMAX, False, S, A, P,
        )  # fmt: skip
        last = (steps - 1) % STAGES
        mbarrier.wait(filled.index(2 * last + 1), ((steps - 1) // STAGES) & 1)
        acc = warpgroup_mma(weights, tiles.index(2 * last + 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    inside = (a_row < num_rows)[:, None]
    at = (origin + a_row).to(gl.int64) * H + head
    if SPLIT:
        share = split.to(gl.int64) * all_rows * H
        gl.store(sums + (share + at)[:, None] * D + a_column[None, :], acc, mask=inside)
        if SOFTMAX:
            at = share + (origin + s_row).to(gl.int64) * H + head
            gl.store(stats + at * 2, top, mask=s_row < num_rows)
            gl.store(stats + at * 2 + 1, total, mask=s_row < num_rows)
    else:
        if SOFTMAX:
            acc = acc * gl.convert_layout(1.0 / gl.where(total > 0, total, 1.0), gl.SliceLayout(1, A))[:, None]
        else:
            acc = acc * inverse_n
        gl.store(out + at[:, None] * D + a_column[None, :], acc.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["num_users", "all_rows", "num_splits", "page_size"])
def attention_sm90(
    q_desc, k_desc, v_desc, q, k, v, out, sums, stats, seq_offsets, num_candidates, history_lengths, kv_indptr,
    kv_indices, q_stride, k_stride, v_stride, alpha, inverse_n, num_users, all_rows, num_splits, page_size,
    H: gl.constexpr, D: gl.constexpr, CONSUMERS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    BOX: gl.constexpr, EXACT: gl.constexpr, PAGED: gl.constexpr, SPLIT: gl.constexpr, SOFTMAX: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """As ``attention``, with ROWS = 64 CONSUMERS; q_desc, k_desc, v_desc describe rows [*, H*d] of q and history."""
    wait_for_previous(OVERLAP)
    ROWS: gl.constexpr = CONSUMERS * WARPGROUP
    program = gl.program_id(0)
    split = program % num_splits
    head = program // num_splits % H
    tile = program // (num_splits * H)
    user = find_user(seq_offsets, num_users, tile, ROWS)
    real = user < num_users
    origin = gl.load(seq_offsets + user)  # all of the user's numbers at once: each load is half a microsecond
    num_rows = gl.load(seq_offsets + user + 1, mask=real, other=all_rows) - origin
    new = num_rows - gl.load(num_candidates + user, mask=real, other=0)
    history = gl.where(real, new, 0)
    pages = kv_indices
    num_boxes = 1
    if PAGED:
        history = gl.load(history_lengths + user, mask=real, other=0)
        pages = kv_indices + gl.load(kv_indptr + user)
        num_boxes = gl.cdiv(history, BOX)
    tile_in_user = tile - (origin + user * (ROWS - 1)) // ROWS
    num_tiles = gl.cdiv(num_rows, ROWS)
    if tile_in_user < num_tiles:
        first_row = (num_tiles - 1 - tile_in_user) * ROWS
        seen_by_any = gl.maximum(gl.minimum(history - new + gl.minimum(first_row + ROWS, num_rows), history), 0)
        num_blocks = gl.cdiv(seen_by_any, KEYS)
        share = gl.cdiv(num_blocks, num_splits)
        low = split * share
        high = gl.maximum(gl.minimum(low + share, num_blocks), low)
        q_tiles = gl.allocate_shared_memory(q.dtype.element_ty, [CONSUMERS, WARPGROUP, D], TILE)
        tiles = gl.allocate_shared_memory(q.dtype.element_ty, [2 * STAGES, KEYS, D], TILE)
        q_filled = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        filled = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
        freed = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_filled.index(0), count=1)
        for i in gl.static_range(2 * STAGES):
            mbarrier.init(filled.index(i), count=1)
            mbarrier.init(freed.index(i), count=CONSUMERS)
        fence_async_shared()
        shared = (q_tiles, tiles, q_filled, filled, freed)
        # constants have to be spelled out in the lists below: inside a tuple variable they would become values
        descriptors, paging = (q_desc, k_desc, v_desc), (pages, num_boxes, page_size)
        copied = (origin, first_row, head, low, high)
        tensors, sizes = (q, k, v, out, sums, stats), (all_rows, q_stride, k_stride, v_stride, alpha, inverse_n)
        rows = (origin, first_row, num_rows, new, history, head, low, high, split)
        if CONSUMERS == 2:
            gl.warp_specialize(
                [
                    (consume, (0, tensors, shared, rows, sizes, H, D, KEYS, STAGES, SPLIT, SOFTMAX)),
                    (consume, (1, tensors, shared, rows, sizes, H, D, KEYS, STAGES, SPLIT, SOFTMAX)),
                    (produce, (descriptors, shared, paging, copied, 2, D, KEYS, BOX, EXACT, STAGES, PAGED)),
                ],
                [4, 1],
                [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [
                    (consume, (0, tensors, shared, rows, sizes, H, D, KEYS, STAGES, SPLIT, SOFTMAX)),
                    (consume, (1, tensors, shared, rows, sizes, H, D, KEYS, STAGES, SPLIT, SOFTMAX)),
                    (consume, (2, tensors, shared, rows, sizes, H, D, KEYS, STAGES, SPLIT, SOFTMAX)),
                    (produce, (descriptors, shared, paging, copied, 3, D, KEYS, BOX, EXACT, STAGES, PAGED)),
                ],
                [4, 4, 1],
                [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
            )
