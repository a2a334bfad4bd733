"""GPT-2 and Llama 3 to and from Hugging Face ``transformers``: state dicts, and checkpoint folders.

Nothing here imports torch: pass ``{name: tensor.numpy() for ...}`` of a ``state_dict()``, and
``torch.from_numpy`` what comes back. Folders hold ``config.json`` and safetensors files, as
``save_pretrained`` writes them and the Hugging Face Hub has them; they need the package
``safetensors``.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.convert.huggingface_formats import (
    FORMATS,
    HEAD,
    ID_KEYS,
    Config,
    format_of,
    has_tied_head,
    special_tokens_from_dict,
    special_tokens_to_dict,
)
from jaxllm.convert.places import Place, Shapes, arrays_of, assemble, check, flatten
from jaxllm.convert.safetensors_files import (
    DTYPES,
    Stored,
    open_tensors,
    write_tensors,
)
from jaxllm.data.files import check_new, new_folder, read_json, write_json
from jaxllm.models.blocks import Params
from jaxllm.models.special_tokens import SpecialTokens

__all__ = [
    "SpecialTokens",
    "config_from_dict",
    "config_to_dict",
    "from_state_dict",
    "load",
    "load_special_tokens",
    "save",
    "to_state_dict",
]

T = TypeVar("T")
# What else a folder says of its tokenizer and of how the model writes.
_GENERATION = "generation_config.json"
_BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", _GENERATION)


def config_from_dict(config: Mapping[str, Any]) -> Config:
    """Our config from the contents of a ``config.json``.

    Raises:
        ValueError: The model is neither a GPT-2 nor a Llama, it differs from ours in a way that
            matters, such as biases or another activation, or a key is missing or no number.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise ValueError(f"model_type is {kind!r}; it must be {' or '.join(map(repr, FORMATS))}")
    if config.get("quantization_config"):
        raise ValueError("quantization_config is given; quantized checkpoints cannot be read")
    ids = special_tokens_from_dict(config)
    return dataclasses.replace(FORMATS[kind].config_from_dict(config), special_tokens=ids)


def config_to_dict(config: Config) -> dict[str, Any]:
    """The contents of a ``config.json`` that ``transformers`` reads."""
    ids = special_tokens_to_dict(config.special_tokens)
    return format_of(config).config_to_dict(config) | ids


def from_state_dict(
    state_dict: Mapping[str, np.ndarray], config: Config, *, dtype: DTypeLike = jnp.float32
) -> Params:
    """Our parameters from those of a ``GPT2LMHeadModel`` or a ``LlamaForCausalLM``.

    Args:
        state_dict: The model's arrays by name. ``lm_head.weight`` may be left out where it is tied
            to the token table, as may the prefix that all other names have in common.
        config: The shape of the model; the vocabulary is padded with rows of zeros.
        dtype: The dtype of our arrays.

    Raises:
        ValueError: A name is missing or unexpected, a shape is not the one that ``config`` asks
            for, or a head that ``config`` has tied to the token table differs from it.
    """
    arrays = _in_full(state_dict, config)
    shapes = {name: np.shape(array) for name, array in arrays.items()}
    return _read(shapes, arrays.__getitem__, config, dtype)


def to_state_dict(params: Params, config: Config) -> dict[str, np.ndarray]:
    """The ``state_dict`` of a ``GPT2LMHeadModel`` or a ``LlamaForCausalLM``, in float32.

    Args:
        params: As the model's ``init`` makes them, in any dtype, the blocks stacked or in a list;
            gradients of them too.
        config: The shape of the model; the padding of the vocabulary is dropped.

    Raises:
        ValueError: ``params`` has not the arrays, or the shapes, that ``config`` asks for.
    """
    arrays, places = _write_plan(params, config)
    named = {name: place.copy(arrays[place.path], np.float32) for name, place in places.items()}
    return named | {HEAD: named[format_of(config).table]} if has_tied_head(config) else named


