"""The command line of the pretraining examples."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxllm import data, ops, training
from jaxllm.convert import huggingface, llmc
from jaxllm.core.backend import BACKENDS, resolve
from jaxllm.data import tokenizer
from jaxllm.data.tokenizer import BYTES, Tokenizer
from jaxllm.models.common import SAVE_ATTENTION, SAVE_GEMMS, by_block
from jaxllm.training import evaluation, loader, parallel, schedules


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The default training options of a preset."""

    steps: int = 2000
    batch_size: int = 16
    seq_len: int = 1024
    accumulate: int = 1
    lr: float = 6e-4
    warmup: int = 100


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family and its training recipes.

    Attributes:
        name: The name in messages.
        model: The module, with ``init``, ``loss``, ``forward``, ``num_params`` and
            ``flops_per_token``.
        presets: Configs by name. The defaults are ``"tiny"`` on a CPU and ``"d6"`` on a GPU.
        recipes: Recipes by the name of the preset; other presets use the defaults of Recipe.
        overlap: As in :func:`jaxllm.training.make_train_step`.
    """

    name: str
    model: ModuleType
    presets: Mapping[str, Any]
    recipes: Mapping[str, Recipe]
    overlap: bool = True

    @property
    def stem(self) -> str:
        """The name of the model's module: ``"gpt2"``."""
        return self.model.__name__.rpartition(".")[-1]


GPT2_END_OF_TEXT = 50256  # GPT-2's last token
PROMPT = "def "
SMOKE = Recipe(steps=8, batch_size=2, seq_len=32, accumulate=2, lr=4e-3, warmup=2)
# What the backward pass recomputes.
REMAT = {
    "nothing": False,
    "activations": SAVE_GEMMS,
    "blocks_but_attention": SAVE_ATTENTION,
    "blocks": True,
}
# Options that a resumed run must have in common with its checkpoint.
IDENTITY = ("preset", "vocab_size", "seed", "order", "batch_size", "seq_len", "accumulate")
IDENTITY += ("dtype", "precision", "unroll", "document_mask", "ignore_next_document")
# Options that a resumed run may change; the change is printed.
SETTINGS = ("steps", "lr", "warmup", "schedule", "final_fraction", "decay_fraction")
SETTINGS += ("weight_decay", "max_grad_norm", "microbatch_weights", "max_loss_z", "max_norm_z")
SETTINGS += ("float8_counts", "max_underflow")


