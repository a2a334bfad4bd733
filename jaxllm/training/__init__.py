"""Training: steps, optimizers, schedules, anomaly detection, checkpoints, logs and metrics."""

import importlib.util

if importlib.util.find_spec("optax") is None:
    raise ImportError('jaxllm.training needs optax: pip install "jaxllm[train]"')

from jaxllm.core.precision import cast, default_compute_dtype, widen
from jaxllm.training.anomaly import explain_halt, nonfinite
from jaxllm.training.metrics import (
    PEAK_FLOPS,
    measured_matmul_flops,
    model_flops_utilization,
    peak_flops,
)
from jaxllm.training.optim_optax import adamw, decay_mask
from jaxllm.training.schedules import warmup_cosine
from jaxllm.training.step import (
    TrainState,
    init_state,
    keep_compiled,
    label_mask,
    make_eval_step,
    make_train_step,
    mean_loss,
)

__all__ = [
    "PEAK_FLOPS",
    "TrainState",
    "adamw",
    "cast",
    "decay_mask",
    "default_compute_dtype",
    "explain_halt",
    "init_state",
    "keep_compiled",
    "label_mask",
    "make_eval_step",
    "make_train_step",
    "mean_loss",
    "measured_matmul_flops",
    "model_flops_utilization",
    "nonfinite",
    "peak_flops",
    "warmup_cosine",
    "widen",
]
