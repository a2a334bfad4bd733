"""What the models share: running a stack of blocks, the LM head, and layouts of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from jaxllm import ops
from jaxllm.models.special_tokens import SpecialTokens
from jaxllm.ops.block.precision import check_precision
from jaxllm.ops.checks import (
    as_bool,
    as_integer,
    check_integer,
    check_key,
    check_shape,
    is_certain,
)

Params = dict[str, Any]
# attend(layer, q, k, v) -> out, of (B, T, N, H) and (B, T, K, H): attention with a cache.
Attend = Callable[[int, Array, Array, Array], Array]
Policy = Callable[..., bool]  # one of jax.checkpoint_policies
_ARRAYS = (jax.Array, np.ndarray)

# Saves the results of GEMMs and attention, and recomputes norms, rotations and activations: less
# memory for little time. The names are those that the ops give their outputs. A projection that is
# rotated over itself is saved rotated.
SAVE_GEMMS = jax.checkpoint_policies.save_only_these_names("linear", "flash_attention")
# Saves attention's output and recomputes the rest of a block: for long sequences, where attention
# takes most of the time.
SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names("flash_attention")


def run_blocks(
    block: Callable[[ops.Residual, Any], ops.Residual],
    h: ops.Residual,
    layers: Any,
    *,
    remat: bool | Policy = False,
) -> ops.Residual:
    """Runs a block once for each layer.

    Args:
        block: ``block(h, layer) -> h``.
        h: The residual that goes into the first block.
        layers: The parameters of the blocks: stacked on a leading axis, for ``lax.scan``; or a
            list, whose blocks are traced one after another.
        remat: Whether each block is recomputed in the backward pass, or what to save of it.

    Returns:
        The residual after the last block.

    Raises:
        TypeError: ``remat`` is no bool and no function.
    """
    unrolled = isinstance(layers, list)
    remat = _as_remat(remat)

    def step(h, layer):
        return block(h, layer), None

    if remat:
        # A scan keeps its body from being merged with its recomputation; no barrier is needed.
        policy = None if remat is True else remat
        step = jax.checkpoint(step, prevent_cse=unrolled, policy=policy)
    if unrolled:
        for layer in layers:
            h, _ = step(h, layer)
        return h

    def first(h, layers):
        return block(h, jax.tree.map(lambda x: x[0], layers))

    # The carry has one structure from the start: the one that a block returns.
    return jax.lax.scan(step, h.like(jax.eval_shape(first, h, layers)), layers)[0]


def _as_remat(remat: Any) -> Any:
    if callable(remat):
        return remat
    try:
        return remat is not None and as_bool("remat", remat)
    except TypeError as error:
        raise TypeError(
            f"remat is {remat!r}; it must be a bool, or one of jax.checkpoint_policies"
        ) from error


def by_block(precision: ops.Precision, layer: Params) -> tuple[ops.Precision, ops.Precision]:
    """The precision of the attention block, and that of the feed-forward block.

    Args:
        precision: One recipe, or one by the name of a linear layer, as in ``{"qkv": "row"}``.
        layer: The parameters of both blocks, whose linear layers these may be.

    Raises:
        TypeError: ``precision`` is neither a name, a mapping nor None.
        ValueError: A recipe or a layer is unknown.
    """
    parts = [
        [name for name, linear in layer[part].items() if "weight" in linear]
        for part in ("attention", "mlp")
    ]
    check_precision(precision, *parts[0], *parts[1])
    if precision is None or isinstance(precision, str):
        return precision, precision
    chosen: Mapping[str, Any] = precision
    attention, ffn = ({name: chosen.get(name) for name in part} for part in parts)
    return attention, ffn


class Shape(Protocol):
    """What the LM head reads of a model's config."""

    @property
    def vocab_size(self) -> int:
        """Tokens, without the padding."""
        ...

    @property
    def saved_per_token(self) -> int:
        """Elements that the blocks save for each token for the backward pass."""
        ...


