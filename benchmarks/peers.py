"""The peers, in a process of their own: JAX's and torch's profilers would share one CUPTI.

``benchmarks.ops`` runs this module and reads its output: one JSON object a line, first the limits
that torch measures, then one object for each op, case, direction and peer. A peer that cannot run
gives an object with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import timing
from jaxllm.testing import Case, Normal

# Ops that a peer has no kernel for are not among its ops: Liger has no fused add + layer norm.
PEERS: dict[str, tuple[str, ...]] = {
    "layer_norm": ("torch.compile", "liger", "torch eager"),
    "rms_norm": ("torch.compile", "liger", "torch eager"),
    "add_layer_norm": ("torch.compile", "torch eager"),
    "add_rms_norm": ("torch.compile", "liger", "torch eager"),
    "embed": ("torch.compile", "torch eager"),
    "rope": ("torch.compile", "liger", "torch eager"),
}

_EPS = 1e-5


def _torch_ops() -> dict[str, Callable[..., Any]]:
    """The ops as one writes them in torch."""
    import torch
    import torch.nn.functional as F

    def layer_norm(x, scale, bias):
        return F.layer_norm(x, scale.shape, scale, bias, _EPS)

    def rms_norm(x, scale):
        return F.rms_norm(x, scale.shape, scale, _EPS)

    def add_layer_norm(x, residual, scale, bias):
        h = x + residual
        return layer_norm(h, scale, bias), h

    def add_rms_norm(x, residual, scale):
        h = x + residual
        return rms_norm(h, scale), h

    def embed(tokens, token_table, position_table=None):
        out = F.embedding(tokens, token_table)
        return out if position_table is None else out + position_table[: tokens.shape[-1]]

    def rope(q, k, cos, sin, interleaved=False):
        return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)

    def rotate(x, cos, sin, interleaved):
        # In the layout B T N H each position's row of a table serves all heads.
        cos, sin = cos[:, None, :], sin[:, None, :]
        wide = x.float()
        a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
        turned = (a * cos - b * sin, a * sin + b * cos)
        joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        return joined.to(x.dtype)

    norms = (layer_norm, rms_norm, add_layer_norm, add_rms_norm)
    return {fn.__name__: fn for fn in (*norms, embed, rope)}


def _liger_ops() -> dict[str, Callable[..., Any]]:
    # Llama's casting keeps only the root mean square in float32. In place would overwrite the
    # cotangents that the next repetition needs; the bytes moved are the same.
    import torch
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    def layer_norm(x, scale, bias):
        return LigerLayerNormFunction.apply(x, scale, bias, _EPS)

    def rms_norm(x, scale):
        return LigerRMSNormFunction.apply(x, scale, _EPS, 0.0, "llama", False)

    def add_rms_norm(x, residual, scale):
        return LigerFusedAddRMSNormFunction.apply(x, residual, scale, _EPS, 0.0, "llama", False)

    def rope(q, k, cos, sin, interleaved=False):
        if interleaved:
            raise NotImplementedError("Liger's rope is half-split")
        # It works in place, and repetitions must not let the values grow: so true rotations. It
        # takes heads before positions, and gives that view of memory where positions come first.
        cos, sin = true_rotation(cos)
        q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    @functools.cache  # not part of what is timed
    def true_rotation(angles):
        both = torch.cat((angles, angles), -1)[None]
        return both.cos(), both.sin()

    norms = (layer_norm, rms_norm, add_rms_norm)
    return {fn.__name__: fn for fn in (*norms, rope)}


def _build(peer: str, op: str, smoke: bool) -> Callable[..., Any]:
    if peer == "liger":
        return _liger_ops()[op]
    fn = _torch_ops()[op]
    if peer == "torch eager":
        return fn
    import torch
    import torch._functorch.config

    # By default a compiled backward may reuse saved tensors and so refuses to run twice.
    torch._functorch.config.donated_buffer = False
    # Every shape is a compilation of its own, and torch gives up on a function after eight.
    torch._dynamo.reset()
    # A smoke test need not wait for a C++ compiler.
    return torch.compile(fn, dynamic=False, backend="aot_eager" if smoke else "inductor")


def _make_inputs(case: Case, dtype: str, device: str) -> tuple[Any, ...]:
    import torch

    def make(spec: Any) -> Any:
        if not isinstance(spec, Normal):
            share = torch.rand(spec.shape, device=device) ** spec.skew
            return spec.low + (share * (spec.high - spec.low)).long()
        values = spec.mean + spec.std * torch.randn(spec.shape, device=device)
        values = values.to(getattr(torch, spec.dtype or dtype))
        return values.requires_grad_(not spec.constant)

    return tuple(make(spec) for spec in case.inputs.values())


def _forward_call(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    import torch

    def call() -> Any:
        with torch.no_grad():
            return fn(*inputs)

    return call


def _backward_call(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """The gradients alone: the graph is built here, outside of what is timed."""
    import torch

    outputs = fn(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = tuple(torch.randn_like(out) for out in outputs)
    wanted = tuple(x for x in inputs if x.requires_grad)
    return lambda: torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True)


def time_peer(
    peer: str, case: Case, dtype: str, direction: str, *, timer: str, smoke: bool
) -> timing.Timing:
    """The device time of one peer on one case.

    Raises:
        Exception: Whatever keeps the peer from running; the caller reports it.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    fn = functools.partial(_build(peer, case.op, smoke), **case.static)
    torch.manual_seed(0)
    first = _make_inputs(case, dtype, device)
    count, note = timing.number_of_sets(sum(x.numel() * x.element_size() for x in first))
    sets = [first] + [_make_inputs(case, dtype, device) for _ in range(1, 2 if smoke else count)]
    make_call = _forward_call if direction == "forward" else _backward_call
    calls = [make_call(fn, inputs) for inputs in sets]
    result = timing.time_torch(calls, repetitions=3 if smoke else 30, timer=timer)
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
    from benchmarks.ops import add_selection_arguments, select_cases

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
        for direction in options.direction:
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
                    )
                except Exception as error:  # a peer may fail in any way, and the others still run
                    _emit(kind="failure", reason=reason(error), **row)
                else:
                    _emit(kind="timing", **dataclasses.asdict(result), **row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