def make_parser(family: Family, description: str | None) -> argparse.ArgumentParser:
    """Defines all flags. :func:`parse` fills in those whose default is None."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", type=Path, metavar="TOML", help="a file of flags; the command line wins"
    )
    parser.add_argument("--smoke", action="store_true", help="a test run of less than a minute")
    yes_or_no = argparse.BooleanOptionalAction

    add = parser.add_argument_group("model").add_argument
    add("--preset", choices=family.presets, help="default: d6 on a GPU, tiny on other devices")
    add(
        "--init-from",
        type=Path,
        help="a Hugging Face folder, or llm.c's .bin (GPT-2), whose model is trained; --preset "
        "then gives only the defaults of other flags",
    )
    add("--vocab-size", type=int, help="of the tokens in DATA; default: the tokenizer's")
    add("--tokenizer", help="bytes, gpt2, a tokenizer.json, or llm.c's .bin; default: bytes")
    add("--end-of-text", metavar="NAME", help="the token between documents; default: detected")
    add("--backend", choices=BACKENDS, help="of every op; default: JAXLLM_BACKEND, or auto")
    add("--dtype", choices=("float32", "bfloat16"), help="the compute dtype; default: by device")
    add(
        "--precision",
        metavar="RECIPE",
        help="row or tensor, for float8 operands in the GEMMs of the blocks; or of some layers, as "
        "in up=row,down=row; default: the compute dtype",
    )
    add(
        "--remat",
        choices=REMAT,
        default="nothing",
        help="what the backward pass recomputes: less memory, more time",
    )
    add(
        "--unroll",
        action=yes_or_no,
        help="do not stack the layers: faster steps, slower compilation; default: on a GPU",
    )

    add = parser.add_argument_group("data").add_argument
    add("--data", type=Path, help="a folder of *train*.bin and *val*.bin; default: data/stdlib")
    add("--order", choices=("shuffled", "llmc"), default="shuffled", help="of the batches")
    add("--seed", type=int, default=0)
    # Absent, not False, as in the checkpoints of runs before these flags.
    flag: dict[str, Any] = {"action": "store_true", "default": None}
    add(
        "--document-mask",
        **flag,
        help="mask attention by document, and restart the positions in each: a document follows "
        "each end-of-text token",
    )
    add(
        "--ignore-next-document",
        **flag,
        help="with --document-mask, ignore labels that are the first token of another document",
    )

    add = parser.add_argument_group(
        "training (defaults of the first six: by the preset)"
    ).add_argument
    add("--steps", type=int)
    add("--batch-size", type=int, help="sequences in a microbatch")
    add("--seq-len", type=int, help="a preset of shorter sequences is made longer")
    add("--accumulate", type=int, help="microbatches in a step")
    add("--lr", type=float, help="the peak learning rate")
    add("--warmup", type=int, help="steps; a longer default is cut to --steps")
    add("--schedule", choices=schedules.NAMES, default="cosine")
    add("--final-fraction", type=float, default=0.1, help="the final rate, as a share of the peak")
    add("--decay-fraction", type=float, default=0.2, help="the share of the steps that wsd decays")
    add("--weight-decay", type=float, default=0.1)
    add("--max-grad-norm", type=float, default=1.0, help="0 for no limit")
    add(
        "--microbatch-weights",
        choices=("labels", "equal"),
        default="labels",
        help="weight microbatches by their number of labels, or equally",
    )
    add("--max-loss-z", type=float, help="skip steps whose loss has a larger z-score")
    add("--max-norm-z", type=float, help="skip steps whose gradient norm has a larger z-score")
    add(
        "--float8-counts",
        action="store_true",
        help="log the shares of inputs and weights, and of gradients, that --precision rounds to "
        "zero, and the number of elements that are not finite; the last halts the run",
    )
    add(
        "--max-underflow",
        type=float,
        help="with --float8-counts, skip steps in which one of these shares is larger",
    )

    add = parser.add_argument_group("several devices and processes").add_argument
    add(
        "--mesh",
        metavar="data=D,fsdp=F,context=C,tensor=T",
        help="the batch is sharded over D * F devices, its sequences over C, the parameters over "
        "F * T; axes that are not named are 1. Default: no mesh on one device, data=-1 on several. "
        "-1 stands for all remaining devices",
    )
    add("--coordinator", metavar="HOST:PORT", help="the address of process 0, for all processes")
    add("--processes", type=int, metavar="N", help="the number of processes; with --coordinator")
    add("--process", type=int, metavar="I", help="this process, from 0; with --coordinator")
    add(
        "--distributed",
        action="store_true",
        help="take the three from the environment: SLURM, Open MPI, or a cloud that JAX detects",
    )
    add(
        "--heartbeat-timeout",
        type=int,
        default=100,
        metavar="SECONDS",
        help="end all processes if one is silent for this long (default: %(default)s)",
    )

    add = parser.add_argument_group(
        "intervals in steps; 0: only at the end, and for checkpoints never"
    ).add_argument
    add("--val-every", type=int, default=100, metavar="STEPS")
    add("--val-batches", type=int, default=8, metavar="N", help="batches in a validation")
    add("--sample-every", type=int, default=200, metavar="STEPS")
    add("--prompt", help="the beginning of samples; default: by the tokenizer")
    add("--hellaswag", type=Path, metavar="BIN", help="llm.c's eval file")
    add("--hellaswag-every", type=int, default=250, metavar="STEPS")
    add("--checkpoint-every", type=int, default=0, metavar="STEPS")
    add("--keep", type=int, default=3, metavar="N", help="keep the newest N checkpoints, ...")
    add("--keep-every", type=int, metavar="STEPS", help="... and those of multiples of STEPS")
    add("--resume", action="store_true", help="resume from the newest checkpoint in OUT, if any")

    add = parser.add_argument_group("output").add_argument
    add(
        "--out",
        type=Path,
        help="default: runs/MODEL_PRESET; a log and a model of an earlier run are replaced",
    )
    add("--tensorboard", action=yes_or_no, default=True, help="if it is installed")
    add("--save-llmc", action="store_true", help="also save the model in llm.c's format (GPT-2)")
    add(
        "--mfu",
        choices=("peak", "matmul"),
        default="peak",
        help="relative to the GPU's peak, or to a measured matmul",
    )
    return parser


def parse(
    argv: Sequence[str] | None, family: Family, description: str | None
) -> argparse.Namespace:
    """Reads the command line; the recipe and the device give the defaults."""
    parser = make_parser(family, description)
    options = parser.parse_args(argv)
    if options.config is not None:
        try:
            argv = [*flags_of(options.config, parser), *(sys.argv[1:] if argv is None else argv)]
        except (OSError, ValueError) as error:
            parser.error(str(error))
        options = parser.parse_args(argv)
    try:
        resolve(options.backend)  # fails where JAXLLM_BACKEND is unknown
        start_processes(options)
        options.mesh = open_mesh(options.mesh)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))

    options.family = family
    on_gpu = jax.default_backend() == "gpu"
    if options.preset is None:
        options.preset = "d6" if on_gpu and not options.smoke else "tiny"
    recipe = SMOKE if options.smoke else family.recipes.get(options.preset, Recipe())
    defaults = dataclasses.asdict(recipe)
    defaults["dtype"] = training.default_compute_dtype()
    defaults["unroll"] = on_gpu
    defaults["out"] = Path("runs", f"{family.stem}_{options.preset}")
    given = {name for name, value in vars(options).items() if value is not None}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.mesh is not None and options.smoke and "batch_size" not in given:
        options.batch_size = max(options.batch_size, options.mesh.size)
    check_ranges(options, parser)
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed is {options.seed}, must be from 0 to 2**63 - 1")
    if "warmup" not in given:
        options.warmup = min(options.warmup, options.steps)
    if options.warmup > options.steps:
        parser.error(f"--warmup is {options.warmup}, must be at most --steps, {options.steps}")
    if options.ignore_next_document and not options.document_mask:
        parser.error("--ignore-next-document needs --document-mask")
    if options.save_llmc and family.stem != "gpt2":
        parser.error("--save-llmc: llm.c's format supports only GPT-2")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out is {options.out}, must be a folder")
    try:
        options.learning_rate = schedules.make_schedule(
            options.schedule,
            options.lr,
            options.steps,
            warmup=options.warmup,
            final_fraction=options.final_fraction,
            decay_fraction=options.decay_fraction,
        )
        if options.mesh is not None:
            sharding = parallel.batch_sharding(options.mesh)
            loader.check_batch_size(sharding, options.batch_size)
            loader.check_seq_len(sharding, options.seq_len)
        options.params, config = load_model(options)
        if options.vocab_size is None and config is not None:
            options.vocab_size = config.vocab_size
        options.tokenizer = find_tokenizer(options)
        if options.vocab_size is None:
            options.vocab_size = (options.tokenizer or BYTES).vocab_size
        options.model_config = make_config(options, config)
        options.precision = read_precision(options)
        check_float8_counts(options)
        options.documents = document_options(options)
        options.prompt_tokens = find_prompt(options)
        with parallel.first_process_first():
            options.train, options.val = open_data(options)
        options.questions = open_questions(options)
        make_writable(options.out)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    return options


def make_writable(folder: Path) -> None:
    """Makes the output folder, before a run whose results could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out is {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"--out is {folder}, in which no file can be written")


