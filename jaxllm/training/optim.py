"""In-place AdamW: an optax-compatible transformation, and a fused ``step`` without updates.

An optax optimizer returns updates, which ``optax.apply_updates`` adds to the parameters in a second
pass over memory. ``step`` writes the new parameters directly and saves that pass::

    optimizer = jaxllm.training.optim.adamw(6e-4)
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        params, state, grad_norm = optimizer.step(grads, state, params)
        return params, state
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from jaxllm import ops
from jaxllm.core import partition, promotion
from jaxllm.core.precision import is_floating, wide_dtype
from jaxllm.ops.checks import (
    as_decay,
    as_finite_number,
    as_number,
    as_scalar,
    check_floating,
    leaf_names,
    leaves_like,
    mask_leaves,
)

Params = Any  # a nested dict of arrays, or any other pytree of them
Schedule = Callable[[ArrayLike], ArrayLike]


class Optimizer(NamedTuple):
    """An optax gradient transformation with an additional in-place ``step``.

    Attributes:
        init: ``init(params) -> state``.
        update: ``update(grads, state, params) -> (updates, state)``, for ``optax.apply_updates``.
            A gradient may be None, as Equinox has it for frozen parameters: then the update is None
            and the moments do not change. The state keeps its structure and dtypes.
        step: ``step(grads, state, params, *, grad_scale=1, grad_norm=None, skip=False,
            copy_dtype=None) -> (params, state, grad_norm)``. The gradients are multiplied by the
            scalar ``grad_scale``. The returned norm is the one before clipping; pass ``grad_norm``
            if it is known. If the bool scalar ``skip`` is true, parameters and state do not
            change. With a ``copy_dtype``, the new parameters in that dtype are a fourth result.
        schedules: ``schedules(state) -> values``, what the schedules give for the next step, by
            name. A training step with an anomaly detector halts if one is not finite. None for no
            schedules.
    """

    init: Callable[[Params], Any]
    update: Callable[..., tuple[Any, Any]]
    step: Callable[..., tuple[Any, ...]]
    schedules: Callable[[Any], dict[str, ArrayLike]] | None = None


class AdamWState(NamedTuple):
    """The state of :func:`adamw`.

    Attributes:
        count: The number of steps taken, without skipped ones; an int32 scalar. Schedules and the
            bias correction of the moments depend on it.
        master: float32 masters of the narrower parameters; None for the other parameters.
        m: The first moment, the running mean of the gradients. float32; float64 for float64
            parameters.
        v: The second moment, the running mean of the squared gradients, in the dtype of ``m``.
    """

    count: Int[Array, ""]
    master: Params
    m: Params
    v: Params


jax.export.register_namedtuple_serialization(AdamWState, serialized_name="jaxllm.AdamWState")


def adamw(
    learning_rate: ArrayLike | Schedule,
    *,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike | Schedule = 0.1,
    mask: Any = None,
    max_grad_norm: ArrayLike | None = None,
    seed: int | None = None,
) -> Optimizer:
    """AdamW for parameters of any floating dtype, with float32 masters of the narrow ones.

    For bfloat16 parameters, the optimizer's state holds float32 masters. Each step updates the
    masters in place and rounds them to the parameters, so updates below a bfloat16 rounding step
    are not lost. With the same gradients, the masters equal ``optax.adamw`` on float32 parameters.

    ``update`` works inside every optax wrapper that accepts ``optax.adamw``. Updates have the wider
    dtype of parameter and gradient, as in optax. With float32 updates, ``optax.apply_updates``
    gives the rounded masters. With bfloat16 gradients of bfloat16 parameters, the update is rounded
    too: a parameter may differ from its rounded master until the next step.

    Hyperparameters may be traced, for example by ``optax.inject_hyperparams``. The CUDA kernel
    accepts only a traced learning rate: name the other hyperparameters in ``static_args``.

    Args:
        learning_rate: A finite rate, or a schedule: a function from the number of steps taken,
            without skipped ones, to the rate.
        b1: The decay of the first moment, from 0 to 1.
        b2: The decay of the second moment, from 0 to 1.
        eps: Added to the square root of the second moment; finite, at least 0.
        weight_decay: A step multiplies parameters by ``1 - rate * weight_decay``. A finite number,
            at least 0, or a schedule.
        mask: Which arrays decay: a tree of bools like the parameters, or a prefix of one; or a
            function from the parameters to such a tree. None for all arrays.
        max_grad_norm: The largest global gradient norm; larger gradients are scaled down. None for
            no limit.
        seed: Round masters to bfloat16 parameters stochastically, with this seed. None for round to
            nearest.

    Raises:
        TypeError: A hyperparameter is not a number; or from ``update`` and ``step``: an array has
            no floating dtype, or the state is that of another optimizer.
        ValueError: A hyperparameter is out of range (traced values are not checked); or from
            ``update`` and ``step``: gradients, state or mask differ from the parameters in
            structure or shapes; the message names the leaves.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101).

    Example:
        >>> params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        >>> optimizer = optax.chain(jaxllm.training.optim.adamw(6e-4))
    """
    check_hyperparameters(learning_rate, b1, b2, eps, weight_decay, max_grad_norm)

    def init(params: Params) -> AdamWState:
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=wide_dtype(p)), params)
        master = jax.tree.map(_master, params)
        # m and v must be distinct arrays: a training step donates both.
        return AdamWState(jnp.zeros((), jnp.int32), master, zeros, jax.tree.map(jnp.copy, zeros))

    def step(
        grads: Params,
        state: AdamWState,
        params: Params,
        *,
        grad_scale: ArrayLike = 1.0,
        grad_norm: ArrayLike | None = None,
        skip: ArrayLike = False,
        copy_dtype: DTypeLike | None = None,
    ):
        if not isinstance(state, AdamWState):
            kind = type(state).__name__
            raise TypeError(f"state has type {kind}; it must be an AdamWState, which init returns")
        _check_masters(state.master, params)
        scale, norm = clipping(grads, max_grad_norm, grad_scale, grad_norm)
        params, master, m, v, copy = update_in_place(
            grads,
            params,
            state.master,
            state.m,
            state.v,
            count=state.count,
            learning_rate=learning_rate,
            b1=b1,
            b2=b2,
            eps=eps,
            weight_decay=weight_decay,
            mask=mask,
            grad_scale=scale,
            skip=skip,
            copy_dtype=copy_dtype,
            seed=seed,
        )
        state = AdamWState(steps_taken(state.count, skip), master, m, v)
        return (params, state, norm) if copy_dtype is None else (params, state, norm, copy)

    def update(grads: Params, state: AdamWState, params: Params | None = None):
        if params is None:
            raise ValueError(
                "params is None; AdamW needs the parameters: update(grads, state, params)"
            )
        new, state, *_ = step(grads, state, params)
        olds, structure = jax.tree.flatten(params)
        updates = map(_difference, jax.tree.leaves(new), olds, structure.flatten_up_to(grads))
        return structure.unflatten(updates), state

    scheduled = at_step_of(lambda state: state.count, learning_rate, weight_decay)
    return Optimizer(*map(promotion.by_default, (init, update, step)), schedules=scheduled)


def check_hyperparameters(
    learning_rate: ArrayLike | Schedule,
    b1: ArrayLike,
    b2: ArrayLike,
    eps: ArrayLike,
    weight_decay: ArrayLike | Schedule,
    max_grad_norm: ArrayLike | None,
) -> None:
    """Checks the hyperparameters of AdamW that are neither schedules nor traced.

    Raises:
        TypeError: One is not a number.
        ValueError: One is out of range.
    """
    if not callable(learning_rate):
        as_finite_number("learning_rate", learning_rate)
    as_decay("b1", b1)
    as_decay("b2", b2)
    as_finite_number("eps", eps, least=0)
    if not callable(weight_decay):
        as_finite_number("weight_decay", weight_decay, least=0)
    _as_limit(max_grad_norm)


@contextlib.contextmanager
def named_state_errors(
    name: str, init: Callable[[Params], Any], state: Any, params: Params
) -> Iterator[None]:
    """Names the state in an error of an update, if another optimizer made the state.

    Optax does not check a state, so its error is often one of a missing attribute.

    Raises:
        TypeError: The block raises an error, and the state has not the structure that ``init``
            returns.
    """
    try:
        yield
    except Exception as error:
        check_made_by(name, init, state, params, error)
        raise


def check_made_by(
    name: str,
    init: Callable[[Params], Any],
    state: Any,
    params: Params,
    error: Exception | None = None,
) -> None:
    """Raises TypeError, from ``error``, if a state has not the structure that ``init`` returns."""
    try:
        wanted = jax.tree.structure(jax.eval_shape(init, params))
    except Exception:  # such as an init that reads the values of parameters
        return
    if (found := jax.tree.structure(state)) != wanted:
        raise TypeError(
            f"{name} is that of another optimizer: it has the structure {found}; it must have that "
            f"of optimizer.init(params), {wanted}"
        ) from error


def steps_taken(count: Array, skip: ArrayLike) -> Array:
    """The number of steps taken after a step: moments of a skipped one need no correction."""
    if isinstance(skip, bool):
        return count if skip else count + 1
    return count + jnp.where(skip, 0, 1).astype(jnp.result_type(count))


def at_step_of(
    count_of: Callable[[Any], ArrayLike],
    learning_rate: ArrayLike | Schedule,
    weight_decay: ArrayLike | Schedule,
) -> Callable[[Any], dict[str, ArrayLike]] | None:
    """The ``schedules`` of an :class:`Optimizer`; None if neither argument is one."""
    of_names: Any = {"learning_rate": learning_rate, "weight_decay": weight_decay}
    of_names = {name: value for name, value in of_names.items() if callable(value)}

    def schedules(state: Any) -> dict[str, ArrayLike]:
        return {name: _at_step(value, count_of(state)) for name, value in of_names.items()}

    return schedules if of_names else None


def update_in_place(
    grads: Params,
    params: Params,
    master: Params,
    m: Params,
    v: Params,
    *,
    count: ArrayLike,
    learning_rate: ArrayLike | Schedule,
    weight_decay: ArrayLike | Schedule,
    mask: Any,
    copy_dtype: DTypeLike | None,
    seed: int | None = None,
    **options: Any,
) -> tuple[Params, Params, Params, Params, Params | None]:
    """Calls :func:`jaxllm.ops.adamw_update` on the parameters that have a gradient.

    Args:
        grads: The gradients. For a gradient of None, parameter and moments do not change.
        params: The parameters.
        master: The float32 masters of the narrow parameters; None for the others.
        m: The first moments.
        v: The second moments.
        count: The number of steps taken before, without skipped ones.
        learning_rate: As in :func:`adamw`.
        weight_decay: As in :func:`adamw`.
        mask: As in :func:`adamw`.
        copy_dtype: The dtype of a copy of the parameters; None for no copy.
        seed: As in :func:`adamw`.
        **options: As in :func:`jaxllm.ops.adamw_update`.

    Returns:
        ``(params, master, m, v, copy)``. ``copy`` is None without a ``copy_dtype``.
    """
    names, structure = leaf_names(params), jax.tree.structure(params)
    if len(set(names)) < len(names):  # a key "a/b" next to "b" in "a"
        names = [str(i) for i in range(len(names))]
    gradients = leaves_like("grads", grads, params, "params", optional=True)
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]
    masters = leaves_like("state.master", master, params, "params", optional=True)
    ms, vs = (leaves_like(f"state.{x}", of, params, "params") for x, of in (("m", m), ("v", v)))
    mask = promotion.callback(mask)(params) if is_function(mask) else mask
    decays = mask_leaves("mask", mask, params, "params")
    lr, decay = (_at_step(value, count) for value in (learning_rate, weight_decay))
    copies: list[Any] = [None] * len(leaves)

    # One call per dtype. Most models have one dtype. On several devices one for each part of the
    # model, so that it does not wait for the gradients of all to be summed.
    parts = [name.split("/")[0] for name in names]
    if seed is not None or len(set(parts)) > _MAX_PARTS or not partition.is_wanted(leaves):
        parts = [""] * len(names)
    pairs = zip(leaves, masters, parts, strict=True)
    kinds = [(leaf.dtype, of is not None, part) for leaf, of, part in pairs]
    for kind in dict.fromkeys(kinds):
        dtype, has_master, _ = kind
        is_next = [other == kind for other in kinds]
        indices = [i for i in range(len(leaves)) if is_next[i] and gradients[i] is not None]
        sources = (masters if has_master else leaves, gradients, ms, vs)
        outputs = ops.adamw_update(
            # Names for error messages; leaf order, because the seed of a leaf depends on its index.
            *(OrderedDict((names[i], jnp.asarray(of[i])) for i in indices) for of in sources),
            mask=OrderedDict((names[i], decays[i]) for i in indices),
            copy_dtype=dtype if has_master else copy_dtype if dtype.itemsize >= 4 else None,
            seed=seed if dtype == jnp.bfloat16 else None,
            step=count + 1,
            lr=lr,
            weight_decay=decay,
            **options,
        )
        if has_master and seed is not None:
            # A skipped step would round the unchanged masters with other random bits: the kernel
            # rounds whatever `skip` is. This costs one more pass over the rounded parameters.
            skip, (*others, rounded) = options.get("skip", False), outputs
            kept = {names[i]: _unless(skip, leaves[i], rounded[names[i]]) for i in indices}
            outputs = (*others, kept)
        targets = (masters, ms, vs, leaves) if has_master else (leaves, ms, vs, copies)
        for target, new in zip(targets, outputs, strict=False):  # outputs may have no copies
            for i in indices:
                target[i] = new[names[i]]
    params, master, m, v = (structure.unflatten(of) for of in (leaves, masters, ms, vs))
    if copy_dtype is None:
        return params, master, m, v, None
    for i, leaf in enumerate(leaves):
        if copies[i] is None:  # a narrow parameter, or one without a gradient
            copies[i] = leaf.astype(copy_dtype) if is_floating(leaf) else leaf
    return params, master, m, v, structure.unflatten(copies)


def _unless(skip: ArrayLike, old: Array, new: Array) -> Array:
    """The new array, or the old one if the step is skipped."""
    return new if skip is False else jnp.where(skip, old, new)


_MAX_PARTS = 8  # of a model; more calls than these would cost more launches than they save


@promotion.by_default
def clipping(
    grads: Params,
    max_norm: ArrayLike | None,
    grad_scale: ArrayLike = 1.0,
    grad_norm: ArrayLike | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The factor that scales and clips gradients, and their norm before clipping.

    Args:
        grads: The gradients.
        max_norm: The largest norm; None for no limit.
        grad_scale: A factor that is applied before clipping.
        grad_norm: The norm of the gradients times ``grad_scale``, if it is known.

    Returns:
        ``(factor, norm)``. Multiply the gradients by ``factor``, which includes ``grad_scale``.
        ``norm`` is the norm of the gradients times ``grad_scale``.

    Raises:
        TypeError: A gradient has no floating dtype, or another argument is not a number.
        ValueError: ``max_norm`` is not above 0, which is not checked of a traced value; or
            ``grad_scale`` or ``grad_norm`` is not a scalar.
    """
    limit = _as_limit(max_norm)
    grads = jax.tree.map(jnp.asarray, grads)
    for name, leaf in zip(leaf_names(grads), jax.tree.leaves(grads), strict=True):
        check_floating(**{f"grads/{name}": leaf})
    scale = as_scalar("grad_scale", grad_scale)
    scale = scale.astype(jnp.result_type(jnp.float32, *jax.tree.leaves(grads)))
    norm = as_scalar(
        "grad_norm", ops.global_norm(grads) * scale if grad_norm is None else grad_norm
    )
    if limit is None:
        return scale, norm
    limit = jnp.asarray(limit, norm.dtype)
    return jnp.where(norm < limit, scale, scale * limit / norm), norm


