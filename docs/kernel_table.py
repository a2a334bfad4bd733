"""Writes ``kernel_table.md``: the op for each kernel of the sources, and the files of each op.

Run ``python docs/kernel_table.py`` after an op is added. It follows the code: from an op's ``Op``
object to its modules, from their FFI targets to the handlers, from these to the launchers that they
call, and so to the kernels. Measurements are read from the results.
"""

from __future__ import annotations

import csv
import functools
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import jaxllm.ops
from jaxllm.core.dispatch import Composition, Direction, Op
from jaxllm.testing import Case

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "kernel_table.md"
RESULTS = ROOT / "benchmarks" / "results" / "h200.csv"
ON_H100 = RESULTS.with_name("h100-80gb-hbm3.csv")

# Older rows of the results have these names.
FORMER_NAMES = {"attention_block": "pre_norm_self_attention", "ffn_block": "pre_norm_mlp"}

# The kernels of the projects that the ops descend from, and the ops here that compute the same.
SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    "llm.c": {
        "encoder_forward_kernel3, encoder_backward_kernel": ("embed",),
        "layernorm_forward_kernel3, layernorm_backward_kernel2": ("layer_norm", "add_layer_norm"),
        "matmul_forward_kernel4, matmul_backward": ("matmul", "linear", "mlp"),
        "matmul_backward_bias_kernel4": ("bias_add",),
        "attention_forward, attention_backward, permute_kernel, unpermute_kernel": (
            "flash_attention",
            "flash_attention_packed",
            "self_attention",
        ),
        "softmax_forward_kernel5, softmax_autoregressive_backward_kernel": ("softmax",),
        "residual_forward_kernel": ("add", "add_layer_norm", "attention_block", "ffn_block"),
        "gelu_forward_kernel, gelu_backward_kernel": ("gelu", "bias_gelu"),
        "fused_classifier_kernel3": ("cross_entropy", "linear_cross_entropy"),
        "adamw_kernel2": ("adamw_update",),
        "global_norm_squared": ("global_norm",),
    },
    "llama3.cuda": {
        "encoder_forward_kernel": ("embed",),
        "matmul_forward_kernel": ("matmul",),
        "rmsnorm forward and backward": ("rms_norm", "add_rms_norm"),
        "swiglu forward and backward": ("swiglu", "swiglu_packed"),
        "precompute_freqs_cis": ("rope_table",),
        "apply_rope_forward, apply_rope_backward": ("rope",),
        "repeat_interleave forward and backward": ("repeat_kv",),
        "attention_forward_gqa, attention_backward_gqa": ("flash_attention",),
    },
    "CUDA-Learn-Notes": {
        "sgemm_naive, sgemm_block_tile_k_tile_vec4, sgemm double-buffered, hgemm": ("matmul",),
        "sgemv_k32, sgemv_k128, sgemv_k16": ("matvec",),
        "warp_reduce_sum, block_reduce_sum, block_all_reduce, and their vec4 forms": (
            "reduce_sum",
        ),
        "warp_reduce_max, block_reduce_max": ("reduce_max",),
        "dot_product, dot_product_vec4": ("dot",),
        "elementwise_add, elementwise_add_vec4": ("add",),
        "histogram, histogram_vec4": ("histogram",),
        "softmax, softmax_vec4, safe_softmax, online_softmax": ("softmax",),
        "sigmoid, sigmoid_vec4, safe_sigmoid": ("sigmoid",),
        "relu, relu_vec4": ("relu",),
        "layer_norm, layer_norm_vec4": ("layer_norm",),
        "rms_norm, rms_norm_vec4": ("rms_norm",),
        "flash_attn_1 and flash_attn_2 in f32, f16, bf16": ("flash_attention",),
        "flash_attn_2 in f8": ("flash_attention_float8",),
        "flash_attn_2_split_kv in f16, bf16, f8": ("decode_attention",),
        "hard_nms": ("nms",),
    },
    "KuiperLLama": {
        "matmul_kernel_cu_fp32": ("matvec",),
        "quantization by groups": ("quantize", "dequantize"),
        "matmul_kernel_cu_fp32int8": ("quantized_matvec", "quantized_matmul"),
    },
}

# The speed of the sources' kernels as the sources state it.
FIGURES = {
    "rmsnorm forward and backward": (
        "8192 x 768 float32 on an L4: 0.238 ms, 211 GB/s or 0.70 of the card's 300; backward "
        "0.396 ms, 127 GB/s or 0.42"
    ),
    "swiglu forward and backward": "6.29 M bfloat16 on an L4: 0.171 ms; backward 0.290 ms",
    "encoder_forward_kernel": "memory throughput 0.908",
    "matmul_forward_kernel": "compute throughput 0.623",
    "precompute_freqs_cis": "1024 x 32 on an L4: 0.0098 ms",
    "apply_rope_forward, apply_rope_backward": "memory throughput 0.887",
    "repeat_interleave forward and backward": "width 768, 2 key heads on an L4: 0.320 ms",
    "sgemm_naive, sgemm_block_tile_k_tile_vec4, sgemm double-buffered, hgemm": (
        "hgemm, 16384^3 on an L20: 116.3 TFLOP/s, cuBLAS 114.7"
    ),
}


