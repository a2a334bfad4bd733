"""The derivative of an op: its rule by hand for reverse mode, JAX's derivative for forward mode.

Each op has one rule: ``forward`` returns residuals beside the outputs, and ``backward`` makes
gradients of them. Reverse mode (``jax.grad``, ``jax.vjp``) uses it under every backend.

Forward mode (``jax.jvp``, ``jax.jacfwd``) differentiates the reference, under the backend ``xla``.
There the op is a ``jax.custom_jvp``, whose tangents come from one linear primitive,
``jaxllm_tangents``. Evaluated, it is ``jax.jvp`` of the reference; transposed, it is ``backward``.
So reverse mode computes what ``jax.custom_vjp`` would. The op's arguments are operands of the
primitive too. After the transposition only those that are residuals are read, and under ``jax.jit``
the others are not kept.

JAX's ``linear_call`` is such a primitive as well. But it traces the reference for every gradient,
has no rule for ``jax.vmap``, and cannot be differentiated along what it is not linear in.

Kernels have no derivative of their own. Under the other backends the op is a ``jax.custom_vjp``,
and forward mode raises an error that says what to do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxllm.core import promotion
from jaxllm.core.backend import BackendError, use_xla


def custom_vjp(fn: Callable[..., Any]) -> Any:
    """``jax.custom_vjp``, with forward mode where the backend is ``"xla"``.

    Args:
        fn: The op. Its first argument is static: hashable, with an attribute ``backend``.

    Returns:
        The op. ``op.defvjp(forward, backward, symbolic_zeros=False, reference=None)`` sets its
        rule, as ``jax.custom_vjp``'s does. Forward mode differentiates ``reference(fn)``, or
        ``fn`` where ``reference`` is None.
    """
    fn = promotion.by_default(fn)
    reverse = jax.custom_vjp(fn, nondiff_argnums=(0,))
    both = jax.custom_jvp(fn, nondiff_argnums=(0,))

    @functools.wraps(fn)
    def call(static: Any, *arrays: Any) -> Any:
        if static.backend == "xla":
            return both(static, *arrays)
        return reverse(static, *_watch(arrays, name=fn.__name__, backend=static.backend))

    def defvjp(
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        symbolic_zeros: bool = False,
        reference: Callable[..., Any] | None = None,
    ) -> None:
        forward, backward = promotion.by_default(forward), promotion.by_default(backward)
        reverse.defvjp(forward, backward, symbolic_zeros=symbolic_zeros)
        differentiated = reference(fn) if reference else fn

        @both.defjvp
        def jvp(static: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
            out, residuals = forward(static, *primals)
            leaves, tree = jax.tree.flatten(out)
            rule = _Rule(
                reference=differentiated,
                backward=backward,
                symbolic_zeros=symbolic_zeros,
                static=static,
                primals=jax.tree.structure(primals),
                residuals=jax.tree.structure(residuals),
                out=tree,
                types=tuple(jax.typeof(leaf).to_tangent_aval() for leaf in leaves),
            )
            moving = [t for t in jax.tree.leaves(tangents) if t.dtype != jax.dtypes.float0]
            types = tuple(filter(_is_floating, rule.types))
            operands = jax.tree.leaves((primals, residuals))
            moved = _tangents_p.bind(*operands, *moving, rule=rule, types=types)
            return out, rule.outputs(moved)

    call.defvjp = defvjp  # type: ignore[attr-defined]
    return call


def without_derivative(fn: Callable[..., Any], why: str) -> Callable[..., Any]:
    """``fn``, which raises a :class:`BackendError` where it is differentiated."""
    refusing = jax.custom_jvp(fn)

    @refusing.defjvp
    def refuse(*_: Any) -> Any:
        raise BackendError(why)

    return refusing


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The derivative of one call: hashable, a parameter of ``jaxllm_tangents``.

    The operands of the primitive are the leaves of the op's arguments, those of its residuals, and
    the tangents of the floating arguments. The first two are fixed, in the last it is linear.
    """

    reference: Callable[..., Any]
    backward: Callable[..., Any]
    symbolic_zeros: bool
    static: Any
    primals: Any  # a PyTreeDef, as the next two
    residuals: Any
    out: Any
    types: tuple[Any, ...]  # of the leaves of out, as tangents

    @property
    def fixed(self) -> int:
        """The number of operands in which the primitive is not linear."""
        return self.primals.num_leaves + self.residuals.num_leaves

    def outputs(self, floating: Sequence[Any]) -> Any:
        """The tangents or cotangents of all outputs, from those of the floating ones."""
        values = iter(floating)
        return self.out.unflatten(
            next(values) if _is_floating(x) else np.zeros(x.shape, x.dtype) for x in self.types
        )

    def apply(self, *operands: Any) -> list[Any]:
        """The tangents of the floating outputs."""
        leaves, tangents = operands[: self.primals.num_leaves], operands[self.fixed :]
        moving = [i for i, leaf in enumerate(leaves) if _is_floating(leaf)]

        def reference(*values: Any) -> list[Any]:
            args = list(leaves)
            for i, value in zip(moving, values, strict=True):
                args[i] = value
            out = self.reference(self.static, *self.primals.unflatten(args))
            return list(filter(_is_floating, jax.tree.leaves(out)))

        return jax.jvp(reference, [leaves[i] for i in moving], list(tangents))[1]

    def gradients(self, operands: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The gradients of the floating arguments; None stands for zeros, here and there."""
        floating = filter(_is_floating, self.types)
        filled = [
            ct if ct is not None else SymbolicZero(x) if self.symbolic_zeros else _zeros(x)
            for ct, x in zip(cotangents, floating, strict=True)
        ]
        count = self.primals.num_leaves
        primals = self.primals.unflatten(operands[:count])
        residuals = self.residuals.unflatten(operands[count:])
        by_argument = self.backward(self.static, residuals, self.outputs(filled))
        gradients = []
        for primal, gradient in zip(primals, by_argument, strict=True):
            leaves, tree = jax.tree.flatten(primal)
            parts = [None] * len(leaves) if gradient is None else tree.flatten_up_to(gradient)
            pairs = zip(leaves, parts, strict=True)
            gradients += [part for leaf, part in pairs if _is_floating(leaf)]
        return gradients


@dataclasses.dataclass(frozen=True)
class _MappedRule:
    """A rule under ``jax.vmap``: its operands are batched along ``axes``, its outputs along 0."""

    rule: Any
    axes: tuple[int | None, ...]
    size: int

    @property
    def fixed(self) -> int:
        """As of the rule."""
        return self.rule.fixed

    def apply(self, *operands: Any) -> list[Any]:
        """As of the rule."""
        return jax.vmap(self.rule.apply, self.axes, axis_size=self.size)(*operands)

    def gradients(self, operands: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """As of the rule."""
        axes, own = self.axes[: self.fixed], self.axes[self.fixed :]
        cotangent_axes = [None if ct is None else 0 for ct in cotangents]
        each = jax.vmap(self.rule.gradients, (list(axes), cotangent_axes), axis_size=self.size)
        gradients = each(list(operands), list(cotangents))
        return [
            None if g is None else g.sum(0) if axis is None else jnp.moveaxis(g, 0, axis)
            for g, axis in zip(gradients, own, strict=True)
        ]


def _zeros(like: Any) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)


_tangents_p = Primitive("jaxllm_tangents")
_tangents_p.multiple_results = True


@_tangents_p.def_impl
def _tangents(*operands, rule, types):
    del types
    return rule.apply(*operands)


@_tangents_p.def_abstract_eval
def _tangents_types(*_, rule, types):
    del rule
    return types


def _tangents_jvp(operands, tangents, *, rule, types):
    bind = functools.partial(_tangents_p.bind, rule=rule, types=types)
    moved = list(map(ad.instantiate_zeros, tangents))
    if any(type(t) is not ad.Zero for t in tangents[: rule.fixed]):
        return jax.jvp(rule.apply, list(operands), moved)
    return bind(*operands), bind(*operands[: rule.fixed], *moved[rule.fixed :])


def _tangents_transpose(cotangents, *operands, rule, types):
    del types
    fixed, moving = operands[: rule.fixed], operands[rule.fixed :]
    given = [None if type(ct) is ad.Zero else ct for ct in cotangents]
    gradients = zip(rule.gradients(fixed, given), moving, strict=True)
    return [None] * rule.fixed + [g if ad.is_undefined_primal(x) else None for g, x in gradients]


def _tangents_batching(operands, axes, *, rule, types):
    sizes = {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}
    mapped = _MappedRule(rule, tuple(axes), *sizes)
    types = tuple(jax.make_jaxpr(mapped.apply)(*operands).out_avals)
    return _tangents_p.bind(*operands, rule=mapped, types=types), [0] * len(types)


ad.primitive_jvps[_tangents_p] = _tangents_jvp
ad.primitive_transposes[_tangents_p] = _tangents_transpose
batching.primitive_batchers[_tangents_p] = _tangents_batching
mlir.register_lowering(_tangents_p, mlir.lower_fun(_tangents, multiple_results=True))


# Under the other backends each argument passes through the identity. Its tangent passes through
# another one, which may be transposed and not evaluated.


def _watch(arg: Any, **call: Any) -> Any:
    arrays = (jax.Array, np.ndarray)
    return jax.tree.map(
        lambda x: _watched_p.bind(x, **call) if isinstance(x, arrays) and _is_floating(x) else x,
        arg,
    )


def _watched_jvp(arrays, tangents, **call):
    (tangent,) = tangents
    is_zero = type(tangent) is ad.Zero
    return arrays[0], tangent if is_zero else _reverse_only_p.bind(tangent, **call)


def _refuse_forward_mode(*_, name, backend):
    raise BackendError(
        f"backend {backend!r} cannot serve forward mode (jax.jvp, jax.jacfwd, jax.linearize) of "
        f"{name}, whose kernels have a derivative for reverse mode alone; {use_xla(name)}"
    )


_watched_p = Primitive("jaxllm_watched")
_watched_p.def_impl(lambda x, **_: x)
_reverse_only_p = Primitive("jaxllm_reverse_only")
_reverse_only_p.def_impl(_refuse_forward_mode)
for _p in (_watched_p, _reverse_only_p):
    _p.def_abstract_eval(lambda x, **_: x)
    batching.defvectorized(_p)
ad.primitive_jvps[_watched_p] = _watched_jvp
ad.deflinear2(_reverse_only_p, lambda cotangent, *_, **__: [cotangent])
mlir.register_lowering(_watched_p, lambda context, x, **_: [x])
mlir.register_lowering(_reverse_only_p, lambda context, x, **call: _refuse_forward_mode(x, **call))


# Under jax.vmap JAX sums the gradient of an argument that is not mapped. The cotangent of an output
# that is not mapped is such a sum already: a backward that adds it to the gradient would count it
# once for each member of the batch.


def map_together(outputs: Any) -> Any:
    """The outputs of an op; where ``jax.vmap`` maps one, all are mapped, with their cotangents."""
    leaves, tree = jax.tree.flatten(outputs)
    return tree.unflatten(_together_p.bind(*leaves))


def _together_batching(arrays, axes):
    # jax.vmap gives what it broadcasts the sharding of the mapped axis.
    mapped = jax.vmap(lambda *arrays: list(arrays), tuple(axes))(*arrays)
    return _together_p.bind(*mapped), [0] * len(mapped)


_together_p = Primitive("jaxllm_map_together")
_together_p.multiple_results = True
_together_p.def_impl(lambda *arrays: list(arrays))
_together_p.def_abstract_eval(lambda *arrays: list(arrays))
batching.primitive_batchers[_together_p] = _together_batching
ad.deflinear2(_together_p, lambda cotangents, *_: cotangents)
mlir.register_lowering(_together_p, lambda context, *arrays: list(arrays))