def _as_limit(max_norm: ArrayLike | None) -> Any:
    limit = None if max_norm is None else as_number("max_grad_norm", max_norm)
    if isinstance(limit, float) and not limit > 0:
        raise ValueError(f"max_grad_norm is {max_norm}; it must be above 0, or None for no limit")
    return limit


def _at_step(value: ArrayLike | Schedule, count: ArrayLike) -> ArrayLike:
    """A hyperparameter at step ``count``: the schedule's value, or the constant itself."""
    return promotion.callback(value)(count) if callable(value) else value


def _check_masters(master: Params, params: Params) -> None:
    """Raises ValueError if a narrow parameter has no master, or a wide one has a master."""
    masters = leaves_like("state.master", master, params, "params", optional=True)
    for name, leaf, of in zip(leaf_names(params), jax.tree.leaves(params), masters, strict=True):
        if _is_narrow(leaf) != (of is not None):
            raise ValueError(
                f"state.master has {'no ' if of is None else 'an '}array for {name}, which has "
                f"dtype {jnp.result_type(leaf)}; make a new state with init(params)"
            )


def is_function(value: Any) -> bool:
    """Whether a value is a function, by optax's test: a callable pytree (Equinox) is not one."""
    return callable(value) and all(map(callable, jax.tree.leaves(value)))


def _is_narrow(x: ArrayLike) -> bool:
    return is_floating(x) and jnp.result_type(x).itemsize < 4


def _master(x: ArrayLike) -> Array | None:
    return jnp.asarray(x, jnp.float32) if _is_narrow(x) else None


def _difference(new: Array, old: ArrayLike, grad: ArrayLike | None) -> Array | None:
    """The update of a parameter, in the wider dtype of parameter and gradient."""
    if grad is None:
        return None
    wide = wide_dtype(new)
    return (new.astype(wide) - jnp.asarray(old, wide)).astype(jnp.result_type(new, grad))
