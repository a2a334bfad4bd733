"""Training steps: optimizer, schedule, mixed precision and gradient accumulation in one jit.

A step uses the backend of the enclosing context::

    with jaxllm.use_backend("cuda"):
        state, metrics = step(state, tokens, labels)
"""

from __future__ import annotations

import functools
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
from jaxllm.core import gathers, meshes, promotion
from jaxllm.core.hoisting import hoist_rounding
from jaxllm.core.precision import cast, is_floating, widen
from jaxllm.ops.checks import (
    as_bool,
    as_dtype,
    as_finite_number,
    as_integer,
    as_scalar,
    check_floating_of_any_width,
    leaf_names,
    leaves_like,
)
from jaxllm.training.anomaly import (
    AnomalyState,
    check_limits,
    detect_anomaly,
    init_anomaly_state,
)
from jaxllm.training.arguments import check_microbatches, compute_dtype_of
from jaxllm.training.loader import load_batch
from jaxllm.training.optim import Optimizer, check_made_by, named_state_errors
from jaxllm.training.schedules import Schedule

Params = Any  # a nested dict of arrays
LossFn = Callable[..., Float[Array, ""]]  # of the parameters, tokens, labels and what follows them


class TrainState(NamedTuple):
    """The state of training between two steps.

    Attributes:
        params: The parameters. float32, or narrower if the optimizer's state has float32 masters.
        opt_state: The optimizer's state.
        step: The number of steps taken, an int32 scalar.
        copy: A copy of the parameters in the compute dtype, written by the previous step; None if
            each step casts the parameters itself.
        anomaly: The anomaly detector's state; None if anomalies are not detected.
    """

    params: Params
    opt_state: Any
    step: Int[Array, ""]
    copy: Params | None = None
    anomaly: AnomalyState | None = None


jax.export.register_namedtuple_serialization(TrainState, serialized_name="jaxllm.TrainState")


