"""Training steps: AdamW, a schedule, mixed precision and gradient accumulation in one jitted call.

A step uses the backend that surrounds it::

    with jaxllm.use_backend("cuda"):
        state, metrics = step(state, tokens, labels)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

try:
    import optax
except ImportError as error:
    raise ImportError('jaxllm.training needs optax: pip install "jaxllm[train]"') from error

from jaxllm import data, ops
from jaxllm.guard import Guard, judge, new_guard
from jaxllm.models.blocks import unstack
from jaxllm.optim import Optimizer, clipping
from jaxllm.schedules import Schedule
from jaxllm.schedules import warmup_cosine as warmup_cosine

Params = Any  # a nested dict of arrays
LossFn = Callable[[Params, Int[Array, "B T"], Int[Array, "B T"]], Float[Array, ""]]

# Dense bfloat16 peaks in flop/s from NVIDIA's data sheets; the first name that is found counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}


class TrainState(NamedTuple):
    """All that training carries from one step to the next.

    Attributes:
        params: The parameters, float32; or narrower, where the optimizer's state has masters.
        opt_state: The optimizer's state.
        step: The number of steps taken, an int32 scalar.
        copy: The parameters in the dtype to compute in, as the step before wrote them; None where
            each step makes them.
        guard: What keeps bad steps out; None where nothing does.
    """

    params: Params
    opt_state: Any
    step: Int[Array, ""]
    copy: Params | None = None
    guard: Guard | None = None


def keep_compiled(folder: str | Path) -> None:
    """Keeps compiled programs in a folder, where later processes find them.

    XLA chooses among kernels for a GPU by timing them, and two compilations of one program may then
    add in two orders. With this a run that is repeated or resumed on a machine has the programs of
    the first, and does not wait for their compilation.

    Nothing changes where JAX has such a folder already, as by ``JAX_COMPILATION_CACHE_DIR``.

    Args:
        folder: Created when a program is compiled. Programs of other versions of JAX, of other
            devices or under other flags do no harm in it. A program of which a killed process wrote
            half costs every later process a warning and a compilation, until the folder is removed;
            one that another process is just writing, a single time.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).absolute()))
        # JAX would keep only what takes a second to compile.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def default_compute_dtype() -> str:
    """``"bfloat16"`` where JAX runs on a GPU, ``"float32"`` elsewhere."""
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def cast(tree: Any, dtype: DTypeLike) -> Any:
    """The floating-point arrays of a structure in another dtype, the other arrays as they are."""

    def convert(x: Array) -> Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(convert, tree)


def decay_mask(params: Params) -> Any:
    """Which parameters weight decay pulls to zero: the matrices, not the biases and norm scales.

    What lies under a ``"blocks"`` key is stacked over layers, unless there is a list of them: its
    first axis does not count, and a bias of shape (L, D) is a vector.

    Args:
        params: The parameters.

    Returns:
        The same structure with a bool for each array.
    """

    def is_matrix(path: tuple, x: Array) -> bool:
        in_blocks = any(getattr(key, "key", None) == "blocks" for key in path)
        in_list = any(isinstance(key, jax.tree_util.SequenceKey) for key in path)
        return x.ndim - (in_blocks and not in_list) >= 2

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def adamw(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    max_grad_norm: float | None = 1.0,
) -> Optimizer:
    """AdamW as GPT-2 is trained with: clipped gradients, decay on matrices alone.

    The state is that of ``optax.chain(optax.clip_by_global_norm(...), optax.adamw(...))``, and
    ``update`` is that chain's. ``step`` gives the same parameters and state, to float32 rounding,
    from :func:`jaxllm.ops.adamw_update`: one pass over memory, with the clipping folded in.

    Args:
        learning_rate: A rate, or a schedule of it.
        b1: The decay of the mean gradient.
        b2: The decay of the mean squared gradient.
        eps: Added to the root of the mean square.
        weight_decay: Applied where :func:`decay_mask` says so.
        max_grad_norm: Gradients of a larger global norm are scaled down to it; None for no limit.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101);
    llm.c's defaults.
    """
    chain = optax.adamw(
        learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask
    )
    if max_grad_norm is not None:
        chain = optax.chain(optax.clip_by_global_norm(max_grad_norm), chain)

    def step(
        grads: Params,
        state: Any,
        params: Params,
        *,
        grad_scale: ArrayLike = 1.0,
        grad_norm: ArrayLike | None = None,
        skip: ArrayLike = False,
        copy_dtype: DTypeLike | None = None,
    ):
        scale, norm = clipping(grads, max_grad_norm, grad_scale, grad_norm)
        # Adam's count, and the schedule's where there is one: they are equal.
        count = optax.tree_utils.tree_get_all_with_path(state, "count")[0][1]
        params, m, v, *copy = ops.adamw_update(
            params,
            grads,
            optax.tree_utils.tree_get(state, "mu"),
            optax.tree_utils.tree_get(state, "nu"),
            step=count + 1,
            lr=learning_rate(count) if callable(learning_rate) else learning_rate,
            b1=b1,
            b2=b2,
            eps=eps,
            weight_decay=weight_decay,
            mask=decay_mask(params),
            grad_scale=scale,
            skip=skip,
            copy_dtype=copy_dtype,
        )
        return params, optax.tree_utils.tree_set(state, count=count + 1, mu=m, nu=v), norm, *copy

    return Optimizer(chain.init, chain.update, step)


