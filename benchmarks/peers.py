"""The peers, in a process of their own: JAX's and torch's profilers would share one CUPTI.

``benchmarks.ops`` runs this module and reads its output, one JSON object per line: first the
limits that torch measures, then one object for each op, case, direction and peer. After a failure
the object has the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from benchmarks.peer_ops import (
    PEERS,
    cublaslt_ops,
    cut_cross_entropy_ops,
    liger_ops,
    torch_ops,
    torch_rowwise_ops,
    torchvision_ops,
)
from jaxllm.testing import Boxes, Case, Normal


def _build(peer: str, case: Case, smoke: bool) -> Callable[..., Any]:
    import torch

    by_peer = {
        "liger": liger_ops,
        "cut-cross-entropy": cut_cross_entropy_ops,
        "torchvision": torchvision_ops,
        "cublaslt": cublaslt_ops,
        "torch rowwise": torch_rowwise_ops,
    }
    ops = by_peer.get(peer, torch_ops)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fn = functools.partial(ops()[case.op], **_peer_options(case, device))
    if peer != "torch.compile":
        return fn
    import torch._functorch.config

    # By default a compiled backward may reuse saved tensors and so refuses to run twice.
    torch._functorch.config.donated_buffer = False
    # Each shape is compiled separately, and torch stops compiling a function after eight shapes.
    torch._dynamo.reset()
    # A smoke test need not wait for a C++ compiler.
    return torch.compile(fn, dynamic=False, backend="aot_eager" if smoke else "inductor")


def _peer_options(case: Case, device: str = "cpu") -> dict[str, Any]:
    """The options of a case that change what a peer computes; arrays become torch's."""
    import torch

    shared = ("activation", "bins", "causal", "groups", "interleaved", "iou_threshold", "scale")
    shared += ("transpose_a", "transpose_b", "transpose_weight", "vocab_size")
    shared += ("heads", "kind", "kv_heads", "segment_ids", "window")
    options = {name: case.static[name] for name in shared if name in case.static}
    return {
        name: torch.tensor(value, device=device) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }


def _make_inputs(case: Case, dtype: str, device: str) -> tuple[Any, ...]:
    import torch

    def make(spec: Any) -> Any:
        if isinstance(spec, Boxes):
            low, sides = torch.rand((2, *spec.shape[:-1], 2), device=device)
            low = (low * spec.field).round()
            boxes = torch.cat([low, low + (sides * spec.side).round()], dim=-1)
            return boxes.to(getattr(torch, dtype))
        if not isinstance(spec, Normal):
            share = torch.rand(spec.shape, device=device) ** spec.skew
            return spec.low + (share * (spec.high - spec.low)).long()
        values = spec.mean + spec.std * torch.randn(spec.shape, device=device)
        values = values.to(getattr(torch, spec.dtype or dtype))
        return values.requires_grad_(case.has_backward and not spec.constant)

    return tuple(jax.tree.map(make, spec) for spec in case.inputs.values())