def keep_compiled(folder: str | Path) -> None:
    """Sets JAX's persistent compilation cache to a folder, for programs of any compile time.

    XLA autotunes GPU kernels by timing them, so two compilations of one program may sum in
    different orders. With the cache, a repeated or resumed run on the same machine runs the same
    programs, and does not wait for their compilation.

    The call has no effect if JAX has a cache folder already, for example from
    ``JAX_COMPILATION_CACHE_DIR``.

    Args:
        folder: The cache folder, created when the first program is compiled. Programs for other JAX
            versions, devices or flags may share it. If a process is killed while it writes a
            program, each later process warns and recompiles that program until the folder is
            removed.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).absolute()))
        # By default, JAX stores only programs that take at least a second to compile.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def label_mask(labels: Int[Array | np.ndarray, "*A B T"]) -> Bool[Array | np.ndarray, "*A B T"]:
    """The mask of labels that count in a loss: true where a label is not negative."""
    return labels >= 0


def init_state(
    params: Params,
    optimizer: Optimizer | optax.GradientTransformation,
    *,
    copy_dtype: DTypeLike | None = None,
    detect_anomalies: bool = False,
) -> TrainState:
    """The state before the first step. Later steps keep its dtypes.

    Args:
        params: The parameters. The first step donates them, so do not use them afterwards.
        optimizer: A jaxllm or optax optimizer, such as :func:`adamw`.
        copy_dtype: Keep a copy of the parameters in this dtype, bfloat16 or float16, which must be
            the compute dtype of the step. The optimizer writes the copy together with the
            parameters, so a step need not cast them. None for no copy.
        detect_anomalies: Leave the parameters unchanged in steps that are not finite or are
            outliers. See :mod:`jaxllm.training.anomaly`.

    Returns:
        The state, with ``step`` 0.

    Raises:
        TypeError: ``optimizer`` is none, a leaf of ``params`` is no array or number, ``copy_dtype``
            is not bfloat16, float16 or None, or ``detect_anomalies`` is no bool; or the parameters
            are narrower than float32, and the optimizer accepts only gradients of their dtype.
    """
    _check_optimizer(optimizer)
    for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)):
            raise TypeError(f"params/{name} is {leaf!r}; it must be an array or a number")
    copy_dtype = None if copy_dtype is None else as_dtype("copy_dtype", copy_dtype)
    if copy_dtype not in (None, jnp.bfloat16, jnp.float16):
        raise TypeError(f"copy_dtype is {copy_dtype}; it must be bfloat16, float16 or None")
    copy = None if copy_dtype is None else cast(params, copy_dtype)
    anomaly = init_anomaly_state() if as_bool("detect_anomalies", detect_anomalies) else None
    is_narrow = jax.eval_shape(widen, params) != jax.eval_shape(lambda tree: tree, params)
    if is_narrow and not isinstance(optimizer, Optimizer):
        opt_state = _settled_state(optimizer, params)
    else:
        opt_state = optimizer.init(params)
    opt_state = jax.tree.map(_own_hyperparameter, opt_state)
    return _own_arrays(TrainState(params, opt_state, jnp.zeros((), jnp.int32), copy, anomaly))


def _settled_state(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """The initial state of an optax optimizer, in the dtypes that it has after a step.

    Optax initializes the moments of bfloat16 parameters in bfloat16. An update with float32
    gradients promotes them to float32, so the second step would compile again.
    """
    state = optimizer.init(params)
    grads, loss = jax.eval_shape(widen, params), jax.ShapeDtypeStruct((), jnp.float32)
    update = functools.partial(_update_with_loss, optimizer)
    for _ in range(3):  # nested wrappers may need one round each to settle
        try:
            _, after = jax.eval_shape(update, grads, state, params, loss)
        except _MissingArgumentError:
            raise
        except TypeError as error:
            raise TypeError(
                "the optimizer does not accept float32 gradients for narrower parameters, which a "
                f"training step passes to it; keep the parameters in float32. {error}"
            ) from error
        before, state = state, _in_dtypes_of(state, after)
        if all(map(operator.is_, jax.tree.leaves(before), jax.tree.leaves(state))):
            break
    return state


class _MissingArgumentError(TypeError):
    """An optimizer needs arguments that a training step does not have."""


def _update_with_loss(
    optimizer: Any, grads: Params, state: Any, params: Params, loss: Array
) -> tuple[Any, Any]:
    """The update of an optax optimizer, which gets the loss as ``value`` if it takes that."""
    try:
        try:
            return optimizer.update(grads, state, params, value=loss)
        except TypeError as error:
            if "unexpected keyword argument 'value'" not in str(error):
                raise
        return optimizer.update(grads, state, params)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise _MissingArgumentError(
            "optimizer needs arguments that a training step does not have, which passes gradients, "
            "parameters, and the loss as value. A line search needs value_fn, a function of the "
            f"parameters: pass optax.lbfgs(rate, linesearch=None), which has none. {error}"
        ) from error


def _in_dtypes_of(tree: Any, like: Any) -> Any:
    """Casts a tree to the dtypes of another; returns it unchanged if the structures differ."""
    if jax.tree.structure(tree) != jax.tree.structure(like):
        return tree
    return jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), tree, like)


def _own_hyperparameter(x: ArrayLike) -> ArrayLike:
    """Copies a small array of an optimizer's state, such as a learning rate or a random key.

    It may be the array that the caller made the optimizer with, and a step donates it. A large one
    is a moment, which the optimizer has made itself.
    """
    return jnp.copy(x) if isinstance(x, jax.Array) and x.size <= 1024 else x


def _own_arrays(tree: Any) -> Any:
    """Makes the leaves distinct arrays without weak types.

    A step donates each leaf, so two leaves must not share a buffer. A step returns no weak types,
    so a weak type in its input would compile a second program.
    """
    seen: dict[int, Array] = {}

    def own(x: ArrayLike) -> Array:
        array = x if isinstance(x, jax.Array) else jnp.array(x)
        if getattr(array, "weak_type", False):  # a random key has no such attribute
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
    float8_counts: bool = False,
    max_underflow: float | None = None,
    shardings: Any = None,
    overlap: bool = True,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Makes the jitted function that takes one optimizer step.

    The parameters are cast to the compute dtype once per step, unless the state has a copy in it.
    Weights of layers with a ``precision`` are rounded to float8 once per step, but for stacked
    blocks and recomputed ones, which round them for each microbatch.
    Loss and gradients are averaged over the microbatches in float32, weighted by the number of
    labels. So the result does not depend on how the sequences are split into microbatches.

    Args:
        loss_fn: ``loss_fn(params, tokens, labels, *more) -> loss``, the mean loss of one microbatch
            over the labels that count. All arrays but the parameters have shape (B, T), or another
            that begins with B. ``more`` is what the step gets after the labels, such as the segment
            ids and positions of :func:`jaxllm.data.batch`.
        optimizer: A jaxllm or optax optimizer. An :class:`Optimizer` updates in place, and without
            accumulation takes gradients in the compute dtype. An optax optimizer that takes extra
            arguments, such as ``optax.contrib.reduce_on_plateau`` in a chain, gets the loss of the
            step as ``value``. One that needs ``value_fn`` for a line search, such as
            ``optax.lbfgs``, is an error.
        learning_rate: The optimizer's rate or schedule, to report it in the metrics. A schedule
            gets the optimizer's count of steps, which is without the skipped ones.
        compute_dtype: The dtype of the forward and backward pass, and of the state's copy of the
            parameters if it has one; None for :func:`default_compute_dtype`.
        microbatch_weights: The weight of a microbatch. ``"labels"`` is the number of labels in
            :func:`label_mask`; a microbatch without labels adds nothing. ``"equal"`` weights all
            microbatches alike. For a loss that counts labels in another way, pass a function from
            labels, (B, T), to a scalar.
        max_loss_z: Skip steps whose loss has a larger z-score, above 0. Needs a state made with
            ``detect_anomalies``. See :func:`jaxllm.training.anomaly.detect_anomaly`.
        max_norm_z: The same for the gradient norm.
        float8_counts: Counts what layers with a ``precision`` lose in rounding to float8, see
            :func:`jaxllm.ops.count_float8`. The counts are in the metrics, and the anomaly detector
            gets them. They take one more pass over what is rounded.
        max_underflow: Skip steps in which float8 loses a larger share of the elements to zero, from
            0 to 1. Needs ``float8_counts`` and a state made with ``detect_anomalies``.
        shardings: The shardings of the state, from
            :func:`jaxllm.training.parallel.state_shardings`. The returned state keeps them. None
            for training on one device, or to let XLA choose.
        overlap: With ``shardings``: whether XLA runs collectives beside kernels, by its
            latency-hiding scheduler. False is faster for GPT-2 under FSDP in bfloat16 on Hopper
            GPUs: kernels of its fused blocks need all SMs at once, and wait for collectives to end.
        compiler_options: XLA's options for the step. None for those of
            :func:`default_compiler_options` with ``shardings``, else for none.

    Returns:
        ``step(state, tokens, labels, *more) -> (state, metrics)``, with tokens and labels of shape
        (accumulate, B, T), and in ``more`` arrays whose first axis is the microbatch. The input
        state is donated. The step raises TypeError if the state is no :class:`TrainState`, if a
        parameter or the loss has no floating dtype, if the loss is no scalar, if the optimizer
        needs arguments that the step does not have, or if the state is that of another optimizer
        and this one cannot take it. It raises ValueError if the arrays differ in
        the number of microbatches or have none, if the state's copy does not have the compute
        dtype, if there is a limit and the state has no anomaly detector, if the shardings are those
        of another state, or if a function ``microbatch_weights`` does not return a scalar.

        The metrics are float32 scalars: ``loss`` in nats; ``grad_norm`` before clipping;
        ``learning_rate`` if it was given; and with ``detect_anomalies`` the metrics of
        :func:`jaxllm.training.anomaly.detect_anomaly`. Loss and norm are those of the whole step.
        With ``float8_counts`` also ``float8_underflow`` and ``float8_gradient_underflow``, the
        shares of the elements of inputs and weights, and of gradients, that became zero; and
        ``float8_overflow``, the number of all that are not finite.

    Raises:
        TypeError: ``loss_fn`` is no function; ``optimizer`` is none; ``compute_dtype`` is not a
            floating dtype of 16 bits or more, or needs ``jax_enable_x64``; ``learning_rate`` or a
            limit is not a number; ``float8_counts`` or ``overlap`` is no bool; or ``shardings`` is
            no :class:`TrainState`.
        ValueError: ``microbatch_weights`` is not ``"labels"``, ``"equal"`` or a function,
            ``learning_rate`` or a limit is out of range, or ``max_underflow`` is given without
            ``float8_counts``.
    """
    limits: Any = {
        "max_loss_z": max_loss_z,
        "max_norm_z": max_norm_z,
        "max_underflow": max_underflow,
    }
    check_limits(**limits)
    loss_fn = _checked_loss(loss_fn, is_scalar=True)
    _check_optimizer(optimizer)
    float8_counts, overlap = as_bool("float8_counts", float8_counts), as_bool("overlap", overlap)
    if learning_rate is not None and not callable(learning_rate):
        as_finite_number("learning_rate", learning_rate)
    if shardings is not None and not isinstance(shardings, TrainState):
        kind = type(shardings).__name__
        raise TypeError(
            f"shardings has type {kind}; it must be a TrainState of shardings, which "
            "parallel.state_shardings(mesh, state) returns"
        )
    if max_underflow is not None and not float8_counts:
        raise ValueError(
            f"max_underflow is {max_underflow} and float8_counts False; it needs the counts"
        )
    dtype = compute_dtype_of(compute_dtype)
    weigh = _weigher(microbatch_weights)

    def train_step(state: TrainState, tokens: Array, labels: Array, *more: Array):
        check_state("state", state)
        check_microbatches(tokens, labels, *more)
        if shardings is not None:
            _check_shardings(shardings, state)
        copied_to = _copy_dtype(state, dtype)
        for name, leaf in zip(leaf_names(state.params), jax.tree.leaves(state.params), strict=True):
            check_floating_of_any_width(**{f"state.params/{name}": leaf})
        if state.anomaly is None:
            for name, limit in limits.items():
                if limit is not None:
                    raise ValueError(
                        f"{name} is {limit}, and the state has no anomaly detector; make it with "
                        "init_state(detect_anomalies=True)"
                    )
        # Casting is linear, so the gradient with respect to the float32 parameters is the gradient
        # with respect to the cast ones.
        params = cast(state.params if state.copy is None else state.copy, dtype)
        copy = {} if copied_to is None else {"copy_dtype": copied_to}

        def gradients(params: Params, *microbatch: Array):
            counts = None
            if float8_counts:
                counted = jax.value_and_grad(ops.count_float8(loss_fn), argnums=(0, 1))
                probe = ops.Float8Counts.zeros()
                loss, (counts, grads) = counted(probe, params, *microbatch)
            else:
                loss, grads = jax.value_and_grad(loss_fn)(params, *microbatch)
            if shardings is not None:  # a device needs the sum of what it updates
                grads = meshes.placed(grads, shardings.params)
            return (loss.astype(jnp.float32), grads), counts

        def weighted(params: Params, weight: Array, *microbatch: Array):
            found, counts = gradients(params, *microbatch)
            scaled = jax.tree.map(lambda x: weight.astype(x.dtype) * x, widen(found))
            return jax.tree.map(
                lambda x: jnp.where(weight == 0, jnp.zeros_like(x), x), (scaled, counts)
            )

        # The first microbatch starts the sum, so that without accumulation there is no second
        # copy of the gradients.
        if len(tokens) == 1:
            total = gradients(params, *(x[0] for x in (tokens, labels, *more)))
        else:
            microbatches = (weigh(labels), tokens, labels, *more)
            first, rest = ([x[i] for x in microbatches] for i in (0, slice(1, None)))
            of_microbatch = hoist_rounding(weighted, params, *first)

            def accumulate(total, microbatch):
                return jax.tree.map(jnp.add, total, of_microbatch(*microbatch)), None

            total, _ = jax.lax.scan(accumulate, of_microbatch(*first), rest)
        (total_loss, grads), counts = total
        loss, scale = total_loss / len(tokens), 1 / len(tokens)

        rate = learning_rate
        if callable(learning_rate):
            rate = as_scalar("learning_rate", learning_rate(_steps_taken(state)))
        anomaly, verdict, detected = None, {}, {}
        if state.anomaly is not None:
            norm = ops.global_norm(grads) * scale
            found = {"float8_counts": counts, "hyperparameters": _scheduled(optimizer, state)}
            if callable(learning_rate):
                found["hyperparameters"] += (rate,)
            anomaly, skip, detected = detect_anomaly(
                state.anomaly, state.step + 1, loss, norm, **limits, **found
            )
            verdict = {"grad_norm": norm, "skip": skip}
        if isinstance(optimizer, Optimizer):
            updated, opt_state, grad_norm, *copies = optimizer.step(
                grads, state.opt_state, state.params, grad_scale=scale, **copy, **verdict
            )
        else:
            updated, opt_state, grad_norm = _optax_step(
                optimizer, grads, state, loss, scale, verdict.get("skip")
            )
            copies = [] if copied_to is None else [cast(updated, copied_to)]
        metrics = {"loss": loss, "grad_norm": grad_norm, **detected}
        if counts is not None:
            of_operands, of_gradients = counts.underflow_share
            metrics |= {
                "float8_underflow": of_operands,
                "float8_gradient_underflow": of_gradients,
                "float8_overflow": counts.overflow.sum(),
            }
        if learning_rate is not None:
            metrics["learning_rate"] = jnp.asarray(rate, jnp.float32)
        copied = copies[0] if copies else None
        if shardings is not None:
            copied = meshes.placed(copied, shardings.copy)
        return TrainState(updated, opt_state, state.step + 1, copied, anomaly), metrics

    options: Any = {"donate_argnames": "state", "compiler_options": compiler_options}
    if shardings is None:
        return jax.jit(train_step, **options)
    if compiler_options is None:
        options["compiler_options"] = default_compiler_options(shardings, overlap)
    weights = shardings.params if shardings.copy is None else shardings.copy
    if all(sharding.is_fully_replicated for sharding in jax.tree.leaves(weights)):
        train_step = gathers.whole_weights()(train_step)
    return jax.jit(train_step, **options, out_shardings=(shardings, None))