def init_state(
    params: Params,
    optimizer: Optimizer | optax.GradientTransformation,
    *,
    copy_dtype: DTypeLike | None = None,
    guarded: bool = False,
) -> TrainState:
    """The state before the first step.

    Args:
        params: The parameters; the first step donates them, so they are gone after it.
        optimizer: Such as :func:`adamw`.
        copy_dtype: Keep a copy of the parameters in this dtype, bfloat16 or float16, which the
            optimizer writes beside them: a step that computes in it need not cast them. None for no
            copy.
        guarded: Whether a step that is not finite, or far out, leaves the parameters as they are:
            see :mod:`jaxllm.guard`.
    """
    copy = None if copy_dtype is None else cast(params, copy_dtype)
    guard = new_guard() if guarded else None
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), copy, guard)


def make_train_step(
    loss_fn: LossFn,
    optimizer: Optimizer | optax.GradientTransformation,
    *,
    learning_rate: float | Schedule | None = None,
    compute_dtype: DTypeLike | None = None,
    max_loss_z: float | None = None,
    max_norm_z: float | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Makes the jitted function that takes one optimizer step.

    The parameters are cast to the compute dtype once, or the state has them in it. Their gradients
    are averaged over the microbatches in float32, and each microbatch counts alike, however many
    labels it ignores.

    Args:
        loss_fn: ``loss_fn(params, tokens, labels)``, the mean loss of one microbatch.
        optimizer: Such as :func:`adamw`, or any of optax's. An :class:`Optimizer` takes its step in
            place, from gradients in the compute dtype where nothing is accumulated.
        learning_rate: What the optimizer was given, to have it among the metrics. (An optimizer of
            optax's counts its own steps, without those that a guard has skipped.)
        compute_dtype: What the loss is computed in; None for :func:`default_compute_dtype`.
        max_loss_z: Of a guarded state: as in :func:`jaxllm.guard.judge`.
        max_norm_z: Likewise.

    Returns:
        ``step(state, tokens, labels) -> (state, metrics)``, with tokens and labels of shape
        (accumulate, B, T). The metrics are float32 scalars: ``loss`` in nats, ``grad_norm`` before
        clipping, ``learning_rate`` if it was given, and of a guarded state those of
        :func:`jaxllm.guard.judge`. The state that goes in is donated: its
        buffers become those of the state that comes out.
    """
    dtype = jnp.dtype(compute_dtype or default_compute_dtype())

    def train_step(state: TrainState, tokens: Array, labels: Array):
        # Casting is linear, so the gradient with respect to the float32 parameters is the gradient
        # with respect to the cast ones.
        params = cast(state.params if state.copy is None else state.copy, dtype)
        narrow = jax.tree.leaves(state.copy)
        copy = {"copy_dtype": narrow[0].dtype} if narrow else {}

        def gradients(tokens: Array, labels: Array):
            loss, grads = jax.value_and_grad(loss_fn)(params, tokens, labels)
            return loss.astype(jnp.float32), grads

        def accumulate(total, microbatch):
            return jax.tree.map(jnp.add, total, cast(gradients(*microbatch), jnp.float32)), None

        # The first microbatch starts the sum, so that without accumulation there is no second
        # copy of the gradients.
        total = gradients(tokens[0], labels[0])
        if len(tokens) > 1:
            total, _ = jax.lax.scan(accumulate, cast(total, jnp.float32), (tokens[1:], labels[1:]))
        total_loss, grads = total
        loss, scale = total_loss / len(tokens), 1 / len(tokens)

        guard, verdict, facts = None, {}, {}
        if state.guard is not None:
            norm = ops.global_norm(grads) * scale
            limits = {"max_loss_z": max_loss_z, "max_norm_z": max_norm_z}
            guard, skip, facts = judge(state.guard, state.step + 1, loss, norm, **limits)
            verdict = {"grad_norm": norm, "skip": skip}
        if isinstance(optimizer, Optimizer):
            updated, opt_state, grad_norm, *copies = optimizer.step(
                grads, state.opt_state, state.params, grad_scale=scale, **copy, **verdict
            )
        else:
            updated, opt_state, grad_norm = _optax_step(
                optimizer, grads, state, scale, verdict.get("skip")
            )
            copies = [cast(updated, narrow[0].dtype)] if narrow else []
        metrics = {"loss": loss, "grad_norm": grad_norm, **facts}
        if learning_rate is not None:
            rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
            metrics["learning_rate"] = jnp.asarray(rate, jnp.float32)
        copied = copies[0] if copies else None
        return TrainState(updated, opt_state, state.step + 1, copied, guard), metrics

    return jax.jit(train_step, donate_argnames="state")


def _optax_step(
    optimizer: optax.GradientTransformation,
    grads: Params,
    state: TrainState,
    grad_scale: float,
    skip: Array | None,
) -> tuple[Params, Any, Array]:
    """The new parameters and optimizer's state, and the norm of the gradients."""
    grads = jax.tree.map(lambda x: x * grad_scale, cast(grads, jnp.float32))
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params, norm = optax.apply_updates(state.params, updates), ops.global_norm(grads)
    if skip is not None:
        params, opt_state = jax.tree.map(
            lambda old, new: jnp.where(skip, old, new),
            (state.params, state.opt_state),
            (params, opt_state),
        )
    return params, opt_state, norm


def make_eval_step(
    loss_fn: LossFn, *, compute_dtype: DTypeLike | None = None
) -> Callable[[Params, ArrayLike, ArrayLike], Float[Array, ""]]:
    """Makes the jitted function that computes a loss and no gradient.

    Args:
        loss_fn: As in :func:`make_train_step`.
        compute_dtype: Likewise.

    Returns:
        ``evaluate(params, tokens, labels) -> loss``, with tokens and labels of shape (B, T).
    """
    dtype = jnp.dtype(compute_dtype or default_compute_dtype())

    def evaluate(params: Params, tokens: Array, labels: Array) -> Array:
        return loss_fn(cast(params, dtype), tokens, labels).astype(jnp.float32)

    return jax.jit(evaluate)


def mean_loss(
    evaluate: Callable[[Params, ArrayLike, ArrayLike], Float[Array, ""]],
    params: Params,
    dataset: data.Dataset,
    *,
    batch_size: int,
    seq_len: int,
    batches: int | None = None,
) -> float:
    """The mean loss over the windows of a data set, each read once; its exponential is the
    perplexity.

    Args:
        evaluate: Of :func:`make_eval_step`.
        params: The parameters, or their int8 form.
        dataset: What the model has not been trained on.
        batch_size: B, the windows that are read together.
        seq_len: T, the tokens in each.
        batches: How many batches to read, the same ones each time; None for all that are full. Of
            fewer windows than a batch has, some are read twice.

    Returns:
        The loss in nats a token.

    Raises:
        ValueError: The data set is shorter than one window, or a number is below 1.
    """
    if batches is not None and batches < 1:
        raise ValueError(f"batches is {batches}; it must be at least 1, or None")
    if batch_size < 1 or seq_len < 1:
        raise ValueError(
            f"batch_size is {batch_size} and seq_len {seq_len}; they must be at least 1"
        )
    full = max(data.num_windows(dataset, seq_len) // batch_size, 1)
    losses = [
        evaluate(params, *data.batch(dataset, batch_size, seq_len, seed=0, step=i))
        for i in range(full if batches is None else min(batches, full))
    ]
    return float(np.mean(jax.device_get(losses), dtype=np.float64))


def explain_halt(
    loss_fn: LossFn,
    params: Params,
    tokens: ArrayLike,
    labels: ArrayLike,
    *,
    compute_dtype: DTypeLike | None = None,
) -> str:
    """What is not finite in the step at which a guarded run halted.

    Args:
        loss_fn: As in :func:`make_train_step`.
        params: The parameters that the step found, which a guarded state still has.
        tokens: The step's, of shape (accumulate, B, T).
        labels: Likewise.
        compute_dtype: As in :func:`make_train_step`.

    Returns:
        Lines that name each parameter that is not finite, and of each microbatch that is not finite
        the loss and each parameter whose gradient is not.
    """
    dtype = jnp.dtype(compute_dtype or default_compute_dtype())
    lines = [f"parameter {fault}" for fault in nonfinite(params)]
    gradients = jax.jit(jax.value_and_grad(loss_fn))
    for i, microbatch in enumerate(zip(jnp.asarray(tokens), jnp.asarray(labels), strict=True)):
        loss, grads = gradients(cast(params, dtype), *microbatch)
        faults = [f"gradient of {fault}" for fault in nonfinite(grads)]
        if faults or not jnp.isfinite(loss):
            lines += [f"microbatch {i}: loss {float(loss)}", *faults]
    if not lines:
        lines = ["each microbatch is finite by itself: the sum or the norm of the gradients is not"]
    return "\n".join(lines)


def nonfinite(params: Params) -> list[str]:
    """The arrays that hold a NaN or an infinity, and how many; layers counted one by one."""
    if isinstance(params, dict) and isinstance(params.get("blocks"), dict):
        params = unstack(params)
    counts = jax.jit(
        lambda tree: jax.tree.map(lambda x: (jnp.isnan(x).sum(), jnp.isinf(x).sum()), tree)
    )
    paths = jax.tree_util.tree_leaves_with_path(params)
    found = jax.tree.leaves(jax.device_get(counts(params)))
    return [
        f"{jax.tree_util.keystr(path, simple=True, separator='/')}: {nans} NaN and {infinities} "
        f"infinite of {x.size}"
        for (path, x), nans, infinities in zip(paths, found[::2], found[1::2], strict=True)
        if nans or infinities
    ]


def peak_flops(device_kind: str) -> float | None:
    """The dense bfloat16 peak of a device in flop/s, or None if it is not in the table.

    Args:
        device_kind: As in ``jax.devices()[0].device_kind``.
    """
    for name, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{name}\b", device_kind):
            return peak
    return None


def measured_matmul_flops(
    dtype: DTypeLike | None = None, *, size: int | None = None, repeats: int = 20
) -> float:
    """The rate of large square matrix products on the default device, in flop/s.

    ``2 size^3`` operations a product, the best of three runs of ``repeats`` products, each of which
    needs the one before.

    Args:
        dtype: Of the matrices; None for :func:`default_compute_dtype`.
        size: Their rows and columns; None for 8192 on a GPU, 512 elsewhere.
        repeats: Products in a run.
    """
    size = size or (8192 if jax.default_backend() == "gpu" else 512)
    dtype = jnp.dtype(dtype or default_compute_dtype())
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    weight = jax.random.normal(jax.random.key(1), (size, size), dtype) / size**0.5
    run = jax.jit(
        lambda x: jax.lax.fori_loop(0, repeats, lambda _, x: (x @ weight).astype(dtype), x)
    )
    run(x).block_until_ready()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        run(x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 * repeats / min(seconds)


def model_flops_utilization(flops: float, seconds: float, device_kind: str) -> float | None:
    """The share of a device's bfloat16 peak that the model's own arithmetic reaches.

    ``MFU = flops / seconds / peak``, where a model's ``flops_per_token`` says what counts.

    Args:
        flops: What the model must compute, recomputation not counted.
        seconds: How long it took.
        device_kind: As in :func:`peak_flops`.

    Returns:
        A number between 0 and 1; None where the peak is unknown, such as on a CPU.
    """
    peak = peak_flops(device_kind)
    return None if peak is None else flops / seconds / peak
