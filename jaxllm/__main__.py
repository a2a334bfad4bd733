"""The command line of ``python -m jaxllm``.

``python -m jaxllm info`` prints versions, devices, the CUDA extension and the selected backend.
``python -m jaxllm check-llmc CHECKPOINT STATE`` compares GPT-2 with a debug state of llm.c.
``python -m jaxllm plan --model 3.1-8b --mesh fsdp=8`` predicts memory, communication and time of a
training step, without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxllm
from jaxllm.convert import llmc_check
from jaxllm.core import backend, ffi

_PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy", "optax")


def info() -> str:
    """Versions, devices, the CUDA extension's state, and the backend that ``auto`` selects."""
    lines = [f"jaxllm      {jaxllm.__version__}", f"python      {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            lines.append(f"{package:<11} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    lines += [f"device      {d.id}: {d.device_kind} ({d.platform})" for d in jax.local_devices()]

    facts = ffi.build_facts()
    if facts:
        lines.append(
            f"extension   built with CUDA {facts['cuda']} for {facts['architectures']}, "
            f"with the FFI headers of jaxlib {facts['jaxlib']}"
        )
    if reason := ffi.unavailable_reason():
        lines.append(f"extension   unavailable: {reason}")
    if gpus := ffi.devices():
        lines += [f"gpu         {_describe(gpu)}" for gpu in gpus]
        reason = ffi.no_hopper_reason()
        lines.append(f"hopper      its kernels {'run' if reason is None else f'do not: {reason}'}")

    try:
        lines.append(f"backend     {backend.resolve()} is selected")
    except ValueError as error:  # of the environment variable
        lines.append(f"backend     {error}")
    lines.append(f"auto        {_auto()}")
    return "\n".join(lines)


def _describe(gpu: ffi.Device) -> str:
    """The properties of a GPU that select its kernels."""
    code = f"the extension's code for sm_{gpu.image}{'a' if gpu.has_sm90a else ''}"
    return (
        f"sm_{gpu.capability}, {gpu.multiprocessors} SMs, {gpu.shared_bytes >> 10} KiB of shared "
        f"memory per CTA; runs {code if gpu.image else 'no code of the extension'}"
    )


def _auto() -> str:
    """The backend that ``auto`` selects on the default device, for an op of all backends."""
    x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((128,), jnp.bfloat16)
    explanation = jaxllm.explain(
        lambda x, scale: jaxllm.ops.rms_norm(x, scale, backend="auto"), x, scale
    )
    (call,) = explanation.calls
    device = jax.default_backend()
    if device != "gpu":
        return f"{call.fallback}, because the default device is a {device} and not an NVIDIA GPU"
    reasons = "; ".join(f"not {name}: {why}" for name, why in call.rejected)
    return f"{call.on_gpu}{', ' + reasons if reasons else ', the first of its preference'}"


def _add_plan(commands: Any) -> None:
    """Adds the subcommand ``plan``."""
    plan = commands.add_parser(
        "plan", help="predict memory, communication and time of a training step"
    )
    plan.add_argument("--model", required=True, help="a preset: 3.1-8b, gpt2:d12, llama3:d12")
    plan.add_argument(
        "--mesh",
        default="data=1",
        help="such as fsdp=4,tensor=2; axes: data, fsdp, context, tensor; default: one GPU",
    )
    plan.add_argument(
        "--batch-size", type=int, help="sequences of a microbatch, of all GPUs; default: what fits"
    )
    plan.add_argument("--seq-len", type=int, help="default: 1024 of GPT-2, 4096 of Llama")
    plan.add_argument("--gpu", choices=("h100", "h200"), default="h100")
    plan.add_argument(
        "--remat",
        nargs="?",
        const="blocks",
        choices=("blocks", "blocks_but_attention"),
        help="recompute blocks in the backward pass, or all of them but attention",
    )
    plan.add_argument("--accumulate", type=int, default=1, help="microbatches of a step")
    plan.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    plan.add_argument(
        "--interconnect", type=float, metavar="GB/S", help="between hosts, per GPU; default: 50"
    )


def _plan(options: argparse.Namespace) -> str:
    """The text of the subcommand ``plan``."""
    from jaxllm.training.plan_report import plan_text  # needs optax; info does not

    given = {name: x for name, x in vars(options).items() if name != "command"}
    saves_attention = options.remat == "blocks_but_attention"
    return plan_text(**given | {"remat": bool(options.remat), "saves_attention": saves_attention})


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m jaxllm")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="print versions, devices, the extension and the backend")
    check = commands.add_parser("check-llmc", help="compare GPT-2 with a debug state of llm.c")
    check.add_argument("checkpoint", help="such as gpt2_124M.bin")
    check.add_argument("debug_state", help="such as gpt2_124M_debug_state.bin")
    check.add_argument("--dtype", choices=tuple(llmc_check.TOLERANCES), default="float32")
    check.add_argument("--backend", choices=backend.BACKENDS, default="auto")
    check.add_argument(
        "--tolerance",
        type=float,
        help="the largest relative error; default: by the dtype",
        metavar="SHARE",
    )
    _add_plan(commands)
    options = parser.parse_args(argv)
    if options.command == "info":
        print(info())
        return
    if options.command == "plan":
        try:
            print(_plan(options))
        except (ImportError, ValueError) as error:
            parser.error(str(error))
        return
    try:
        with jaxllm.use_backend(options.backend):
            passed, table = llmc_check.check(
                options.checkpoint,
                options.debug_state,
                dtype=options.dtype,
                tolerance=options.tolerance,
            )
    except (OSError, ValueError, jaxllm.BackendError) as error:
        parser.error(str(error))
    print(table)
    if not passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
