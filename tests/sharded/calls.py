"""Small calls of every op, with the names of their dimensions: what the tests here shard."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer  # type: ignore[attr-defined]
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import ops, testing
from jaxllm.core import shards
from jaxllm.ops.block import attention, ffn
from jaxllm.ops.rotary.packed import PackedRotation, rope_packed
from jaxllm.testing import Boxes, Integers, Normal

SHAPE = {"a": 2, "b": 4}
ALL = ("a", "b")
SIZES = {"B": 8, "T": 8, "S": 8, "N": 8, "H": 4, "D": 16, "F": 16, "M": 16, "K": 16, "V": 24}
SIZES |= {"1": 1, "R": 8, "P": 24, "C": 4, "E": 3, "G": 2}


def make_mesh(kind):
    return jax.make_mesh(tuple(SHAPE.values()), ALL, axis_types=(getattr(AxisType, kind),) * 2)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op.

    Attributes:
        op: The name of the op.
        fn: The call, of its arrays by name and a backend.
        inputs: The dimensions of each array, such as ``"B T 2N H"``, where ``2N`` is a dimension
            twice as large as N that is sharded as N is.
        sharded: The names along which the op says that it may be sharded.
        weights: Arrays, each with the name of a dimension that FSDP shards it along.
        undeclared: An array, and the name of a dimension along which it cannot be sharded.
        kinds: How to draw an array that is not normally distributed.
        name: The name of the call, where an op has several.
        context: The dimensions of what is gathered where a sequence is sharded, as in ``inputs``.
        backends: The backends to call it with.
        has_backward: Whether the op has a derivative.
        dtype: The dtype of the floating arrays.
        is_large: Whether its program is large, and sharded along two names at a time alone.
        runs: The op that gathers, where it is not ``op``: a variant, or a part on several devices.
    """

    op: str
    fn: Callable[..., Any]
    inputs: Mapping[str, str]
    sharded: str
    weights: Mapping[str, str] = dataclasses.field(default_factory=dict)
    undeclared: tuple[str, str] | None = None
    kinds: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""
    context: tuple[str, ...] = ()
    backends: tuple[str, ...] = ("auto",)
    has_backward: bool = True
    dtype: str = "float32"
    is_large: bool = False
    runs: str | None = None

    def __str__(self) -> str:
        return f"{self.op}-{self.name}" if self.name else self.op

    def __call__(self, arrays: Mapping[str, Any], backend: str) -> Any:
        """Calls it; the arrays may be in another order, as jit sorts them."""
        return self.fn({name: arrays[name] for name in self.inputs}, backend)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the call."""
        drawn = {}
        for seed, (name, dims) in enumerate(self.inputs.items()):
            spec = self.kinds.get(name, Normal)(tuple(map(_size, dims.split())))
            drawn[name] = _draw(spec, self.dtype, seed)
        return drawn

    def specs(self, axes: Mapping[str, Any]) -> dict[str, P]:
        """The sharding of each array along named dimensions."""
        return {name: P(*map(axes.get, _names(dims))) for name, dims in self.inputs.items()}

    def shardings(self) -> dict[str, dict[str, P]]:
        """Each declared sharding: along one name over all devices, and along two."""
        names = self.sharded.split()
        found = {} if self.is_large else {name: self.specs({name: ALL}) for name in names}
        for one, other in itertools.pairwise(names):
            found[f"{one} {other}"] = self.specs({one: "a", other: "b"})
        if self.weights:
            found["FSDP"] = self.fsdp()
        return found

    def fsdp(self) -> dict[str, P]:
        """Rows and weights along the same mesh axes."""
        specs = self.specs({self.sharded.split()[0]: ALL})
        for name, dim in self.weights.items():
            names = _names(self.inputs[name])
            specs[name] = P(*(ALL if other == dim else None for other in names))
        return specs

    def is_moved_in_context(self, kind: str, size: int) -> bool:
        """Whether a collective is one of a sequence in shards: keys, or halves of queries."""
        sizes = [math.prod(map(_size, dims.split())) for dims in self.context]
        is_keys = size in [whole // shards for whole in sizes for shards in (1, 2, 4)]
        return bool(sizes) and (kind == "collective-permute" or (kind == "all-gather" and is_keys))

    def gathered(self) -> dict[str, P]:
        """A sharding that the op does not declare."""
        assert self.undeclared is not None
        array, dim = self.undeclared
        names = {name: _names(dims) for name, dims in self.inputs.items()}
        return {
            name: P(*(ALL if (name, other) == (array, dim) else None for other in names[name]))
            for name in names
        }


def _size(dim: str) -> int:
    return int(dim[:-1] or 1) * SIZES[dim[-1]]


def _draw(spec: Any, dtype: str, seed: int) -> np.ndarray:
    if isinstance(spec, np.ndarray):
        return spec
    return np.asarray(*testing.make_inputs(testing.Case("", "", {"": spec}), dtype, seed))


def _names(dims: str) -> list[str]:
    return [dim.lstrip("0123456789") for dim in dims.split()]


def integers(high, low=0, dtype="int32"):
    return lambda shape: Integers(shape, high, low=low, dtype=dtype)


def about(mean, std=0.1, dtype=None):
    return lambda shape: Normal(shape, mean=mean, std=std, dtype=dtype)


def constant(shape):
    return Normal(shape, dtype="float32", constant=True)


def small(shape):
    return Normal(shape, std=shape[0] ** -0.5)


def _float8(shape):
    return _draw(Normal(shape), "float32", sum(shape)).astype(jnp.float8_e4m3fn)


def _of(op, **static):
    """The call of an op whose arrays are its first arguments."""
    function = getattr(ops, op)
    return lambda arrays, backend: function(*arrays.values(), **static, backend=backend)


def _attention(arrays, backend):
    q, k, v, segments, cos, sin = arrays.values()
    options = {"segment_ids": segments, "rope_table": (cos, sin), "softcap": 5.0, "window": 5}
    return ops.flash_attention(q, k, v, causal=True, **options, backend=backend)


def _attention_packed(arrays, backend, heads=10, kv_heads=1):
    qkv, segments, cos, sin = arrays.values()
    options = {"segment_ids": segments, "rope_table": (cos, sin), "causal": True}
    return ops.flash_attention_packed(qkv, heads, kv_heads, **options, backend=backend)


def _attention_with_sinks(arrays, backend):
    q, k, v, sinks, segments = arrays.values()
    options = {"causal": True, "segment_ids": segments, "return_lse": True, "backend": backend}
    return ops.flash_attention(q, k, v, sinks, **options)


def _attention_with_bias(arrays, backend):
    q, k, v, bias = arrays.values()
    options = {"causal": True, "return_lse": True, "backend": backend}
    return ops.flash_attention(q, k, v, None, bias, **options)


def _attention_packed_with_sinks(arrays, backend):
    qkv, sinks = arrays.values()
    options = {"causal": True, "sinks": sinks, "return_lse": True, "backend": backend}
    return ops.flash_attention_packed(qkv, 16, 8, **options)


def _self_attention(arrays, backend, heads=2):
    x, weight, bias, segments = arrays.values()
    options = {"causal": True, "segment_ids": segments}
    return ops.self_attention(x, weight, bias, heads, **options, backend=backend)


def _rope_packed(*, by_parts):
    heads, kv_heads = (2 * SIZES["N"], SIZES["N"]) if by_parts else (4, 1)
    options = PackedRotation(heads, kv_heads, interleaved=False, by_parts=by_parts)
    return lambda arrays, backend: rope_packed(*arrays.values(), backend=backend, options=options)


def _block(arrays, first):
    norm = {"scale": arrays["scale"], "bias": arrays["norm_bias"]}
    weights = {name: {"weight": arrays[f"{name}_weight"]} for name in (*first, "out")}
    for name, layer in weights.items():
        if f"{name}_bias" in arrays:
            layer["bias"] = arrays[f"{name}_bias"]
    return ops.residual(arrays["x"], "layer"), norm, weights


def _attention_block(arrays, backend):
    h, norm, weights = _block(arrays, ("qkv",))
    h = ops.attention_block(h, norm, weights, heads=8, causal=True, backend=backend)
    return ops.attention_block(h, norm, weights, heads=8, causal=True, backend=backend).x


def _attention_block_fused(arrays, backend, heads=2, blocks=2):
    h, norm, weights = _block(arrays, ("qkv",))
    options = {"heads": heads, "kv_heads": heads, "causal": True, "scale": None, "window": None}
    for _ in range(blocks):  # the second has the norm of the first
        layers = (weights["qkv"], weights["out"], None, arrays["segments"], None)
        h = attention._fused(backend, h, norm, *layers, **options, attend=None)
    return h.x


def _ffn_block(arrays, backend):
    h, norm, weights = _block(arrays, ("up",))
    weights = {"up": weights["up"], "down": weights["out"]}
    return ops.ffn_block(ops.ffn_block(h, norm, weights, backend=backend), norm, weights).x


def _ffn_block_fused(arrays, backend):
    h, norm, weights = _block(arrays, ("up",))
    for _ in range(2):
        h = ffn._fused(backend, h, norm, weights["up"], weights["out"], activation="gelu")
    return h.x


def _decode_attention(arrays, backend):
    return ops.decode_attention(*arrays.values(), backend=backend)


def _decode_attention_paged(arrays, backend):
    q, k, v, lengths, table = arrays.values()
    return ops.decode_attention(q, k, v, lengths, None, None, table, backend=backend)


def _decode_block(arrays, backend):
    matrices = ("qkv", "out", "gate_up", "down")
    given: Any = {n: ops.Transposed(x) if n in matrices else x for n, x in arrays.items()}
    return ops.decode_block(*given.values(), backend=backend)


def _add_layer_norm(arrays, backend):
    x, residual, scale, bias, x_bias = arrays.values()
    return ops.add_layer_norm(x, residual, scale, bias, x_bias=x_bias, backend=backend)


def _first_norm(op):
    function = getattr(ops, op)
    return lambda arrays, backend: function(
        arrays["x"], None, *list(arrays.values())[1:], backend=backend
    )


def _adamw(**static):
    def call(arrays, backend):
        trees = {
            name: {
                leaf: x for key, x in arrays.items() for n, leaf in [key.split("_")] if n == name
            }
            for name in ("param", "grad", "m", "v")
        }
        options = {"step": 3, "lr": 0.01, **static}
        return ops.adamw_update(*trees.values(), **options, backend=backend)

    return call


def _adamw_inputs(**leaves):
    return {
        f"{name}_{leaf}": dims
        for name in ("param", "grad", "m", "v")
        for leaf, dims in leaves.items()
    }


def _adamw_kinds(inputs):
    return {
        name: about(1.0, dtype="float32") if name.startswith("v_") else about(0.0, dtype="float32")
        for name in inputs
        if name.startswith(("m_", "v_"))
    }


def _norm_inputs(kind, **more):
    return {"x": "B T D", **more, "scale": "D", **({"bias": "D"} if kind == "layer" else {})}


# Of no number of shards the queries are as many elements as the keys.
_QKV = {"q": "B T 3N H", "k": "B T N H", "v": "B T N H"}
_LONGER_KEYS = {"q": "B T 3N 2H", "k": "B 2T N 2H", "v": "B 2T N 2H"}
_TREE = _adamw_inputs(matrix="M F", vector="F", deep="B T D")
_ACTIVATIONS = ("gelu", "relu", "sigmoid")
_LAYER = {"x": "B T D", "weight": "D F", "bias": "F"}
_EMBED = {"tokens": "B T", "token_table": "V D", "position_table": "S D"}
_BLOCK = {"x": "B T D", "scale": "D", "norm_bias": "D"}
_ATTENTION_BLOCK = _BLOCK | {
    "qkv_weight": "D 2P", "qkv_bias": "2P", "out_weight": "M D", "out_bias": "D",
}  # fmt: skip
_BY_PARTS = {"qkv_weight": "D E N C", "qkv_bias": "E N C", "out_weight": "4N D"}
_FFN_BLOCK = _BLOCK | {"up_weight": "D F", "up_bias": "F", "out_weight": "F D", "out_bias": "D"}
_OF_BLOCK = {"scale": about(1.0), "qkv_weight": small, "up_weight": small, "out_weight": small}
_LABELS = integers(24, low=-24)  # about half of the rows are ignored
_EVERY = ("auto", "pallas", "xla")

CALLS = [
    *(
        Call(op, _of(op), {"x": "B T D"}, "B T D", backends=_EVERY if op == "gelu" else ("auto",))
        for op in _ACTIVATIONS
    ),
    *(
        Call(op, _of(op), {"x": "B T F", "bias": "F"}, "B T F", weights={"bias": "F"})
        for op in ("bias_gelu", "bias_add")
    ),
    Call("swiglu", _of("swiglu"), {"gate": "B T D", "up": "B T D"}, "B T D"),
    Call("swiglu_packed", _of("swiglu_packed"), {"x": "B T D"}, "B T", undeclared=("x", "D")),
    Call("swiglu_packed", _of("swiglu_packed", by_parts=True), {"x": "B T G F"}, "B T F",
         name="by_parts"),
    Call("add", _of("add"), {"x": "B T D", "y": "B T D"}, "B T D"),
    Call(
        "flash_attention", _of("flash_attention", causal=True), _LONGER_KEYS, "T B N",
        undeclared=("q", "H"), context=("B 2T N 2H",), backends=_EVERY, is_large=True,
    ),
    Call(
        "flash_attention",
        _attention,
        {**_QKV, "segments": "B T", "cos": "B T G", "sin": "B T G"},
        "T B N",
        kinds={"segments": integers(3), "cos": constant, "sin": constant},
        context=("B T N H", "B T"),
        name="all_options",
        is_large=True,
    ),
    Call(
        "flash_attention", _attention_with_sinks, {**_QKV, "sinks": "3N", "segments": "B T"},
        "T B N", kinds={"segments": integers(3)}, context=("B T N H", "B T"), name="sinks",
        is_large=True,
    ),
    *(
        Call(
            "flash_attention", _attention_with_bias,
            {"q": "B T 3N H", "k": "B T N H", "v": "B T N H", "bias": dims}, "B T N",
            undeclared=("bias", "S"), context=("B T N H",), name=name, is_large=True,
            runs="flash_attention_bias",
        )
        for name, dims in (("bias", "B 3N T S"), ("bias_of_heads", "1 3N T S"),
                           ("bias_of_sequences", "B 1 T S"), ("bias_of_all", "1 1 T S"))
    ),
    # Values are narrower than queries and keys, and so is the output.
    Call(
        "flash_attention", _of("flash_attention", causal=True),
        {"q": "B T 3N 4H", "k": "B T N 4H", "v": "B T N 2H"}, "B T N",
        undeclared=("v", "H"), context=("B T N 4H", "B T N 2H"), name="narrow_values",
        is_large=True,
    ),
    # Each shard of the queries' heads reads the one key head, whose gradient is a sum over them.
    Call(
        "flash_attention", _of("flash_attention", causal=True),
        {"q": "B T 3N H", "k": "B T 1 H", "v": "B T 1 H"}, "T B N", context=("B T H",),
        name="one_kv_head", is_large=True,
    ),
    # Eight devices divide the heads of the queries and not those of the keys.
    Call(
        "flash_attention", _of("flash_attention", causal=True),
        {"q": "B T 2N H", "k": "B S G H", "v": "B S G H"}, "",
        undeclared=("q", "N"), name="few_kv_heads",
    ),
    Call(
        "flash_attention_packed", _attention_packed,
        {"qkv": "B T 3M", "segments": "B T", "cos": "T G", "sin": "T G"}, "B T",
        kinds={"segments": integers(3), "cos": constant, "sin": constant}, undeclared=("qkv", "M"),
        context=("B T C", "B T"), is_large=True,
    ),
    *(
        Call(
            "flash_attention_packed",
            functools.partial(_attention_packed, heads=heads, kv_heads=8),
            {"qkv": f"B T {parts} N 2H", "segments": "B T", "cos": "T C", "sin": "T C"}, "B T N",
            kinds={"segments": integers(3), "cos": constant, "sin": constant},
            undeclared=undeclared, context=("B T N 2H", "B T"), name=name, is_large=True,
        )
        for name, parts, heads, undeclared in (
            ("by_parts", "E", 8, None),
            ("grouped_by_parts", "C", 16, ("qkv", "H")),
        )
    ),
    Call(
        "flash_attention_packed", _attention_packed_with_sinks,
        {"qkv": "B T C N 2H", "sinks": "2N"}, "B T N", context=("B T N 2H",), name="sinks",
        is_large=True,
    ),
    Call(
        "flash_attention_float8",
        _of("flash_attention_float8", causal=True),
        {**_QKV, "q_scale": "3N", "k_scale": "N", "v_scale": "N"},
        "B N",
        kinds={"q": _float8, "k": _float8, "v": _float8}
        | dict.fromkeys(("q_scale", "k_scale", "v_scale"), about(1.0)),
        undeclared=("q", "T"),
        has_backward=False,
        dtype="float32",
    ),
    Call("softmax", _of("softmax", causal=True), {"x": "B N T S"}, "B N", undeclared=("x", "S")),
    Call("repeat_kv", _of("repeat_kv", groups=2), {"x": "B S N H"}, "B S N"),
    Call(
        "decode_attention", _decode_attention,
        {
            "q": "B 2N H", "k_cache": "B S N H", "v_cache": "B S N H", "lengths": "B",
            "k_scales": "B S N", "v_scales": "B S N",
        },
        "B N",
        kinds={"lengths": integers(10)}
        | dict.fromkeys(("k_cache", "v_cache"), integers(128, -127, "int8"))
        | dict.fromkeys(("k_scales", "v_scales"), about(0.02, 0.003, "float32")),
        undeclared=("k_cache", "S"), has_backward=False,
    ),
    Call(
        "decode_attention", _decode_attention_paged,
        {"q": "B 2N H", "k_cache": "P C N H", "v_cache": "P C N H", "lengths": "B", "table": "B G"},
        "B N", kinds={"lengths": integers(9), "table": integers(24)},
        undeclared=("k_cache", "P"), has_backward=False, name="pages",
        runs="decode_attention_paged",
    ),
    Call(
        "self_attention", _self_attention,
        {"x": "B T D", "weight": "D 2P", "bias": "2P", "segments": "B T"}, "B T",
        kinds={"weight": small, "segments": integers(3)}, weights={"weight": "D", "bias": "P"},
        undeclared=("x", "D"), context=("B T K", "B T"), is_large=True,
    ),
    Call(
        "self_attention", functools.partial(_self_attention, heads=8),
        {"x": "B T D", "weight": "D E N C", "bias": "E N C", "segments": "B T"}, "B T N",
        kinds={"weight": small, "segments": integers(3)}, weights={"weight": "D", "bias": "N"},
        undeclared=("weight", "D"), context=("B T N C", "B T"), name="by_parts", is_large=True,
    ),
    Call(
        "attention_block", _attention_block,
        _ATTENTION_BLOCK | _BY_PARTS, "B T N", kinds=_OF_BLOCK,
        weights={"qkv_weight": "D", "out_weight": "D"}, context=("B T N C",), name="by_parts",
        is_large=True,
    ),
    Call(
        "attention_block", _attention_block_fused, {**_ATTENTION_BLOCK, "segments": "B T"}, "B T",
        kinds={**_OF_BLOCK, "segments": integers(3)}, name="fused",
        weights={"qkv_weight": "D", "qkv_bias": "P"}, context=("B T K", "B T"), is_large=True,
    ),
    Call(
        "attention_block", functools.partial(_attention_block_fused, heads=8),
        {**_ATTENTION_BLOCK, **_BY_PARTS, "segments": "B T"}, "B T N",
        kinds={**_OF_BLOCK, "segments": integers(3)}, name="fused_by_parts",
        weights={"qkv_weight": "D", "out_weight": "N"}, context=("B T N C", "B T"), is_large=True,
    ),
    Call(
        "attention_block", functools.partial(_attention_block_fused, blocks=1),
        {**_ATTENTION_BLOCK, "segments": "B T"}, "", undeclared=("x", "D"), name="one_fused",
        kinds={**_OF_BLOCK, "segments": integers(3)},
    ),
    Call(
        "mlp", _of("mlp"),
        {"x": "B T D", "up_weight": "D F", "up_bias": "F", "down_weight": "F M", "down_bias": "M"},
        "B T F", kinds={"up_weight": small, "down_weight": small},
        weights={"up_weight": "D", "down_weight": "M", "up_bias": "F"}, undeclared=("x", "D"),
    ),
    Call(
        "ffn_block", _ffn_block, _FFN_BLOCK, "B T F", kinds=_OF_BLOCK,
        weights={"up_weight": "F", "out_weight": "D"}, is_large=True,
    ),
    Call(
        "ffn_block", _ffn_block_fused, _FFN_BLOCK, "B T F", kinds=_OF_BLOCK, undeclared=("x", "D"),
        weights={"up_weight": "D", "out_weight": "F", "up_bias": "F"}, name="fused", is_large=True,
    ),
    Call(
        "decode_block", _decode_block,
        {
            "residual": "B D", "norm1": "D", "norm2": "D", "qkv": "3D D", "out": "D D",
            "gate_up": "2F D", "down": "D F", "cos": "B C", "sin": "B C",
            "k_cache": "B S G 2C", "v_cache": "B S G 2C", "lengths": "B",
        },
        "B",
        kinds={"lengths": integers(8)}, undeclared=("k_cache", "S"), has_backward=False,
    ),
    Call(
        "embed", _of("embed"), _EMBED, "B T V", kinds={"tokens": integers(24)},
        weights={"token_table": "V", "position_table": "D"}, undeclared=("position_table", "S"),
    ),
    Call(
        "tied_embed", _of("tied_embed"), _EMBED, "B T V", kinds={"tokens": integers(24)},
        weights={"token_table": "V"}, undeclared=("token_table", "D"), runs="embed",
    ),
    Call(
        "linear", _of("linear"), _LAYER, "B T D F", kinds={"weight": small},
        weights={"weight": "D", "bias": "F"}, backends=("auto", "xla"),
    ),
    Call(
        "linear", _of("linear", activation="gelu"), _LAYER, "B T F", kinds={"weight": small},
        weights={"weight": "F"}, undeclared=("x", "D"), name="gelu", backends=("auto", "pallas"),
    ),
    Call("linear", _of("linear"), {"x": "T D", "weight": "D F"}, "T D F", name="no_bias"),
    Call(
        "linear", _of("linear"), {"x": "B T D", "weight": "D G F", "bias": "G F"}, "B T D F",
        kinds={"weight": small}, weights={"weight": "D"}, name="by_parts",
    ),
    Call(
        "linear", _of("linear", activation="gelu"),
        {"x": "T D", "weight": "D E N C", "bias": "E N C"}, "T N",
        kinds={"weight": small}, weights={"weight": "D"}, name="heads_by_parts_gelu",
    ),
    Call(
        "linear", _of("linear"), {"x": "T D", "weight": "D E N C"}, "T D N",
        kinds={"weight": small}, name="heads_by_parts_no_bias",
    ),
    Call(
        "matmul", _of("matmul", activation="gelu"), {"a": "M K", "b": "K F", "bias": "F"}, "M F",
        kinds={"b": small}, weights={"b": "K"}, undeclared=("b", "K"),
    ),
    Call(
        "matmul", _of("matmul", transpose_a=True, transpose_b=True), {"a": "K M", "b": "F K"},
        "M F", kinds={"b": small}, weights={"b": "F"}, undeclared=("a", "K"), name="transposed",
    ),
    Call("matvec", _of("matvec"), {"w": "M K", "x": "R K"}, "M R K", has_backward=False),
    *(
        Call(
            "float8_matmul", _of("float8_matmul", out_dtype=jnp.float32),
            {"a": "M K", "b": "F K", "scale_a": scale_a, "scale_b": scale_b}, "M F K", name=name,
            kinds={"a": _float8, "b": _float8, "scale_a": about(1.0), "scale_b": about(1.0)},
            has_backward=False,
        )
        for name, scale_a, scale_b in (("", "M", "F"), ("one_scale", "", ""), ("rows", "M", ""))
    ),
    Call(
        "float8_matmul", _of("float8_matmul", out_dtype=jnp.float32),
        {"a": "M K", "b": "F K", "scale_a": "", "scale_b": "", "bias": "F"}, "M F K", name="bias",
        kinds={"a": _float8, "b": _float8, "scale_a": about(1.0), "scale_b": about(1.0)},
        has_backward=False,
    ),
    *(
        Call(
            "cross_entropy",
            _of("cross_entropy", reduction=reduction, label_smoothing=0.1, vocab_size=21),
            {"logits": "B T V", "labels": "B T"}, "B T V", kinds={"labels": integers(21, low=-21)},
            name=reduction,
        )
        for reduction in ("mean", "sum", "none")
    ),
    Call(
        "linear_cross_entropy", _of("linear_cross_entropy", chunk_rows=2),
        {"hidden": "M D", "weight": "D V", "labels": "M"}, "M V",
        kinds={"weight": small, "labels": _LABELS}, weights={"weight": "V"},
        undeclared=("hidden", "D"),
    ),
    Call(
        "linear_cross_entropy", _of("linear_cross_entropy", transpose_weight=True, z_loss=0.1),
        {"hidden": "B T D", "weight": "V D", "labels": "B T"}, "B T V",
        kinds={"weight": small, "labels": _LABELS}, weights={"weight": "D"}, name="tied",
    ),
    Call(
        "layer_norm", _of("layer_norm"), _norm_inputs("layer"), "B T",
        kinds={"scale": about(1.0)}, weights={"scale": "D"}, undeclared=("x", "D"), backends=_EVERY,
    ),
    Call(
        "rms_norm", _of("rms_norm"), _norm_inputs("rms"), "B T", kinds={"scale": about(1.0)},
        weights={"scale": "D"}, undeclared=("x", "D"), backends=("auto", "pallas"),
    ),
    Call(
        "add_layer_norm", _add_layer_norm,
        {**_norm_inputs("layer", residual="B T D"), "x_bias": "D"}, "B T",
        kinds={"scale": about(1.0)}, weights={"bias": "D"}, undeclared=("residual", "D"),
    ),
    Call(
        "add_rms_norm", _of("add_rms_norm"), _norm_inputs("rms", residual="B T D"), "B T",
        kinds={"scale": about(1.0)}, undeclared=("x", "D"),
    ),
    *(
        Call(f"add_{kind}_norm", _first_norm(f"add_{kind}_norm"), _norm_inputs(kind), "B T",
             kinds={"scale": about(1.0)}, name="first")
        for kind in ("layer", "rms")
    ),
    Call(
        "layer_norm", _of("layer_norm"), _norm_inputs("layer"), "B", name="bfloat16",
        kinds={"scale": about(1.0)}, dtype="bfloat16",
    ),
    Call("linear", _of("linear"), _LAYER, "B D", kinds={"weight": small}, name="bfloat16",
         dtype="bfloat16"),
    Call("adamw_update", _adamw(), _TREE, "M F B T D", kinds=_adamw_kinds(_TREE),
         has_backward=False, backends=("auto", "xla")),
    Call("global_norm", lambda arrays, backend: ops.global_norm(arrays, backend=backend),
         {"matrix": "M F", "vector": "F", "deep": "B T D"}, "M F B T D", has_backward=False),
    Call("quantize", _of("quantize", group_size=4), {"w": "M K"}, "M", undeclared=("w", "K"),
         has_backward=False),
    *(
        Call(
            op, _of(op), {"q": "M 2K", "scales": scales, **more}, sharded, name=name,
            kinds={"q": integers(128, -127, "int8"), "scales": about(0.02, 0.003, "float32")},
            has_backward=False,
        )
        for name, scales in (("", "M K"), ("one_group", "M 1"))
        for op, more, sharded in (
            ("dequantize", {}, "M K"),
            ("quantized_matvec", {"x": "R 2K"}, "M R K"),
            ("quantized_matmul", {"x": "R 2K"}, "M R K"),
        )
    ),
    Call("reduce_sum", _of("reduce_sum"), {"x": "B T D"}, "B T D", backends=("auto", "xla")),
    Call("reduce_max", _of("reduce_max"), {"x": "B T D"}, "B T D", backends=("auto", "xla")),
    Call("dot", _of("dot"), {"a": "B T D", "b": "B T D"}, "B T D"),
    Call("histogram", _of("histogram", bins=7), {"x": "B T"}, "B T",
         kinds={"x": integers(9, low=-2)}, has_backward=False),
    Call("rope", _of("rope"), {"q": "B T 2N 2H", "k": "B T N 2H", "cos": "T G", "sin": "T G"},
         "B T N", kinds={"cos": constant, "sin": constant}, undeclared=("q", "H")),
    Call("rope", _of("rope"), {"q": "B T N H", "k": "B T N H", "cos": "B T G", "sin": "B T G"},
         "B T N", kinds={"cos": constant, "sin": constant}, name="position_ids"),
    Call("rope_packed", _rope_packed(by_parts=False),
         {"qkv": "B T P", "cos": "T G", "sin": "T G"}, "B T",
         kinds={"cos": constant, "sin": constant}, undeclared=("qkv", "P")),
    Call("rope_packed", _rope_packed(by_parts=True),
         {"qkv": "B T C N 2H", "cos": "B T G", "sin": "B T G"}, "B T N",
         kinds={"cos": constant, "sin": constant}, undeclared=("qkv", "H"), name="by_parts"),
    Call("nms", _of("nms", iou_threshold=0.5), {"boxes": "M C", "scores": "M"}, "",
         kinds={"boxes": lambda shape: Boxes(shape, 20.0, 20.0)}, undeclared=("boxes", "M"),
         has_backward=False),
]  # fmt: skip


def is_floating(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def value_and_gradients(call: Call, backend: str, arrays, seed: int = 1):
    """The outputs of a call, and the gradients of its floating arrays."""
    fixed = {name: x for name, x in arrays.items() if not is_floating(x)}

    def fn(some):
        return call(some | fixed, backend)

    some = {name: x for name, x in arrays.items() if name not in fixed}
    if not call.has_backward:
        return fn(some), {}
    out, pull = jax.vjp(fn, some)
    # Of the outputs, so that XLA may shard the cotangents as it shards the outputs.
    return out, pull(jax.tree.map(_plus, out, noise(out, seed)))[0]


def noise(out, seed: int = 1):
    """NumPy arrays in the shapes of the outputs."""
    return jax.tree.map(
        lambda x, i: np.random.default_rng((seed, i)).standard_normal(x.shape).astype(x.dtype),
        out,
        jax.tree.unflatten(jax.tree.structure(out), range(len(jax.tree.leaves(out)))),
    )


def _plus(out, noise):
    """The sum, in the sharding that the type of the output has."""
    sharding = jax.typeof(out).sharding
    if not sharding.mesh.empty and sharding.mesh.explicit_axes:
        is_traced = isinstance(out, Tracer)
        place = jax.sharding.reshard if is_traced else jax.device_put
        noise = place(jnp.asarray(noise), sharding if is_traced else out.sharding)
    return out + noise


def expected(call: Call):
    """The same on one device, under backend "xla"."""
    if str(call) not in _expected:
        run = functools.partial(value_and_gradients, call, "xla")
        _expected[str(call)] = on_one_device(run, call.arrays())
    return _expected[str(call)]


_expected: dict[str, Any] = {}


def on_one_device(fn, *args):
    """The results of a function whose ops run as in a process with one device."""
    with shards.inside_shard():
        return jax.device_get(jax.jit(lambda *args: fn(*args))(*args))


def put(mesh, arrays, specs):
    """The arrays with their shardings."""
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}


def same_shardings(mesh, arrays, specs):
    """The shardings of the gradients: those of the arrays."""
    return {name: NamedSharding(mesh, specs[name]) for name, x in arrays.items() if is_floating(x)}


_COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce)(?:-start)?\("
)


def collectives(program: Any) -> list[tuple[str, int]]:
    """The kind of each collective of a compiled program, and the largest array that it makes."""
    found = []
    for shapes, kind in _COLLECTIVE.findall(program.as_text()):
        sizes = [
            math.prod(map(int, filter(None, dims.split(","))))
            for dims in re.findall(r"\w+\[([\d,]*)\]", shapes)
        ]
        found += [(kind, size) for size in sizes]
    return found
