"""Times our backends and their peers on one family of ops, in one run on one GPU.

``python -m benchmarks.ops norm --case gpt2_124m`` prints one table for each case and direction, and
appends its rows to ``benchmarks/results/<gpu>.csv``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxllm.ops
from benchmarks import peers, timing
from benchmarks.arguments import check_counts, check_csv
from benchmarks.peer_ops import JAX_PEERS, PEERS
from benchmarks.record import PROVENANCE, ROOT, append_rows, format_table, provenance, slug
from jaxllm.testing import DTYPES, Case, Normal, cotangents_like, make_inputs

DIRECTIONS = ("forward", "backward")
# Outputs and gradients in one program, for an op whose forward computes the gradients too.
GRADIENT = "gradient"
BACKENDS = ("cuda", "pallas", "xla")

COLUMNS = (
    *PROVENANCE,
    *("op", "case", "shape", "dtype", "direction", "implementation"),
    *("median_us", "p20_us", "p80_us", "bytes", "gb_per_s", "share_of_copy"),
    *("copy_gb_per_s", "matmul_tflop_per_s", "timer", "note"),
)

# The key of a measurement; the value is a Timing, or the reason for a failure.
Key = tuple[str, str, str, str]  # op, case, direction, implementation
Results = dict[Key, "timing.Timing | str"]


# Selection


def families() -> tuple[str, ...]:
    """The families of ops that have cases."""
    names = (module.name for module in pkgutil.iter_modules(jaxllm.ops.__path__) if module.ispkg)
    return tuple(name for name in names if importlib.util.find_spec(f"jaxllm.ops.{name}.cases"))


def add_selection_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that select what to time; the peers' process takes them too."""
    parser.add_argument("family", choices=families(), help="the family of ops")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="default: all large cases")
    parser.add_argument("--op", nargs="+", metavar="NAME", help="default: all of the family")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--direction", nargs="+", choices=(*DIRECTIONS, GRADIENT), default=[*DIRECTIONS, GRADIENT]
    )
    parser.add_argument(
        "--timer", choices=timing.TIMERS, help="default: the device's trace; wall with --smoke"
    )
    parser.add_argument(
        "--least-sets",
        type=int,
        default=2,
        help="the minimum number of input sets; the time of a memory-bound call varies by a few "
        "percent with the addresses, and many sets average that out; default: %(default)s",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on any machine")


def select_cases(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Case]:
    """The cases that the options select; an unknown name is a command-line error."""
    cases = importlib.import_module(f"jaxllm.ops.{options.family}.cases").CASES
    for option, wanted, known in (
        ("--op", options.op, [case.op for case in cases]),
        ("--case", options.case, [case.name for case in cases]),
    ):
        for name in wanted or ():
            if name not in known:
                parser.error(f"{option} {name!r} is none of {', '.join(dict.fromkeys(known))}")
    cases = [case for case in cases if not options.op or case.op in options.op]
    if options.case:
        cases = [case for case in cases if case.name in options.case]
    elif options.smoke:
        small = {case.op: case for case in reversed(cases) if not case.large}
        cases = [case for case in cases if case is small.get(case.op)]
    else:
        cases = [case for case in cases if case.large]
    if not cases:
        parser.error("no case matches both --op and --case")
    return cases


def directions_of(case: Case, options: argparse.Namespace) -> list[str]:
    """The requested directions that a case has."""
    has_gradient = bool(case.gradient_elements or case.gradient_flops)
    known = ("forward", GRADIENT) if has_gradient else DIRECTIONS
    known = known if case.has_backward else ("forward",)
    return [direction for direction in options.direction if direction in known]


# Ours


def implementations(case: Case, options: argparse.Namespace) -> list[str]:
    """Our backends, and the peers that are JAX functions, which run in our process."""
    return [*options.backend, *([] if options.no_peers else JAX_PEERS.get(case.op, ()))]


def op_call(case: Case, backend: str) -> Callable[..., Any]:
    """The case's call with its options, or a peer that is a JAX function."""
    if backend in JAX_PEERS.get(case.op, ()):
        return functools.partial(JAX_PEERS[case.op][backend], **case.static)
    op = case.call or getattr(jaxllm.ops, case.op)
    return functools.partial(op, **case.static, backend=backend)


def forward_call(case: Case, backend: str) -> Callable[..., Any]:
    """The jitted op, as a training step calls it; inputs updated in place are donated."""
    if case.saves_more and backend != "xla":
        return jax.jit(functools.partial(_forward_and_saved, _vjp(case, backend)))
    names = list(case.inputs)
    donated = tuple(names.index(name) for name in case.in_place)
    return jax.jit(op_call(case, backend), donate_argnums=donated)


def _forward_and_saved(vjp: Callable[..., Any], *inputs: Any) -> tuple[Any, list[jax.Array]]:
    """The outputs, and the residuals of the backward that are neither inputs nor outputs.

    An input that the program also returned would be copied.
    """
    outputs, pullback = vjp(*inputs)
    there = {id(x) for x in jax.tree.leaves((inputs, outputs))}
    return outputs, [x for x in jax.tree.leaves(pullback) if id(x) not in there]


def replace_inputs(case: Case, inputs: tuple[Any, ...], outputs: Any) -> tuple[Any, ...]:
    """The inputs of the next call: outputs replace the inputs that the op updates in place."""
    replaced = dict(zip(case.in_place, outputs, strict=False))  # there may be more outputs
    return tuple(replaced.get(name, x) for name, x in zip(case.inputs, inputs, strict=True))


def backward_call() -> Callable[..., Any]:
    """A jitted call of a pullback, which is an argument: the program has no part of the forward."""

    def backward(pullback: Callable[..., Any], cotangents: Any) -> list[jax.Array]:
        gradients = jax.tree.leaves(pullback(cotangents))
        # XLA would copy an array that is returned twice, or that is also an argument. A model's
        # backward and torch do not. So a gradient that two inputs share is returned once, and an
        # unchanged cotangent is not returned.
        computed = {id(gradient): gradient for gradient in gradients}
        for cotangent in jax.tree.leaves(cotangents):
            computed.pop(id(cotangent), None)
        if not computed:
            raise ValueError("every gradient is an unchanged cotangent: there is nothing to time")
        return list(computed.values())

    return jax.jit(backward)


def make_pullback(case: Case, backend: str) -> Callable[..., tuple[Any, Any]]:
    """A jitted function from inputs to outputs and pullback, for the inputs with a gradient."""
    # One trace for all sets gives pullbacks of one structure, so the backward compiles once.
    return jax.jit(_vjp(case, backend))


def _vjp(case: Case, backend: str) -> Callable[..., tuple[Any, Any]]:
    op = op_call(case, backend)
    is_differentiable = [
        isinstance(spec, Normal) and not spec.constant
        for spec in jax.tree.leaves(tuple(case.inputs.values()))
    ]

    def forward(*inputs: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(inputs)

        def of_differentiable(*values: jax.Array) -> Any:
            given = iter(values)
            merged = [
                next(given) if wanted else x
                for x, wanted in zip(leaves, is_differentiable, strict=True)
            ]
            return op(*tree.unflatten(merged))

        primals = [x for x, wanted in zip(leaves, is_differentiable, strict=True) if wanted]
        return jax.vjp(of_differentiable, *primals)

    return forward


def gradient_call(case: Case, backend: str) -> Callable[..., Any]:
    """The jitted op and its gradients, which may overwrite donated inputs."""
    pullback = make_pullback(case, backend)

    def both(*inputs: jax.Array) -> tuple[Any, Any]:
        outputs, pull = pullback(*inputs)
        return outputs, pull(jax.tree.map(jnp.ones_like, outputs))

    donated = [i for i, name in enumerate(case.inputs) if name in case.donated]
    return jax.jit(both, donate_argnums=donated)


def time_gradient(
    case: Case, backend: str, dtype: str, *, timer: str, smoke: bool
) -> timing.Timing:
    """As :func:`time_ours`, for outputs and gradients together; the note has the memory."""
    call = gradient_call(case, backend).lower(*make_inputs(case, dtype)).compile()
    result = timing.time_jax_consuming(
        call,
        lambda seed: make_inputs(case, dtype, seed),
        repetitions=3 if smoke else 10,
        timer=timer,
    )
    memory = call.memory_analysis()
    extra = "" if memory is None else f"temporary GiB={memory.temp_size_in_bytes / 2**30:.3f}"
    return dataclasses.replace(result, note="; ".join(filter(None, (result.note, extra))))


def time_ours(
    case: Case,
    backend: str,
    dtype: str,
    direction: str,
    *,
    timer: str,
    smoke: bool,
    least_sets: int = 2,
    most_sets: int = timing.MAX_SETS,
) -> timing.Timing:
    """The device time of one backend on one case, over ``least_sets`` to ``most_sets`` input sets.

    Raises:
        Exception: Any failure of the backend; the caller reports it.
    """
    renew = None
    if direction == GRADIENT:
        return time_gradient(case, backend, dtype, timer=timer, smoke=smoke)
    if direction == "forward":
        fn = forward_call(case, backend)
        if case.in_place:
            renew = functools.partial(replace_inputs, case)

        def make_set(seed: int) -> tuple[Any, ...]:
            return make_inputs(case, dtype, seed)
    else:
        fn, forward = backward_call(), make_pullback(case, backend)

        def make_set(seed: int) -> tuple[Any, ...]:
            outputs, pullback = forward(*make_inputs(case, dtype, seed))
            return pullback, cotangents_like(outputs, seed + 1)

    first = make_set(0)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    count, note = timing.number_of_sets(size, least_sets)
    count = min(count, 2 if smoke else most_sets)
    sets = [first] + [make_set(seed) for seed in range(1, count)]
    repetitions = 3 if smoke else 30
    result = timing.time_jax(fn, sets, repetitions=repetitions, timer=timer, renew=renew)
    return dataclasses.replace(result, note="; ".join(filter(None, (result.note, note))))


def our_calls(cases: Sequence[Case], options: argparse.Namespace) -> list[tuple[Case, Key]]:
    """The measurements of our backends."""
    return [
        (case, (case.op, case.name, direction, backend))
        for case in cases
        for direction in directions_of(case, options)
        for backend in implementations(case, options)
    ]


def run_ours(cases: Sequence[Case], options: argparse.Namespace) -> Results:
    """Times every requested backend; the result of a failure is its reason.

    Ctrl-C ends the timing and keeps the results so far.
    """
    results: Results = {}
    for case, key in our_calls(cases, options):
        *_, direction, backend = key
        try:
            results[key] = time_ours(
                case,
                backend,
                options.dtype,
                direction,
                timer=options.timer,
                smoke=options.smoke,
                least_sets=options.least_sets,
                most_sets=options.sets,
            )
        except KeyboardInterrupt:
            print("interrupted: the results so far are kept", file=sys.stderr)
            return results
        except Exception as error:  # a missing kernel is a row, not the end of the run
            results[key] = peers.reason(error)
        _report(key, results[key])
    return results


def _report(key: Key, result: timing.Timing | str) -> None:
    """Prints a result at once, so that a crash of a later kernel does not lose it."""
    text = result if isinstance(result, str) else f"{result.percentile(50):.2f} us {result.timer}"
    print(f"{' '.join(key)}: {text}", file=sys.stderr, flush=True)


def pool(results: Results, more: Results) -> Results:
    """Combines the results of two rounds; a failure in either is a failure."""
    pooled = dict(more)
    for key, first in results.items():
        then = more.get(key)
        if isinstance(first, timing.Timing) and isinstance(then, timing.Timing):
            pooled[key] = dataclasses.replace(then, times_us=first.times_us + then.times_us)
        elif isinstance(first, str) or then is None:
            pooled[key] = first
    return pooled


# Peers


def run_peers(
    cases: Sequence[Case], options: argparse.Namespace
) -> tuple[timing.Limits | None, Results]:
    """Runs the peers' process; a measurement that it does not report is a row with the reason."""
    command = [sys.executable, "-m", "benchmarks.peers", options.family, "--timer", options.timer]
    command += ["--dtype", options.dtype, "--direction", *options.direction]
    command += ["--least-sets", str(options.least_sets)]
    command += ["--case", *dict.fromkeys(case.name for case in cases)]
    command += ["--op", *dict.fromkeys(case.op for case in cases)]
    command += ["--smoke"] if options.smoke else []
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory) / "out", Path(directory) / "err"
        with out.open("w") as stdout, err.open("w") as stderr:
            # It imports JAX to read our cases; JAX must leave the GPU to torch.
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=stdout, stderr=stderr, env=environment
            )
            try:
                status = f"exit status {process.wait(options.peer_timeout)}"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = f"stopped after {options.peer_timeout} s"
        lines, log = out.read_text().splitlines(), err.read_text().strip().splitlines()
    if process.returncode != 0:
        print("\n".join(["the peers' process failed:", *log[-20:]]), file=sys.stderr)
    limits, results = read_peers(lines)
    unreported = "; ".join([f"no report: {status}", *log[-1:]])[:200]
    for case in cases:
        for direction in directions_of(case, options):
            for peer in PEERS.get(case.op, ()):
                key = (case.op, case.name, direction, peer)
                _report(key, results.setdefault(key, unreported))
    return limits, results