def check_state(name: str, state: Any) -> None:
    """Raises TypeError where an argument is not a training state, but for example parameters."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{name} has type {type(state).__name__}; it must be a TrainState, such as init_state "
            "returns"
        )


def _check_shardings(shardings: TrainState, state: TrainState) -> None:
    """Raises ValueError where the shardings are of a state with other arrays."""
    for name, of, part in zip(state._fields, shardings, state, strict=True):
        if name not in ("params", "copy") and _is_prefix(of, part):
            continue
        try:
            leaves_like(f"shardings.{name}", of, part, f"state.{name}")
        except ValueError as error:
            raise ValueError(
                f"{error}; make the shardings of this state, by parallel.state_shardings(mesh, "
                "state)"
            ) from error


def _is_prefix(shardings: Any, tree: Any) -> bool:
    """Whether ``jax.jit`` takes the shardings for a tree. None lets XLA choose one."""
    try:
        jax.tree.map(lambda *_: None, shardings, tree, is_leaf=lambda x: x is None)
    except ValueError:
        return False
    return True


def _checked_loss(loss_fn: LossFn, *, is_scalar: bool) -> LossFn:
    """The loss function, with an error where it returns no array, or no floating scalar."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is {loss_fn!r}; it must be a function")

    @functools.wraps(loss_fn)
    def checked(*args: Any) -> Array:
        loss = loss_fn(*args)
        if not isinstance(loss, jax.Array | np.ndarray | np.generic):
            raise TypeError(f"loss_fn returns {type(loss).__name__}; it must return an array")
        if is_scalar and (loss.shape or not is_floating(loss)):
            raise TypeError(
                f"loss_fn returns {loss.dtype} of shape {loss.shape}; it must return a scalar of a "
                "floating dtype"
            )
        return loss

    return checked