def lm_head(params: Params) -> Array | ops.Quantized:
    """The LM head, one row a token: the token table where it is tied."""
    return params["lm_head"] if "lm_head" in params else params["wte"]


def logits(x: Array, head: Array | ops.Quantized) -> Array:
    """The logits of what comes out of the last norm."""
    return ops.linear(x, head if isinstance(head, ops.Quantized) else head.T)


def next_logits(x: Array, head: Array | ops.Quantized) -> Array:
    """:func:`logits` of one position a sequence, (B, D), for decoding: they have no derivative."""
    return ops.linear(x, head if isinstance(head, ops.Quantized) else ops.Transposed(head))


_MANY_ROWS = 4096


def lm_head_loss(
    head: Array | ops.Quantized,
    hidden: Array,
    labels: Array,
    config: Shape,
    *,
    remat: bool | Policy = False,
    ignore_index: int | None = None,
) -> Float[Array, ""]:
    """The mean cross entropy of the labels, given the input of the LM head.

    The fewer the chunks of rows, the faster their GEMMs. The logits of a chunk may take two fifths
    of the memory that the blocks save.

    Args:
        head: The LM head, (Vp, D).
        hidden: Its input, (B, T, D).
        labels: The token that follows each token.
        config: The model's shape.
        remat: Whether the blocks save little.
        ignore_index: As in :func:`jaxllm.ops.cross_entropy`.
    """
    check_integer(labels=labels)
    if isinstance(head, ops.Quantized):
        head = ops.dequantize(head.q, head.scales).astype(hidden.dtype)
    saved = 0 if remat else config.saved_per_token
    rows = 2 * labels.size * saved // (5 * head.shape[0])
    return ops.linear_cross_entropy(
        hidden,
        head,
        labels,
        transpose_weight=True,
        ignore_index=ignore_index,
        vocab_size=config.vocab_size,
        chunk_rows=rows if is_certain(lambda: rows >= _MANY_ROWS) else None,
    )


def for_decoding(params: Params) -> Params:
    """The parameters as decoding reads them fastest: each layer apart, each weight by its outputs.

    The heads of ``qkv`` are in the usual order then, queries of one key head side by side.

    :func:`jaxllm.inference.generate.complete` does this itself; do it before, to do it once for
    many calls.

    Args:
        params: A model's parameters, or their int8 form.

    Returns:
        Parameters for :mod:`jaxllm.inference`, with a list of layers under ``"blocks"``, in which
        each plain ``weight`` is a :class:`jaxllm.ops.Transposed`.
    """
    layers = [map_weights(_transposed, in_usual_order(layer)) for layer in layers_of(params)]
    return {**params, "blocks": layers}


def in_usual_order(blocks: Params, *, is_stacked: bool = False) -> Params:
    """Parameters of a block whose layers all have a matrix as weight, and a vector as bias.

    Args:
        blocks: Those of one block, or with ``is_stacked`` of all.
        is_stacked: Whether the arrays have a leading layer axis.
    """

    def of_layer(layer: Params, merge: Callable[[Array], Array], ndim: int) -> Params:
        ranks = {"weight": ndim + is_stacked, "bias": ndim - 1 + is_stacked}
        return {
            name: merge(jnp.asarray(x)) if isinstance(x, _ARRAYS) and x.ndim == ranks[name] else x
            for name, x in layer.items()
        }

    attention = {**blocks["attention"]}
    attention["qkv"] = of_layer(attention["qkv"], merge_heads, 4)
    mlp = {**blocks["mlp"]}
    if "gate_up" in mlp:
        mlp["gate_up"] = of_layer(mlp["gate_up"], lambda x: jax.lax.collapse(x, x.ndim - 2), 3)
    return {**blocks, "attention": attention, "mlp": mlp}


def merge_heads(x: Array) -> Array:
    """(..., N/K + 2, K, H) as (..., (N + 2K) H) in the usual order: queries, keys, values."""
    queries, rest = x[..., :-2, :, :].swapaxes(-3, -2), x[..., -2:, :, :]
    parts = [jax.lax.collapse(part, x.ndim - 3) for part in (queries, rest)]
    return jnp.concatenate(parts, axis=-1)