def read_peers(lines: Sequence[str]) -> tuple[timing.Limits | None, Results]:
    """Parses the peers' output; lines that are no report, such as a library's, are skipped."""
    limits: timing.Limits | None = None
    results: Results = {}
    for line in lines:
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue
        kind = fields.pop("kind", None) if isinstance(fields, dict) else None
        if kind == "limits":
            limits = timing.Limits(**fields)
        elif kind in ("timing", "failure"):
            key = tuple(fields.pop(name) for name in ("op", "case", "direction", "peer"))
            if kind == "failure":
                results[key] = fields["reason"]
            else:
                results[key] = timing.Timing(
                    tuple(fields["times_us"]), fields["timer"], fields["note"]
                )
    return limits, results


# Rows and tables


def make_row(
    case: Case, dtype: str, key: Key, result: timing.Timing | str, limits: timing.Limits
) -> dict[str, Any]:
    """One row of the CSV, without its provenance."""
    _, _, direction, implementation = key
    moved = {
        "forward": case.forward_bytes,
        "backward": case.backward_bytes,
        GRADIENT: case.gradient_bytes,
    }[direction](dtype)
    row: dict[str, Any] = {
        "op": case.op,
        "case": case.name,
        "shape": describe_shape(next(iter(case.inputs.values()))),
        "dtype": dtype,
        "direction": direction,
        "implementation": implementation,
        "bytes": moved,
        "copy_gb_per_s": f"{limits.copy_gb_per_s:.1f}",
        "matmul_tflop_per_s": f"{limits.matmul_tflop_per_s:.1f}",
    }
    if isinstance(result, str):
        return row | {"note": result}
    rate = moved / result.percentile(50) / 1e3
    # For GEMMs the rate of operations says more than that of bytes; the row has the run's limit.
    flops = {
        "forward": case.forward_flops,
        "backward": case.backward_flops,
        GRADIENT: case.gradient_flops,
    }[direction]
    speed = f"{flops / result.percentile(50) / 1e6:.1f} TFLOP/s" if flops else ""
    return row | {
        "median_us": f"{result.percentile(50):.2f}",
        "p20_us": f"{result.percentile(20):.2f}",
        "p80_us": f"{result.percentile(80):.2f}",
        "gb_per_s": f"{rate:.1f}",
        "share_of_copy": f"{rate / limits.copy_gb_per_s:.3f}",
        "timer": result.timer,
        "note": "; ".join(filter(None, (speed, result.note))),
    }


