"""Training steps: AdamW, a schedule, mixed precision and gradient accumulation in one jitted call.

A step uses the backend that surrounds it::

    with jaxllm.use_backend("cuda"):
        state, metrics = step(state, tokens, labels)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxllm import data, ops
from jaxllm.core import promotion
from jaxllm.core.precision import cast, default_compute_dtype, widen
from jaxllm.training.anomaly import Guard, judge, new_guard
from jaxllm.training.optim import Optimizer

Params = Any  # a nested dict of arrays
LossFn = Callable[[Params, Int[Array, "B T"], Int[Array, "B T"]], Float[Array, ""]]


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


jax.export.register_namedtuple_serialization(TrainState, serialized_name="jaxllm.TrainState")


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


def counted(labels: Int[Array | np.ndarray, "*A B T"]) -> Bool[Array | np.ndarray, "*A B T"]:
    """Which labels count in a loss: those that are not negative."""
    return labels >= 0


def init_state(
    params: Params,
    optimizer: Optimizer | optax.GradientTransformation,
    *,
    copy_dtype: DTypeLike | None = None,
    guarded: bool = False,
) -> TrainState:
    """The state before the first step, in the dtypes that every later one has.

    Args:
        params: The parameters; the first step donates them, so they are gone after it.
        optimizer: Such as :func:`adamw`.
        copy_dtype: Keep a copy of the parameters in this dtype, bfloat16 or float16, which the
            optimizer writes beside them: a step that computes in it need not cast them. None for no
            copy.
        guarded: Whether a step that is not finite, or far out, leaves the parameters as they are:
            see :mod:`jaxllm.training.anomaly`.

    Raises:
        TypeError: The parameters are narrower than float32, and the optimizer takes gradients of
            their dtype alone.
    """
    copy = None if copy_dtype is None else cast(params, copy_dtype)
    guard = new_guard() if guarded else None
    is_narrow = jax.eval_shape(widen, params) != jax.eval_shape(lambda tree: tree, params)
    if is_narrow and not isinstance(optimizer, Optimizer):
        opt_state = _settled_state(optimizer, params)
    else:
        opt_state = optimizer.init(params)
    return _own_arrays(TrainState(params, opt_state, jnp.zeros((), jnp.int32), copy, guard))


def _settled_state(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """The first state of an optimizer of optax's, in the dtypes that it has after a step.

    Optax makes the means of bfloat16 parameters in bfloat16, and float32 gradients turn them into
    float32: the second step would be another program.
    """
    state = optimizer.init(params)
    grads = jax.eval_shape(widen, params)
    for _ in range(3):  # a wrapper's dtypes may follow those of what it wraps
        try:
            _, after = jax.eval_shape(optimizer.update, grads, state, params)
        except TypeError as error:
            raise TypeError(
                "the optimizer takes no float32 gradients of narrower parameters, which a training "
                f"step gives it; keep the parameters in float32. {error}"
            ) from error
        before, state = state, _in_dtypes_of(state, after)
        if all(map(operator.is_, jax.tree.leaves(before), jax.tree.leaves(state))):
            break
    return state


def _in_dtypes_of(tree: Any, like: Any) -> Any:
    """A tree in the dtypes of another; as it is where their structures differ."""
    if jax.tree.structure(tree) != jax.tree.structure(like):
        return tree
    return jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), tree, like)


def _own_arrays(tree: Any) -> Any:
    """Arrays of their own, as a step donates each, and of no weak type, as it returns none."""
    seen: dict[int, Array] = {}

    def own(x: ArrayLike) -> Array:
        array = x if isinstance(x, jax.Array) else jnp.array(x)
        if getattr(array, "weak_type", False):  # which the key of a generator has not
            array = jax.lax.convert_element_type(array, array.dtype)
        if id(array) in seen:
            array = jnp.copy(array)
        seen[id(array)] = array
        return array

    return jax.tree.map(own, tree)


def make_train_step(
    loss_fn: LossFn,
    optimizer: Optimizer | optax.GradientTransformation,
    *,
    learning_rate: float | Schedule | None = None,
    compute_dtype: DTypeLike | None = None,
    microbatch_weights: Literal["labels", "equal"] | Callable[[Array], Array] = "labels",
    max_loss_z: float | None = None,
    max_norm_z: float | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Makes the jitted function that takes one optimizer step.

    The parameters are cast to the compute dtype once, or the state has them in it. Loss and
    gradients are averaged over the microbatches in float32, each weighted by its number of labels.
    So a step is the same however its sequences are cut into microbatches.

    Args:
        loss_fn: ``loss_fn(params, tokens, labels)``, the mean loss of one microbatch over the
            labels that count.
        optimizer: Such as :func:`adamw`, or any of optax's. An :class:`Optimizer` takes its step in
            place, from gradients in the compute dtype where nothing is accumulated.
        learning_rate: What the optimizer was given, to have it among the metrics. (An optimizer of
            optax's counts its own steps, without those that a guard has skipped.)
        compute_dtype: What the loss is computed in; None for :func:`default_compute_dtype`.
        microbatch_weights: ``"labels"`` weights a microbatch by the labels that :func:`counted`
            counts; one without any adds nothing. ``"equal"`` weights all alike. A function from
            the labels of a microbatch, (B, T), to its weight is for a loss that counts otherwise.
        max_loss_z: Of a guarded state: as in :func:`jaxllm.training.anomaly.judge`.
        max_norm_z: Likewise.

    Returns:
        ``step(state, tokens, labels) -> (state, metrics)``, with tokens and labels of shape
        (accumulate, B, T). The metrics are float32 scalars: ``loss`` in nats, ``grad_norm`` before
        clipping, ``learning_rate`` if it was given, and of a guarded state those of
        :func:`jaxllm.training.anomaly.judge`. Loss and norm are those of the whole step, with the
        weights.
        The state that goes in is donated: its buffers become those of the state that comes out.

    Raises:
        ValueError: ``microbatch_weights`` is neither of the names nor a function.
    """
    dtype = jnp.dtype(compute_dtype or default_compute_dtype())
    weigh = _weigher(microbatch_weights)

    def train_step(state: TrainState, tokens: Array, labels: Array):
        # Casting is linear, so the gradient with respect to the float32 parameters is the gradient
        # with respect to the cast ones.
        params = cast(state.params if state.copy is None else state.copy, dtype)
        narrow = jax.tree.leaves(state.copy)
        copy = {"copy_dtype": narrow[0].dtype} if narrow else {}

        def gradients(tokens: Array, labels: Array):
            loss, grads = jax.value_and_grad(loss_fn)(params, tokens, labels)
            return loss.astype(jnp.float32), grads

        def weighted(weight: Array, tokens: Array, labels: Array):
            return jax.tree.map(
                lambda x: jnp.where(weight == 0, jnp.zeros_like(x), weight.astype(x.dtype) * x),
                widen(gradients(tokens, labels)),
            )

        def accumulate(total, microbatch):
            return jax.tree.map(jnp.add, total, weighted(*microbatch)), None

        # The first microbatch starts the sum, so that without accumulation there is no second
        # copy of the gradients.
        if len(tokens) == 1:
            total = gradients(tokens[0], labels[0])
        else:
            microbatches = (weigh(labels), tokens, labels)
            first, rest = ([x[i] for x in microbatches] for i in (0, slice(1, None)))
            total, _ = jax.lax.scan(accumulate, weighted(*first), rest)
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


