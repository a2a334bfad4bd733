"""The residual stream between the blocks of a pre-norm transformer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.core import meshes, promotion, vma
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.gathers import sharded_like
from jaxllm.ops.checks import (
    as_finite,
    check_floating,
    check_pre_norm,
    check_same_dtype,
    check_shape,
)
from jaxllm.ops.gemm.float8_norm import NormArrays
from jaxllm.ops.gemm.fused import Normalized, normalize
from jaxllm.ops.norm.api import add_layer_norm, add_rms_norm, layer_norm, rms_norm

NormKind = Literal["layer", "rms"]


@jax.tree_util.register_pytree_node_class
class Residual:
    """The residual stream, with what the block before has already computed of the next norm.

    A norm fuses with what precedes it. So a block may leave its last addition to the norm of the
    next block (:attr:`branch`), or its last GEMM may already have normalized the sum
    (:attr:`normalized`). Blocks take and return a Residual; :func:`residual` makes the first.

    Nothing outside of the blocks sets an array and keeps its norm: :meth:`add` drops it. The kind
    of the norm and its ``eps`` are part of the type. ``jax.tree.map`` sees the leaves; use it to
    place or cast them, and not to compute with them.

    Attributes:
        kind: ``"layer"`` or ``"rms"``: the norm that the blocks begin with.
        eps: What the norm adds to the variance or the mean square.
        branch: A term that is not added yet, and its bias; or None.
        normalized: The layer norm of :attr:`x` without scale and bias; or None.
    """

    __slots__ = ("_branch", "_eps", "_kind", "_normalized", "_x")

    def __init__(self, x: Float[Array, "*B T D"], kind: NormKind, eps: float) -> None:
        self._x, self._eps = x, eps
        self._kind: NormKind = kind
        self._branch: tuple[Array, Array | None] | None = None
        self._normalized: Normalized | None = None

    @property
    def kind(self) -> NormKind:
        """The norm that the blocks begin with."""
        return self._kind

    @property
    def eps(self) -> float:
        """What the norm adds to the variance or the mean square."""
        return self._eps

    @property
    def branch(self) -> tuple[Array, Array | None] | None:
        """A term that is not added yet, and its bias."""
        return self._branch

    @property
    def normalized(self) -> Normalized | None:
        """The layer norm of :attr:`x` without scale and bias."""
        return self._normalized

    @property
    @promotion.by_default
    def x(self) -> Float[Array, "*B T D"]:
        """The array."""
        if self._branch is None:
            return self._x
        # In float32, as the norm's kernel adds them; so is the sum for the gradient of the bias.
        wide = jnp.promote_types(self._x.dtype, jnp.float32)
        branch, bias = self._branch
        branch = sharded_like("residual", 1, branch, self._x)
        terms = [term.astype(wide) for term in (branch, meshes.whole(bias)) if term is not None]
        return sum(terms, self._x.astype(wide)).astype(self._x.dtype)

    def add(self, y: Float[Array, "*B T D"]) -> Residual:
        """The residual plus ``y``, such as an adapter's output; the next norm is computed anew.

        Raises:
            TypeError: ``y`` is not of the residual's dtype.
            ValueError: ``y`` is not of its shape.
        """
        check_floating(y=y)
        check_shape("y", y, self._x.shape, "the shape of the residual")
        check_same_dtype("y", y, "the residual", self._x)
        x = self.x
        return Residual(x + sharded_like("residual", 1, y, x), self._kind, self._eps)

    def like(self, other: Residual) -> Residual:
        """The same values with the fields that ``other`` has, for a carry of ``jax.lax.scan``."""
        branch, normalized = None, None
        if other.branch is not None:
            branch = jax.tree.map(meshes.zeros, other.branch)
        if other.normalized is not None:
            normalized = self._normalized or self.normalize(resolve())
        found = carry(self, self.x, branch=branch, normalized=normalized)
        return vma.vary_like(found, other)

    def normalize(self, backend: Backend) -> Normalized:
        """The layer norm of :attr:`x` without scale and bias; the gradient goes along x alone."""
        return normalize(backend, jax.lax.stop_gradient(self.x), self._eps)

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """As JAX asks of a pytree node."""
        return (self._x, self._branch, self._normalized), (self._kind, self._eps)

    @classmethod
    def tree_unflatten(cls, kind_and_eps: tuple, children: tuple) -> Residual:
        """As JAX asks of a pytree node."""
        x, branch, normalized = children
        return carry(cls(x, *kind_and_eps), x, branch=branch, normalized=normalized)


def carry(
    h: Residual,
    x: Array,
    *,
    branch: tuple[Array, Array | None] | None = None,
    normalized: Normalized | None = None,
) -> Residual:
    """The residual that a block returns, of the type of ``h``: for blocks alone.

    Args:
        h: The residual before.
        x: The new array, or the one that ``branch`` is to be added to.
        branch: A term that the next norm's kernel adds, and its bias.
        normalized: The layer norm of ``x``.
    """
    made = Residual(x, h.kind, h.eps)
    made._branch, made._normalized = branch, normalized
    return made


def residual(x: Float[Array, "*B T D"], norm: NormKind = "layer", *, eps: float = 1e-5) -> Residual:
    """The residual stream that the first block takes.

    Args:
        x: The embeddings.
        norm: The norm that each block begins with: ``"layer"`` (GPT-2) or ``"rms"`` (Llama).
        eps: What it adds to the variance or the mean square; finite, at least 0.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: ``norm`` is unknown, or ``eps`` is not in its range.
    """
    check_floating(x=x)
    if norm not in ("layer", "rms"):
        raise ValueError(f"norm is {norm!r}; it must be 'layer' or 'rms'")
    return Residual(x, norm, as_finite("eps", eps, least=0))


def pre_norm(
    h: Residual, norm: Mapping[str, Array], backend: Backend | None = None
) -> tuple[Float[Array, "*B T D"], Residual]:
    """The norm of a residual, fused with the addition that the block before left to it.

    Args:
        h: The residual.
        norm: ``scale``, and of a layer norm ``bias``.
        backend: As in :func:`jaxllm.ops.layer_norm`.

    Returns:
        ``(out, h)``: the normalized rows, and the residual with nothing left to add.
    """
    check_residual(h)
    check_norm(h, norm)
    term, rest, bias = _terms(h)
    options: dict[str, Any] = {"eps": h.eps, "backend": backend}
    if h.kind == "layer":
        out, x = add_layer_norm(term, rest, **norm, x_bias=bias, **options)
    else:
        out, x = add_rms_norm(term, rest, **norm, **options)
    return out, carry(h, x)


def _terms(h: Residual) -> tuple[Array, Array | None, Array | None]:
    """What a norm's kernel adds: the branch, the residual, and of a layer norm the branch's bias.

    The branch is the sum itself, and the others are None, where the kernel has nothing to add.
    """
    branch, bias = h.branch or (None, None)
    # The kernels of RMS norms take no bias.
    if branch is None or (h.kind == "rms" and bias is not None):
        return h.x, None, None
    return branch, h._x, bias


def norm_arrays(h: Residual, norm: Mapping[str, Array]) -> NormArrays:
    """The arrays of :func:`pre_norm`, checked; the bias of a layer norm without one is zeros."""
    check_floating(x=h._x)
    term, rest, term_bias = _terms(h)
    scale, bias = norm["scale"], norm.get("bias")
    checked = check_pre_norm(h._x, scale, "bias", bias)
    if term_bias is not None:
        check_pre_norm(h._x, scale, "the bias of the layer before", term_bias)
    return NormArrays(term, rest, term_bias, scale, None if h.kind == "rms" else checked)


def final_norm(
    h: Residual, norm: Mapping[str, Array], *, backend: Backend | None = None
) -> Float[Array, "*B T D"]:
    """The norm after the last block.

    Args:
        h: What the last block returns.
        norm: ``scale``, and of a layer norm ``bias``.
        backend: As in :func:`jaxllm.ops.layer_norm`.

    Returns:
        The normalized rows.

    Raises:
        TypeError: ``h`` is no :class:`Residual`; or as in :func:`jaxllm.ops.layer_norm`.
        ValueError: As in :func:`jaxllm.ops.layer_norm` and :func:`jaxllm.ops.rms_norm`.
    """
    check_residual(h)
    check_norm(h, norm)
    if h.branch is not None:
        return pre_norm(h, norm, backend)[0]
    function = layer_norm if h.kind == "layer" else rms_norm
    return function(h.x, **norm, eps=h.eps, backend=backend)


def check_norm(h: Residual, norm: Any) -> None:
    """Raises TypeError or ValueError where a norm lacks a part, or has one that no kernel reads."""
    check_keys("norm", norm, "scale", others=("bias",))
    if h.kind == "rms" and "bias" in norm:
        raise TypeError("norm has a bias; the RMS norm of this residual has none")


def check_keys(name: str, tree: object, *keys: str, others: tuple[str, ...] | None = None) -> None:
    """Raises TypeError or ValueError where a tree of parameters lacks one of these keys.

    Also where it has a key that is neither one of them nor of ``others``; None allows any.
    """
    if not isinstance(tree, Mapping):
        raise TypeError(f"{name} is of type {type(tree).__name__}; it must be a mapping")
    for key in keys:
        if key not in tree:
            wanted, found = ", ".join(keys), ", ".join(map(str, tree)) or "nothing"
            raise ValueError(f"{name} has {found}; it must have {wanted}")
    if others is not None and (unknown := [key for key in tree if key not in (*keys, *others)]):
        wanted = " and ".join([", ".join(keys), *others])
        raise ValueError(f"{name} has {', '.join(map(str, unknown))}; it may have {wanted} alone")


def check_residual(h: object) -> None:
    """Raises TypeError where ``h`` is no Residual."""
    if not isinstance(h, Residual):
        raise TypeError(
            f"h is of type {type(h).__name__}; it must be a Residual, which jaxllm.ops.residual(x) "
            "makes"
        )


jax.export.register_pytree_node_serialization(
    Residual,
    serialized_name="jaxllm.Residual",
    serialize_auxdata=lambda kind_and_eps: json.dumps(kind_and_eps).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)
jax.export.register_namedtuple_serialization(Normalized, serialized_name="jaxllm.Normalized")
