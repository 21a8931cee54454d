"""The paged KV cache: pages on the device, copies on the host, and what they stand for."""

from recexp.cache.kv_cache import CachePlan, PagedKVCache
from recexp.cache.pages import OutOfPages

__all__ = ["CachePlan", "OutOfPages", "PagedKVCache"]
