"""Writes the tables of ``architectures.md``: the kernels that each kind of GPU runs.

Run ``python docs/architectures.py`` after a predicate or a launcher changes. It needs the CUDA
extension, but no GPU: it traces calls for the GPUs described below, and writes what ``auto`` and
``cuda`` choose there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import kernel_table

import jaxllm
from jaxllm import testing
from jaxllm.core import ffi
from jaxllm.core.dispatch import FUSED, PARTS
from jaxllm.ops.attention import xla as cudnn_attention
from jaxllm.testing import Case

PAGE = Path(__file__).with_suffix(".md")


def _gpu(capability: int, sms: int, shared_kib: int, **changes: Any) -> ffi.Device:
    facts = {
        "capability": capability,
        "multiprocessors": sms,
        "shared_bytes": shared_kib << 10,
        "image": capability,
        "has_sm90a": False,
        "clusters": 0,
    }
    return ffi.Device(**(facts | changes))


# The GPUs, each with code for its own architecture. 90 is a Hopper GPU whose code was compiled
# without the instructions specific to Hopper, 90a one with them.
GPUS = {
    "80": _gpu(80, 108, 163),
    "86": _gpu(86, 84, 99),
    "89": _gpu(89, 128, 99),
    "90": _gpu(90, 132, 227),
    "90a": ffi.H100,
    "100": _gpu(100, 148, 227),
    "103": _gpu(103, 160, 227),
    "120": _gpu(120, 188, 99),
}
EXAMPLES = {
    "80": "A100, A30",
    "86": "A10, A40, RTX 30",
    "89": "L4, L40, RTX 40",
    "90": "H100, H200, H20",
    "90a": "H100, H200, H20",
    "100": "B200",
    "103": "B300",
    "120": "RTX PRO 6000, RTX 50",
}


@contextlib.contextmanager
def on(gpu: ffi.Device | None) -> Iterator[None]:
    """Traces programs for a GPU that this machine may lack, with cuDNN available."""
    takes_wide_heads = gpu is not None and gpu.capability >= 90
    capabilities = () if gpu is None else (f"{gpu.capability // 10}.{gpu.capability % 10}",)

    def no_cudnn(width: int, value_width: int) -> str | None:
        del value_width
        is_served = takes_wide_heads or width <= cudnn_attention.MAX_HEAD_WIDTH_BEFORE_HOPPER
        return None if is_served else "heads are too wide"

    with (
        mock.patch.object(ffi, "device", lambda: gpu),
        mock.patch.object(ffi, "devices", lambda: () if gpu is None else (gpu,)),
        mock.patch.object(ffi, "compute_capabilities", lambda: capabilities),
        mock.patch.object(cudnn_attention, "_no_cudnn", no_cudnn),
        mock.patch.object(cudnn_attention.cudnn, "check_cudnn_version", lambda: 91000),
        mock.patch.object(cudnn_attention.cudnn, "check_compute_capability", lambda _: True),
    ):
        yield


@dataclasses.dataclass(frozen=True)
class Launch:
    """A call of an FFI target in a traced program.

    Attributes:
        stem: The target, without "jaxllm_".
        operands: Shapes and dtypes of the operands.
        results: Shapes and dtypes of the results, including workspaces.
        attributes: Its attributes.
    """

    stem: str
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    attributes: dict[str, Any]


def program_of(case: Case, backend: str) -> Callable[..., Any]:
    """A case's outputs, and its gradients if it has any, as a function of its inputs."""
    op = case.call or getattr(jaxllm.ops, case.op)
    fn = functools.partial(op, **case.static, backend=backend)

    def program(*inputs: Any) -> Any:
        if not case.has_backward:
            return fn(*inputs)
        leaves, tree = jax.tree.flatten(inputs)
        floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_floating(*some: Any) -> Any:
            arguments = list(leaves)
            for i, x in zip(floating, some, strict=True):
                arguments[i] = x
            return fn(*tree.unflatten(arguments))

        out, pull = jax.vjp(of_floating, *(leaves[i] for i in floating))
        return out, pull(jax.tree.map(jnp.ones_like, out))

    return program


def launches(fn: Callable[..., Any], *inputs: Any) -> list[Launch]:
    """The FFI calls in the program of a function, in order."""
    return list(_launches(jax.make_jaxpr(lambda *x: fn(*x))(*inputs).jaxpr))


def _launches(jaxpr: Any) -> Iterator[Launch]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ffi_call":
            avals = [
                tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in some)
                for some in (equation.invars, equation.outvars)
            ]
            name = equation.params["target_name"].removeprefix("jaxllm_")
            yield Launch(name, avals[0], avals[1], dict(equation.params["attributes"]))
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _launches(getattr(value, "jaxpr", value))


