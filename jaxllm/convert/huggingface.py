"""Parameters to and from Hugging Face ``transformers``, as dicts of NumPy arrays.

Neither direction imports torch: pass ``{name: tensor.numpy() for ...}`` of a ``state_dict()``, and
``torch.from_numpy`` what comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models.gpt2 import GPT2Config, Params, init

Path = tuple[str, ...]

# Where each of our arrays is in a GPT2LMHeadModel; {} is the layer. Its Conv1D weights are
# (in, out), as ours are.
_TABLES: dict[Path, str] = {
    ("wte",): "transformer.wte.weight",
    ("wpe",): "transformer.wpe.weight",
    ("ln_f", "scale"): "transformer.ln_f.weight",
    ("ln_f", "bias"): "transformer.ln_f.bias",
}
_LAYERS: dict[Path, str] = {
    ("blocks", "ln1", "scale"): "transformer.h.{}.ln_1.weight",
    ("blocks", "ln1", "bias"): "transformer.h.{}.ln_1.bias",
    ("blocks", "attention", "qkv", "weight"): "transformer.h.{}.attn.c_attn.weight",
    ("blocks", "attention", "qkv", "bias"): "transformer.h.{}.attn.c_attn.bias",
    ("blocks", "attention", "out", "weight"): "transformer.h.{}.attn.c_proj.weight",
    ("blocks", "attention", "out", "bias"): "transformer.h.{}.attn.c_proj.bias",
    ("blocks", "ln2", "scale"): "transformer.h.{}.ln_2.weight",
    ("blocks", "ln2", "bias"): "transformer.h.{}.ln_2.bias",
    ("blocks", "mlp", "up", "weight"): "transformer.h.{}.mlp.c_fc.weight",
    ("blocks", "mlp", "up", "bias"): "transformer.h.{}.mlp.c_fc.bias",
    ("blocks", "mlp", "down", "weight"): "transformer.h.{}.mlp.c_proj.weight",
    ("blocks", "mlp", "down", "bias"): "transformer.h.{}.mlp.c_proj.bias",
}
_HEAD = "lm_head.weight"  # tied to wte: a second name of the same numbers


def gpt2_from_huggingface(state_dict: Mapping[str, np.ndarray], config: GPT2Config) -> Params:
    """Our parameters, in float32, from those of a ``GPT2LMHeadModel``.

    Args:
        state_dict: The model's arrays by name. ``lm_head.weight`` may be left out.
        config: The shape of the model; the vocabulary is padded with rows of zeros.

    Raises:
        ValueError: A name is missing or unexpected, a shape is not the one that ``config`` asks
            for, or the head is not tied to the token table.
    """
    ours = _our_shapes(config)
    wanted = {name: ours[path] for path, name in _TABLES.items()}
    wanted[_TABLES["wte",]] = (config.vocab_size, config.width)
    for path, name in _LAYERS.items():
        wanted |= {name.format(layer): ours[path][1:] for layer in range(config.layers)}
    if _HEAD in state_dict:
        wanted[_HEAD] = (config.vocab_size, config.width)
    _check({name: array.shape for name, array in state_dict.items()}, wanted)
    if _HEAD in state_dict and not np.array_equal(state_dict[_HEAD], state_dict[_TABLES["wte",]]):
        raise ValueError(f"{_HEAD} differs from {_TABLES['wte',]}; GPT-2 ties the two")

    arrays = {path: np.asarray(state_dict[name], np.float32) for path, name in _TABLES.items()}
    padding = config.padded_vocab_size - config.vocab_size
    arrays["wte",] = np.pad(arrays["wte",], ((0, padding), (0, 0)))
    for path, name in _LAYERS.items():
        layers = [state_dict[name.format(layer)] for layer in range(config.layers)]
        arrays[path] = np.stack(layers).astype(np.float32)
    return _unflatten({path: jnp.asarray(array) for path, array in arrays.items()})


def gpt2_to_huggingface(params: Params, config: GPT2Config) -> dict[str, np.ndarray]:
    """The ``state_dict`` of a ``GPT2LMHeadModel``, in float32, from our parameters.

    Args:
        params: As :func:`jaxllm.models.gpt2.init` makes them, in any dtype; gradients of them too.
        config: The shape of the model; the padding of the vocabulary is dropped.

    Raises:
        ValueError: ``params`` has not the arrays, or the shapes, that ``config`` asks for.
    """
    arrays = _flatten(params)
    _check(
        {"/".join(path): array.shape for path, array in arrays.items()},
        {"/".join(path): shape for path, shape in _our_shapes(config).items()},
    )
    # Copies: what np.asarray makes of a jax.Array may not be written to.
    arrays = {path: np.array(array, np.float32) for path, array in arrays.items()}
    arrays["wte",] = arrays["wte",][: config.vocab_size]
    named = {name: arrays[path] for path, name in _TABLES.items()} | {_HEAD: arrays["wte",]}
    for path, name in _LAYERS.items():
        named |= {name.format(layer): arrays[path][layer] for layer in range(config.layers)}
    return named


def _our_shapes(config: GPT2Config) -> dict[Path, tuple[int, ...]]:
    params = jax.eval_shape(lambda: init(jax.random.key(0), config))
    return {path: leaf.shape for path, leaf in _flatten(params).items()}


def _check(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError unless names and shapes are the wanted ones; the message has them all."""
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [f"{name} is unexpected" for name in found if name not in wanted]
    faults += [
        f"{name} has shape {tuple(found[name])}; it must be {shape}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != shape
    ]
    if faults:
        raise ValueError("; ".join(faults))


def _flatten(tree: Params, prefix: Path = ()) -> dict[Path, Any]:
    """The arrays of a nested dict by their paths."""
    flat = {}
    for name, value in tree.items():
        path = (*prefix, name)
        flat |= _flatten(value, path) if isinstance(value, dict) else {path: value}
    return flat


def _unflatten(flat: dict[Path, Any]) -> Params:
    """The nested dict whose arrays have these paths."""
    tree: Params = {}
    for path, value in flat.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree
