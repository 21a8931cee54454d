"""Attention backends, one a file; importing this package registers them."""

from recexp.layers.backends import padded, reference

__all__ = ["padded", "reference"]