def _check_optimizer(optimizer: Any) -> None:
    """Raises TypeError where there is no optimizer, but for example the function that makes one."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"optimizer is {optimizer!r}; it must be a jaxllm or optax optimizer, such as "
            "training.adamw(1e-3) returns"
        )


def _copy_dtype(state: TrainState, compute_dtype: jnp.dtype) -> jnp.dtype | None:
    """The dtype of the state's copy; None if there is none.

    Raises:
        ValueError: It is not the compute dtype, so the step would compute with rounded parameters.
    """
    dtype = next((x.dtype for x in jax.tree.leaves(state.copy) if is_floating(x)), None)
    if dtype not in (None, compute_dtype):
        raise ValueError(
            f"state.copy has dtype {dtype} and compute_dtype is {compute_dtype}; they must be "
            "equal: pass copy_dtype to init_state and compute_dtype to make_train_step"
        )
    return dtype


def _scheduled(optimizer: Any, state: TrainState) -> tuple[ArrayLike, ...]:
    """What the schedules of a jaxllm optimizer give for the next step; optax's are not known."""
    schedules = optimizer.schedules if isinstance(optimizer, Optimizer) else None
    return () if schedules is None else tuple(schedules(state.opt_state).values())


def _steps_taken(state: TrainState) -> ArrayLike:
    """The count of steps in the optimizer's state, which schedules get; else the state's step."""

    def is_counter(node: Any) -> bool:
        count: Any = node.count if "count" in getattr(node, "_fields", ()) else None
        return isinstance(count, jax.Array) and not count.shape and not is_floating(count)

    nodes = jax.tree.leaves(state.opt_state, is_leaf=is_counter)
    return next((node.count for node in nodes if is_counter(node)), state.step)