_ABOVE_0 = ("steps", "batch_size", "seq_len", "accumulate", "keep", "keep_every", "val_batches")
_ABOVE_0 += ("max_loss_z", "max_norm_z")
_FROM_0 = ("max_grad_norm", "weight_decay", "warmup")
_FROM_0 += ("val_every", "sample_every", "hellaswag_every", "checkpoint_every")


def check_ranges(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exits with a message if a number that is given is out of its range, or NaN."""
    for name in (*_ABOVE_0, *_FROM_0, "max_underflow"):
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if name in _ABOVE_0 and not value > 0:
            parser.error(f"{flag} is {value}, must be above 0")
        if name in _FROM_0 and not value >= 0:
            parser.error(f"{flag} is {value}, must be 0 or above")
        if name == "max_underflow" and not 0 <= value <= 1:
            parser.error(f"{flag} is {value}, must be from 0 to 1")
    if options.weight_decay > float(np.finfo(np.float32).max):
        parser.error(f"--weight-decay is {options.weight_decay}, must be finite")


def start_processes(options: argparse.Namespace) -> None:
    """Connects the processes of the run, before JAX looks for devices.

    Raises:
        RuntimeError: The other processes cannot be reached.
        ValueError: The flags contradict each other.
    """
    named = (options.coordinator, options.processes, options.process)
    if options.distributed and any(x is not None for x in named):
        raise ValueError("pass --distributed, or --coordinator, --processes and --process")
    if options.heartbeat_timeout < 1:
        raise ValueError(f"--heartbeat-timeout is {options.heartbeat_timeout}, must be above 0")
    if any(x is not None for x in named) and None in named:
        raise ValueError("--coordinator, --processes and --process must be passed together")
    if not options.distributed and options.coordinator is None:
        return
    if options.process is not None and not 0 <= options.process < options.processes:
        raise ValueError(f"--process is {options.process}, must be from 0 to --processes - 1")
    jax.distributed.initialize(*named, heartbeat_timeout_seconds=options.heartbeat_timeout)


def open_mesh(text: str | None) -> jax.sharding.Mesh | None:
    """The mesh of ``--mesh``; None for one device without that flag."""
    if text is None and jax.device_count() == 1:
        return None
    sizes: Any = parallel.parse_mesh("data=-1" if text is None else text)
    return parallel.make_mesh(**sizes)


def flags_of(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """Converts a TOML file to flags: ``batch-size = 32`` to ``--batch-size=32``.

    Raises:
        ValueError: The file is not valid TOML, a name is not a flag, or a flag that takes a value
            or begins with ``no-`` is false.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    flags = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in parser._option_string_actions or flag in ("--help", "--config"):
            raise ValueError(f"{path}: {name} is not the name of a flag")
        if value is True:
            flags.append(flag)
        elif value is not False:
            flags.append(f"{flag}={value}")
        elif f"--no-{flag[2:]}" in parser._option_string_actions:
            flags.append(f"--no-{flag[2:]}")
        elif flag.startswith("--no-"):
            raise ValueError(f"{path}: {name} is false; write {name[3:]} = true")
        elif parser._option_string_actions[flag].nargs != 0:
            raise ValueError(f"{path}: {name} is false; it takes a value")
    return flags


def find_tokenizer(options: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer of the options; BYTES for a vocabulary of bytes; otherwise None."""
    if options.tokenizer is not None or options.end_of_text is not None:
        name = "bytes" if options.tokenizer is None else options.tokenizer
        return tokenizer.load(name, end_of_text=options.end_of_text)
    return BYTES if options.vocab_size in (None, BYTES.vocab_size) else None


def document_options(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``data.batch`` that mask attention by document; empty without the flag."""
    if not options.document_mask:
        return {}
    if options.tokenizer is not None:
        end_of_text = read_end_of_text(options)
    elif options.vocab_size == GPT2_END_OF_TEXT + 1:
        end_of_text = GPT2_END_OF_TEXT
    else:
        raise ValueError(
            f"--document-mask: the end-of-text token of a vocabulary of {options.vocab_size} is "
            "unknown; pass --tokenizer"
        )
    return {"end_of_text": end_of_text, "ignore_next_document": bool(options.ignore_next_document)}


def read_end_of_text(options: argparse.Namespace) -> int:
    """The end-of-text token of the tokenizer, which must be in the vocabulary."""
    found = options.tokenizer.end_of_text
    if found >= options.vocab_size:
        raise ValueError(
            f"--vocab-size is {options.vocab_size}; the end-of-text token of the tokenizer "
            f"{options.tokenizer.name} is {found}"
        )
    return found


def find_prompt(options: argparse.Namespace) -> np.ndarray:
    """The tokens that samples begin with."""
    if options.tokenizer is None:
        if options.prompt is not None:
            raise ValueError("--prompt: the tokenizer is unknown; pass --tokenizer")
        # GPT-2's last id is its end-of-text token, after which a new document begins.
        return np.array([options.model_config.vocab_size - 1])
    if options.end_of_text is not None:
        read_end_of_text(options)  # which the saved model names
    text = options.prompt
    if text is None and options.tokenizer is BYTES:
        text = PROMPT
    if text is None:
        return np.array([read_end_of_text(options)])
    tokens = options.tokenizer.encode(text)
    if tokens.size == 0:
        raise ValueError(f"--prompt is {text!r}; it must have a token")
    if (largest := tokens.max()) >= options.model_config.vocab_size:
        raise ValueError(
            f"--prompt: {text!r} has token {largest}; the vocabulary has "
            f"{options.model_config.vocab_size}"
        )
    return tokens


def open_data(options: argparse.Namespace) -> tuple[data.Dataset, data.Dataset | None]:
    """Opens the two splits; builds the default corpus if it does not exist."""
    folder = options.data
    if folder is None and options.smoke:  # one package, for speed
        folder = options.out / "data"
        if not folder.exists():
            data.build(folder, [data.standard_library() / "json"], extensions=(".py",))
    elif folder is None:
        folder = data.ensure_standard_library()
    train = data.open_split(folder, "train")
    # Read a batch, so that a corpus that is too short is an error here.
    read_rows(train, options, 0, range(options.batch_size))
    val = data.open_split(folder, "val") if any(folder.glob("*val*.bin")) else None
    if val:
        data.check_vocabulary(val, options.vocab_size)
    if val is None or data.num_windows(val, options.seq_len) == 0:
        if jax.process_index() == 0:
            print(f"{folder}: no validation data")
        return train, None
    return train, val


def open_questions(options: argparse.Namespace) -> list[evaluation.Question]:
    """HellaSwag's questions; an empty list without ``--hellaswag``."""
    if options.hellaswag is None:
        return []
    questions = evaluation.read_questions(options.hellaswag)
    try:
        sharding = rows_sharding(options)
        evaluation.check_questions(questions, options.model_config, sharding=sharding)
    except ValueError as error:
        raise ValueError(f"{options.hellaswag}: {error}") from error
    return questions


def rows_sharding(options: argparse.Namespace) -> Any:
    """The sharding of tokens of shape (B, T); None without a mesh."""
    if options.mesh is None:
        return None
    return parallel.batch_sharding(options.mesh, accumulate=False)


def make_batch(
    dataset: data.Dataset, options: argparse.Namespace, step: int
) -> tuple[np.ndarray | jax.Array, ...]:
    """The tokens and labels of a step, counted from 0, of shape (accumulate, B, T).

    With ``--document-mask``, segment ids and positions follow. With a mesh they are sharded, and
    each process reads its part.
    """
    A, B, T = options.accumulate, options.batch_size, options.seq_len
    if options.mesh is not None:
        sharding = parallel.batch_sharding(options.mesh)
        read = functools.partial(read_rows, dataset, options, step)
        return loader.load_batch(sharding, (A, B, T), read)
    parts = [read_rows(dataset, options, step, range(i * B, (i + 1) * B)) for i in range(A)]
    return tuple(map(np.stack, zip(*parts, strict=True)))


def read_rows(
    dataset: data.Dataset, options: argparse.Namespace, step: int, rows: range
) -> tuple[np.ndarray, ...]:
    """Some of the sequences of a step, (len(rows), T): rows of one of its microbatches.

    Row i is row ``i % B`` of microbatch ``i // B``.
    """
    A, B, T = options.accumulate, options.batch_size, options.seq_len
    if options.order == "llmc":
        microbatch = rows.start // B
        rows = range(rows.start - microbatch * B, rows.stop - microbatch * B)
        of_step: Any = {"index": step * A + microbatch, "rows": rows, **options.documents}
        part = data.batch_in_order(dataset, B, T, **of_step)
    else:
        of_step = {"seed": options.seed, "step": step, "rows": rows, **options.documents}
        part = data.batch(dataset, A * B, T, **of_step)
    tokens, labels, *_ = part
    if max(tokens.max(), labels.max()) >= options.vocab_size:
        try:
            data.check_vocabulary(dataset, options.vocab_size)
        except ValueError as error:  # which names the file and the position
            raise ValueError(
                f"a token is too large, but the vocabulary has {options.vocab_size}; pass "
                f"--vocab-size (50257 for GPT-2's tokens): {error}"
            ) from None
    return part


def load_model(options: argparse.Namespace) -> tuple[Any, Any]:
    """The parameters and config of ``--init-from``; ``(None, None)`` without it."""
    if options.init_from is None:
        return None, None
    if options.init_from.suffix == ".bin":
        params, config = llmc.load_gpt2(options.init_from, dtype="float32")
    else:
        params, config = huggingface.load(options.init_from)
    if (stem := type(config).__module__.rpartition(".")[-1]) != options.family.stem:
        raise ValueError(
            f"{options.init_from} is a {stem} model; this script trains {options.family.stem}"
        )
    return params, config


def make_config(options: argparse.Namespace, loaded: Any) -> Any:
    """The loaded model's config, or the preset with this run's vocabulary and length."""
    if loaded is not None:
        for name, wanted in (("vocab_size", loaded.vocab_size), ("seq_len", loaded.max_seq_len)):
            if getattr(options, name) > wanted:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {getattr(options, name)}; the model of "
                    f"{options.init_from} has {wanted}"
                )
        return loaded
    config = dataclasses.replace(
        options.family.presets[options.preset], vocab_size=options.vocab_size
    )
    if options.seq_len > config.max_seq_len or options.preset == "tiny":
        config = dataclasses.replace(config, max_seq_len=options.seq_len)
    return config


def read_precision(options: argparse.Namespace) -> ops.Precision:
    """The recipe of all layers, or those of the layers that ``--precision`` names."""
    text = options.precision
    if text is not None and "=" in text:
        pairs = [part.partition("=") for part in text.split(",")]
        precision: Any = {}
        for name, _, recipe in pairs:
            if name.strip() in precision:
                raise ValueError(f"--precision is {text!r}; it names {name.strip()!r} twice")
            precision[name.strip()] = recipe.strip()
    else:
        precision = text
    model, config = options.family.model, options.model_config
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), config))
    try:
        by_block(precision, params["blocks"])
    except ValueError as error:
        raise ValueError(f"--{error}") from error
    return precision


