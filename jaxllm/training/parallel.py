"""Training on several devices and in several processes: parameters and batch in shards.

A mesh has four axes::

    data      each device along it has the same weights and another part of the batch
    fsdp      each device along it has another shard of the parameters and another part of the batch
    context   each device along it has the same weights and another part of each sequence
    tensor    each device along it has other heads, columns of the MLP and tokens of the vocabulary,
              and the same part of the batch

So sequences are sharded along ``data`` and ``fsdp``, and their tokens along ``context``. The state
is sharded along ``fsdp`` and ``tensor``. Along ``fsdp`` parameters are gathered where an op uses
them, and their gradients are reduce-scattered. Along ``tensor`` no parameter moves: the outputs of
attention and of the MLP are summed. Along ``data`` and ``context`` each device has the copy in the
compute dtype, but of the rest of the state a shard: it updates that, and then the copy is gathered.
Without a copy it has the whole state::

    mesh = parallel.make_mesh(data=2, fsdp=4)
    state = parallel.init_state(mesh, lambda: gpt2.init(key, config), optimizer)
    shardings = parallel.state_shardings(mesh, state)
    step = training.make_train_step(loss_fn, optimizer, shardings=shardings)
    batch = loader.load_batch(
        parallel.batch_sharding(mesh),
        (accumulate, B, T),
        lambda rows: data.batch(dataset, accumulate * B, T, seed=0, step=0, rows=rows),
    )
    state, metrics = step(state, *batch)

The batch, the initial parameters and checkpoints do not depend on the mesh. With a mesh of Explicit
axes, call all of this under ``jax.set_mesh(mesh)``.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(arXiv:1910.02054), stage 3 along ``fsdp`` and stage 1 along ``data``; Zhao et al., "PyTorch FSDP"
(arXiv:2304.11277); Shoeybi et al., "Megatron-LM" (arXiv:1909.08053) for ``tensor``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxllm.core.meshes import ROW_AXES
from jaxllm.core.precision import is_random_key
from jaxllm.models.common import unstack, with_auto_axes
from jaxllm.ops.checks import as_bool, as_integer, leaves_like
from jaxllm.training.optim import Optimizer, is_function
from jaxllm.training.optim_optax import decay_mask, is_stacked, names_of
from jaxllm.training.step import Params, TrainState
from jaxllm.training.step import init_state as init_on_one_device

AXES = (*ROW_AXES, "tensor")
_OF_BATCH = ("data", "fsdp")
# The dimension of a layer's weight or of a table that is sharded along tensor, from the last; and
# of the layers whose columns are, the number of dimensions that the columns have.
_ALONG_TENSOR = {"qkv": -2, "gate_up": -1, "up": -1, "out": -2, "down": -2}
_ALONG_TENSOR |= {"wte": -2, "lm_head": -2}
_COLUMNS = {"qkv": 3, "gate_up": 2, "up": 1}
_OF_OPTIMIZER = ("params", "opt_state")  # of a state with a copy, which the passes read
_COPIES = ("data", "context")  # along these all devices have the same parameters
_GATHERED_BYTES = 2**28  # arrays up to this size are gathered as a whole


def parse_mesh(text: str) -> dict[str, int]:
    """Reads the sizes of a mesh from a command line: ``"data=2,fsdp=4"``.

    Args:
        text: ``AXIS=SIZE`` for each axis, with commas between. A size of -1 stands for all
            remaining devices.

    Returns:
        The arguments for :func:`make_mesh`. An axis that ``text`` does not name has size 1.

    Raises:
        ValueError: ``text`` has another form, or names an axis that is unknown or named before.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not size.removeprefix("-").isdecimal():
            raise ValueError(f"mesh {text!r} has {part!r}; it must be like data=2,fsdp=4")
        if axis not in AXES:
            raise ValueError(f"mesh {text!r} has the axis {axis!r}; axes are {', '.join(AXES)}")
        if axis in sizes:
            raise ValueError(f"mesh {text!r} names the axis {axis} twice")
        sizes[axis] = int(size)
    return {axis: sizes.get(axis, 1) for axis in AXES}