def _forward_call(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """The forward of a training step: like ours, it also writes its residuals."""
    return functools.partial(fn, *inputs)


def _fused_adamw_call(case: Case, inputs: tuple[Any, ...]) -> Callable[[], None]:
    """The fused AdamW of torch, whose moments and gradients have the dtype of the parameters.

    Gradients and copies in another dtype cost an extra conversion.
    """
    import torch

    if case.static.get("seed") is not None:
        raise ValueError("torch has no random rounding")
    params, grads = (jax.tree.leaves(tree) for tree in inputs[:2])
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.dtype)
    options = {"lr": case.static["lr"], "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(params, **options, fused=True)
    copy_dtype = case.static.get("copy_dtype")
    copies = [param.to(getattr(torch, copy_dtype)) for param in params] if copy_dtype else None
    convert: Any = getattr(torch, "_foreach_copy_")  # noqa: B009 (pyright finds no such name)

    @torch.no_grad()
    def call() -> None:
        if grads[0].dtype != params[0].dtype:
            convert([param.grad for param in params], grads)
        optimizer.step()
        if copies:
            convert(copies, params)

    return call


def _backward_call(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """The gradients alone: the graph is built here, outside the timed call."""
    import torch

    outputs = fn(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = tuple(torch.randn_like(out) for out in outputs)
    wanted = tuple(x for x in jax.tree.leaves(inputs) if x.requires_grad)

    def call() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True)

    given = {cotangent.data_ptr() for cotangent in cotangents}
    if all(gradient.data_ptr() in given for gradient in call()):
        raise ValueError("every gradient is an unchanged cotangent: there is nothing to time")
    return call


def _gradient_call(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """Outputs and gradients; a peer that overwrites its inputs costs the same in each call."""
    import torch

    wanted = tuple(x for x in jax.tree.leaves(inputs) if x.requires_grad)
    return lambda: torch.autograd.grad(fn(*inputs), wanted)


def _peak_note(call: Callable[[], Any]) -> str:
    """The memory of a call in addition to its inputs; results count."""
    import torch

    if not torch.cuda.is_available():
        return ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return f"temporary and results GiB={(torch.cuda.max_memory_allocated() - before) / 2**30:.3f}"


def time_peer(
    peer: str,
    case: Case,
    dtype: str,
    direction: str,
    *,
    timer: str,
    smoke: bool,
    least_sets: int = 2,
) -> timing.Timing:
    """The device time of one peer on one case, over at least ``least_sets`` sets of inputs.

    Raises:
        Exception: Any failure of the peer; the caller reports it.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    first = _make_inputs(case, dtype, device)
    size = sum(x.numel() * x.element_size() for x in jax.tree.leaves(first))
    count, note = timing.number_of_sets(size, least_sets)
    sets = [first] + [_make_inputs(case, dtype, device) for _ in range(1, 2 if smoke else count)]
    repetitions = 30 if direction in ("forward", "backward") else 10
    if peer == "torch fused":
        calls = [_fused_adamw_call(case, inputs) for inputs in sets]
    else:
        fn = _build(peer, case, smoke)
        make_call = {"forward": _forward_call, "backward": _backward_call}.get(
            direction, _gradient_call
        )
        calls = [make_call(fn, inputs) for inputs in sets]
    result = timing.time_torch(calls, repetitions=3 if smoke else repetitions, timer=timer)
    if direction == "gradient":
        note = "; ".join(filter(None, (note, _peak_note(calls[0]))))
    return dataclasses.replace(result, note="; ".join(filter(None, (result.note, note))))


def torch_limits(timer: str, smoke: bool = False) -> timing.Limits:
    """The copy bandwidth and the matmul rate that torch reaches."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, width = timing.limit_sizes(smoke)
    repetitions = 3 if smoke else 20
    source = torch.randint(-(2**31), 2**31, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy = timing.time_torch([lambda: target.copy_(source)], repetitions=repetitions, timer=timer)
    del source, target
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    calls = [lambda: a @ b, lambda: b @ a]
    matmul = timing.time_torch(calls, repetitions=repetitions, timer=timer)
    return timing.limits_from(copy, matmul, size, width, "torch")


def reason(error: BaseException) -> str:
    """An exception in one line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:200]


def _emit(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Times the peers of a family's cases; see the module's docstring."""
    from benchmarks.ops import add_selection_arguments, directions_of, select_cases

    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    add_selection_arguments(parser)
    options = parser.parse_args(argv)
    options.timer = options.timer or ("wall" if options.smoke else "trace")
    try:
        limits = torch_limits(options.timer, options.smoke)
        _emit(kind="limits", **dataclasses.asdict(limits))
    except Exception as error:
        print(f"torch measures no limits: {reason(error)}", file=sys.stderr)
    for case in select_cases(parser, options):
        for direction in directions_of(case, options):
            for peer in PEERS.get(case.op, ()):
                row = {"op": case.op, "case": case.name, "direction": direction, "peer": peer}
                print(f"{case.op} {case.name} {direction}: {peer}", file=sys.stderr, flush=True)
                try:
                    result = time_peer(
                        peer,
                        case,
                        options.dtype,
                        direction,
                        timer=options.timer,
                        smoke=options.smoke,
                        least_sets=options.least_sets,
                    )
                except Exception as error:  # a peer may fail in any way, and the others still run
                    _emit(kind="failure", reason=reason(error), **row)
                else:
                    _emit(kind="timing", **dataclasses.asdict(result), **row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