def is_for_decoding(params: Params) -> bool:
    """Whether :func:`for_decoding` has laid out these parameters."""
    blocks = params["blocks"]
    if not isinstance(blocks, list):
        return False
    return isinstance(blocks[0]["attention"]["qkv"]["weight"], ops.Transposed | ops.Quantized)


def _transposed(name: str, weight: Any) -> Any:
    del name
    return ops.Transposed(jnp.asarray(weight).T) if isinstance(weight, _ARRAYS) else weight


def map_weights(fn: Callable[[str, Any], Any], tree: Mapping[str, Any], path: str = "") -> Params:
    """The same parameters with ``fn(path, weight)`` instead of each layer's ``weight``."""
    return {
        key: map_weights(fn, value, f"{path}.{key}")
        if isinstance(value, Mapping)
        else fn(f"{path}.{key}", value)
        if key == "weight"
        else value
        for key, value in tree.items()
    }


def layers_of(params: Params) -> list[Params]:
    """The blocks' parameters, a layer at a time."""
    blocks = params["blocks"]
    return blocks if isinstance(blocks, list) else unstack(params)["blocks"]


def with_auto_axes(mesh: Mesh) -> Mesh:
    """The same mesh with Auto axes.

    To move parameters from a mesh with Explicit axes to it copies nothing::

        auto = with_auto_axes(mesh)
        params = jax.device_put(params, parallel.state_shardings(auto, params))

    Sampling needs it: JAX does not slice the padding off logits that are sharded along the
    vocabulary under Explicit axes. :func:`jaxllm.inference.generate.complete` and ``stream`` do it
    themselves.
    """
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def unstack(params: Params) -> Params:
    """A model's parameters with the blocks in a list, which a model runs one after another.

    XLA compiles such a model for longer, and the program is faster: no layer's weights are sliced
    out of an array, nor their gradients put into one, and each GEMM sees its own bias.

    Args:
        params: The parameters, as a model's ``init`` makes them. Those without a layer axis are
            not copied. Those with such a list are returned as they are.

    Returns:
        The same with a list under ``"blocks"``; :func:`stack` is the inverse.

    Raises:
        TypeError: ``params`` is no mapping.
        ValueError: There are no ``"blocks"``, or their arrays have no first axis in common.
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"params has type {type(params).__name__}; it must be a dict with blocks")
    if "blocks" not in params:
        raise ValueError(f"params has the keys {list(params)}; it must have blocks")
    if isinstance(params["blocks"], list):
        return params
    leaves, structure = jax.tree.flatten(params["blocks"])
    shapes = [jnp.shape(leaf) for leaf in leaves]
    if others := [shape for shape in shapes if not shape or shape[0] != shapes[0][0]]:
        raise ValueError(
            f"blocks has arrays of shape {shapes[0]} and {others[0]}; all must have the layers as "
            "their first axis"
        )
    layers = zip(*map(list, leaves), strict=True)  # a list of an array is its rows
    return {**params, "blocks": [structure.unflatten(layer) for layer in layers]}


def stack(params: Params) -> Params:
    """A model's parameters with the blocks stacked on a leading axis, which a model runs by a scan.

    Args:
        params: As :func:`unstack` returns them; stacked ones are returned as they are.
    """
    blocks = params["blocks"]
    if not isinstance(blocks, list):
        return params
    return {**params, "blocks": jax.tree.map(lambda *layers: jnp.stack(layers), *blocks)}


def check_tokens(tokens: Array, max_seq_len: int) -> None:
    """Checks the tokens that go into a model.

    Raises:
        TypeError: ``tokens`` is not of an integer dtype.
        ValueError: ``tokens`` is not of shape (B, T), or T is beyond ``max_seq_len``.
    """
    check_integer(tokens=tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens has shape {tokens.shape}; it must be (B, T)")
    if is_certain(lambda: tokens.shape[1] > max_seq_len):
        raise ValueError(
            f"tokens has shape {tokens.shape}, sequences of {tokens.shape[1]}; the model has "
            f"max_seq_len {max_seq_len}"
        )


def window_within(window: int | None, length: int) -> int | None:
    """A window, or None if it hides no key of a sequence of ``length`` tokens."""
    return None if window is None or is_certain(lambda: length <= window) else window


def check_documents(
    tokens: Array, segment_ids: Array | None, positions: Array | None
) -> tuple[Array | None, Array | None]:
    """Checks what says where documents begin in the rows of ``tokens``.

    Args:
        tokens: The tokens, (B, T).
        segment_ids: The document of each token, (B, T), or None.
        positions: The position of each token in its document, (B, T), or None.

    Returns:
        ``(segment_ids, positions)``, as JAX arrays.

    Raises:
        TypeError: An argument is not of an integer dtype.
        ValueError: An argument differs from ``tokens`` in shape.
    """
    given = {"segment_ids": segment_ids, "positions": positions}
    for name, array in given.items():
        if array is not None:
            check_integer(**{name: array})
            check_shape(name, array, tokens.shape, "the shape of tokens")
    segment_ids, positions = (None if x is None else jnp.asarray(x) for x in given.values())
    return segment_ids, positions


def check_config(config: Any, *sizes: str) -> None:
    """Checks what configs have in common, and makes Python integers of the sizes.

    Raises:
        TypeError: A size is no integer, or ``special_tokens`` no ``SpecialTokens``.
        ValueError: A size is below 1.
    """
    for name in sizes:
        size = as_integer(name, getattr(config, name))
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be >= 1")
        object.__setattr__(config, name, size)
    tokens = config.special_tokens
    if not isinstance(tokens, SpecialTokens):
        raise TypeError(
            f"special_tokens has type {type(tokens).__name__}; it must be SpecialTokens"
        )


def check_config_type(config: Any, *kinds: type) -> None:
    """Raises TypeError where a config is not that of a model family, or of one of several."""
    if not isinstance(config, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"config has type {type(config).__name__}; it must be {wanted}")


def check_family(
    params: Params, config: Any, kind: type, names: tuple[str, ...], of_block: tuple[str, ...]
) -> None:
    """Checks that parameters and a config are of one model family.

    Args:
        params: The parameters.
        config: The config.
        kind: The type that it must have.
        names: What the parameters must have.
        of_block: What each of their blocks must have; ``"mlp/up"`` is in its ``"mlp"``.

    Raises:
        TypeError: The config is of another family.
        ValueError: The parameters are.
    """
    check_config_type(config, kind)

    def check(tree: Any, names: tuple[str, ...], holder: str) -> None:
        for path in names:
            found = tree
            for name in path.split("/"):
                if not isinstance(found, Mapping) or name not in found:
                    init = f"the init of {kind.__module__}"
                    raise ValueError(f"{holder} has no {path!r}; params must be a dict from {init}")
                found = found[name]

    check(params, names, "params")
    blocks = params["blocks"]
    for block in blocks if isinstance(blocks, list | tuple) else [blocks]:
        check(block, of_block, "params['blocks']")


def check_params(params: Params, config: Any) -> None:
    """Raises ValueError where parameters do not have the layers, heads or tokens of a config.

    The heads of parameters that are laid out for decoding, or int8, are not known. Raises TypeError
    where the layers are in a tuple: it would be taken for stacked ones.
    """
    tables = {name: params[name] for name in ("wte", "lm_head") if name in params}
    for name, table in tables.items():
        rows = (table.q if isinstance(table, ops.Quantized) else table).shape[0]
        if rows < config.vocab_size:  # tokens beyond the table would be clamped
            raise ValueError(
                f"params has a {name} of {rows} rows; config has vocab_size {config.vocab_size}"
            )
    blocks = params["blocks"]
    if isinstance(blocks, tuple):
        raise TypeError("params['blocks'] is a tuple; it must be a list of layers, or stacked")
    in_list = isinstance(blocks, list)
    layers = len(blocks) if in_list else jax.tree.leaves(blocks)[0].shape[0]
    if layers != config.layers:
        raise ValueError(f"params has {layers} layers; it must have {config.layers}, as config has")
    parts = (config.heads // config.kv_heads + 2, config.kv_heads, config.head_width)
    for layer in blocks if in_list else [blocks]:
        weight = layer["attention"]["qkv"]["weight"]
        if getattr(weight, "ndim", 0) >= 4 and weight.shape[-3:] != parts:
            found = ", ".join(map(str, weight.shape[-3:]))
            raise ValueError(
                f"params has a qkv weight of shape (..., {found}); it must be (..., "
                f"{', '.join(map(str, parts))}), by the heads of config"
            )


def pad_vocab(vocab_size: int) -> int:
    """``vocab_size`` rounded up to a multiple of 128, for the GEMM of the LM head."""
    return -(-vocab_size // 128) * 128


def num_params(params: Any) -> int:
    """The number of elements in the arrays of a tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def flops_per_token(params: Params, lm_head: int, attention: int) -> int:
    """Floating-point operations of one training step, forward and backward, for one token.

    ``6 M + 12 A``, where M counts the parameters that a GEMM multiplies by: the weights of the
    blocks and the padded LM head, and no token or position table, norm or bias. Each costs a
    multiplication and an addition forward and twice that backward. The second term is attention's
    two matmuls at full length T, as if there were no causal mask: ``A = L T D``. This is the
    convention of PaLM's appendix B (arXiv:2204.02311); recomputation does not count.

    Args:
        params: The parameters as a model's ``init`` makes them, or their shapes.
        lm_head: Elements of the LM head.
        attention: A, the columns of a token's queries times the keys that they see, of all layers.
    """
    sizes: list[int] = []
    map_weights(lambda _, weight: sizes.append(math.prod(weight.shape)), params["blocks"])
    return 6 * (sum(sizes) + lm_head) + 12 * attention


