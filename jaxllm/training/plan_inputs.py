"""What a plan is made from: GPUs, measured steps, presets and the elements of their parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh

from jaxllm.models import gpt2, llama3
from jaxllm.training.optim_optax import names_of
from jaxllm.training.parallel import AXES, state_shardings

GIB = 2**30
# Bytes that a process can allocate, besides the CUDA context. In upper case the names are keys of
# PEAK_FLOPS.
GPU_MEMORY = {"h100": 78 * GIB, "h200": 139 * GIB}

# The modules of the families, by name.
FAMILIES: dict[str, Any] = {"gpt2": gpt2, "llama3": llama3}


@dataclasses.dataclass(frozen=True)
class Model:
    """A preset.

    Attributes:
        family: ``"gpt2"`` or ``"llama3"``.
        preset: Its name in the ``PRESETS`` of :mod:`jaxllm.models.gpt2` or ``llama3``.
        config: The shape.
    """

    family: str
    preset: str
    config: Any

    @property
    def params(self) -> Any:
        """The shapes of the parameters, stacked."""
        init: Callable[..., Any] = FAMILIES[self.family].init
        return jax.eval_shape(lambda: init(jax.random.key(0), self.config))

    @property
    def is_tied(self) -> bool:
        """Whether the LM head is the token table."""
        return getattr(self.config, "tied_head", True)

    @property
    def mlp_columns(self) -> int:
        """Columns of the MLP's hidden arrays: F for GELU, and 3F for gate, up and their product."""
        return 3 * self.config.mlp_width if self.family == "llama3" else 4 * self.config.width

    @property
    def query_columns(self) -> int:
        """Columns of all queries of a token."""
        return self.config.heads * self.config.head_width

    @property
    def qkv_columns(self) -> int:
        """Columns of all queries, keys and values of a token."""
        return (self.config.heads + 2 * self.config.kv_heads) * self.config.head_width

    @property
    def attention_columns(self) -> int:
        """Columns saved of attention per token and layer: the projection and the output.

        With norms of queries and keys, the projection before and after them.
        """
        projections = 2 if getattr(self.config, "qk_norm", False) else 1
        return self.query_columns + projections * self.qkv_columns

    def attended(self, seq_len: int) -> tuple[Fraction, Fraction]:
        """Query columns times the keys that they see, of all layers: whole, and under the mask.

        The second is the mean over a causal sequence: half of T keys, or ``w - w^2 / 2T`` of a
        window w.

        Args:
            seq_len: T, tokens in a sequence.
        """
        windows = getattr(self.config, "windows", (None,) * self.config.layers)
        keys = [Fraction(seq_len if w is None else min(seq_len, w)) for w in windows]
        seen = sum(w - w * w / (2 * seq_len) for w in keys)
        return self.query_columns * Fraction(sum(keys)), self.query_columns * Fraction(seen)

    def saved_per_token(self, split: Split) -> int:
        """Elements saved per token on each GPU along ``tensor``.

        Attention's projection and output are divided if its heads are split, and the hidden arrays
        of the MLP (GPT-2: GELU's value and derivative) if its columns are. The inputs of norms and
        of the GEMMs after them are whole.
        """
        config = self.config
        attention = self.attention_columns
        mlp = (1 if self.family == "llama3" else 2) * self.mlp_columns
        whole = config.saved_per_token // config.layers - attention - mlp
        return config.layers * (
            whole + split.divide(attention, "qkv") + split.divide(mlp, "up", "gate_up")
        )


def find_model(name: str) -> Model:
    """Finds a preset by name: ``"3.1-8b"``, or ``"gpt2:d12"`` where both families have the name.

    Args:
        name: ``PRESET`` or ``FAMILY:PRESET``.

    Raises:
        ValueError: No preset has the name, or several have it.
    """
    family, colon, preset = name.rpartition(":")
    found = [
        Model(of, preset, module.PRESETS[preset])
        for of, module in FAMILIES.items()
        if preset in module.PRESETS and (not colon or of == family)
    ]
    if len(found) > 1:
        choices = " or ".join(f"{model.family}:{preset}" for model in found)
        raise ValueError(f"model {name!r} is a preset of several families; write {choices}")
    if not found:
        presets = (f"{of}:{key}" for of, module in FAMILIES.items() for key in module.PRESETS)
        raise ValueError(f"model {name!r} is unknown; the presets are {', '.join(presets)}")
    return found[0]


