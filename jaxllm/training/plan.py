"""Memory, communication and time of a training step, predicted without a GPU.

``python -m jaxllm plan`` prints what :func:`make_plan` returns. It reads shapes and shardings only;
no array is made and no JAX backend starts.

Terms of the formulas: n GPUs; R tokens per GPU and microbatch, those of all GPUs divided by
``data`` x ``fsdp`` x ``context``; L layers of width D; Vp rows of the padded vocabulary, of which a
GPU has Vt = Vp / ``tensor``; c bytes per element of the compute dtype; A microbatches per step.

The blocks are assumed unrolled (:func:`jaxllm.models.common.unstack`), the optimizer
:func:`jaxllm.training.adamw`, the parameters float32 with a copy in the compute dtype, and the
shardings those of :func:`jaxllm.training.parallel.state_shardings`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction

from jaxllm.ops.checks import as_bool, as_float, as_integer
from jaxllm.training.metrics import PEAK_FLOPS
from jaxllm.training.parallel import AXES
from jaxllm.training.plan_inputs import (
    ATTENTION_MFU,
    FAMILIES,
    GPU_MEMORY,
    Elements,
    Model,
    Row,
    Split,
    count_elements,
    find_model,
    nearest_row,
)

# Bus bandwidth of NCCL's all-reduce between two H100s of one host over NVLink, measured, in bytes
# per second. NCCL's bus bandwidth is bytes sent per GPU and second.
NVLINK = 329e9
# Between hosts, per GPU: one network card of 400 Gbit/s each, the rate of the data sheet of DGX
# H100. Not measured; --interconnect changes it.
INTERCONNECT = 50e9
HOST_GPUS = 8

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
BLOCK_LAYERS = ("qkv", "out", "gate_up", "up", "down")
# Restated from jaxllm.models.common.lm_head_loss and jaxllm.ops.loss.api_linear; tests/test_plan.py
# compares them.
_MANY_ROWS, _CHUNK_BYTES, _TILE_ROWS, _LARGE_SUM = 4096, 320 * 2**20, 128, 2**29


@dataclasses.dataclass(frozen=True)
class MemoryLine:
    """Bytes per GPU of one kind of array, at the three moments that may be the peak.

    Attributes:
        name: What the arrays are.
        lm_head: While the LM head computes loss and gradients of a chunk.
        backward: In the backward pass of the last layer, when all other layers' activations exist.
        update: In the optimizer, when all gradients exist.
    """

    name: str
    lm_head: int = 0
    backward: int = 0
    update: int = 0


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind along the same axes of the mesh, per step.

    Attributes:
        kind: all-gather, reduce-scatter, all-reduce or permute.
        of: weights, gradients or activations.
        axes: The axes of the mesh, as ``data``, ``fsdp`` or ``data x fsdp``.
        sent: Bytes that each GPU sends.
        exposed: How many of them no computation of the step can overlap.
        bandwidth: Bytes per second and GPU.
    """

    kind: str
    of: str
    axes: str
    sent: float
    exposed: float
    bandwidth: float

    @property
    def seconds(self) -> float:
        """Duration without latency: ``sent / bandwidth``."""
        return self.sent / self.bandwidth

    @property
    def exposed_seconds(self) -> float:
        """The part of the duration that no computation can overlap."""
        return self.exposed / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a training step takes; :func:`make_plan` checks the sizes.

    Attributes:
        model: The model.
        mesh: The sizes of the axes ``data``, ``fsdp``, ``context`` and ``tensor``.
        batch_size: Sequences of a microbatch, of all GPUs.
        seq_len: Tokens of each.
        gpu: A key of :data:`jaxllm.training.plan_inputs.GPU_MEMORY`.
        remat: Whether each block is recomputed in the backward pass.
        saves_attention: With remat: all of it but attention, whose output is saved.
        accumulate: Microbatches of a step.
        dtype: The compute dtype.
        interconnect: Bytes per second and GPU between hosts.
        elements: From :func:`jaxllm.training.plan_inputs.count_elements`.
        split: Likewise.
    """

    model: Model
    mesh: dict[str, int]
    batch_size: int
    seq_len: int
    gpu: str
    remat: bool
    saves_attention: bool
    accumulate: int
    dtype: str
    interconnect: float
    elements: dict[str, Elements]
    split: Split

    @property
    def gpus(self) -> int:
        """GPUs of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def sequences(self) -> int:
        """Sequences of a microbatch that a GPU has, or has a part of."""
        return self.batch_size // (self.mesh["data"] * self.mesh["fsdp"])

    @property
    def rows(self) -> int:
        """R, tokens of a microbatch that a GPU has; those along ``tensor`` have the same."""
        return self.sequences * (self.seq_len // self.mesh["context"])

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all GPUs."""
        return self.accumulate * self.batch_size * self.seq_len

    @property
    def num_params(self) -> int:
        """Elements of all parameters."""
        return FAMILIES[self.model.family].num_params(self.model.config)

    # ---- Memory

    @functools.cached_property
    def memory(self) -> tuple[MemoryLine, ...]:
        """The bytes of each kind of array on a GPU.

        With P elements of parameters per GPU (sharded ones divided by ``fsdp`` and ``tensor``), and
        S of those that a GPU updates (divided by ``data`` and ``context`` too, if there is a copy):

        - parameters ``4 S``; optimizer state, m and v, ``8 S``: the float32 parameters are the
          master
        - narrow copy ``c P``, none in float32
        - gradients: of the LM head until the update ``c Vt D / fsdp``, whole along ``fsdp`` while
          the head computes them (see :func:`lm_head_bytes`); in the backward pass one layer's; in
          the update ``c S`` and the token table's gradient ``c Vt D``. With A > 1 in addition the
          float32 sum ``4 S``.
        - saved activations ``c R saved_per_token``, where the residual and the norms' outputs are
          whole along ``tensor``, and heads and MLP columns are divided; with remat ``c R 2 L D``,
          since the residual that goes from block to block is two arrays, and with attention saved
          ``R L (c N H + 4 N)`` for outputs and statistics, divided along ``tensor``
        - logits of a chunk ``c rows Vt``, and input and input gradient of the head ``2 c R D``
        - gradients of one block's activations ``c R (columns of the MLP / tensor + 2 D)``; with
          remat also the block's own saved activations
        - gathered weights of FSDP: the LM head, or two layers, one in use and one under way
        - keys and values of one layer gathered along ``context``, and their gradients before the
          reduce-scatter, each ``c context R (columns of keys and values) / tensor``
        """
        config, c, fsdp = self.model.config, ITEMSIZE[self.dtype], self.mesh["fsdp"]
        blocks, head = self.elements["blocks"], self.elements["lm_head"]
        local, layers = self.elements["all"].local(fsdp), config.layers
        updated = self.elements["all"].local(fsdp * self.updaters)
        rows, saved = self.rows, self.model.saved_per_token(self.split)
        kept = c * (2 * layers * config.width if self.remat else saved)
        if self.remat and self.saves_attention:
            attended = c * self.model.query_columns + 4 * config.heads
            kept += layers * self.split.divide(attended, "qkv")
        columns = self.split.divide(self.model.mlp_columns, "up", "gate_up")
        block = columns + 2 * config.width + (saved // layers if self.remat else 0)
        logits, head_gradient = lm_head_bytes(self)
        head_input = c * rows * config.width
        resident = {
            "parameters (float32)": 4 * updated,
            "optimizer state (float32 m, v)": 8 * updated,
            f"copy in {self.dtype}": 0 if c == 4 else c * local,
            "sum of gradients (float32)": 4 * updated if self.accumulate > 1 else 0,
        }
        is_table_whole = self.gpus > 1 or self.model.is_tied
        token_table = c * self.split.divide(config.padded_vocab_size, "wte") * config.width
        keys = 2 * c * self.gathered_keys if self.mesh["context"] > 1 else 0
        return (
            *(MemoryLine(name, size, size, size) for name, size in resident.items()),
            MemoryLine(
                "gradients",
                head_gradient,
                c * head.local(fsdp) + c * blocks.total // layers,
                c * updated + is_table_whole * token_table,
            ),
            MemoryLine("saved activations", *[rows * kept] * 2),
            MemoryLine("logits of a chunk", logits),
            MemoryLine("input of the LM head, gradient", 2 * head_input, head_input),
            MemoryLine("activation gradients", 0, c * rows * block),
            MemoryLine(
                "gathered weights (FSDP)",
                c * head.sharded * (fsdp > 1),
                2 * c * (blocks.sharded // layers) * (fsdp > 1),
            ),
            MemoryLine("keys, values, gradients (context)", 0, keys),
        )

    @property
    def updaters(self) -> int:
        """GPUs with the same copy of the parameters, of which each updates a part; 1 without."""
        return self.mesh["data"] * self.mesh["context"] if ITEMSIZE[self.dtype] < 4 else 1

    @property
    def gathered_keys(self) -> int:
        """Elements of one layer's keys and values, of whole sequences and a GPU's heads."""
        columns = 2 * self.model.config.kv_heads * self.model.config.head_width
        return self.sequences * self.seq_len * self.split.divide(columns, "qkv")

    @property
    def totals(self) -> dict[str, int]:
        """The sum of the memory lines at each moment."""
        names = ("lm_head", "backward", "update")
        return {name: sum(getattr(line, name) for line in self.memory) for name in names}

    @property
    def peak(self) -> int:
        """Bytes per GPU at the worst moment."""
        return max(self.totals.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is at most the GPU's memory."""
        return self.peak <= GPU_MEMORY[self.gpu]

    # ---- Communication

    @functools.cached_property
    def communication(self) -> tuple[Collective, ...]:
        """The collectives of a step, of which all but one repeat for each microbatch.

        - all-gather along ``fsdp``: each layer's weights forward and backward, once more with
          remat; the tables for the embedding, and the LM head once, since its loss computes its
          gradients. A tied table is gathered for both at once.
        - reduce-scatter along ``fsdp``: each gradient of a matrix
        - along ``data`` and ``context``, of each GPU's shard along ``fsdp``: with a copy of the
          parameters a reduce-scatter of the gradients, and once per step an all-gather of the new
          copy; without, an all-reduce
        - all-reduce along all three: the gradients of biases and norms
        - along ``tensor`` and ``context``: :meth:`_of_activations`

        In a group of g GPUs, each sends ``(g - 1) / g`` of the whole array's bytes, and in an
        all-reduce twice that; in a permute all that it has. Of the first three, exposed are the
        gathers of the tables and the first layer, at the start, and the sums of their gradients, at
        the end. Those of activations are all exposed: the next op waits for them.
        """
        layers, fsdp = self.model.config.layers, self.mesh["fsdp"]
        every, blocks, embedding = (self.elements[of] for of in ("all", "blocks", "embedding"))
        sharded, exposed = every.sharded, blocks.sharded // layers + embedding.sharded
        replicated = every.replicated
        exposed_replicated = blocks.replicated // layers + embedding.replicated
        gathered = sharded + (2 if self.remat else 1) * blocks.sharded
        own, exposed_own, steps = sharded // fsdp, exposed // fsdp, Fraction(1, self.accumulate)
        copies, all_three = ("data", "context"), ("data", "fsdp", "context")
        of_copies = [("all-reduce", "gradients", copies, own, exposed_own)]
        if self.updaters > 1:
            of_copies = [
                ("reduce-scatter", "gradients", copies, own, exposed_own),
                ("all-gather", "weights", copies, own * steps, exposed_own * steps),
            ]
        found: dict[tuple[str, str, str], Collective] = {}
        for kind, of, group, elements, exposed_elements in (
            ("all-gather", "weights", ("fsdp",), gathered, exposed),
            ("reduce-scatter", "gradients", ("fsdp",), sharded, exposed),
            *of_copies,
            ("all-reduce", "gradients", all_three, replicated, exposed_replicated),
            *(
                (kind, "activations", (axis,), count, count)
                for kind, axis, count in self._of_activations()
            ),
        ):
            axes = tuple(axis for axis in group if self.mesh[axis] > 1)
            if not axes or not elements:
                continue
            size = math.prod(self.mesh[axis] for axis in axes)
            share = (size - 1) / size * (2 if kind == "all-reduce" else 1)
            scale = ITEMSIZE[self.dtype] * self.accumulate * (1 if kind == "permute" else share)
            key = kind, of, " x ".join(axes)
            bandwidth = bus_bandwidth(self.mesh, axes, self.interconnect)
            before = found.get(key, Collective(*key, 0.0, 0.0, bandwidth))
            found[key] = dataclasses.replace(
                before,
                sent=before.sent + float(elements * scale),
                exposed=before.exposed + float(exposed_elements * scale),
            )
        return tuple(found.values())

    def _of_activations(self) -> tuple[tuple[str, str, int], ...]:
        """Kind, axis and elements of the collectives of a microbatch's activations.

        - all-reduce along ``tensor``, R D each: the outputs of ``out`` and ``down`` forward, the
          input gradients of ``qkv`` and ``gate_up`` or ``up`` backward, the output of ``out`` once
          more with remat, the embedding, and the input gradient of the LM head. Not counted: the
          LM head's statistics, a few numbers per row.
        - all-gather along ``context``: keys and values forward and backward, once more where remat
          recomputes attention; reduce-scatter: their gradients
        - permute along ``context``, half of a GPU's rows each, if that is a whole number: queries
          and outputs forward, once more where remat recomputes attention; both and their gradients
          backward
        """
        config, split, again = self.model.config, self.split, int(self.remat)
        attends_again = int(self.remat and not self.saves_attention)
        layers, context = config.layers, self.mesh["context"]
        sums = layers * (
            ("out" in split) * (1 + again)
            + ("down" in split)
            + ("qkv" in split)
            + ("up" in split or "gate_up" in split)
        )
        sums += ("wte" in split) + (("wte" if self.model.is_tied else "lm_head") in split)
        is_zigzag = context > 1 and self.seq_len // context % 2 == 0
        swaps = layers * (6 + 2 * attends_again) * is_zigzag
        query_columns = split.divide(self.model.query_columns, "qkv")
        return (
            ("all-reduce", "tensor", sums * self.rows * config.width),
            ("all-gather", "context", layers * (2 + attends_again) * self.gathered_keys),
            ("reduce-scatter", "context", layers * self.gathered_keys),
            ("permute", "context", swaps * self.rows * query_columns // 2),
        )

    # ---- Time

    @property
    def rate(self) -> Row | None:
        """The measured row whose MFU the prediction uses; None where none applies."""
        return nearest_row(self.model, self.gpu) if self.dtype == "bfloat16" else None

    @property
    def compute_seconds(self) -> float | None:
        """The step time without communication, None without a rate.

        ``A R (6 M / u + 7 L T D / a) / peak`` for M elements that GEMMs multiply by: causal
        attention computes two products of half the keys forward and five backward. ``a`` is
        :data:`jaxllm.training.plan_inputs.ATTENTION_MFU`, and ``u`` what :attr:`rate`, a whole step
        on one GPU with its norms and its optimizer, leaves for GEMMs. Both terms are divided by
        ``tensor`` but for layers that are not sharded; with remat a third of the blocks' GEMMs and
        two sevenths of attention come again. So norms are assumed to be divided by ``tensor`` too,
        and narrower GEMMs to be as fast.
        """
        if self.rate is None:
            return None
        config, split, peak = self.model.config, self.split, PEAK_FLOPS[self.gpu.upper()]
        products, attention = _flops_per_token(self.model, self.seq_len)
        head = "wte" if self.model.is_tied else "lm_head"
        of_head = 6 * config.padded_vocab_size * config.width
        divided = 6 * sum(n for layer, n in split.weights.items() if layer in BLOCK_LAYERS)
        blocks = products - of_head - divided + divided // split.tensor
        products = blocks * (4 if self.remat else 3) // 3 + split.divide(of_head, head)
        attention = split.divide(attention, "qkv")
        attention += attention * 2 // 7 * (self.remat and not self.saves_attention)
        flops = products / _products_mfu(self.rate) + attention / ATTENTION_MFU
        return self.accumulate * self.rows * flops / peak

    def step_seconds(self, *, overlap: bool = True) -> float | None:
        """The predicted step time, None without a measured rate.

        Without overlap ``compute + communication``. With overlap ``max(compute, overlappable) +
        exposed``: what can overlap costs only what exceeds the computation.

        Args:
            overlap: Whether XLA runs all collectives that it can at the same time as kernels.

        Raises:
            TypeError: ``overlap`` is not a bool.
        """
        overlap = as_bool("overlap", overlap)
        if self.compute_seconds is None:
            return None
        total = sum(of.seconds for of in self.communication)
        if not overlap:
            return self.compute_seconds + total
        exposed = sum(of.exposed_seconds for of in self.communication)
        return max(self.compute_seconds, total - exposed) + exposed


def make_plan(
    model: Model,
    mesh: dict[str, int],
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    gpu: str = "h100",
    remat: bool = False,
    saves_attention: bool = False,
    accumulate: int = 1,
    dtype: str = "bfloat16",
    interconnect: float = INTERCONNECT,
) -> Plan:
    """Predicts memory, communication and time of a training step.

    Args:
        model: From :func:`jaxllm.training.plan_inputs.find_model`.
        mesh: The sizes of the axes, as of :func:`jaxllm.training.parallel.parse_mesh`; 1 for those
            that are not in it.
        batch_size: Sequences of a microbatch, of all GPUs. None for as many tokens per GPU as the
            family's measured row has (those along ``tensor`` have the same ones); for fewer
            sequences, by halves, if they do not fit.
        seq_len: Tokens of each; None for that of the measured row.
        gpu: A key of :data:`jaxllm.training.plan_inputs.GPU_MEMORY`.
        remat: Whether each block is recomputed in the backward pass.
        saves_attention: With remat: all of it but attention, whose output is saved.
        accumulate: Microbatches of a step.
        dtype: The compute dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        interconnect: Bytes per second and GPU between hosts.

    Raises:
        TypeError: A size is not an integer, ``interconnect`` is not a number, or ``remat`` or
            ``saves_attention`` is not a bool.
        ValueError: An axis is unknown, ``saves_attention`` is true without ``remat``, a size is
            below 1, ``data`` x ``fsdp`` does not divide the batch or ``context``
            the sequence, the sequence is longer than GPT-2's table of positions, or the GPU or the
            dtype is unknown.
    """
    if gpu not in GPU_MEMORY:
        raise ValueError(f"gpu is {gpu!r}; it must be one of {', '.join(GPU_MEMORY)}")
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(ITEMSIZE)}")
    remat, saves_attention = as_bool("remat", remat), as_bool("saves_attention", saves_attention)
    if saves_attention and not remat:
        raise ValueError("saves_attention is True; it needs remat")
    if unknown := [axis for axis in mesh if axis not in AXES]:
        raise ValueError(f"mesh has the axis {unknown[0]!r}; axes are {', '.join(AXES)}")
    row = nearest_row(model, gpu)
    seq_len = as_integer("seq_len", row.seq_len if seq_len is None else seq_len, least=1)
    mesh = {axis: as_integer(axis, mesh.get(axis, 1), least=1) for axis in AXES}
    batch_size = None if batch_size is None else as_integer("batch_size", batch_size, least=1)
    accumulate = as_integer("accumulate", accumulate, least=1)
    interconnect = as_float("interconnect", interconnect)
    if not interconnect > 0:
        raise ValueError(f"interconnect is {interconnect:g} bytes per second; it must be above 0")
    if seq_len > model.config.max_seq_len and model.family == "gpt2":
        raise ValueError(
            f"seq_len is {seq_len}; {model.family}:{model.preset} has max_seq_len "
            f"{model.config.max_seq_len}"
        )
    if seq_len % mesh["context"]:
        raise ValueError(f"seq_len is {seq_len}; context={mesh['context']} does not divide it")
    shards = mesh["data"] * mesh["fsdp"]
    if batch_size is not None and batch_size % shards:
        raise ValueError(
            f"batch_size is {batch_size}; data x fsdp = {shards} does not divide the sequences"
        )
    elements, split = count_elements(model, mesh)
    plan = Plan(
        model=model,
        mesh=mesh,
        batch_size=batch_size or shards * max(1, row.tokens * mesh["context"] // seq_len),
        seq_len=seq_len,
        gpu=gpu,
        remat=remat,
        saves_attention=saves_attention,
        accumulate=accumulate,
        dtype=dtype,
        interconnect=interconnect,
        elements=elements,
        split=split,
    )
    while batch_size is None and not plan.fits and plan.batch_size > shards:
        plan = dataclasses.replace(plan, batch_size=plan.batch_size // shards // 2 * shards)
    return plan


def _flops_per_token(model: Model, seq_len: int) -> tuple[int, int]:
    """Operations of a step for one token: those of GEMMs, and those of causal attention."""
    whole, seen = model.attended(seq_len)
    flops = FAMILIES[model.family].flops_per_token(model.config, seq_len)
    return flops - int(12 * whole), int(14 * seen)


def _products_mfu(row: Row) -> float:
    """The share of the peak of all but attention in a measured step."""
    family, _, preset = row.model.partition("_")
    products, attention = _flops_per_token(find_model(f"{family}:{preset}"), row.seq_len)
    conventional = FAMILIES[family].flops_per_token(FAMILIES[family].PRESETS[preset], row.seq_len)
    return products / (conventional / row.mfu - attention / ATTENTION_MFU)


def lm_head_bytes(plan: Plan) -> tuple[int, int]:
    """The bytes of a chunk's logits, and of the LM head's gradient while it is summed.

    As :func:`jaxllm.models.common.lm_head_loss` and :func:`jaxllm.ops.linear_cross_entropy`. The
    limit of a chunk's rows is computed from the tokens of all GPUs, and applied to one GPU's. So
    each GPU may have a larger chunk than the same tokens on a single GPU. Along ``tensor`` a GPU
    has the logits of its part of the vocabulary, and the default limit of rows is as much larger.

    Args:
        plan: The plan.
    """
    config, c, tokens = plan.model.config, ITEMSIZE[plan.dtype], plan.batch_size * plan.seq_len
    vocab_size, width = config.padded_vocab_size, config.width
    limit = 0 if plan.remat else 2 * tokens * config.saved_per_token // (5 * vocab_size)
    local = plan.split.divide(vocab_size, "wte" if plan.model.is_tied else "lm_head")
    is_default = limit < _MANY_ROWS
    if is_default:
        limit = max(_CHUNK_BYTES, c * vocab_size * width) // (c * vocab_size)
        limit = limit // _TILE_ROWS * _TILE_ROWS or limit
    is_one_chunk = tokens <= limit
    limit *= vocab_size // local if is_default else 1
    rows = plan.rows
    chunks = math.ceil(rows / limit)
    size = min(rows, limit, math.ceil(rows / chunks / _TILE_ROWS) * _TILE_ROWS)
    is_large = 4 * vocab_size * width > _LARGE_SUM
    is_narrow = plan.dtype == "bfloat16" and (is_one_chunk or is_large)
    return c * size * local, (c if is_narrow else 4) * local * width


def bus_bandwidth(mesh: dict[str, int], axes: tuple[str, ...], interconnect: float) -> float:
    """Bytes per second that each GPU of a group sends.

    :data:`NVLINK` within a host. Between hosts a group is a ring through g of a host's GPUs, with
    their g network cards: ``min(NVLINK, g interconnect)``. Neighbours along ``tensor`` are the
    closest, then those along ``context`` and ``fsdp``, as
    :func:`jaxllm.training.parallel.make_mesh` has them.

    Args:
        mesh: The sizes of the axes; 1 for those that are not in it.
        axes: Those of the group.
        interconnect: Bytes per second and GPU between hosts.
    """
    reach, on_host, free = 1, Fraction(1), Fraction(HOST_GPUS)
    outermost = min(AXES.index(axis) for axis in axes)
    for axis in reversed(AXES[outermost:]):  # the nearest GPUs first
        size = mesh.get(axis, 1)
        reach *= size
        if axis in axes:
            on_host *= max(1, min(size, free))
        free /= size
    if reach <= HOST_GPUS:
        return NVLINK
    return min(NVLINK, int(on_host) * interconnect)