def _is_jaxpr(value: object) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


# Targets whose kernels have instructions of sm_90a: predicates reject them on other GPUs.
HOPPER_STEMS = frozenset(
    {
        "lm_head_softmax",
        "matmul_bias_gelu",
        "matmul_delta",
        "matmul_residual_norm",
        "matmul_norm_backward",
        "matmul_residual",
        "matmul_dgelu",
        "wgrad_pair",
        "float8_matmul",
    }
)


def kernels_of(launch: Launch, gpu: ffi.Device | None) -> tuple[str, ...]:
    """The kernels that a handler may choose for a call, by the names of ``SharedNeed``.

    The kernels for Hopper have separate names here.
    """
    hopper = gpu is not None and gpu.capability == 90 and gpu.has_sm90a
    stem, operands = launch.stem, launch.operands
    if "attention" in stem and stem != "decode_attention":
        if stem == "flash_attention_float8":
            return (f"flash_attention_forward_{_least(operands[0].shape[-1], 64, 128, 256)}",)
        direction = "backward" if stem.endswith("backward") else "forward"
        width, dtype = operands[0].shape[-1], operands[0].dtype
        if "heads" in launch.attributes:  # a packed projection
            width //= int(launch.attributes["heads"]) + 2 * int(launch.attributes["kv_heads"])
        if dtype == jnp.float32:
            return (f"flash_attention_float32_{_least(width, 64, 128, 256)}",)
        if "_bias_" in stem:
            return (f"flash_attention_{direction}_bias_{_least(width, 64, 128, 256)}",)
        if hopper and width % 8 == 0:
            return (f"flash_attention_{direction}_hopper",)
        return (f"flash_attention_{direction}_{_least(width, 32, 64, 96, 128, 256)}",)
    if stem == "decode_attention":
        q = operands[0]
        if q.dtype != jnp.float32 and q.shape[-1] in (64, 128):
            return ("decode_attention",)
        return ("decode_attention_any_width",)
    if stem == "matmul":
        if operands[0].dtype != jnp.float32:
            return ("matmul_hopper",) if hopper else ("matmul_mma_16_bits",)
        if bool(launch.attributes["tf32"]):
            return ("matmul_mma_float32",)
        large = ("matmul_float32_hopper",) if hopper else ()
        return (*large, *(f"matmul_float32_{size}" for size in ("large", "square", "small")))
    return (stem,)


def _least(width: int, *widths: int) -> int:
    return min(each for each in widths if each >= width)


def _heads(batch: int, length: int, heads: int, width: int, value_width: int | None = None) -> Case:
    shape = testing.Normal((batch, length, heads, width))
    values = testing.Normal((batch, length, heads, value_width or width))
    arrays = {"q": shape, "k": shape, "v": values}
    return Case("flash_attention", f"heads of {width}", arrays, {"causal": True})


def _case(op: str, name: str) -> Case:
    (case,) = [case for case in kernel_table.cases_of(op) if case.name == name]
    return case


# Calls whose kernels may differ from GPU to GPU: a label, the case and the dtype.
ROWS: tuple[tuple[str, Case, str], ...] = (
    ("GPT-2 124M", _case("ffn_block", "gpt2_124m"), "bfloat16"),
    ("GPT-2 124M", _case("attention_block", "gpt2_124m"), "bfloat16"),
    ("GPT-2 124M", _case("mlp", "gpt2_124m"), "bfloat16"),
    ("GPT-2 124M", _case("linear_cross_entropy", "gpt2_124m"), "bfloat16"),
    ("GPT-2 124M", _case("flash_attention", "gpt2_124m"), "bfloat16"),
    ("GPT-2 124M", _case("flash_attention", "gpt2_124m"), "float32"),
    ("Llama 3 8B", _case("flash_attention", "llama3_8b_short"), "bfloat16"),
    ("heads of 96", _heads(1, 2048, 16, 96), "bfloat16"),
    ("heads of 256", _heads(1, 2048, 8, 256), "bfloat16"),
    ("heads of 256", _heads(1, 2048, 8, 256), "float32"),
    ("T5 base, with a bias", _case("flash_attention", "t5_base"), "bfloat16"),
    ("Llama 3 8B", _case("decode_attention", "llama3_8b"), "bfloat16"),
    ("Llama 3 1B", _case("decode_block", "llama3_1b"), "bfloat16"),
    ("4096 cubed", _case("matmul", "square_4096"), "bfloat16"),
    ("4096 cubed", _case("matmul", "square_4096"), "float32"),
)