def make_mesh(
    *,
    data: int = -1,
    fsdp: int = 1,
    context: int = 1,
    tensor: int = 1,
    axis_type: Literal["auto", "explicit"] = "auto",
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a mesh with the axes ``data``, ``fsdp``, ``context`` and ``tensor``.

    Neighbours along ``tensor`` are the closest to each other, then those along ``context`` and
    ``fsdp``: on one host, if its devices suffice.

    Args:
        data: The number of devices along ``data``. -1 for all that remain.
        fsdp: The number of devices along ``fsdp``. -1 for all that remain.
        context: The number of devices along ``context``. -1 for all that remain.
        tensor: The number of devices along ``tensor``. -1 for all that remain.
        axis_type: ``"auto"``: XLA chooses the shardings of intermediate arrays. ``"explicit"``: the
            types of arrays have their shardings; then use the mesh under ``jax.set_mesh``.
        devices: The ``jax.Device`` objects; None for all devices of all processes.

    Returns:
        The mesh. It has all axes; an axis that is not used has size 1.

    Raises:
        TypeError: A size is no integer.
        ValueError: The sizes do not multiply to the number of devices, a size is not -1 or at least
            1, several are -1, or ``axis_type`` is unknown.
    """
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    if axis_type not in types:
        raise ValueError(f"axis_type is {axis_type!r}; it must be 'auto' or 'explicit'")
    devices = jax.devices() if devices is None else list(devices)
    count = len(devices)
    sizes = {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
    for axis, size in sizes.items():
        sizes[axis] = size = as_integer(axis, size)
        if size < 1 and size != -1:
            raise ValueError(f"{axis} is {size}; it must be at least 1, or -1 for what remains")
    shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "data=1"
    rest = [axis for axis, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"{shown}: only one size may be -1")
    known = math.prod(size for size in sizes.values() if size != -1)
    if rest and count % known == 0:
        sizes[rest[0]] = count // known
    elif rest:
        raise ValueError(f"{shown}: {known} does not divide the number of devices, {count}")
    if (product := math.prod(sizes.values())) != count:
        raise ValueError(
            f"{shown}: the sizes multiply to {product}, but there are {count} devices in "
            f"{len({device.process_index for device in devices})} processes"
        )
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(types[axis_type],) * len(AXES), devices=devices
    )


def batch_sharding(mesh: Mesh | AbstractMesh, *, accumulate: bool = True) -> NamedSharding:
    """The sharding of tokens and labels.

    Sequences are sharded along ``data`` and ``fsdp``, and their tokens along ``context``.

    Args:
        mesh: The mesh from :func:`make_mesh`.
        accumulate: Whether the arrays have the shape (accumulate, B, T); otherwise (B, T).

    Raises:
        TypeError: ``accumulate`` is no bool.
        ValueError: The mesh lacks an axis of :func:`make_mesh`.
    """
    _check_mesh(mesh)
    leading = [None] * as_bool("accumulate", accumulate)
    context = "context" if mesh.shape["context"] > 1 else None
    return NamedSharding(mesh, P(*leading, _OF_BATCH, context))


def _check_mesh(mesh: Mesh | AbstractMesh) -> None:
    """Raises TypeError for what is no mesh, and ValueError where it lacks an axis of make_mesh."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh has type {type(mesh).__name__}; it must be a mesh of make_mesh")
    if missing := [axis for axis in AXES if axis not in mesh.shape]:
        raise ValueError(
            f"mesh has the axes {', '.join(map(str, mesh.axis_names))}, and no {missing[0]}; make "
            "it with make_mesh, which gives an axis that is not used the size 1"
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that each device has whole."""
    return NamedSharding(mesh, P())


def state_shardings(mesh: Mesh | AbstractMesh, state: Any) -> Any:
    """The shardings of a training state, or of parameters alone.

    A matrix is sharded along ``fsdp``: a weight along its input dimension, a table (``wte``,
    ``wpe``, ``lm_head``) along its rows. If ``fsdp`` does not divide that dimension, the matrix is
    sharded along its other dimension; if it divides neither, the matrix is replicated. The layer
    axis of stacked blocks is never sharded, because a scan would gather all layers at once.

    Along ``tensor``, ``qkv`` is sharded by whole heads, ``gate_up`` and ``up`` along their columns
    with their biases, ``out`` and ``down`` along their rows, and ``wte`` and ``lm_head`` along the
    vocabulary. What ``tensor`` does not divide is replicated along it; so is ``out`` where
    ``qkv`` is.

    Biases and scales of norms are replicated otherwise. They are less than 0.1% of a model, and
    each would cost a collective of its own. All else, such as the step, is replicated.

    The optimizer's moments and masters and the copy in the compute dtype are sharded as their
    parameters. With a copy, which is what the passes read, all but the copy are sharded along
    ``data`` and ``context`` too, in the dimension of ``fsdp``, if they divide it.

    Args:
        mesh: The mesh from :func:`make_mesh`.
        state: A :class:`jaxllm.training.TrainState`, or another tree with the same names, of arrays
            or of ``jax.ShapeDtypeStruct``.

    Returns:
        A tree of ``NamedSharding``. Each spec has an entry for each dimension, so that the results
        of a step are the same to ``jax.jit`` as its arguments, and it compiles once.

    Raises:
        TypeError: ``mesh`` is no mesh.
        ValueError: The mesh lacks an axis of :func:`make_mesh`.
    """
    _check_mesh(mesh)
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    has_copy = isinstance(state, TrainState) and state.copy is not None
    several = tuple(axis for axis in _COPIES if mesh.shape[axis] > 1)
    copies = [several, *((axis,) for axis in several), ()]  # as many of them as divide a dimension
    leaves = jax.tree_util.tree_leaves_with_path(state)
    shapes = {tuple(names_of(path)): np.shape(x) for path, x in leaves}

    def is_divided(names: tuple[str, ...], layer: str) -> bool:
        shape, along = shapes[names], _ALONG_TENSOR[layer]
        if len(shape) < -along or shape[along] % tensor != 0:
            return False
        # The rows of out are whole heads. A fused block gathers them where each device has all.
        qkv = (*names[:-2], "qkv", "weight")
        return layer != "out" or qkv not in shapes or is_divided(qkv, "qkv")

    def sharding(path: tuple, x: Any, is_matrix: bool) -> NamedSharding:
        names = names_of(path)
        layer = next((name for name in names[:-3:-1] if name in _ALONG_TENSOR), "")
        axes: list[tuple[str, ...]] = [()] * np.ndim(x)
        along = _ALONG_TENSOR.get(layer, 0) if is_matrix or layer in _COLUMNS else 0
        if along and tensor > 1 and is_divided(tuple(names), layer):
            axes[along] = ("tensor",)
        # The input dimension of a matrix, before the columns, which may be in parts; or the last.
        columns = min(_COLUMNS.get(layer, 1), np.ndim(x) - is_stacked(names) - 1)
        dims = (-1 - columns, -1) if is_matrix else ()

        def divides(dim: int, more: tuple[str, ...]) -> bool:
            return x.shape[dim] % math.prod(mesh.shape[of] for of in (*axes[dim], *more)) == 0

        fits = [dim for dim in dims if divides(dim, ("fsdp",))][: None if fsdp == 1 else 1]
        is_of_optimizer = has_copy and names[0] in _OF_OPTIMIZER
        for more in copies if is_of_optimizer else [()]:
            if along_dim := [dim for dim in fits if divides(dim, ("fsdp", *more))]:
                axes[along_dim[0]] += ("fsdp", *more)
                break
        return NamedSharding(mesh, P(*(of if len(of) > 1 else (*of, None)[0] for of in axes)))

    return jax.tree_util.tree_map_with_path(sharding, state, decay_mask(state))


def init_state(
    mesh: Mesh,
    params: Params | Callable[[], Params],
    optimizer: Optimizer | optax.GradientTransformation,
    *,
    unroll: bool = False,
    copy_dtype: DTypeLike | None = None,
    detect_anomalies: bool = False,
) -> TrainState:
    """Creates a training state in shards: no device ever has a whole matrix.

    The elements equal those of :func:`jaxllm.training.init_state` on one device, bit for bit, if
    JAX draws random numbers in its default way (``jax_threefry_partitionable``).

    Args:
        mesh: The mesh from :func:`make_mesh`.
        params: A function that creates the parameters, such as ``lambda:
            gpt2.init(jax.random.key(0), config)``: it is traced, and creates them in shards. Or
            parameters that each process has whole, such as a loaded model; do not use them
            afterwards.
        optimizer: As in :func:`jaxllm.training.init_state`.
        unroll: Whether the blocks are a list, as :func:`jaxllm.models.common.unstack` returns them.
        copy_dtype: As in :func:`jaxllm.training.init_state`.
        detect_anomalies: As in :func:`jaxllm.training.init_state`.

    Returns:
        The state, with the shardings of :func:`state_shardings`.

    Raises:
        TypeError: As in :func:`jaxllm.training.init_state`, ``mesh`` is no mesh, or ``unroll`` is
            no bool.
        ValueError: The mesh lacks an axis of :func:`make_mesh`.
    """
    _check_mesh(mesh)
    options: Any = {"copy_dtype": copy_dtype, "detect_anomalies": detect_anomalies}
    create, given = _creation(mesh, params, optimizer, as_bool("unroll", unroll), options)
    with jax.set_mesh(with_auto_axes(mesh)):
        state = create(*given)
    return jax.device_put(state, state_shardings(mesh, state))  # the same shards; nothing is copied


def _creation(
    mesh: Mesh,
    params: Params | Callable[[], Params],
    optimizer: Optimizer | optax.GradientTransformation,
    unroll: bool,
    options: dict[str, Any],
) -> tuple[Any, tuple[Params, ...]]:
    """The jitted function that creates a state, and its arguments.

    XLA shards the program that draws the parameters. Under Explicit axes, ``jax.random`` would draw
    whole arrays, so the mesh of this program has Auto axes.
    """

    def create(*given: Params) -> TrainState:
        created = given[0] if given else params()
        return init_on_one_device(unstack(created) if unroll else created, optimizer, **options)

    auto = with_auto_axes(mesh)
    with jax.set_mesh(auto):
        given = () if is_function(params) else (put(state_shardings(auto, params), params),)
        shardings = state_shardings(auto, jax.eval_shape(create, *given))
    return jax.jit(create, out_shardings=shardings), given


def put(shardings: Any, tree: Any) -> Any:
    """Shards arrays that each process has whole, such as a loaded model.

    Args:
        shardings: A tree of shardings like ``tree``, or one for all arrays.
        tree: A tree of NumPy arrays or arrays of one device, equal in all processes. Random keys
            may be among them.

    Returns:
        The sharded arrays.

    Raises:
        ValueError: ``shardings`` differs from ``tree`` in structure; the message names the leaves.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    leaves_like("shardings", shardings, tree, "tree")

    def shard(x: Any, sharding: Any) -> Array:
        whole = x if is_random_key(x) else np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(shard, tree, shardings)


def to_host(tree: Any) -> Any:
    """Copies sharded arrays to the host, for writing them to a file.

    In one process the devices' shards are copied. In several, each array, or each layer of a large
    one, is gathered on the devices first, so a device needs memory for one layer's largest matrix.
    All processes must call it.

    Args:
        tree: A tree of arrays.

    Returns:
        The tree with NumPy arrays; of random keys, their uint32 data.
    """

    def copy(x: Any) -> np.ndarray:
        x = jax.random.key_data(x) if is_random_key(x) else x
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        if x.ndim < 3 or x.nbytes <= _GATHERED_BYTES:
            return np.asarray(multihost_utils.process_allgather(x, tiled=True))
        return np.stack([copy(_row(x, i)) for i in range(len(x))])

    return jax.tree.map(copy, tree)


@jax.jit
def _row(x: Array, i: int) -> Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


@contextmanager
def first_process_first() -> Iterator[None]:
    """Runs the body in process 0, then in all others: for files that the first one creates.

    Without several processes, it runs the body. All processes must enter it.
    """
    if jax.process_count() == 1:
        yield
        return
    if jax.process_index() != 0:
        multihost_utils.sync_global_devices("first_process_first")
        yield
        return
    try:
        yield
    finally:  # after an error too: the others then find it themselves
        multihost_utils.sync_global_devices("first_process_first")
