"""LLM training and inference kernels for JAX: CUDA custom calls, Pallas, and their definitions."""

from jaxllm import ops
from jaxllm.core.backend import Backend, BackendError, explain, use_backend

__version__ = "0.1.0"

__all__ = ["Backend", "BackendError", "explain", "ops", "use_backend"]