def load(folder: str | Path, *, dtype: DTypeLike | None = None) -> tuple[Params, Config]:
    """Reads a checkpoint folder: ``config.json``, and safetensors files, one or several.

    Everything is checked before the first tensor is read. Tensors are read one at a time, into one
    of our arrays at a time.

    Args:
        folder: The folder.
        dtype: The dtype of our arrays; None for the checkpoint's, or float32 where its tensors
            differ in dtype.

    Returns:
        ``(params, config)``. The padding of the vocabulary has rows of zeros. The config has the
        special tokens that :func:`load_special_tokens` finds.

    Raises:
        FileNotFoundError: The folder, or a file that it should hold, is not there.
        ValueError: A file is truncated or corrupt, the model is not one of ours, or the tensors are
            not the ones that it has: a name is missing or unexpected, or a tensor has another shape
            or is not of float32, bfloat16 or float16.

    Example:
        >>> params, config = huggingface.load("Llama-3.2-1B", dtype="bfloat16")
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder")
    contents = read_json(folder / "config.json")
    try:
        config = config_from_dict(contents)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    config = dataclasses.replace(config, special_tokens=load_special_tokens(folder))
    with open_tensors(folder) as stored:
        tensors = _in_full(stored, config)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        try:
            _check_dtypes(tensors)
            dtype = _stored_dtype(tensors) if dtype is None else dtype
            params = _read(shapes, lambda name: tensors[name].read(), config, dtype)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
    return params, config


def load_special_tokens(folder: str | Path) -> SpecialTokens:
    """The ids of special tokens that a checkpoint folder names.

    ``generation_config.json`` adds its ends of a text to those of ``config.json``, and comes first
    for the other ids. Either file may be missing.

    Args:
        folder: The folder.

    Returns:
        The ids. At each of ``eos`` :func:`jaxllm.inference.generate.complete` stops.

    Raises:
        ValueError: A file is no JSON object, or an id no integer.
    """
    found = []
    for name in ("config.json", _GENERATION):
        path = Path(folder) / name
        contents = read_json(path) if path.is_file() else {}
        try:
            found.append(special_tokens_from_dict(contents))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    model, generation = found
    return SpecialTokens(
        model.bos if generation.bos is None else generation.bos,
        tuple(dict.fromkeys(model.eos + generation.eos)),
        model.pad if generation.pad is None else generation.pad,
    )


def save(
    folder: str | Path,
    params: Params,
    config: Config,
    *,
    max_shard_bytes: int = 5_000_000_000,
    tokenizer_json: str | Path | None = None,
    special_tokens: SpecialTokens | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint folder that :func:`load` and ``from_pretrained`` read.

    The folder appears only once it is complete.

    Args:
        folder: The folder to create.
        params: As the model's ``init`` makes them, the blocks stacked or in a list; float32,
            bfloat16 or float16, which is kept.
        config: The shape of the model; the padding of the vocabulary is dropped.
        max_shard_bytes: Tensors that are larger together are written into several files. No more
            than one file's are in the machine's memory at a time.
        tokenizer_json: The file of the model's tokenizer, which is copied, with the configs of
            tokenizer and generation that are in its folder; None for none.
        special_tokens: The ids of the tokens that begin, end and fill up a text. None for those of
            ``config``; if it has none, for those that :func:`load_special_tokens` finds in the
            folder of ``tokenizer_json``.
        overwrite: Replace what is there, once the new folder is complete.

    Raises:
        FileExistsError: The folder exists and is not empty, and is not to be overwritten.
        FileNotFoundError: There is no such tokenizer.
        ValueError: ``params`` has not the arrays, or the shapes, that ``config`` asks for, or one
            of another dtype; ``max_shard_bytes`` is below 1; or a config beside the tokenizer
            cannot be read.
    """
    folder = Path(folder)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be >= 1")
    if not overwrite:
        check_new(folder)
    if tokenizer_json is not None and not Path(tokenizer_json).is_file():
        raise FileNotFoundError(f"{tokenizer_json}: there is no such file")
    beside = SpecialTokens()
    if tokenizer_json is not None:
        beside = load_special_tokens(Path(tokenizer_json).parent)
    if special_tokens is None:
        named = config.special_tokens
        special_tokens = beside if named == SpecialTokens() else named
    arrays, places = _write_plan(params, config)
    for path, array in arrays.items():
        if array.dtype not in DTYPES.values():
            raise ValueError(
                f"{path} has dtype {array.dtype}; it must be {_either(DTYPES.values())}"
            )
    with new_folder(folder, overwrite=overwrite) as partial:
        config = dataclasses.replace(config, special_tokens=special_tokens)
        contents = config_to_dict(config) | {"torch_dtype": arrays["wte"].dtype.name}
        write_json(partial / "config.json", contents)
        if tokenizer_json is not None:
            shutil.copyfile(tokenizer_json, partial / "tokenizer.json")
            for name in _BESIDE_TOKENIZER:
                if (file := Path(tokenizer_json).with_name(name)).is_file():
                    shutil.copyfile(file, partial / name)
            if special_tokens != beside and (partial / _GENERATION).exists():
                generation = dict.fromkeys(ID_KEYS) | special_tokens_to_dict(special_tokens)
                write_json(partial / _GENERATION, read_json(partial / _GENERATION) | generation)
        write_tensors(
            partial,
            {name: place.nbytes(arrays[place.path]) for name, place in places.items()},
            lambda name: places[name].copy(arrays[places[name].path]),
            max_bytes=max_shard_bytes,
        )


