"""CUDA graphs over the paged cache."""

from recexp.graphs.buffers import Static, capacity, num_capture_pages
from recexp.graphs.graphed import GraphedModel

__all__ = ["GraphedModel", "Static", "capacity", "num_capture_pages"]
