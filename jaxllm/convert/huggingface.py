"""Converts models to and from Hugging Face ``transformers``: GPT-2, Llama, Mistral, Qwen2, Qwen3.

- State dicts: :func:`from_state_dict` and :func:`to_state_dict`. The arrays are NumPy's, so this
  module does not import torch.
- Checkpoint folders, as ``save_pretrained`` writes them and the Hugging Face Hub has them:
  :func:`load` and :func:`save`. They hold ``config.json`` and safetensors files, and need the
  package ``safetensors``.
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

from jaxllm.convert.config_keys import expect
from jaxllm.convert.huggingface_formats import (
    FORMATS,
    ID_KEYS,
    LM_HEAD,
    Config,
    format_of,
    has_tied_head,
    special_tokens_from_dict,
    special_tokens_to_dict,
)
from jaxllm.convert.parameter_mapping import (
    ParamSlice,
    Shapes,
    assemble,
    check_dtype,
    check_shapes,
    flatten,
    stacked_arrays,
)
from jaxllm.convert.safetensors_files import (
    DTYPES,
    Stored,
    open_tensors,
    write_tensors,
)
from jaxllm.data.files import check_new, new_folder, read_json, write_json
from jaxllm.models.common import Params
from jaxllm.models.special_tokens import SpecialTokens
from jaxllm.ops.checks import as_bool, as_float

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
# The config files of the tokenizer and of generation, and the chat template of transformers 5.
_GENERATION = "generation_config.json"
_BESIDE_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    _GENERATION,
)
_MORE_TEMPLATES = "additional_chat_templates"  # a folder


def config_from_dict(config: Mapping[str, Any]) -> Config:
    """Converts the contents of a ``config.json`` to a jaxllm config.

    Raises:
        TypeError: ``config`` is not a mapping, but for example a config of ``transformers``.
        ValueError: The ``model_type`` is unknown; a setting has a value that jaxllm's model does
            not support, such as another activation; or a key is missing or not a number.
    """
    _check_mapping("config", config, "the contents of a config.json, or to_dict() of a config")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise ValueError(f"model_type is {kind!r}; it must be {' or '.join(map(repr, FORMATS))}")
    if config.get("quantization_config"):
        raise ValueError("quantization_config is set; quantized checkpoints are not supported")
    expect(config, "per_layer_config", None, {})
    ids = special_tokens_from_dict(config)
    return dataclasses.replace(FORMATS[kind].config_from_dict(config), special_tokens=ids)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Converts a jaxllm config to the contents of a ``config.json`` for ``transformers``.

    The options of a :class:`jaxllm.models.llama3.Llama3Config` choose the architecture:
    ``qkv_bias`` means Qwen2, ``qk_norm`` Qwen3, a window without either Mistral, and none of them
    Llama. A Llama whose ``width`` is not a multiple of ``heads`` is written as a Mistral without a
    window, because ``transformers`` rejects it as a Llama.

    Raises:
        TypeError: ``config`` is of another type.
        ValueError: No architecture has the options of the config.
    """
    form = format_of(config)
    ids = special_tokens_to_dict(config.special_tokens)
    return form.config_to_dict(config) | ids


def from_state_dict(
    state_dict: Mapping[str, np.ndarray], config: Config, *, dtype: DTypeLike = jnp.float32
) -> Params:
    """Converts the state dict of a ``GPT2LMHeadModel``, a ``LlamaForCausalLM`` or a model like it.

    Args:
        state_dict: The model's arrays by name, such as ``{name: tensor.numpy()}``. The common
            prefix of the names may be omitted. ``lm_head.weight`` may be omitted if it is tied to
            the token table.
        config: The config of the model. The vocabulary is padded with rows of zeros.
        dtype: The dtype of the parameters.

    Returns:
        The parameters of the jaxllm model.

    Raises:
        TypeError: ``dtype`` is not a floating dtype, or needs ``jax_enable_x64``; ``config`` is of
            another type; ``state_dict`` is not a mapping; or NumPy cannot read one of its arrays,
            such as a bfloat16 tensor of torch.
        ValueError: A name is missing or unexpected; a shape differs from the config; an array is
            not of a floating dtype; or ``lm_head.weight`` differs from the token table although the
            config ties them.
    """
    dtype = check_dtype(dtype)
    _check_mapping("state_dict", state_dict, "arrays by name, as a model's state_dict() has them")
    full = _full_names(state_dict, config)
    arrays = {name: _as_array(name, array) for name, array in full.items()}
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}; it must be a floating dtype")
    shapes = {name: array.shape for name, array in arrays.items()}
    return _read(shapes, lambda name: np.asarray(arrays[name]), config, dtype)