_ON_GPUS = {
    # XLA copies the operands of the all-reduces that it joins into one array, and the results out
    # of it: for GPT-2's gradients 0.8 ms of a step of 50. NCCL takes arrays apart in one launch.
    "xla_disable_hlo_passes": "all-reduce-contiguous",
    # Up to how many bytes XLA joins; by default 30 MB. A collective starts on a device when a
    # kernel leaves its SMs, and ends after it has started on all. A step of Llama 3.2 1B takes 1
    # to 2% less.
    "xla_gpu_all_reduce_combine_threshold_bytes": 2**28,
    "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**27,
}


def default_compiler_options(shardings: Any, overlap: bool) -> dict[str, Any] | None:
    """XLA's options for a step on several GPUs; None for other devices."""
    devices = {device for of in jax.tree.leaves(shardings) for device in of.device_set}
    if len(devices) == 1 or any(device.platform != "gpu" for device in devices):
        return None
    return _ON_GPUS | ({} if overlap else {"xla_gpu_enable_latency_hiding_scheduler": False})


def _weigher(
    weights: Literal["labels", "equal"] | Callable[[Array], Array],
) -> Callable[[Array], Float[Array, " A"]]:
    """The function from the labels of a step, (A, B, T), to weights, (A,), of mean 1."""
    if weights == "equal":
        return lambda labels: jnp.ones(len(labels), jnp.float32)
    if weights != "labels" and not callable(weights):
        raise ValueError(
            f"microbatch_weights is {weights!r}; it must be 'labels', 'equal' or a function"
        )
    weight_of = weights if callable(weights) else lambda labels: label_mask(labels).sum()

    def weigh(labels: Array) -> Array:
        found = jnp.stack([weight_of(of) for of in labels]).astype(jnp.float32)
        if found.ndim != 1:
            raise ValueError(
                f"microbatch_weights returns shape {found.shape[1:]}; it must return a scalar"
            )
        mean = found.mean()
        return found / jnp.where(mean == 0, 1, mean)

    return weigh


