"""LLM training and inference kernels for JAX: CUDA custom calls, Pallas, and jax.numpy references.

============================  ====================================================================
``jaxllm.ops``                the ops, from ``layer_norm`` to ``attention_block``
``jaxllm.nn``                 ops in the form of ``jax.nn``, for models that exist
``jaxllm.models``             ``gpt2`` and ``llama3``: config, init, block, forward, loss
``jaxllm.training``           steps, optimizers, schedules, checkpoints, logs
``jaxllm.data``               texts to token shards to batches
``jaxllm.inference``          generation with a key-value cache, int8 weights
``jaxllm.convert``            Hugging Face, llm.c and llama2.c checkpoints
``jaxllm.export``             ``jax.export`` of programs with kernels
``jaxllm.core``               how a call finds its kernel
============================  ====================================================================

``ops``, ``nn``, the backend switch and ``explain`` come with ``import jaxllm``; import the others
by name.
"""

from jaxllm.core import versions  # noqa: F401  first: an unsupported JAX may fail in what follows

# isort: split
from jaxllm import nn, ops
from jaxllm.core.backend import Backend, BackendError, explain, use_backend

__version__ = "0.1.0"

__all__ = ["Backend", "BackendError", "explain", "nn", "ops", "use_backend"]