def to_state_dict(params: Params, config: Config) -> dict[str, np.ndarray]:
    """Converts parameters to the state dict of the class in ``transformers``.

    Args:
        params: The parameters, or their gradients, in any dtype. The blocks are stacked or in a
            list.
        config: The config of the model. The padding of the vocabulary is dropped.

    Returns:
        NumPy arrays by name, float32.

    Raises:
        TypeError: ``config`` is of another type.
        ValueError: Names or shapes of the parameters differ from the config, or no architecture has
            the options of the config.
    """
    arrays, mapping = _write_plan(params, config)
    named = {name: part.copy(arrays[part.path], np.float32) for name, part in mapping.items()}
    return named | {LM_HEAD: named[format_of(config).table]} if has_tied_head(config) else named


def load(folder: str | Path, *, dtype: DTypeLike | None = None) -> tuple[Params, Config]:
    """Reads a checkpoint folder with a ``config.json`` and one or more safetensors files.

    All names, shapes and dtypes are checked before the first tensor is read. Tensors are read one
    at a time, so host memory holds at most one parameter and one tensor.

    Args:
        folder: The folder.
        dtype: The dtype of the parameters; None for the checkpoint's dtype, or float32 if the
            tensors have different dtypes.

    Returns:
        ``(params, config)``. The padding of the vocabulary has rows of zeros. The config has the
        special tokens from :func:`load_special_tokens`.

    Raises:
        FileNotFoundError: The folder or one of its files does not exist.
        TypeError: ``dtype`` is not a floating dtype, or needs ``jax_enable_x64``.
        ValueError: A file is truncated or corrupt; the model is not supported; a tensor is missing
            or unexpected; or a tensor has a wrong shape, or a dtype other than float32, bfloat16
            and float16.

    Example:
        >>> params, config = huggingface.load("Llama-3.2-1B", dtype="bfloat16")
    """
    folder, dtype = Path(folder), None if dtype is None else check_dtype(dtype)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder")
    contents = read_json(folder / "config.json")
    try:
        config = config_from_dict(contents)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    config = dataclasses.replace(config, special_tokens=load_special_tokens(folder))
    with open_tensors(folder) as stored:
        tensors = _full_names(stored, config)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        try:
            _check_dtypes(tensors)
            dtype = _stored_dtype(tensors) if dtype is None else dtype
            params = _read(shapes, lambda name: tensors[name].read(), config, dtype)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
    return params, config


def load_special_tokens(folder: str | Path) -> SpecialTokens:
    """Reads the ids of the special tokens of a checkpoint folder.

    ``eos`` has the ids of ``config.json`` and then those of ``generation_config.json``. For the
    other ids, ``generation_config.json`` takes precedence. Either file may be missing.

    Args:
        folder: The folder.

    Returns:
        The ids. :func:`jaxllm.inference.generate.complete` stops at each id in ``eos``.

    Raises:
        ValueError: A file is not a JSON object, or an id is not an integer.
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
    max_shard_bytes: float = 5_000_000_000,
    tokenizer_json: str | Path | None = None,
    special_tokens: SpecialTokens | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint folder that :func:`load` and ``from_pretrained`` read.

    The folder is created atomically.

    Args:
        folder: The folder to create.
        params: The parameters, the blocks stacked or in a list. Their dtype, which is float32,
            bfloat16 or float16, is kept.
        config: The config of the model. The padding of the vocabulary is dropped.
        max_shard_bytes: The largest size of a safetensors file. Host memory holds the tensors of
            one file at a time.
        tokenizer_json: The tokenizer file to copy, together with the tokenizer and generation
            configs and the chat templates in its folder; None for no tokenizer.
        special_tokens: The ids of the begin, end and padding tokens. None for the ids in
            ``config``; if it has none, for the ids from :func:`load_special_tokens` of the
            tokenizer's folder.
        overwrite: Replace the folder if it exists.

    Raises:
        FileExistsError: The folder has contents and ``overwrite`` is false, or it is a file.
        FileNotFoundError: The tokenizer file does not exist.
        TypeError: ``config`` is of another type, ``overwrite`` is not a bool, ``max_shard_bytes``
            is not a number, or ``special_tokens`` does not have integers.
        ValueError: Names, shapes or dtypes of the parameters differ from the config;
            ``max_shard_bytes`` is below 1; no architecture has the options of the config; or a
            config in the tokenizer's folder is invalid.
    """
    folder, overwrite = Path(folder), as_bool("overwrite", overwrite)
    max_shard_bytes = as_float("max_shard_bytes", max_shard_bytes)
    if not max_shard_bytes >= 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes:g}; it must be >= 1")
    check_new(folder, overwrite=overwrite)
    format_of(config)  # checks it
    if tokenizer_json is not None and not Path(tokenizer_json).is_file():
        raise FileNotFoundError(f"{tokenizer_json}: there is no such file")
    tokenizer_ids = SpecialTokens()
    if tokenizer_json is not None:
        tokenizer_ids = load_special_tokens(Path(tokenizer_json).parent)
    if special_tokens is None:
        named = config.special_tokens
        special_tokens = tokenizer_ids if named == SpecialTokens() else named
    special_tokens_to_dict(special_tokens)  # before the parameters are read
    arrays, mapping = _write_plan(params, config)
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
            if (templates := Path(tokenizer_json).with_name(_MORE_TEMPLATES)).is_dir():
                shutil.copytree(templates, partial / _MORE_TEMPLATES)
            if special_tokens != tokenizer_ids and (partial / _GENERATION).exists():
                generation = dict.fromkeys(ID_KEYS) | special_tokens_to_dict(special_tokens)
                write_json(partial / _GENERATION, read_json(partial / _GENERATION) | generation)
        write_tensors(
            partial,
            {name: part.nbytes(arrays[part.path]) for name, part in mapping.items()},
            lambda name: mapping[name].copy(arrays[mapping[name].path]),
            max_bytes=max_shard_bytes,
        )