def _in_full(tensors: Mapping[str, T], config: Config) -> dict[str, T]:
    """Tensors by the names that they have in the model with its head, without old buffers."""
    form = format_of(config)
    bare = not any(name.startswith(form.prefix) for name in tensors)
    prefix = form.prefix if bare else ""
    full = {name if name == HEAD else prefix + name: tensor for name, tensor in tensors.items()}
    return {
        name: tensor
        for name, tensor in full.items()
        if not form.buffers.fullmatch(name.removeprefix(form.prefix))
    }


def _read(
    shapes: Shapes, read: Callable[[str], np.ndarray], config: Config, dtype: DTypeLike
) -> Params:
    """Our parameters from the tensors that have these names and shapes."""
    form = format_of(config)
    if config.layers > len(shapes):
        raise ValueError(f"the config has {config.layers} layers; there are {len(shapes)} tensors")
    ours, places = _shapes(config), form.places(config)
    wanted = {name: place.shape(ours[place.path]) for name, place in places.items()}
    has_second_head = has_tied_head(config) and HEAD in shapes
    if has_second_head:
        wanted[HEAD] = wanted[form.table]
    check(shapes, wanted)
    if has_second_head and not np.array_equal(read(HEAD), read(form.table)):
        raise ValueError(f"{HEAD} differs from {form.table}; the model's config ties the two")
    return assemble(read, places, ours, dtype)


def _write_plan(params: Params, config: Config) -> tuple[dict[str, Any], dict[str, Place]]:
    """Our arrays by path, checked, and the place of each tensor that is to be written."""
    arrays = arrays_of(params)
    check({path: array.shape for path, array in arrays.items()}, _shapes(config))
    return arrays, format_of(config).places(config)


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of our arrays by path."""
    init = format_of(config).model.init
    params = jax.eval_shape(lambda: init(jax.random.key(0), config))
    return {path: leaf.shape for path, leaf in flatten(params).items()}


def _check_dtypes(tensors: Mapping[str, Stored]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {_either(DTYPES)}")


def _stored_dtype(tensors: Mapping[str, Stored]) -> DTypeLike:
    """The dtype that holds all tensors."""
    dtypes = {DTYPES[tensor.dtype] for tensor in tensors.values()}
    return dtypes.pop() if len(dtypes) == 1 else jnp.float32


def _either(names: Iterable[Any]) -> str:
    return " or ".join(map(str, names))