def cell(case: Case, dtype: str, gpu: ffi.Device, backend: str = "cuda") -> str:
    """The kernels of a call and of its gradients on a GPU, in order."""
    with on(gpu):
        found = launches(program_of(case, backend), *testing.input_types(case, dtype))
        names = dict.fromkeys(name for launch in found for name in kernels_of(launch, gpu))
    return ", ".join(f"`{name}`" for name in names)


def choice(case: Case, dtype: str, gpu: ffi.Device) -> str:
    """The implementations that ``auto`` takes for a call and for its gradients."""
    names = {"xla-gpu": "cuDNN", "xla": "XLA"}
    with on(gpu):
        calls = jaxllm.explain(program_of(case, "auto"), *testing.input_types(case, dtype)).calls
    taken = [call.on_gpu for call in calls if call.on_gpu not in (FUSED, PARTS)]
    return ", ".join(dict.fromkeys(names.get(name, name) for name in taken))


def gpu_rows() -> Iterator[str]:
    """The properties of the GPUs in the tables."""
    yield "| code | GPUs | SMs | shared memory of a CTA | kernels for Hopper | clusters |"
    yield "|---|---|---|---|---|---|"
    for name, gpu in GPUS.items():
        with on(gpu):
            reason = ffi.no_hopper_reason()
        cells = (
            f"sm_{name}",
            EXAMPLES[name],
            str(gpu.multiprocessors),
            f"{gpu.shared_bytes >> 10} KiB",
            "run" if reason is None else f"rejected: {reason}",
            "yes" if gpu.image >= 90 else "no",
        )
        yield f"| {' | '.join(cells)} |"


def by_group(text_of: Callable[[ffi.Device], str]) -> Iterator[tuple[str, str]]:
    """Groups of GPUs with equal texts, and the text; the largest group comes last."""
    groups: dict[str, list[str]] = {}
    for name, gpu in GPUS.items():
        groups.setdefault(text_of(gpu), []).append(f"sm_{name}")
    for text, names in sorted(groups.items(), key=lambda group: len(group[1])):
        is_largest = names == max(groups.values(), key=len)
        others = "every GPU" if len(groups) == 1 else "the others"
        label = others if is_largest else ", ".join(names)
        yield label, text


def kernel_rows() -> Iterator[str]:
    """The kernels of calls for ``backend="cuda"``."""
    yield "| call | GPUs | kernels |"
    yield "|---|---|---|"
    for what, case, dtype in ROWS:
        for gpus, text in by_group(functools.partial(cell, case, dtype)):
            yield f"| {what}: `{case.op}`, {dtype} | {gpus} | {text} |"


def choice_rows() -> Iterator[str]:
    """What ``auto`` takes, for the calls where that is not ``cuda`` on every GPU."""
    yield "| call | GPUs | `auto` takes |"
    yield "|---|---|---|"
    for what, case, dtype in ROWS:
        groups = list(by_group(functools.partial(choice, case, dtype)))
        if [text for _, text in groups] != ["cuda"]:
            for gpus, text in groups:
                yield f"| {what}: `{case.op}`, {dtype} | {gpus} | {text} |"


def need_rows() -> Iterator[str]:
    """The kernels with a fixed amount of shared memory, and the GPUs that have less."""
    yield "| kernel | shared memory | GPUs that have less |"
    yield "|---|---|---|"
    for name, need in sorted(ffi.shared_needs().items()):
        without = [f"sm_{each}" for each, gpu in GPUS.items() if gpu.shared_bytes < need]
        yield f"| `{name}` | {need / 1024:.1f} KiB | {', '.join(without) or 'none'} |"


def same_everywhere() -> str:
    """The ops whose kernels are the same on every kind of GPU, for one case of each op."""
    kinds = [GPUS[name] for name in ("80", "86", "90", "90a", "120")]
    shown = {case.op for _, case, _ in ROWS} | HOPPER_STEMS
    names = []
    for name in kernel_table.op_objects():
        cases = kernel_table.cases_of(name)
        for case in [*[case for case in cases if case.large], *cases][:1]:
            if name not in shown and len({cell(case, "bfloat16", gpu) for gpu in kinds}) == 1:
                names.append(f"`{name}`")
    return ", ".join(names)


TABLES: dict[str, Callable[[], Any]] = {
    "gpus": gpu_rows,
    "kernels": kernel_rows,
    "choices": choice_rows,
    "needs": need_rows,
    "same": lambda: [same_everywhere() + "."],
}


def page() -> str:
    """The page with new tables; the text between them is kept."""
    text = PAGE.read_text()
    for name, rows in TABLES.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->\n"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = before + begin + "".join(f"{row}\n" for row in rows()) + end + after
    return text


def main() -> int:
    """Writes the page."""
    if reason := ffi.unavailable_reason():
        print(reason, file=sys.stderr)
        return 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