def _check_mapping(name: str, value: Any, wanted: str) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} has type {type(value).__name__}; it must be a dict: {wanted}")


def _as_array(name: str, value: Any) -> Any:
    """An array whose dtype is NumPy's. Of JAX's arrays none is copied to the host yet."""
    if isinstance(getattr(value, "dtype", None), np.dtype):
        return value
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} has type {type(value).__name__}, which NumPy cannot read: {error}; it must be "
            "a NumPy array, such as tensor.detach().float().numpy()"
        ) from error


def _full_names(tensors: Mapping[str, T], config: Config) -> dict[str, T]:
    """Adds the prefix to the names of a bare model's tensors, and drops old buffers."""
    form = format_of(config)
    bare = not any(name.startswith(form.prefix) for name in tensors)
    prefix = form.prefix if bare else ""
    full = {name if name == LM_HEAD else prefix + name: tensor for name, tensor in tensors.items()}
    return {
        name: tensor
        for name, tensor in full.items()
        if not form.buffers.fullmatch(name.removeprefix(form.prefix))
    }


def _read(
    shapes: Shapes, read: Callable[[str], np.ndarray], config: Config, dtype: DTypeLike
) -> Params:
    """Reads the parameters from tensors with these names and shapes."""
    form = format_of(config)
    if config.layers > len(shapes):
        raise ValueError(f"the config has {config.layers} layers; there are {len(shapes)} tensors")
    param_shapes, mapping = _shapes(config), form.mapping(config)
    wanted = {name: part.shape(param_shapes[part.path]) for name, part in mapping.items()}
    has_copy_of_table = has_tied_head(config) and LM_HEAD in shapes
    if has_copy_of_table:
        wanted[LM_HEAD] = wanted[form.table]
    check_shapes(shapes, wanted)
    if has_copy_of_table and not np.array_equal(read(LM_HEAD), read(form.table)):
        raise ValueError(f"{LM_HEAD} differs from {form.table}; the model's config ties the two")
    return assemble(read, mapping, param_shapes, dtype)


def _write_plan(params: Params, config: Config) -> tuple[dict[str, Any], dict[str, ParamSlice]]:
    """The parameters by path, checked, and the parameter slice of each tensor to write."""
    form, arrays = format_of(config), stacked_arrays(params)
    check_shapes({path: array.shape for path, array in arrays.items()}, _shapes(config))
    return arrays, form.mapping(config)


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters by path."""
    init = format_of(config).model.init
    params = jax.eval_shape(lambda: init(jax.random.key(0), config))
    return {path: leaf.shape for path, leaf in flatten(params).items()}


def _check_dtypes(tensors: Mapping[str, Stored]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {_either(DTYPES)}")


def _stored_dtype(tensors: Mapping[str, Stored]) -> DTypeLike:
    """The common dtype of all tensors; float32 if they differ."""
    dtypes = {DTYPES[tensor.dtype] for tensor in tensors.values()}
    return dtypes.pop() if len(dtypes) == 1 else jnp.float32


def _either(names: Iterable[Any]) -> str:
    return " or ".join(map(str, names))