def _weigher(
    weights: Literal["labels", "equal"] | Callable[[Array], Array],
) -> Callable[[Array], Float[Array, " A"]]:
    """The function from the labels of a step, (A, B, T), to weights of mean 1."""
    if weights == "equal":
        return lambda labels: jnp.ones(len(labels), jnp.float32)
    if weights != "labels" and not callable(weights):
        raise ValueError(
            f"microbatch_weights is {weights!r}; it must be 'labels', 'equal' or a function"
        )
    weight_of = weights if callable(weights) else lambda labels: counted(labels).sum()

    def weigh(labels: Array) -> Array:
        found = jnp.stack([weight_of(of) for of in labels]).astype(jnp.float32)
        mean = found.mean()
        return found / jnp.where(mean == 0, 1, mean)

    return weigh


@promotion.by_default
def _optax_step(
    optimizer: optax.GradientTransformation,
    grads: Params,
    state: TrainState,
    grad_scale: float,
    skip: Array | None,
) -> tuple[Params, Any, Array]:
    """The new parameters and optimizer's state, and the norm of the gradients."""
    grads = jax.tree.map(lambda x: x * grad_scale, widen(grads))
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    opt_state = _in_dtypes_of(opt_state, state.opt_state)
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
    """The mean loss over the labels of a data set, each window read once; its exponential is the
    perplexity.

    Batches are weighted by their number of labels, as :func:`counted` counts them.

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
    losses, counts = [], []
    for i in range(full if batches is None else min(batches, full)):
        tokens, labels = data.batch(dataset, batch_size, seq_len, seed=0, step=i)
        losses.append(evaluate(params, tokens, labels))
        counts.append(np.count_nonzero(counted(labels)))
    # A batch without labels adds nothing, whatever its loss is.
    losses = np.where(counts, np.asarray(jax.device_get(losses), np.float64), 0.0)
    return float(losses @ counts / max(sum(counts), 1))
