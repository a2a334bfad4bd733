"""Optimizer cases: small odd shapes for tests, GPT-2's for GPU tests and benchmarks."""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxllm.testing import Case, Normal

# The parameters of GPT-2 124M, with stacked layers as in jaxllm.models.gpt2.
_GPT2_124M = {
    "wte": (50304, 768),
    "wpe": (1024, 768),
    "blocks": {
        "ln1": {"scale": (12, 768), "bias": (12, 768)},
        "qkv": {"weight": (12, 768, 2304), "bias": (12, 2304)},
        "out": {"weight": (12, 768, 768), "bias": (12, 768)},
        "ln2": {"scale": (12, 768), "bias": (12, 768)},
        "up": {"weight": (12, 768, 3072), "bias": (12, 3072)},
        "down": {"weight": (12, 3072, 768), "bias": (12, 768)},
    },
    "ln_f": {"scale": (768,), "bias": (768,)},
}


def _specs(shapes: Any, **normal: Any) -> Any:
    return jax.tree.map(
        lambda shape: Normal(shape, **normal), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def _size(specs: Any) -> int:
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs))


def _adamw(
    name: str,
    shapes: Any,
    *,
    masters: bool = False,
    large: bool = False,
    timed_only: bool = False,
    **static: Any,
) -> Case:
    param = _specs(shapes, mean=0.5, dtype="float32" if masters else None)
    size = _size(param)
    # Gradients in, parameters in and out; in float32 m and v in and out. Master parameters are
    # float32 too, with a bfloat16 copy out.
    return Case(
        "adamw_update",
        name,
        {
            "param": param,
            "grad": _specs(shapes),
            "m": _specs(shapes, std=0.1, dtype="float32"),
            "v": _specs(shapes, mean=1.0, std=0.1, dtype="float32"),
        },
        {"step": 3, "lr": 0.01, **static},
        forward_elements=size if masters else 3 * size,
        forward_fixed_bytes=(26 if masters else 16) * size,
        has_backward=False,
        in_place=("param", "m", "v"),
        large=large,
        timed_only=timed_only,
    )


def _norm(
    name: str, shapes: Any, *, std: float = 1.0, large: bool = False, timed_only: bool = False
) -> Case:
    specs = _specs(shapes, std=std)
    return Case(
        "global_norm",
        name,
        {"tree": specs},
        forward_elements=_size(specs),
        has_backward=False,
        large=large,
        timed_only=timed_only,
    )


_AWKWARD = {"odd": (5, 77), "none": (0, 3), "one": (1,), "scalar": (), "even": (4, 256)}
_LARGE = {"odd": (5003, 1001), "row": (33000,), "even": (4096, 4096)}

CASES = (
    _adamw("gpt2_124m", _GPT2_124M, large=True, timed_only=True),
    _adamw(
        "gpt2_124m_masters",
        _GPT2_124M,
        masters=True,
        copy_dtype="bfloat16",
        large=True,
        timed_only=True,
    ),
    _adamw(
        "gpt2_124m_stochastic",
        _GPT2_124M,
        masters=True,
        copy_dtype="bfloat16",
        seed=0,
        large=True,
        timed_only=True,
    ),
    _adamw("large_tree", _LARGE, large=True),
    _adamw("matrix", (3, 256)),
    _adamw("odd_width", (5, 77), step=1, weight_decay=0.0, grad_scale=0.25),
    _adamw("late", (2, 3, 40), step=100_000, b2=0.999),
    _adamw("skipped", (5, 77), skip=True),
    _adamw("awkward_tree", _AWKWARD),
    _norm("gpt2_124m", _GPT2_124M, large=True, timed_only=True),
    _norm("large_tree", _LARGE, large=True),
    _norm("matrix", (3, 256)),
    _norm("odd_width", (5, 77)),
    _norm("zeros", (7, 9), std=0.0),
    _norm("awkward_tree", _AWKWARD),
    _norm("nothing", (0, 128)),
)
