"""AdamW in place, as an optimizer that optax takes and a step that goes without its updates.

optax asks an optimizer for updates, which it then adds to the parameters. For float32 parameters
that is a pass over memory more than the update itself, so there is also ``step``, which returns the
new parameters::

    optimizer = jaxllm.training.optim.adamw(6e-4)
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        params, state, grad_norm = optimizer.step(grads, state, params)
        return params, state
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from jaxllm import ops
from jaxllm.core import promotion
from jaxllm.core.precision import is_floating, wide_dtype
from jaxllm.ops.checks import as_number, check_floating, leaf_names, leaves_like, mask_leaves

Params = Any  # a nested dict of arrays, or any other pytree of them
Schedule = Callable[[ArrayLike], ArrayLike]


class Optimizer(NamedTuple):
    """What optax calls a gradient transformation, with a step in place beside it.

    Attributes:
        init: ``init(params) -> state``.
        update: ``update(grads, state, params) -> (updates, state)``, for ``optax.apply_updates``.
            Where a gradient is None, as Equinox leaves those of frozen parameters, the update is
            None and the moments stay. The state keeps its structure and dtypes.
        step: ``step(grads, state, params, *, grad_scale=1, grad_norm=None, skip=False,
            copy_dtype=None) -> (params, state, grad_norm)``: the update of gradients times
            ``grad_scale``, a scalar, and their norm before clipping, which is ``grad_norm`` where
            that is given. Where ``skip``, a bool scalar, is true, parameters and moments stay as
            they are. With a ``copy_dtype`` the new parameters in that dtype come fourth.
    """

    init: Callable[[Params], Any]
    update: Callable[..., tuple[Any, Any]]
    step: Callable[..., tuple[Any, ...]]


class AdamWState(NamedTuple):
    """The state of :func:`adamw`.

    Attributes:
        count: The number of steps taken, an int32 scalar.
        master: The parameters in float32, where they are narrower; None where they are not.
        m: The running mean of the gradients, float32; float64 for float64 parameters.
        v: The running mean of their squares, likewise.
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

    A model that is held in bfloat16 trains on masters in the optimizer's state: each step updates
    them in place and rounds them to the parameters, so that a step too small for a bfloat16 is not
    lost. With the same gradients the masters are those of ``optax.adamw`` on float32 parameters.

    ``update`` works inside every wrapper of optax that ``optax.adamw`` works in. Its updates have
    the wider dtype of parameter and gradient, as optax's have. ``optax.apply_updates`` turns
    float32 updates into the rounded masters. With bfloat16 gradients of bfloat16 parameters, a
    parameter may miss its master by a rounding of the update, which the next step corrects.

    Numbers may be traced, as ``optax.inject_hyperparams`` makes them. The CUDA kernel takes a
    traced rate, but no other traced number: name the others in ``static_args`` there.

    Args:
        learning_rate: A rate, or a schedule: a function from the steps taken before to the rate.
        b1: The decay of the mean gradient.
        b2: The decay of the mean squared gradient.
        eps: Added to the root of the mean square.
        weight_decay: The share of the rate by which parameters shrink, or a schedule of it.
        mask: Which arrays decay: a tree of bools like the parameters, or a prefix of one; or a
            function from the parameters to one. None for all.
        max_grad_norm: Gradients of a larger global norm are scaled down to it; None for no limit.
        seed: Rounds masters to bfloat16 parameters up or down at random, so that they are right on
            average; None rounds to the nearest.

    Raises:
        TypeError: From ``update`` and ``step``: an array is not of a floating dtype.
        ValueError: From ``update`` and ``step``: gradients, state or mask differ from the
            parameters in structure or shapes; the message names the leaves.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101).

    Example:
        >>> params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        >>> optimizer = optax.chain(jaxllm.training.optim.adamw(6e-4))
    """

    def init(params: Params) -> AdamWState:
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=wide_dtype(p)), params)
        master = jax.tree.map(_master, params)
        # Arrays of their own, for a step that donates them all.
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
        state = AdamWState(state.count + 1, master, m, v)
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

    return Optimizer(*map(promotion.by_default, (init, update, step)))


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
    """:func:`jaxllm.ops.adamw_update` of what has a gradient, on the masters where there are any.

    Args:
        grads: The gradients. Where one is None, parameter and means stay as they are.
        params: The parameters.
        master: The float32 masters of the narrow ones, None for the others.
        m: The running mean of the gradients.
        v: The running mean of their squares.
        count: The number of steps taken before.
        learning_rate: As in :func:`adamw`.
        weight_decay: Likewise.
        mask: Which arrays decay, likewise.
        copy_dtype: Of a copy of the parameters; None for no copy.
        seed: As in :func:`adamw`.
        **options: As in :func:`jaxllm.ops.adamw_update`.

    Returns:
        ``(params, master, m, v, copy)``; the copy is None without a ``copy_dtype``.
    """
    names, structure = leaf_names(params), jax.tree.structure(params)
    if len(set(names)) < len(names):  # of a key "a/b", and of "b" in "a"
        names = [str(i) for i in range(len(names))]
    gradients = leaves_like("grads", grads, params, "params", optional=True)
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]
    masters = leaves_like("state.master", master, params, "params", optional=True)
    ms, vs = (leaves_like(f"state.{x}", of, params, "params") for x, of in (("m", m), ("v", v)))
    mask = promotion.callback(mask)(params) if _is_function(mask) else mask
    decays = mask_leaves("mask", mask, params, "params")
    lr, decay = (_at_step(value, count) for value in (learning_rate, weight_decay))
    copies: list[Any] = [None] * len(leaves)

    # One launch for the leaves of a dtype, as a rule all of them.
    kinds = [(leaf.dtype, of is not None) for leaf, of in zip(leaves, masters, strict=True)]
    for dtype, has_master in dict.fromkeys(kinds):
        is_next = [kind == (dtype, has_master) for kind in kinds]
        places = [i for i in range(len(leaves)) if is_next[i] and gradients[i] is not None]
        sources = (masters if has_master else leaves, gradients, ms, vs)
        outputs = ops.adamw_update(
            # By name for its errors, in the order of the leaves for their seeds.
            *(OrderedDict((names[i], jnp.asarray(of[i])) for i in places) for of in sources),
            mask=OrderedDict((names[i], decays[i]) for i in places),
            copy_dtype=dtype if has_master else copy_dtype if dtype.itemsize >= 4 else None,
            seed=seed if dtype == jnp.bfloat16 else None,
            step=count + 1,
            lr=lr,
            weight_decay=decay,
            **options,
        )
        targets = (masters, ms, vs, leaves) if has_master else (leaves, ms, vs, copies)
        for target, new in zip(targets, outputs, strict=False):  # there may be no copies
            for i in places:
                target[i] = new[names[i]]
    params, master, m, v = (structure.unflatten(of) for of in (leaves, masters, ms, vs))
    if copy_dtype is None:
        return params, master, m, v, None
    for i, leaf in enumerate(leaves):
        if copies[i] is None:  # narrow, and so a rounded copy already, or without a gradient
            copies[i] = leaf.astype(copy_dtype) if is_floating(leaf) else leaf
    return params, master, m, v, structure.unflatten(copies)


@promotion.by_default
def clipping(
    grads: Params,
    max_norm: ArrayLike | None,
    grad_scale: ArrayLike = 1.0,
    grad_norm: ArrayLike | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The factor that scales gradients and limits their norm, and the norm before the limit.

    Args:
        grads: The gradients.
        max_norm: The limit; None for none.
        grad_scale: A factor that applies in any case, before the limit.
        grad_norm: The norm of the gradients times ``grad_scale``, if it is known already.

    Returns:
        ``(factor, norm)``: the gradients are to be multiplied by the factor, which includes
        ``grad_scale``; the norm is that of the gradients times ``grad_scale``.

    Raises:
        ValueError: The limit is not above 0; of a traced limit nobody knows.
    """
    limit = None if max_norm is None else as_number("max_grad_norm", max_norm)
    if isinstance(limit, float) and not limit > 0:
        raise ValueError(f"max_grad_norm is {max_norm}; it must be above 0, or None for no limit")
    grads = jax.tree.map(jnp.asarray, grads)
    for name, leaf in zip(leaf_names(grads), jax.tree.leaves(grads), strict=True):
        check_floating(**{f"grads/{name}": leaf})
    scale = jnp.asarray(grad_scale, jnp.result_type(jnp.float32, *jax.tree.leaves(grads)))
    norm = ops.global_norm(grads) * scale if grad_norm is None else jnp.asarray(grad_norm)
    if limit is None:
        return scale, norm
    limit = jnp.asarray(limit, norm.dtype)
    return jnp.where(norm < limit, scale, scale * limit / norm), norm


def _at_step(value: ArrayLike | Schedule, count: ArrayLike) -> ArrayLike:
    """A hyperparameter at a step: the value of a schedule there, or the number that it is."""
    return promotion.callback(value)(count) if callable(value) else value


def _check_masters(master: Params, params: Params) -> None:
    """Raises ValueError where a narrow parameter has no master, or a wide one has one."""
    masters = leaves_like("state.master", master, params, "params", optional=True)
    for name, leaf, of in zip(leaf_names(params), jax.tree.leaves(params), masters, strict=True):
        if _is_narrow(leaf) != (of is not None):
            raise ValueError(
                f"state.master has {'no ' if of is None else 'an '}array for {name}, which has "
                f"dtype {jnp.result_type(leaf)}; make the state anew with init(params)"
            )


def _is_function(mask: Any) -> bool:
    """As optax asks: a mask that is a pytree is none, though Equinox's modules can be called."""
    return callable(mask) and all(map(callable, jax.tree.leaves(mask)))


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
