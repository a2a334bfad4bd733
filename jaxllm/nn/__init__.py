"""Functions for models that exist: the arguments are those of ``jax.nn``, the kernels ours.

A model written in Flax, in Equinox or by hand replaces its own attention, norms, activation and
loss by these. Where no kernel serves an attention call, ``jax.nn.dot_product_attention`` runs, and
:func:`jaxllm.explain` gives the reason.
"""

from jaxllm.nn.attention import dot_product_attention
from jaxllm.nn.layers import layer_norm, linear_cross_entropy, rms_norm, swiglu

__all__ = [
    "dot_product_attention",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "swiglu",
]