@dataclasses.dataclass(frozen=True)
class Split:
    """What is sharded along ``tensor``.

    Attributes:
        tensor: The size of the axis.
        weights: The elements of the weights that are sharded, counted whole, of all blocks: of
            ``qkv``, ``out``, ``gate_up`` or ``up``, ``down``, ``wte`` and ``lm_head``.
    """

    tensor: int
    weights: dict[str, int]

    def __contains__(self, layer: str) -> bool:
        return layer in self.weights

    def divide(self, count: int, *layers: str) -> int:
        """A GPU's part of what is divided as the columns or rows of one of these layers are."""
        return count // self.tensor if self.weights.keys() & set(layers) else count


@dataclasses.dataclass(frozen=True)
class Elements:
    """The elements of some parameters, of those sharded along ``tensor`` one GPU's part.

    Attributes:
        total: Of all of them.
        sharded: Of those that are sharded along ``fsdp``, before that axis divides them: matrices.
    """

    total: int
    sharded: int

    @property
    def replicated(self) -> int:
        """Elements that each GPU along ``fsdp`` has."""
        return self.total - self.sharded

    def local(self, fsdp: int) -> int:
        """Elements that each GPU has, with this many shards."""
        return self.replicated + self.sharded // fsdp


def count_elements(model: Model, mesh: dict[str, int]) -> tuple[dict[str, Elements], Split]:
    """Counts all parameters, those of each use, and what is sharded along ``tensor``.

    A tied LM head is in both ``embedding`` and ``lm_head``.

    Args:
        model: The model.
        mesh: The sizes of the axes.
    """
    params, tensor = model.params, mesh["tensor"]
    abstract = AbstractMesh(tuple(mesh[axis] for axis in AXES), AXES)
    shardings = state_shardings(cast(Any, abstract), params)
    uses = {
        "all": params.keys(),
        "blocks": {"blocks"},
        "embedding": {"wte", "wpe"},
        "lm_head": {"wte" if model.is_tied else "lm_head"},
        "norm": {"ln_f", "norm_f"},
    }
    found = {use: [0, 0] for use in uses}
    split: dict[str, int] = {}
    for (path, x), of in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
    ):
        names = names_of(path)
        axes = jax.tree.leaves(tuple(of.spec))  # an entry of the spec may have several
        size = x.size
        if "tensor" in axes:
            if names[-1] != "bias":
                split[names[-2] if names[-1] == "weight" else names[-1]] = size
            size //= tensor
        for use in (use for use, keys in uses.items() if names[0] in keys):
            found[use][0] += size
            found[use][1] += size if "fsdp" in axes else 0
    return {use: Elements(*counts) for use, counts in found.items()}, Split(tensor, split)


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured training step of one GPU, a row of ``benchmarks/results/*_train.csv``.

    Attributes:
        model: Its model, as the file names it.
        gpu: ``"h100"`` or ``"h200"``.
        batch_size: Sequences.
        seq_len: Tokens of each.
        commit: The commit that was measured.
        mfu: The share of the bfloat16 peak, optimizer and LM head included.
        peak_gib: The peak that XLA's allocator reports.
    """

    model: str
    gpu: str
    batch_size: int
    seq_len: int
    commit: str
    mfu: float
    peak_gib: float

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch_size * self.seq_len


MEASURED = (
    Row("gpt2_d12", "h100", 32, 1024, "aacb11d", 0.5780, 12.92),
    Row("gpt2_d12", "h200", 32, 1024, "75e4de3", 0.6002, 12.92),
    Row("llama3_3.2-1b", "h200", 4, 4096, "05574b5", 0.6211, 39.09),
)


# The share of the peak that causal attention reaches, forward and backward. It and that of GEMMs
# solve two rows: Llama 3.2 1B on 4096 and on 131,072 tokens (019e78a, an H100, heads 64 wide).
ATTENTION_MFU = 0.524


def nearest_row(model: Model, gpu: str) -> Row:
    """The family's measured row, of the same GPU if there is one."""
    rows = [row for row in MEASURED if row.model.startswith(f"{model.family}_")]
    return min(rows, key=lambda row: row.gpu != gpu)