def check_float8_counts(options: argparse.Namespace) -> None:
    """Raises ValueError where counts are asked for that the run does not have."""
    if options.float8_counts and options.precision is None:
        raise ValueError("--float8-counts: nothing is rounded to float8 without --precision")
    if options.max_underflow is not None and not options.float8_counts:
        raise ValueError("--max-underflow needs --float8-counts")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options that a resumed run may change, for a checkpoint's record."""
    return {name: getattr(options, name) for name in SETTINGS}


def record_of(options: argparse.Namespace) -> dict[str, Any]:
    """The record of a checkpoint."""
    return {**identity(options), **settings(options), "train_files": file_digests(options.train)}


@functools.cache
def file_digests(dataset: data.Dataset) -> dict[str, str]:
    """The digest of each shard of a data set, by the name of its file."""
    shards: Any = dataset.shards
    return {Path(x.filename).name: data.Dataset((x,)).digest for x in shards}


def identity(options: argparse.Namespace) -> dict[str, Any]:
    """The values that a resumed run must have in common with its checkpoint's record."""
    return {
        **{name: getattr(options, name) for name in IDENTITY},
        "train_tokens": options.train.num_tokens,
        **later_identity(options),
    }


def later_identity(options: argparse.Namespace) -> dict[str, Any]:
    """Those values of :func:`identity` that the records of older runs lack."""
    fields = dataclasses.asdict(options.model_config)
    del fields["special_tokens"]
    # JSON has lists alone.
    values = {
        f"config.{name}": list(value) if isinstance(value, tuple) else value
        for name, value in fields.items()
    }
    values["train_digest"] = options.train.digest
    return {"end_of_text": options.documents.get("end_of_text"), **values}