@promotion.by_default
def _optax_step(
    optimizer: optax.GradientTransformation,
    grads: Params,
    state: TrainState,
    loss: Array,
    grad_scale: float,
    skip: Array | None,
) -> tuple[Params, Any, Array]:
    """Updates with an optax optimizer: ``(params, opt_state, grad_norm)``."""
    grads = jax.tree.map(lambda x: x * grad_scale, widen(grads))
    given = grads, state.opt_state, state.params, loss
    made_by = "state.opt_state", optimizer.init, state.opt_state, state.params
    with named_state_errors(*made_by):
        updates, opt_state = _update_with_loss(optimizer, *given)
    if jax.tree.structure(opt_state) != jax.tree.structure(state.opt_state):
        check_made_by(*made_by)
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
) -> Callable[..., Float[Array, ""]]:
    """Makes the jitted function that computes the loss without gradients.

    Args:
        loss_fn: As in :func:`make_train_step`.
        compute_dtype: As in :func:`make_train_step`.

    Returns:
        ``evaluate(params, tokens, labels, *more) -> loss``, with tokens and labels of shape (B, T).

    Raises:
        TypeError: As in :func:`make_train_step`.
    """
    dtype, loss_fn = compute_dtype_of(compute_dtype), _checked_loss(loss_fn, is_scalar=False)

    def evaluate(params: Params, tokens: Array, labels: Array, *more: Array) -> Array:
        return loss_fn(cast(params, dtype), tokens, labels, *more).astype(jnp.float32)

    return jax.jit(evaluate)


