"""Layers of both backbones and the attention beneath them. Importing this package registers all of its names."""

import recexp.layers.backends  # noqa: F401  # registers them
from recexp.layers.attention import Attention, attend, register_attention_backend
from recexp.layers.attention import backends as attention_backends
from recexp.layers.backbone import Backbone, backbones, register_backbone
from recexp.layers.hstu import HSTULayer
from recexp.layers.transformer import TransformerLayer

attention_backends.fix()
backbones.fix()

__all__ = [
    "Attention",
    "Backbone",
    "HSTULayer",
    "TransformerLayer",
    "attend",
    "attention_backends",
    "backbones",
    "register_attention_backend",
    "register_backbone",
]