def op_objects() -> dict[str, Op]:
    """The public functions that are one :class:`Op`, by name."""
    apis = {getattr(jaxllm.ops, name).__module__ for name in jaxllm.ops.__all__}
    values = [
        value for api in sorted(apis) for value in vars(importlib.import_module(api)).values()
    ]
    ops = {value.name: value for value in values if isinstance(value, Op)}
    return {name: ops[name] for name in jaxllm.ops.__all__ if name in ops}


@functools.cache
def fused_ops() -> dict[str, Op]:
    """The ops with ``parts``, by name."""
    names = [module.name for module in pkgutil.walk_packages(jaxllm.ops.__path__, "jaxllm.ops.")]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    return {value.name: value for value in values if isinstance(value, Op) and value.parts}


def compositions() -> dict[str, list[str]]:
    """The public functions that dispatch fused ops, each with the names of these."""
    found = {}
    for function in jaxllm.ops.__all__:
        reached = {op.name for op in reached_ops(getattr(jaxllm.ops, function)) if op.parts}
        if reached - op_objects().keys():
            found[function] = sorted(reached)
    return found


def reached_ops(function: Any) -> list[Op]:
    """The ops that a public function dispatches, but not through other public functions."""
    found: list[Op] = []
    seen = {id(getattr(jaxllm.ops, name)) for name in jaxllm.ops.__all__} - {id(function)}

    def visit(value: Any, names: dict[str, Any]) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Op):
            found.append(value)
            visit(value.parts, {})
        elif isinstance(value, Composition):
            visit(value.fused, {})
            visit(value.unfused, {})
        elif hasattr(value, "co_names"):  # code, perhaps of a function inside another
            for name in value.co_names:
                visit(names.get(name), {})
            for constant in value.co_consts:
                if hasattr(constant, "co_names"):
                    visit(constant, names)
        elif hasattr(value, "__code__") and value.__module__.startswith("jaxllm."):
            visit(value.__code__, value.__globals__)
            for cell in value.__closure__ or ():
                visit(cell.cell_contents, {})
        elif isinstance(value, jax.custom_vjp):
            for part in vars(value).values():
                visit(part, {})

    visit(function, {})
    return found


@functools.cache
def handlers() -> dict[str, str]:
    """The FFI handlers by the stems of their targets, as ``cmake/handlers.cmake`` finds them."""
    pattern = re.compile(r"^JAXLLM_HANDLER\(\s*(\w+)", re.M)
    names = [name for path in sources("*.cc") for name in pattern.findall(path.read_text())]
    return {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): name for name in names}


def targets_of(op: Op) -> list[str]:
    """The stems of the FFI targets that an op's CUDA module calls, itself or through others."""
    found: set[str] = set()
    names: set[str] = {op.name, *(op.stem(direction) for direction in Direction)}
    modules: dict[str, ModuleType] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                visit(part)
        elif isinstance(value, str):
            found.update({value} & handlers().keys())
        elif isinstance(value, ModuleType) and value.__name__.startswith("jaxllm.ops"):
            modules[value.__name__] = value
        elif hasattr(value, "__code__") and value.__module__.startswith("jaxllm.ops"):
            names.update(value.__code__.co_names)
            for constant in value.__code__.co_consts:
                visit(constant)
            for name in value.__code__.co_names:
                visit(value.__globals__.get(name))

    # A function may take a module as an argument, so its names are looked up in all modules found.
    visit(op.cuda)
    known = -1
    while known != len(seen):
        known = len(seen)
        for module in list(modules.values()):
            for name in list(names):
                visit(getattr(module, name, None))
    return sorted(found)


@functools.cache
def included(path: Path) -> tuple[Path, ...]:
    """The headers of families that a C++ file includes, itself or through others."""
    found: dict[Path, None] = {}
    for name in re.findall(r'^#include "((?!common/)[\w/]+/\w+\.c?u?h)"', path.read_text(), re.M):
        header = ROOT / "cuda" / name
        found |= dict.fromkeys((header, *included(header)))
    return tuple(found)