class Initializer:
    """Draws the parameters of a model in float32, as GPT-2 and llm.c do.

    Weights and tables are normal with standard deviation 0.02. That of the two layers of each block
    that add to the residual is 0.02/sqrt(2L). Biases are zero and scales one. The padded rows of
    tables are zero, and their gradients are too.
    """

    def __init__(self, key: PRNGKeyArray, draws: int, layers: int, *, bias: bool) -> None:
        check_key(key)
        self.keys, self.layers, self.bias = iter(jax.random.split(key, draws)), layers, bias

    def normal(self, *shape: int, std: float = 0.02) -> Array:
        """Normal elements."""
        drawn = jax.random.normal(next(self.keys), shape, jnp.float32)
        # XLA would merge ``std`` with a constant of ``normal``, and round otherwise than outside of
        # a ``jit``.
        return std * jax.lax.optimization_barrier(drawn)

    def table(self, vocab_size: int, width: int) -> Array:
        """A row for each token, and the padding."""
        padding = pad_vocab(vocab_size) - vocab_size
        return jnp.pad(self.normal(vocab_size, width), ((0, padding), (0, 0)))

    def linear(self, d_in: int, d_out: int | tuple[int, ...], *, residual: bool = False) -> Params:
        """A layer of each block; ``residual`` where its output is added to the residual."""
        std = 0.02 / math.sqrt(2 * self.layers) if residual else 0.02
        columns = d_out if isinstance(d_out, tuple) else (d_out,)
        weight = self.normal(self.layers, d_in, *columns, std=std)
        bias = {"bias": jnp.zeros((self.layers, *columns), jnp.float32)} if self.bias else {}
        return {"weight": weight, **bias}

    def norm(self, *shape: int) -> Params:
        """A norm."""
        bias = {"bias": jnp.zeros(shape, jnp.float32)} if self.bias else {}
        return {"scale": jnp.ones(shape, jnp.float32), **bias}