def describe_shape(spec: Any) -> str:
    """The shape of an input, such as ``8x768``; for a tree the number of arrays and elements."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(spec)]
    if len(shapes) == 1:
        return "x".join(map(str, shapes[0]))
    return f"{len(shapes)} arrays of {sum(map(math.prod, shapes))}"


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """One table for each case and direction, the fastest first, the failures last."""
    columns = ("implementation", "median_us", "p20_us", "p80_us", "gb_per_s", "share_of_copy")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        names = ("op", "case", "shape", "dtype", "direction")
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    for names, group in groups.items():
        group = sorted(group, key=lambda row: float(row.get("median_us", "inf")))
        cells = [
            [
                *(row.get(column, "-") for column in columns),
                "; ".join(filter(None, (row.get("timer"), row["note"]))),
            ]
            for row in group
        ]
        print("\n" + " ".join(names))
        print(format_table([*columns, "timer, note"], cells))


def main(argv: Sequence[str] | None = None) -> int:
    """Times a family of ops; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__)
    add_selection_arguments(parser)
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--no-peers", action="store_true", help="time our backends alone")
    parser.add_argument(
        "--sets",
        type=int,
        default=timing.MAX_SETS,
        help="the maximum number of input sets, for long calls; default: %(default)s",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="how often to run the peers and then ours; percentiles are over all rounds; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--peer-timeout", type=float, default=400, help="seconds for all peers together"
    )
    parser.add_argument(
        "--csv", type=Path, help="default: benchmarks/results/<gpu>.csv; none with --smoke"
    )
    options = parser.parse_args(argv)
    cases = select_cases(parser, options)
    check_counts(parser, options, "sets", "least_sets", "rounds")
    check_csv(parser, options.csv, COLUMNS)
    # Leaves memory to the peers. XLA reads this when it initializes the device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if jax.default_backend() != "gpu" and not options.smoke:
        parser.error("there is no GPU here; --smoke runs everything on tiny shapes")
    options.timer = options.timer or ("wall" if options.smoke else "trace")

    measured: list[timing.Limits] = []
    results: Results = {}
    for i in range(options.rounds):
        # The peers first: in the first round our process has no memory on the GPU yet.
        limits, peer_results = (None, {}) if options.no_peers else run_peers(cases, options)
        measured += [limits] if limits else []
        if i == 0:
            try:
                measured.append(timing.jax_limits(options.timer, options.smoke))
            except Exception as error:
                if not measured:
                    raise
                print(f"JAX measures no limits: {peers.reason(error)}", file=sys.stderr)
        ours = run_ours(cases, options)
        results = pool(results, ours | peer_results)
        if len(ours) < len(our_calls(cases, options)):
            break  # interrupted
    for found in measured:
        print(
            f"{found.source}: copy {found.copy_gb_per_s:.1f} GB/s,"
            f" bfloat16 matmul {found.matmul_tflop_per_s:.1f} TFLOP/s"
        )
    best = max(measured, key=lambda found: found.copy_gb_per_s)
    print(f"share_of_copy is relative to the copy by {best.source}")

    origin = provenance()
    by_name = {(case.op, case.name): case for case in cases}
    order = {case: i for i, case in enumerate(by_name)}
    directions = (*DIRECTIONS, GRADIENT)
    keys = sorted(results, key=lambda key: (order[key[:2]], directions.index(key[2])))
    rows = [
        origin | make_row(by_name[key[:2]], options.dtype, key, results[key], best) for key in keys
    ]
    print_tables(rows)
    path = options.csv
    if path is None and not options.smoke:
        path = ROOT / "benchmarks" / "results" / f"{slug(origin['gpu'])}.csv"
    if path:
        append_rows(path, COLUMNS, rows)
        print(f"\n{len(rows)} rows appended to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