def mean_loss(
    evaluate: Callable[..., Float[Array, ""]],
    params: Params,
    dataset: data.Dataset,
    *,
    batch_size: int,
    seq_len: int,
    batches: int | None = None,
    sharding: jax.NamedSharding | None = None,
    end_of_text: int | None = None,
    ignore_next_document: bool = False,
) -> float:
    """The mean loss over the labels of a data set; its exponential is the perplexity.

    Each window is read once. Batches are weighted by the number of labels in :func:`label_mask`.

    Args:
        evaluate: The function from :func:`make_eval_step`.
        params: The parameters, or their int8 form.
        dataset: Tokens that the model was not trained on.
        batch_size: B, the number of windows in a batch.
        seq_len: T, the number of tokens in a window.
        batches: How many full batches to read, the same ones on each call. None for all windows:
            the last batch may be smaller, but with a sharding only full batches are read. If the
            data set has less than one full batch, a full batch reads some windows twice.
        sharding: The sharding of the batches, of shape (B, T), for sharded parameters. See
            :func:`jaxllm.training.parallel.batch_sharding`.
        end_of_text: As in :func:`jaxllm.data.batch`. Then ``evaluate`` also gets the segment ids
            and positions of a batch, after the labels.
        ignore_next_document: As in :func:`jaxllm.data.batch`.

    Returns:
        The loss in nats per token.

    Raises:
        TypeError: ``batches``, ``batch_size`` or ``seq_len`` is not an integer.
        ValueError: The data set is shorter than one window; ``batches``, ``batch_size`` or
            ``seq_len`` is below 1; the sharding does not divide ``batch_size``; ``evaluate`` does
            not return a scalar; or ``ignore_next_document`` is true without ``end_of_text``.
    """
    batches = None if batches is None else as_integer("batches", batches)
    batch_size, seq_len = as_integer("batch_size", batch_size), as_integer("seq_len", seq_len)
    if batches is not None and batches < 1:
        raise ValueError(f"batches is {batches}; it must be at least 1, or None")
    if batch_size < 1 or seq_len < 1:
        raise ValueError(
            f"batch_size is {batch_size} and seq_len {seq_len}; they must be at least 1"
        )
    windows = data.num_windows(dataset, seq_len)
    full = max(windows // batch_size, 1)
    count = full if batches is None else min(batches, full)
    is_whole = batches is None and sharding is None and windows > 0
    if is_whole:
        count = -(-windows // batch_size)
    documents: Any = {"end_of_text": end_of_text, "ignore_next_document": ignore_next_document}
    read_batch = functools.partial(data.batch, dataset, batch_size, seq_len, seed=0, **documents)
    losses, counts = [], []
    for i in range(count):
        read = functools.partial(read_batch, step=i)
        if sharding is None:
            left = min(windows - i * batch_size, batch_size)
            batch = read(rows=range(left) if is_whole else None)
            counts.append(np.count_nonzero(label_mask(batch[1])))
            losses.append(evaluate(params, *batch))
            continue
        # One program at a time: on CPUs, the collectives of programs that run at once can deadlock.
        batch = load_batch(sharding, (batch_size, seq_len), _by_rows(read))
        counts.append(int(_count_labels(batch[1])))
        losses.append(jax.block_until_ready(evaluate(params, *batch)))
    if (shape := np.shape(losses[0])) != ():
        raise ValueError(f"evaluate returns shape {shape}; it must return a scalar")
    # A batch without labels adds nothing, even if its loss is NaN.
    losses = np.asarray(jax.device_get(losses), np.float64)
    losses = np.where(counts, losses, 0.0)
    return float(losses @ counts / max(sum(counts), 1))


def _by_rows(read: Callable[..., Any]) -> Callable[[range], Any]:
    return lambda rows: read(rows=rows)


@jax.jit
def _count_labels(labels: Int[Array, "B T"]) -> Int[Array, ""]:
    return label_mask(labels).sum()
