"""The text of ``python -m jaxllm plan``: the tables of a :class:`jaxllm.training.plan.Plan`."""

from __future__ import annotations

from typing import Any

from jaxllm.training.parallel import parse_mesh
from jaxllm.training.plan import INTERCONNECT, Plan, make_plan
from jaxllm.training.plan_inputs import GIB, GPU_MEMORY, find_model

# The share of a GPU's memory that JAX allocates by default, and the share that a plan may take
# before its own error (10% on the measured rows) decides whether it fits.
JAX_MEMORY_FRACTION = 0.75
CERTAIN_FRACTION = 0.9


def describe(plan: Plan) -> str:
    """The heading, and the tables of memory, communication and time."""
    return "\n\n".join((_heading(plan), _memory_text(plan), _communication_text(plan), _time(plan)))


def _heading(plan: Plan) -> str:
    name, mesh = f"{plan.model.family}:{plan.model.preset}", plan.mesh
    axes = " ".join(
        f"{axis}={size}" for axis, size in mesh.items() if size > 1 or axis in ("data", "fsdp")
    )
    microbatches = f"{plan.accumulate} microbatches of " if plan.accumulate > 1 else ""
    return (
        f"{name}, {plan.num_params / 1e9:.3f} billion parameters with padding; "
        f"{plan.dtype}{_remat(plan)}\n"
        f"{plan.gpus} {plan.gpu.upper()}, {axes}; "
        f"{microbatches}{plan.batch_size} x {plan.seq_len} tokens, {plan.sequences} x "
        f"{plan.seq_len // mesh['context']} per GPU; {plan.tokens} per step"
        f"{''.join(f'{chr(10)}{note}' for note in _not_split(plan))}"
    )


def _remat(plan: Plan) -> str:
    if not plan.remat:
        return ""
    return ", remat of all but attention" if plan.saves_attention else ", remat"


def _not_split(plan: Plan) -> list[str]:
    """What the axis ``tensor`` does not divide, and each GPU along it therefore has whole."""
    tensor, config = plan.mesh["tensor"], plan.model.config
    if tensor == 1:
        return []
    mlp = getattr(config, "mlp_width", 4 * config.width)
    rows = config.padded_vocab_size
    checks = (
        ("qkv", config.kv_heads, "key heads", "attention and its layers are"),
        ("down", mlp, "columns of the MLP", "the MLP is"),
        ("wte", rows, "rows of the vocabulary", "the token table and the LM head are"),
    )
    return [
        f"tensor={tensor} does not divide the {count} {what}: {layers} replicated along it"
        for layer, count, what, layers in checks
        if layer not in plan.split
    ]


def _memory_text(plan: Plan) -> str:
    table: list[tuple[str, ...]] = [("memory per GPU, GiB", "LM head", "backward", "update")]
    for line in plan.memory:
        sizes = (line.lm_head, line.backward, line.update)
        if any(sizes):
            table.append((line.name, *(f"{size / GIB:.2f}" if size else "-" for size in sizes)))
    table.append(("total", *(f"{size / GIB:.2f}" for size in plan.totals.values())))
    capacity, peak = GPU_MEMORY[plan.gpu], plan.peak
    shown = f"{peak / GIB:.1f} of {capacity / GIB:.0f} GiB"
    if not plan.fits:
        verdict = f"does not fit: {shown}"
        if not plan.remat:
            verdict += (
                "; --remat, fewer sequences per GPU or a larger fsdp, context or tensor take less"
            )
    elif peak > CERTAIN_FRACTION * capacity:
        verdict = f"may not fit: {shown}, within the 10% that a plan may be off"
    else:
        verdict = f"fits: {shown}"
    if plan.fits and peak > JAX_MEMORY_FRACTION * capacity:
        verdict += "\nset XLA_PYTHON_CLIENT_MEM_FRACTION=0.95; JAX takes 0.75 by default"
    return f"{_format(table)}\n{verdict}"


def _communication_text(plan: Plan) -> str:
    if not plan.communication:
        return "communication: none"
    head = ("communication per step and GPU", "of", "axes", "GB sent", "GB exposed", "GB/s", "ms")
    table: list[tuple[str, ...]] = [head]
    for of in plan.communication:
        sizes = (f"{of.sent / 1e9:.2f}", f"{of.exposed / 1e9:.2f}", f"{of.bandwidth / 1e9:.0f}")
        table.append((of.kind, of.of, of.axes, *sizes, f"{of.seconds * 1e3:.1f}"))
    sent = sum(of.sent for of in plan.communication) / 1e9
    exposed = sum(of.exposed for of in plan.communication) / 1e9
    seconds = sum(of.seconds for of in plan.communication)
    table.append(("total", "", "", f"{sent:.2f}", f"{exposed:.2f}", "", f"{seconds * 1e3:.1f}"))
    return _format(table)


def _time(plan: Plan) -> str:
    compute, rate = plan.compute_seconds, plan.rate
    if compute is None or rate is None:
        return f"step time: unknown; no step was measured in {plan.dtype}"
    table: list[tuple[str, ...]] = [("predicted step", "ms", "tokens/s", "of linear scaling")]
    names = {"all overlap": True, "no overlap": False} if plan.communication else {"": True}
    for name, overlap in names.items():
        seconds = plan.step_seconds(overlap=overlap) or compute
        cells = (f"{seconds * 1e3:.1f}", f"{plan.tokens / seconds:.0f}", f"{compute / seconds:.1%}")
        table.append((name or "one GPU", *cells))
    source = (
        f"computation {compute * 1e3:.1f} ms, by MFU {rate.mfu:.3f} of {rate.model} "
        f"{rate.batch_size} x {rate.seq_len} on one {rate.gpu.upper()} (commit {rate.commit})"
    )
    unmeasured = []
    if rate.model != f"{plan.model.family}_{plan.model.preset}":
        unmeasured.append("model")
    if rate.gpu != plan.gpu:
        unmeasured.append("GPU")
    if plan.accumulate > 1 or plan.tokens // plan.gpus != rate.tokens:
        unmeasured.append("batch")
    if unmeasured:
        source += f"\nthis {', '.join(unmeasured)} was not measured; the row is the nearest one"
    if plan.mesh["tensor"] > 1:
        source += "\nthe narrower GEMMs of a shard along tensor are assumed to have the same MFU"
    return f"{_format(table)}\n{source}"


def _format(table: list[tuple[str, ...]]) -> str:
    """Columns with two spaces between, words to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    def cell(i: int, text: str) -> str:
        is_word = i == 0 or table[0][i] == "axes"
        return text.ljust(widths[i]) if is_word else text.rjust(widths[i])

    return "\n".join("  ".join(cell(i, x) for i, x in enumerate(row)).rstrip() for row in table)


def plan_text(model: str, mesh: str, *, interconnect: float | None = None, **options: Any) -> str:
    """The text for the options of a command line.

    Args:
        model: As in :func:`jaxllm.training.plan_inputs.find_model`.
        mesh: As in :func:`jaxllm.training.parallel.parse_mesh`.
        interconnect: GB per second and GPU between hosts; None for the default.
        options: Those of :func:`jaxllm.training.plan.make_plan`.

    Raises:
        ValueError: As these functions.
    """
    rate = INTERCONNECT if interconnect is None else 1e9 * interconnect
    return describe(make_plan(find_model(model), parse_mesh(mesh), interconnect=rate, **options))
