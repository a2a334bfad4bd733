"""AdamW in place, as an optimizer that optax takes and a step that goes without its updates.

optax asks an optimizer for updates, which it then adds to the parameters. For float32 parameters
that is a pass over memory more than the update itself, so there is also ``step``, which returns the
new parameters::

    optimizer = jaxllm.optim.adamw(6e-4)
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        params, state, grad_norm = optimizer.step(grads, state, params)
        return params, state
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from jaxllm import ops

Params = Any  # a nested dict of arrays
Schedule = Callable[[ArrayLike], ArrayLike]


class Optimizer(NamedTuple):
    """What optax calls a gradient transformation, with a step in place beside it.

    Attributes:
        init: ``init(params) -> state``.
        update: ``update(grads, state, params) -> (updates, state)``, for ``optax.apply_updates``.
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
        master: The parameters in float32, where they are narrower; None where they are float32.
        m: The running mean of the gradients, float32.
        v: The running mean of their squares, float32.
    """

    count: Int[Array, ""]
    master: Params
    m: Params
    v: Params


def adamw(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    mask: Any = None,
    max_grad_norm: float | None = None,
    seed: int | None = None,
) -> Optimizer:
    """AdamW for parameters of any floating dtype, with float32 masters of the narrow ones.

    A model that is held in bfloat16 trains on masters in the optimizer's state: each step updates
    them in place and rounds them to the parameters, so that a step too small for a bfloat16 is not
    lost. With the same gradients the masters are those of ``optax.adamw`` on float32 parameters.

    ``update`` gives float32 updates, which ``optax.apply_updates`` turns into the rounded masters;
    where a parameter falls by many orders of magnitude in one step it may miss by a float32
    rounding of the old value, which the next step mends.

    Args:
        learning_rate: A rate, or a schedule: a function from the steps taken before to the rate.
        b1: The decay of the mean gradient.
        b2: The decay of the mean squared gradient.
        eps: Added to the root of the mean square.
        weight_decay: The share of the rate by which parameters shrink.
        mask: Which arrays decay: a tree of bools like the parameters, or a function from the
            parameters to one; None for all.
        max_grad_norm: Gradients of a larger global norm are scaled down to it; None for no limit.
        seed: Rounds masters to bfloat16 parameters up or down at random, so that they are right on
            average; None rounds to the nearest.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101).

    Example:
        >>> params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        >>> optimizer = optax.chain(jaxllm.optim.adamw(6e-4))
    """

    def init(params: Params) -> AdamWState:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        master = jax.tree.map(lambda p: p.astype(jnp.float32) if _is_narrow(p) else None, params)
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
        scale, norm = clipping(grads, max_grad_norm, grad_scale, grad_norm)
        decays = mask(params) if callable(mask) else mask
        trees = (params, grads, state.m, state.v)
        leaves, gs, ms, vs = (jax.tree.leaves(tree) for tree in trees)
        masters = jax.tree.leaves(state.master, is_leaf=lambda x: x is None)
        copies: dict[int, Array] = {}
        decay = [True] * len(leaves) if decays is None else jax.tree.leaves(decays)
        # One launch for the leaves of a dtype, as a rule all of them.
        for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
            places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
            narrow = _is_narrow(leaves[places[0]])
            outputs = ops.adamw_update(
                *([of[i] for i in places] for of in (masters if narrow else leaves, gs, ms, vs)),
                step=state.count + 1,
                lr=learning_rate(state.count) if callable(learning_rate) else learning_rate,
                b1=b1,
                b2=b2,
                eps=eps,
                weight_decay=weight_decay,
                mask=[decay[i] for i in places],
                grad_scale=scale,
                skip=skip,
                copy_dtype=dtype if narrow else copy_dtype,
                seed=seed if dtype == jnp.bfloat16 else None,
            )
            targets = (masters, ms, vs, leaves) if narrow else (leaves, ms, vs, copies)
            for target, new in zip(targets, outputs, strict=False):  # there may be no copies
                for i, leaf in zip(places, new, strict=True):
                    target[i] = leaf
        structure = jax.tree.structure(params)
        params, master, m, v = (structure.unflatten(of) for of in (leaves, masters, ms, vs))
        state = AdamWState(state.count + 1, master, m, v)
        if copy_dtype is None:
            return params, state, norm
        # Narrow parameters are rounded copies already.
        copied = [jnp.asarray(copies.get(i, leaf), copy_dtype) for i, leaf in enumerate(leaves)]
        return params, state, norm, structure.unflatten(copied)

    def update(grads: Params, state: AdamWState, params: Params | None = None):
        if params is None:
            raise ValueError(
                "params is None; AdamW needs the parameters: update(grads, state, params)"
            )
        new, state, *_ = step(grads, state, params)
        return jax.tree.map(_difference, new, params), state

    return Optimizer(init, update, step)


def clipping(
    grads: Params,
    max_norm: float | None,
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
        ValueError: The limit is not above 0.
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_grad_norm is {max_norm}; it must be above 0, or None for no limit")
    scale = jnp.asarray(grad_scale, jnp.float32)
    norm = ops.global_norm(grads) * scale if grad_norm is None else jnp.asarray(grad_norm)
    if max_norm is None:
        return scale, norm
    return jnp.where(norm < max_norm, scale, scale * max_norm / norm), norm


def _is_narrow(x: Array) -> bool:
    return x.dtype.itemsize < 4


def _difference(new: Array, old: Array) -> Array:
    return new.astype(jnp.float32) - old.astype(jnp.float32)
