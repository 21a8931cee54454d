"""Attention backends, one a file; importing this package registers them."""

from recexp.layers.backends import fbgemm, flex, gather, gluon, padded, paged, reference, triton

__all__ = ["fbgemm", "flex", "gather", "gluon", "padded", "paged", "reference", "triton"]