@functools.cache
def functions_of(path: Path) -> dict[str, str]:
    """The text of each function at the left margin of a C++ file, by name."""
    pattern = r"^[\w:<>,&* ]+?\b(\w+)\([^;{}]*\{\n.*?^\}"
    return {match[1]: match[0] for match in re.finditer(pattern, path.read_text(), re.M | re.S)}


@functools.cache
def kernel_files(handler: str) -> tuple[Path, ...]:
    """The handler's file, then those with the kernels that it launches."""
    pattern = rf"^JAXLLM_HANDLER\(\s*{handler},([^)]*)\)"
    files = {path: re.search(pattern, path.read_text(), re.M) for path in sources("*.cc")}
    ((file, defined),) = [(path, match) for path, match in files.items() if match]
    headers = [header for header in included(file) if header.suffix == ".h"]

    # What the handler calls, in its own file and in its headers.
    functions = {
        name: text for path in (file, *headers) for name, text in functions_of(path).items()
    }
    names: set[str] = set()
    new = set(re.findall(r"\w+", defined[1]))
    while new:
        names |= new
        words = {word for name in new for word in re.findall(r"\w+", functions.get(name, ""))}
        new = words - names

    # The files that implement the headers which declare it, and those that they use in the family.
    kernels: dict[Path, None] = {}
    behind = [header for header in headers if names & declared(header)]
    for header in behind:
        for path in sources("*.cu", "*.cc"):
            if header in included(path) and belongs(path, header) and path not in kernels:
                kernels[path] = None
                near = [other for other in included(path) if path.parent in other.parents]
                behind += [other for other in near if other.suffix == ".h"]
    return (file, *(path for path in kernels if path.suffix == ".cu"))


def sources(*patterns: str) -> list[Path]:
    """The C++ files of these names."""
    return sorted(path for pattern in patterns for path in (ROOT / "cuda").rglob(pattern))


def belongs(path: Path, header: Path) -> bool:
    """Whether a file defines what a header declares: it has its name, or has no header."""
    handler = path.suffix == ".cc" and "JAXLLM_HANDLER" in path.read_text()
    return path.stem == header.stem or not (handler or path.with_suffix(".h").exists())


def declared(header: Path) -> set[str]:
    """The launchers that a header declares, and the types that hold them."""
    text = header.read_text()
    found = re.findall(r"^(?:cudaError_t|struct) (\w+)[ (]", text, re.M)
    return set(found) if "cudaError_t" in text else set()


def link(path: Path) -> str:
    """A link to a file of the repository."""
    return f"[{path.parent.name}/{path.name}](../{path.relative_to(ROOT)})"


def module_link(module: Any) -> str:
    """A link to an implementation; "" for none."""
    return link(Path(str(module.__file__))) if module else ""


def rows_of_sources() -> Iterator[str]:
    """The first table: the kernels of the sources, and our ops."""
    yield "| source | its kernels | op | its figures | measured here |"
    yield "|---|---|---|---|---|"
    for source, kernels in SOURCES.items():
        for names, ops in kernels.items():
            cells = (names, ", ".join(f"`{op}`" for op in ops), FIGURES.get(names, ""))
            here = "; ".join(filter(None, map(measured, ops)))
            yield f"| {source} | {' | '.join(cells)} | {here} |"


@functools.cache
def results(path: Path = RESULTS) -> list[dict[str, str]]:
    """The rows with a time."""
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["median_us"]]


def measured(name: str) -> str:
    """The CUDA rows of an op's first case that has rows, in each dtype."""
    names = (name, FORMER_NAMES.get(name))
    found = [row for row in results() if row["implementation"] == "cuda" and row["op"] in names]
    for case in cases_of(name):
        rows = [row for row in found if row["case"] == case.name]
        shapes: dict[str, list[str]] = {}
        for direction in ("forward", "backward", "gradient"):
            for row in rows:
                if row["direction"] == direction:
                    speeds = shapes.setdefault(f"{row['shape']} {row['dtype']}", [])
                    speeds.append(f"{direction} {speed(case, row)}")
        if shapes:
            texts = (f"{shape}: {', '.join(speeds)}" for shape, speeds in shapes.items())
            return f"`{name}` {', '.join(texts)}"
    return ""


def speed(case: Case, row: dict[str, str]) -> str:
    """The speed of a row: operations or bytes per second, whichever is nearer to the GPU's limit.

    For a row that is far from both limits it is the time.
    """
    microseconds = float(row["median_us"])
    rate = getattr(case, f"{row['direction']}_flops") / microseconds / 1e6
    of_matmul, of_copy = rate / float(row["matmul_tflop_per_s"]), float(row["share_of_copy"])
    if max(of_matmul, of_copy) < 0.01:
        return f"{microseconds:.0f} us"
    return f"{rate:.0f} TFLOP/s" if of_matmul > of_copy else f"{of_copy:.2f}"


