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

import jax

from benchmarks import timing
from jaxllm.testing import Case, Normal

# Ops that a peer has no kernel for are not among its ops: Liger has no fused add + layer norm.
PEERS: dict[str, tuple[str, ...]] = {
    "layer_norm": ("torch.compile", "liger", "torch eager"),
    "rms_norm": ("torch.compile", "liger", "torch eager"),
    "add_layer_norm": ("torch.compile", "torch eager"),
    "add_rms_norm": ("torch.compile", "liger", "torch eager"),
    "softmax": ("torch.compile", "liger", "torch eager"),
    "repeat_kv": ("torch.compile", "torch eager"),
    "gelu": ("torch.compile", "torch eager"),
    "bias_gelu": ("torch.compile", "torch eager"),
    "bias_add": ("torch.compile", "torch eager"),
    "swiglu": ("torch.compile", "liger", "torch eager"),
    "swiglu_packed": ("torch.compile", "torch eager"),
    "relu": ("torch.compile", "torch eager"),
    "sigmoid": ("torch.compile", "torch eager"),
    "add": ("torch.compile", "torch eager"),
    "linear": ("torch.compile", "torch eager"),
    "cross_entropy": ("torch.compile", "liger"),
    "linear_cross_entropy": ("torch.compile", "liger", "cut-cross-entropy"),
    "adamw_update": ("torch fused",),
    "global_norm": ("torch.compile", "torch eager"),
    "embed": ("torch.compile", "torch eager"),
    "rope": ("torch.compile", "liger", "torch eager"),
}


