"""AdamW with optax's state and GPT-2's defaults; :mod:`jaxllm.training` exports it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

try:
    import optax
except ImportError as error:
    raise ImportError('jaxllm.training needs optax: pip install "jaxllm[train]"') from error

from jaxllm.core import promotion
from jaxllm.core.precision import widen
from jaxllm.ops.checks import check_floating, check_shape, leaf_names, leaves_like
from jaxllm.training.optim import (
    Optimizer,
    Params,
    Schedule,
    at_step_of,
    check_hyperparameters,
    clipping,
    named_state_errors,
    steps_taken,
    update_in_place,
)


def decay_mask(params: Params) -> Any:
    """Which parameters weight decay applies to: matrices, but not biases and norm scales.

    Arrays under a key or an attribute ``blocks`` are stacked over layers. Their first axis does not
    count, so a scale of shape (L, D) is a vector. If ``blocks`` holds a list of layers, or a dict
    with numbers as keys, all axes count. An array under a key ``bias`` that stands beside a
    ``weight`` with one dimension more is a bias, whatever its dimensions.

    Args:
        params: The parameters.

    Returns:
        A tree of the same structure, with a bool for each array.
    """
    paths = jax.tree_util.tree_leaves_with_path(params)
    ranks = {tuple(names_of(path)): np.ndim(x) for path, x in paths}

    def is_matrix(path: tuple, x: ArrayLike) -> bool:
        names = names_of(path)
        if names and names[-1] == "bias" and ranks.get((*names[:-1], "weight")) == np.ndim(x) + 1:
            return False
        return np.ndim(x) - is_stacked(names) >= 2

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def names_of(path: tuple) -> list[str]:
    """The names in the path of a leaf."""
    return [jax.tree_util.keystr((key,), simple=True) for key in path]


def is_stacked(names: list[str]) -> bool:
    """Whether the arrays at a path have a leading layer axis."""
    inside = names[names.index("blocks") :] if "blocks" in names else []
    return bool(inside) and not any(name.isdigit() for name in inside)


def adamw(
    learning_rate: ArrayLike | Schedule,
    *,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike | Schedule = 0.1,
    max_grad_norm: ArrayLike | None = 1.0,
) -> Optimizer:
    """AdamW as for GPT-2: clipped gradients, and weight decay on matrices only.

    For float32 parameters, state and ``update`` equal those of
    ``optax.chain(optax.clip_by_global_norm(...), optax.adamw(...))``. ``step`` gives the same
    parameters and state to float32 rounding. It calls :func:`jaxllm.ops.adamw_update`, which makes
    one pass over memory and includes the clipping.

    The moments are float32 for narrower parameters too. There are no masters, so updates below a
    bfloat16 rounding step are lost. :func:`jaxllm.training.optim.adamw` has masters.

    Args:
        learning_rate: A finite rate, or a schedule: a function from the number of steps taken,
            without skipped ones, to the rate.
        b1: The decay of the first moment, from 0 to 1.
        b2: The decay of the second moment, from 0 to 1.
        eps: Added to the square root of the second moment; finite, at least 0.
        weight_decay: Applied to the arrays that :func:`decay_mask` selects. A finite number, at
            least 0, or a schedule.
        max_grad_norm: The largest global gradient norm; larger gradients are scaled down. None for
            no limit.

    Raises:
        TypeError: A hyperparameter is not a number; or from ``update`` and ``step``: an array has
            no floating dtype, or the state is that of another optimizer.
        ValueError: A hyperparameter is out of range (traced values are not checked); or from
            ``update`` and ``step``: gradients or state differ from the parameters in structure or
            shapes; the message names the leaves.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101);
    llm.c's defaults.
    """
    check_hyperparameters(learning_rate, b1, b2, eps, weight_decay, max_grad_norm)
    options: Any = {"b1": b1, "b2": b2, "eps": eps}
    chain = optax.adamw(learning_rate, **options, weight_decay=weight_decay, mask=decay_mask)  # pyright: ignore
    if max_grad_norm is not None:
        chain = optax.chain(optax.clip_by_global_norm(max_grad_norm), chain)  # pyright: ignore

    def init(params: Params) -> Any:
        return chain.init(widen(params))

    def update(grads: Params, state: Any, params: Params | None = None):
        if params is None:
            return chain.update(grads, state, params)  # raises optax's own error
        _check_update(grads, state, params)
        given = jax.tree.map(
            lambda x, of: jnp.zeros_like(of) if x is None and of is not None else x,
            *(grads, params),
            is_leaf=_is_none,
        )
        with named_state_errors("state", init, state, params):
            updates, new = chain.update(widen(given), state, widen(params))
        updates = jax.tree.map(
            lambda x, update, of: None if x is None else update.astype(jnp.result_type(x, of)),
            *(grads, updates, params),
            is_leaf=_is_none,
        )

        def keep(new: Any, old: Any) -> Any:
            """Keeps the old moments of parameters without a gradient."""
            if not _is_adam(new):
                return new
            moments = (
                jax.tree.map(lambda x, y, z: z if x is None else y, grads, *of, is_leaf=_is_none)
                for of in ((new.mu, old.mu), (new.nu, old.nu))
            )
            return optax.ScaleByAdamState(new.count, *moments)

        return updates, jax.tree.map(keep, new, state, is_leaf=_is_adam)

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
        adam = _adam_of(state)
        params, _, m, v, copy = update_in_place(
            grads,
            params,
            jax.tree.map(lambda _: None, params),
            adam.mu,
            adam.nu,
            count=adam.count,
            learning_rate=learning_rate,
            **options,
            weight_decay=weight_decay,
            mask=decay_mask,
            grad_scale=scale,
            skip=skip,
            copy_dtype=copy_dtype,
        )
        adam = optax.ScaleByAdamState(steps_taken(adam.count, skip), m, v)
        # The other leaves of the state are step counts of schedules, equal to Adam's count.
        state = jax.tree.map(lambda x: adam if _is_adam(x) else adam.count, state, is_leaf=_is_adam)
        return (params, state, norm) if copy_dtype is None else (params, state, norm, copy)

    scheduled = at_step_of(lambda state: _adam_of(state).count, learning_rate, weight_decay)
    return Optimizer(*map(promotion.by_default, (init, update, step)), schedules=scheduled)


def _check_update(grads: Params, state: Any, params: Params) -> None:
    """Raises ValueError or TypeError if gradients or moments do not match the parameters."""
    adam = _adam_of(state)
    trees = {"params": params, "grads": grads, "state.mu": adam.mu, "state.nu": adam.nu}
    leaves = [leaves_like(of, trees[of], params, "params", optional=of == "grads") for of in trees]
    for name, *found in zip(leaf_names(params), *leaves, strict=True):
        arrays = {
            f"{of}/{name}": jnp.asarray(leaf)
            for of, leaf in zip(trees, found, strict=True)
            if leaf is not None
        }
        if len(arrays) == len(trees):
            check_floating(**arrays)
        for of, array in arrays.items():
            check_shape(of, array, np.shape(found[0]), f"the shape of params/{name}")


def _adam_of(state: Any) -> Any:
    """The moments in a state; raises TypeError if it is that of another optimizer."""
    nodes = jax.tree.leaves(state, is_leaf=_is_adam)
    adam = next(filter(_is_adam, nodes), None)
    kind = type(state).__name__
    if adam is None:
        raise TypeError(
            f"state is a {kind} without the moments of Adam; it must be what init returns"
        )
    # Such as accumulated gradients, which a step would overwrite with the step count.
    if not all(node is adam or _is_count(node) for node in nodes):
        raise TypeError(
            f"state is a {kind} with more than the moments of Adam and step counts; it must be "
            "what init returns"
        )
    return adam


def _is_adam(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def _is_count(node: Any) -> bool:
    return np.shape(node) == () and jnp.issubdtype(jnp.result_type(node), jnp.integer)


def _is_none(node: Any) -> bool:
    return node is None
