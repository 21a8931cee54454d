"""What Gluon calls differently in the releases of Triton that the kernels support: the one place that knows it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

RELEASES = ("3.6", "3.7", "3.8", "3.9")  # all compiled for SM90; run on a GPU: 3.6

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # renamed in 3.7
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # renamed in 3.8
PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # lost its underscore in 3.9


@gluon.jit
def reinterpret(tile, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory, of the same type, in another shape."""
    if PUBLIC:
        return tile.reinterpret(tile.dtype, shape, layout)
    else:
        return tile._reinterpret(tile.dtype, shape, layout)