def rows_of_ops() -> Iterator[str]:
    """The second table: our ops and their files."""
    yield "| op | reference | Pallas | CUDA: handlers | kernels | cases | large | measured |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, op in op_objects().items():
        parts = "its parts" if op.parts else "none"
        modules = [module_link(module) or parts for module in (op.reference, op.pallas)]
        cells = [*modules, *cuda_links(op), *counts_of(name)]
        yield f"| `{name}` | {' | '.join(cells)} |"


def rows_of_fused_ops() -> Iterator[str]:
    """The third table: the fused ops and their files."""
    yield "| fused op | functions that use it | CUDA: handlers | kernels |"
    yield "|---|---|---|---|"
    users = compositions()
    for name, op in sorted(fused_ops().items()):
        functions = [f"`{user}`" for user, ops in users.items() if name in ops]
        if functions:
            yield f"| `{name}` | {' | '.join((', '.join(functions), *cuda_links(op)))} |"


def rows_of_compositions() -> Iterator[str]:
    """The fourth table: how the functions that use fused ops are tested and measured."""
    yield "| function | cases | large | measured |"
    yield "|---|---|---|---|"
    for name in compositions():
        if cases_of(name):
            yield f"| `{name}` | {' | '.join(counts_of(name))} |"


def cuda_links(op: Op) -> tuple[str, str]:
    """The links to an op's handlers and to its kernels."""
    files = [kernel_files(handlers()[target]) for target in targets_of(op)]
    entries = unique(file[0] for file in files)
    kernels = unique(path for file in files for path in file[1:])
    return " ".join(map(link, entries)) or "none", " ".join(map(link, kernels)) or "none"


def counts_of(name: str) -> tuple[str, str, str]:
    """The number of cases, of large ones, and of measurements."""
    cases = cases_of(name)
    return str(len(cases)), str(sum(case.large for case in cases)), str(rows_of(name))


def rows_of(name: str) -> int:
    """The number of measurements of an op, on any GPU."""
    return sum(
        row["op"] in (name, FORMER_NAMES.get(name)) for row in (*results(), *results(ON_H100))
    )


def cases_of(name: str) -> list[Case]:
    """The cases of an op: the tests run all of them, the benchmarks time the large ones."""
    family = getattr(jaxllm.ops, name).__module__.rpartition(".")[0]
    cases = importlib.import_module(f"{family}.cases").CASES
    return [case for case in cases if case.op == name]


def unique(paths: Iterable[Path]) -> list[Path]:
    """The paths without repetitions, in order."""
    return list(dict.fromkeys(paths))


def table() -> str:
    """The page."""
    lines = [
        "# Kernels and their files",
        "",
        "Generated by `python docs/kernel_table.py`; edit that script, not this page.",
        "",
        "## Kernels of other projects",
        "",
        "The ops descend from kernels in these projects. The figures are the projects' own. The",
        "last column has the CUDA kernels' rows in [h200.csv](../benchmarks/results/h200.csv),",
        "on an H200: a share of copy bandwidth, or TFLOP/s if that is nearer to the GPU's",
        "limit, or a time if the row is far from both limits.",
        "",
        *rows_of_sources(),
        "",
        "## Ops",
        "",
        "A handler checks buffers and launches kernels; kernels do not depend on XLA ([the path",
        "of a call](call.md)). The contract tests run every case on every backend. Large cases",
        "need a GPU, and the benchmarks time them. The last column counts measurements: one",
        "backend or peer on one case in one direction. `flash_attention_float8` has its own",
        "tests instead of cases, and no Pallas kernel: it is for inference on Hopper, and its",
        "fallback is the reference implementation. `float8_matmul` has no Pallas kernel either:",
        "its fallback is XLA's GEMM of float8 arrays. In a linear layer",
        "[float8_round.cu](../cuda/quantization/float8_round.cu) or",
        "[float8_scale_and_round.cu](../cuda/quantization/float8_scale_and_round.cu) rounds its",
        "operands, and [float8_rope.cu](../cuda/quantization/float8_rope.cu) the gradient of one",
        "that it rotates back. In blocks",
        "[float8_activation.cu](../cuda/quantization/float8_activation.cu) and",
        "[float8_norm.cu](../cuda/quantization/float8_norm.cu) write them, ops without cases.",
        "",
        *rows_of_ops(),
        "",
        "## Fused ops",
        "",
        "A fused op is a GEMM with what precedes or follows it, in one kernel. Where the kernel",
        "rejects a call, the op's parts run, and `jaxllm.explain` prints the reason.",
        "",
        *rows_of_fused_ops(),
        "",
        "The functions that use fused ops:",
        "",
        *rows_of_compositions(),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes the page."""
    TABLE.write_text(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