def _optax_adamw(param, grad, m, v, *, step, lr, copy_dtype=None, seed=None):
    """``adamw_update`` as one writes it with optax; its defaults are ours."""
    import optax

    if seed is not None:
        raise ValueError("optax has no random rounding")
    optimizer = optax.adamw(lr, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    state: Any = optimizer.init(param)
    state = (optax.ScaleByAdamState(jax.numpy.int32(step - 1), m, v), *state[1:])
    updates, state = optimizer.update(grad, state, param)
    adam = state[0]
    param = optax.apply_updates(param, updates)
    if copy_dtype is None:
        return param, adam.mu, adam.nu
    return param, adam.mu, adam.nu, jax.tree.map(lambda x: x.astype(copy_dtype), param)


def _masked_cudnn(q, k, v, *, causal=False, window=None, segment_ids=None, scale=None):
    """``flash_attention`` by cuDNN, with an array of what each query sees."""
    if window is None and segment_ids is None:
        raise ValueError("without a window or segments cuDNN needs no mask: see xla")
    distance = jax.numpy.arange(q.shape[1])[:, None] - jax.numpy.arange(k.shape[1])
    mask = distance >= 0 if causal else jax.numpy.ones_like(distance, bool)
    if window is not None:
        mask &= abs(distance) < window
    mask = mask[None, None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation="cudnn")


# Peers that are JAX functions, with the op's arguments; they run beside our backends.
JAX_PEERS: dict[str, dict[str, Callable[..., Any]]] = {
    "adamw_update": {"optax": _optax_adamw},
    "flash_attention": {"cudnn with a mask": _masked_cudnn},
}

_EPS = 1e-5


def _torch_ops() -> dict[str, Callable[..., Any]]:
    """The ops as one writes them in torch."""
    import torch
    import torch.nn.functional as F
    from torch.utils._pytree import tree_leaves  # torch.compile knows nothing of jax.tree

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

    def softmax(x, scale=1.0, causal=False):
        if causal:
            T, S = x.shape[-2:]
            seen = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
            x = x.masked_fill(~seen, -torch.inf)
        return F.softmax(scale * x, dim=-1)

    def repeat_kv(x, groups):
        return x.repeat_interleave(groups, dim=-2)

    def gelu(x):
        return F.gelu(x, approximate="tanh")

    def bias_gelu(x, bias):
        return gelu(x + bias)

    def bias_add(x, bias):
        return x + bias

    def swiglu(gate, up):
        return F.silu(gate) * up

    def swiglu_packed(x):
        return swiglu(*x.chunk(2, dim=-1))

    def relu(x):
        return F.relu(x)

    def sigmoid(x):
        return F.sigmoid(x)

    def add(x, y):
        return x + y

    def linear(x, weight, bias=None, activation=None):
        h = F.linear(x, weight.T, bias)
        return h if activation is None else gelu(h)

    def cross_entropy(logits, labels, *, vocab_size=None):
        logits = logits[..., :vocab_size].float()
        return F.cross_entropy(logits.flatten(0, -2), _labels(labels, logits), ignore_index=-1)

    def linear_cross_entropy(hidden, weight, labels, *, transpose_weight=False, vocab_size=None):
        logits = F.linear(hidden, weight if transpose_weight else weight.T)
        return cross_entropy(logits, labels, vocab_size=vocab_size)

    def global_norm(tree):
        return torch.nn.utils.get_total_norm(tree_leaves(tree))

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
    activations = (gelu, bias_gelu, bias_add, swiglu, swiglu_packed, relu, sigmoid, add)
    others = (global_norm, softmax, repeat_kv, linear, embed, rope)
    losses = (cross_entropy, linear_cross_entropy)
    return {fn.__name__: fn for fn in (*norms, *activations, *others, *losses)}


def _labels(labels: Any, logits: Any) -> Any:
    """Labels in a line, none of them beyond the last column, which torch would not forgive."""
    return labels.flatten().clamp(max=logits.shape[-1] - 1)


def _liger_ops() -> dict[str, Callable[..., Any]]:
    # Llama's casting keeps only the root mean square in float32. In place would overwrite the
    # cotangents that the next repetition needs; the bytes moved are the same.
    import torch
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.softmax import LigerSoftmaxFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def layer_norm(x, scale, bias):
        return LigerLayerNormFunction.apply(x, scale, bias, _EPS)

    def rms_norm(x, scale):
        return LigerRMSNormFunction.apply(x, scale, _EPS, 0.0, "llama", False)

    def add_rms_norm(x, residual, scale):
        return LigerFusedAddRMSNormFunction.apply(x, residual, scale, _EPS, 0.0, "llama", False)

    def softmax(x, scale=1.0, causal=False):
        if causal or scale != 1.0:
            raise NotImplementedError("Liger's softmax has neither a scale nor a mask")
        return LigerSoftmaxFunction.apply(x)

    def swiglu(gate, up):
        # Its backward writes the gradients over gate and up, which a repetition takes as its input:
        # the numbers lose their meaning, and the bytes moved are the same.
        return LigerSiLUMulFunction.apply(gate, up)

    # Both leave the padding of the vocabulary in the softmax; the bytes moved are the same.
    def cross_entropy(logits, labels, *, vocab_size=None):
        labels = _labels(labels, logits)
        return LigerCrossEntropyFunction.apply(logits, labels, None, -1)[0]

    def linear_cross_entropy(hidden, weight, labels, *, transpose_weight=False, vocab_size=None):
        weight = weight if transpose_weight else weight.T
        labels = _labels(labels, weight.T)
        return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels, None, None, -1)[0]

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
    return {
        fn.__name__: fn for fn in (*norms, softmax, swiglu, cross_entropy, linear_cross_entropy)
    }


def _cut_cross_entropy_ops() -> dict[str, Callable[..., Any]]:
    from cut_cross_entropy import linear_cross_entropy as cut

    # The padding of the vocabulary is part of the softmax; small gradients are left out, as is the
    # library's default.
    def linear_cross_entropy(hidden, weight, labels, *, transpose_weight=False, vocab_size=None):
        weight = weight if transpose_weight else weight.T
        return cut(hidden, weight, _labels(labels, weight.T), ignore_index=-1)

    return {"linear_cross_entropy": linear_cross_entropy}


def _build(peer: str, case: Case, smoke: bool) -> Callable[..., Any]:
    ops = {"liger": _liger_ops, "cut-cross-entropy": _cut_cross_entropy_ops}.get(peer, _torch_ops)
    fn = functools.partial(ops()[case.op], **_peer_options(case))
    if peer != "torch.compile":
        return fn
    import torch
    import torch._functorch.config

    # By default a compiled backward may reuse saved tensors and so refuses to run twice.
    torch._functorch.config.donated_buffer = False
    # Every shape is a compilation of its own, and torch gives up on a function after eight.
    torch._dynamo.reset()
    # A smoke test need not wait for a C++ compiler.
    return torch.compile(fn, dynamic=False, backend="aot_eager" if smoke else "inductor")


def _peer_options(case: Case) -> dict[str, Any]:
    """The options of a case that peers understand too."""
    shared = ("activation", "causal", "groups", "interleaved", "scale")
    shared += ("transpose_weight", "vocab_size")
    return {name: case.static[name] for name in shared if name in case.static}


def _make_inputs(case: Case, dtype: str, device: str) -> tuple[Any, ...]:
    import torch

    def make(spec: Any) -> Any:
        if not isinstance(spec, Normal):
            share = torch.rand(spec.shape, device=device) ** spec.skew
            return spec.low + (share * (spec.high - spec.low)).long()
        values = spec.mean + spec.std * torch.randn(spec.shape, device=device)
        values = values.to(getattr(torch, spec.dtype or dtype))
        return values.requires_grad_(case.has_backward and not spec.constant)

    return tuple(jax.tree.map(make, spec) for spec in case.inputs.values())


def _forward_call(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """The forward of a training step: like ours, it also writes what its backward needs."""
    return functools.partial(fn, *inputs)


def _fused_adamw_call(case: Case, inputs: tuple[Any, ...]) -> Callable[[], None]:
    """The fused AdamW of torch, whose moments and gradients have the dtype of the parameters.

    Gradients and copies in another dtype cost a conversion of their own.
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
    """The gradients alone: the graph is built here, outside of what is timed."""
    import torch

    outputs = fn(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = tuple(torch.randn_like(out) for out in outputs)
    wanted = tuple(x for x in inputs if x.requires_grad)

    def call() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True)

    given = {cotangent.data_ptr() for cotangent in cotangents}
    if all(gradient.data_ptr() in given for gradient in call()):
        raise ValueError("every gradient is a cotangent as it came: there is nothing to time")
    return call


def _gradient_call(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """Outputs and gradients; what a peer writes over its inputs costs as much the next time."""
    import torch

    wanted = tuple(x for x in inputs if x.requires_grad)
    return lambda: torch.autograd.grad(fn(*inputs), wanted)


def _peak_note(call: Callable[[], Any]) -> str:
    """The memory that a call takes beyond its inputs, its results included."""
    import torch

    if not torch.cuda.is_available():
        return ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return f"temporary and results GiB={(torch.cuda.max_memory_allocated() - before) / 2**30:.3f}"


def time_peer(
    peer: str, case: Case, dtype: str, direction: str, *, timer: str, smoke: bool
) -> timing.Timing:
    """The device time of one peer on one case.

    Raises:
        Exception: Whatever keeps the peer from running; the caller reports it.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    first = _make_inputs(case, dtype, device)
    size = sum(x.numel() * x.element_size() for x in jax.tree.leaves(first))
    count, note = timing.number_of_sets(size)
    sets = [first] + [_make_inputs(case, dtype, device) for _ in range(1, 2 if smoke else count)]
    repetitions = 30 if direction in ("forward", "backward") else 10
    if peer == "torch fused":
        calls = [_fused_adamw_call(case, inputs) for inputs in sets]
    else:
        fn = _build(peer, case, smoke)
        make_call = {"forward": _forward_call, "backward": _backward_call}.get(
            direction, _gradient_call
        )
        make_call = make_call if case.has_backward else functools.partial
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
                    )
                except Exception as error:  # a peer may fail in any way, and the others still run
                    _emit(kind="failure", reason=reason(error), **row)
                else:
                    _emit(kind="timing", **dataclasses.asdict(result), **row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
