"""The benchmarks' timing, op rows and peers."""

import argparse
import csv
import dataclasses
import functools
import importlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxllm.ops
from benchmarks import ops, peer_ops, peers, timing
from jaxllm.testing import Case, Integers, Normal, cotangents_like, make_inputs

CASES = [
    case
    for family in ops.families()
    for case in importlib.import_module(f"jaxllm.ops.{family}.cases").CASES
]


pytestmark = pytest.mark.usefixtures("small_processes")


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def small_case(op):
    return next(case for case in CASES if case.op == op and not case.large)


# Timing


def test_split_gives_the_busy_time_of_each_repetition():
    # Two kernels per repetition. In the second repetition their overlap counts once.
    events = [(0, 1000, "a"), (1500, 2000, "b"), (10000, 1000, "a"), (10500, 2000, "b")]
    times, note = timing.split([timing.Event(*event) for event in reversed(events)], 2)
    assert times == (3.0, 2.5)
    assert note == "kernels=2"


@pytest.mark.parametrize(
    "names", [("a", "b", "a"), ("a", "b", "a", "a")], ids=["count", "other_kernels"]
)
def test_split_falls_back_to_the_mean_with_a_note(names):
    events = [timing.Event(i * 100, 50, name) for i, name in enumerate(names)]
    times, note = timing.split(events, 2)
    assert times == (pytest.approx(len(names) * 50 / 2 / 1e3),)
    assert "mean only" in note


def test_read_planes_reads_only_gpu_streams():
    def line(name, *starts):
        events = [SimpleNamespace(start_ns=s, duration_ns=5.0, name=name) for s in starts]
        return SimpleNamespace(name=name, events=events)

    planes = [
        SimpleNamespace(name="/host:CPU", lines=[line("Stream #1", 0.0)]),
        SimpleNamespace(
            name="/device:GPU:0",
            lines=[
                line("XLA Modules", 1.0),
                line("XLA Ops", 1.0),
                line("Stream #13(Compute)", 9.0, 1.0),
                line("Stream #14(MemcpyD2D)", 4.0),
            ],
        ),
        SimpleNamespace(name="/device:GPU:10", lines=[line("Stream #13", 7.0)]),
    ]
    assert [event.start_ns for event in timing.read_planes(planes)] == [1.0, 4.0, 7.0, 9.0]
    assert [event.start_ns for event in timing.read_planes(planes, gpu="10")] == [7.0]


def test_communication_is_exposed_where_nothing_runs_beside_it():
    kernels = [(0, 4, "gemm"), (2, 4, "ncclDevKernel"), (5, 1, "gemm"), (8, 3, "ncclDevKernel")]
    assert timing.exposed_ns([timing.Event(*kernel) for kernel in kernels]) == 1 + 3


def test_trace_without_kernels_falls_back_to_wall_time(monkeypatch, capsys):
    monkeypatch.setattr(timing, "read_planes", lambda *_: [])
    fn = jax.jit(jnp.sin)
    with pytest.raises(timing.NoKernelsError, match="host"):
        timing.record_jax(lambda: fn(jnp.ones(8)).block_until_ready())
    result = timing.time_jax(fn, [(jnp.ones(8),), (jnp.ones(8),)], repetitions=2, timer="trace")
    assert result.timer == "wall"
    assert len(result.times_us) == 2
    assert "falling back" in capsys.readouterr().err


def test_torch_trace_annotations_are_ignored():
    def event(kind, start, ph="X"):
        return {"ph": ph, "cat": kind, "ts": start, "dur": 2.0, "name": kind}

    kinds = ("gpu_user_annotation", "kernel", "gpu_memset", "cuda_runtime", "gpu_memcpy")
    trace = {"traceEvents": [event(kind, i) for i, kind in enumerate(kinds)] + [{"ph": "M"}]}
    assert timing.read_chrome_trace(trace) == [
        timing.Event(1000, 2000, "kernel"),
        timing.Event(2000, 2000, "gpu_memset"),
        timing.Event(4000, 2000, "gpu_memcpy"),
    ]


def test_input_sets_exceed_the_l2_cache():
    assert timing.number_of_sets(100 * 10**6) == (3, "")
    assert timing.number_of_sets(10**9) == (2, "")
    assert timing.number_of_sets(1000) == (timing.MAX_SETS, "inputs fit in L2")
    assert timing.number_of_sets(100 * 10**6, least=11) == (11, "")
    assert timing.number_of_sets(100 * 10**6, least=100) == (100, "")


# jaxllm's ops


@pytest.mark.parametrize(
    ("op", "outputs", "statistics"), [("rms_norm", 1, 1), ("add_layer_norm", 2, 2)]
)
def test_timed_forward_saves_residuals_without_copies(op, outputs, statistics):
    case = small_case(op)
    inputs = make_inputs(case, "float32")
    shapes = [x.shape for x in jax.tree.leaves(ops.forward_call(case, "pallas")(*inputs))]
    assert shapes == outputs * [inputs[0].shape] + statistics * [inputs[0].shape[:-1]]
    # XLA fuses more without the statistics, so it is timed without them.
    assert len(jax.tree.leaves(ops.forward_call(case, "xla")(*inputs))) == outputs


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm"])
def test_timed_backward_excludes_the_forward(op, backend):
    case = small_case(op)
    inputs = make_inputs(case, "float32")
    outputs, pullback = ops.make_pullback(case, backend)(*inputs)
    cotangents = cotangents_like(outputs)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(pullback))
    # The forward computes a square root; the backward reads it from the residuals.
    forward = ops.forward_call(case, backend).lower(*inputs).as_text()
    backward = ops.backward_call().lower(pullback, cotangents).as_text()
    assert "rsqrt" in forward
    assert "rsqrt" not in backward
    # dx is one output, even if two inputs share it.
    gradients = ops.backward_call()(pullback, cotangents)
    shapes = [gradient.shape for gradient in gradients]
    assert shapes == [inputs[0].shape, inputs[-1].shape, inputs[-1].shape]


def test_integer_inputs_get_no_gradient(monkeypatch):
    def take(x, index, *, backend):
        return x[index]

    monkeypatch.setattr(ops.jaxllm.ops, "take", take, raising=False)
    case = Case("take", "small", {"x": Normal((5, 3)), "index": Integers((4,), high=5)})
    outputs, pullback = ops.make_pullback(case, "xla")(*make_inputs(case, "float32"))
    (gradient,) = ops.backward_call()(pullback, cotangents_like(outputs))
    assert gradient.shape == (5, 3)


def test_ops_smoke_run_writes_all_rows(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    command = ["norm", "--smoke", "--op", "rms_norm", "--csv", str(path)]
    assert ops.main(command) == 0
    rows = read_csv(path)
    assert tuple(rows[0]) == ops.COLUMNS
    expected = {
        (direction, name)
        for direction in ops.DIRECTIONS
        for name in (*ops.BACKENDS, *peer_ops.PEERS["rms_norm"])
    }
    assert {(row["direction"], row["implementation"]) for row in rows} == expected
    for row in rows:
        assert row["note"]
        if row["median_us"]:
            assert 0 < float(row["p20_us"]) <= float(row["median_us"]) <= float(row["p80_us"])
            assert row["timer"] == "wall"
    assert all(row["median_us"] for row in rows if row["implementation"] in ("xla", "pallas"))
    assert "rms_norm gpt2_row 3x3x768 bfloat16 backward" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_forward_and_backward_are_timed_in_one_program(backend):
    case = small_case("cross_entropy")
    options = argparse.Namespace(direction=["forward", "backward", "gradient"])
    assert ops.directions_of(case, options) == ["forward", "gradient"]
    assert ops.directions_of(small_case("rms_norm"), options) == ["forward", "backward"]
    logits, labels = make_inputs(case, "float32")
    expected = jax.value_and_grad(
        lambda z: jaxllm.ops.cross_entropy(z, labels, **case.static, backend="xla")
    )(logits)
    loss, (dlogits,) = ops.gradient_call(case, backend)(logits, labels)
    assert jnp.allclose(loss, expected[0], rtol=1e-5)
    assert jnp.allclose(dlogits, expected[1], rtol=1e-5, atol=1e-7)
    result = ops.time_ours(case, backend, "float32", "gradient", timer="wall", smoke=True)
    assert len(result.times_us) == 3
    assert "temporary GiB=" in result.note


def assert_torch_matches(case):
    torch = pytest.importorskip("torch")
    inputs = make_inputs(case, "float32")
    ours = jax.tree.leaves(ops.op_call(case, "xla")(*inputs))
    given = jax.tree.map(lambda x: torch.tensor(x.tolist()).reshape(x.shape), inputs)
    theirs = peer_ops.torch_ops()[case.op](*given, **peers._peer_options(case))
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    for our, their in zip(ours, theirs, strict=True):
        assert jnp.allclose(our, jnp.asarray(their.numpy()), atol=1e-4), str(case)


def test_peers_match_the_ops():
    pytest.importorskip("torch")
    for op in peer_ops.torch_ops():
        assert_torch_matches(small_case(op))


@pytest.mark.parametrize(
    "name",
    [
        *("self_attention-grouped", "self_attention-window", "self_attention-segments"),
        *("attention_block-grouped", "attention_block-rms", "attention_block-causal"),
        *("attention_block-no_bias", "ffn_block-no_bias", "ffn_block-rms_gelu"),
        *("ffn_block-swiglu", "ffn_block-layer_swiglu", "ffn_block-no_rows"),
    ],
)
def test_block_peers_take_the_options_and_nested_inputs(name):
    assert_torch_matches(next(case for case in CASES if str(case) == name))


@pytest.mark.parametrize("op", ["attention_block", "ffn_block"])
def test_blocks_are_timed_with_the_gradients_of_nested_inputs(op):
    torch = pytest.importorskip("torch")
    case = small_case(op)
    arrays = len(jax.tree.leaves(make_inputs(case, "float32")))
    outputs, pullback = ops.make_pullback(case, "xla")(*make_inputs(case, "float32"))
    assert len(ops.backward_call()(pullback, cotangents_like(outputs))) == arrays
    inputs = peers._make_inputs(case, "float32", "cpu")
    gradients = peers._backward_call(peers._build("torch eager", case, smoke=True), inputs)()
    assert len(gradients) == arrays and all(isinstance(x, torch.Tensor) for x in gradients)


def test_every_peer_belongs_to_an_op_with_cases():
    assert {*peer_ops.PEERS, *peer_ops.JAX_PEERS} <= {case.op for case in CASES}


def test_optax_matches_adamw_update():
    case = next(case for case in CASES if str(case) == "adamw_update-awkward_tree")
    inputs = make_inputs(case, "float32")
    case = dataclasses.replace(case, in_place=(), static=case.static | {"copy_dtype": "bfloat16"})
    ours = ops.forward_call(case, "xla")(*inputs)
    theirs = ops.forward_call(case, "optax")(*inputs)
    close = jax.tree.map(functools.partial(jnp.allclose, atol=1e-5), ours, theirs)
    assert all(jax.tree.leaves(close))


@pytest.mark.parametrize(
    "name", ["causal_window", "symmetric_window", "two_sided_window", "packed_documents"]
)
def test_masked_cudnn_attention_matches_flash_attention(name, monkeypatch):
    attention = jax.nn.dot_product_attention  # in plain JAX, so that it runs on a CPU
    anywhere = lambda *qkv, implementation, **options: attention(*qkv, **options)  # noqa: E731
    monkeypatch.setattr(jax.nn, "dot_product_attention", anywhere)
    case = next(case for case in CASES if str(case) == f"flash_attention-{name}")
    if case.inputs["q"].shape[1] != case.inputs["k"].shape[1]:
        case = dataclasses.replace(case, inputs=dict.fromkeys("qkv", case.inputs["q"]))
    inputs = make_inputs(case, "float32")
    ours, theirs = (
        ops.forward_call(case, implementation)(*inputs)
        for implementation in ("xla", "cudnn with a mask")
    )
    assert jnp.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("timer", timing.TIMERS)
def test_in_place_op_is_timed_on_its_previous_output(timer):
    seen = []

    @functools.partial(jax.jit, donate_argnums=0)
    def count(x, unused):
        return x + 1, unused

    def renew(arguments, result):
        seen.append(float(result[0]))
        return result[0].copy(), arguments[1]

    sets = [(jnp.zeros(()), jnp.ones(())), (jnp.full((), 100.0), jnp.ones(()))]
    timing.time_jax(count, sets, repetitions=2, timer=timer, renew=renew)
    assert seen[:4] == [1.0, 101.0, 2.0, 102.0]
    assert not sets[1][1].is_deleted()


def test_op_without_derivative_has_only_forward_rows(tmp_path):
    path = tmp_path / "rows.csv"
    command = ["optimizer", "--op", "global_norm", "--smoke", "--no-peers", "--csv", str(path)]
    assert ops.main(command) == 0
    rows = [(row["direction"], row["implementation"]) for row in read_csv(path)]
    assert sorted(rows) == [("forward", name) for name in sorted(ops.BACKENDS)]


def test_shape_of_a_tree_is_its_size():
    assert ops.describe_shape(Normal((8, 768))) == "8x768"
    assert ops.describe_shape({"a": Normal((2, 3)), "b": Normal(())}) == "2 arrays of 7"


def test_constant_gradients_are_not_timed():
    torch = pytest.importorskip("torch")
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    with pytest.raises(ValueError, match="there is nothing to time"):
        peers._backward_call(lambda x, y: x + y, (x, y))
    case = small_case("add")
    out, pullback = ops.make_pullback(case, "xla")(*make_inputs(case, "float32"))
    with pytest.raises(ValueError, match="there is nothing to time"):
        ops.backward_call()(pullback, cotangents_like(out))


def test_gradients_that_are_cotangents_are_left_out():
    case = small_case("bias_add")
    out, pullback = ops.make_pullback(case, "xla")(*make_inputs(case, "float32"))
    gradients = ops.backward_call()(pullback, cotangents_like(out))
    assert [gradient.shape for gradient in gradients] == [(768,)]


def test_missing_peer_rows_have_a_reason():
    lines = [
        "a library's chatter",
        "[1]",
        '{"kind": "limits", "copy_gb_per_s": 2.0, "matmul_tflop_per_s": 3.0, "source": "torch"}',
        '{"kind": "failure", "op": "o", "case": "c", "direction": "d", "peer": "p", "reason": "r"}',
    ]
    limits, results = ops.read_peers(lines)
    assert limits == timing.Limits(2.0, 3.0, "torch")
    assert results == {("o", "c", "d", "p"): "r"}


def test_row_rates_are_computed_from_the_median():
    case = next(case for case in CASES if str(case) == "layer_norm-gpt2_124m")
    key = (case.op, case.name, "forward", "cuda")
    limits = timing.Limits(4000.0, 800.0, "torch")
    row = ops.make_row(case, "bfloat16", key, timing.Timing((100.0,), "trace"), limits)
    assert row["bytes"] == 2 * 65536 * 768 * 2
    assert float(row["gb_per_s"]) == pytest.approx(row["bytes"] / 100e-6 / 1e9, rel=1e-4)
    assert float(row["share_of_copy"]) == pytest.approx(2013.3 / 4000, rel=1e-2)


def test_row_of_a_matmul_has_its_rate():
    case = next(case for case in CASES if str(case) == "matmul-square_4096")
    key = (case.op, case.name, "forward", "cuda")
    limits = timing.Limits(4000.0, 800.0, "torch")
    row = ops.make_row(case, "bfloat16", key, timing.Timing((200.0,), "trace", "2 sets"), limits)
    assert row["note"] == "687.2 TFLOP/s; 2 sets"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "invalid choice"),
        (["norm", "--smoke", "--op", "nothing"], "--op 'nothing' is none of layer_norm"),
        (["norm", "--smoke", "--case", "nothing"], "--case 'nothing' is none of gpt2_124m"),
        (["norm", "--smoke", "--backend", "auto"], "invalid choice"),
        (["norm", "--smoke", "--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["norm", "--smoke", "--sets", "-1"], "--sets is -1; it must be at least 1"),
        (["norm", "--smoke", "--least-sets", "0"], "--least-sets is 0; it must be at least 1"),
    ],
)
def test_ops_command_line_rejects_invalid_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        ops.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.no_gpu
def test_ops_without_a_gpu_suggests_smoke(capsys):
    with pytest.raises(SystemExit, match="2"):
        ops.main(["norm"])
    assert "--smoke" in capsys.readouterr().err


def test_interrupted_run_keeps_its_rows(monkeypatch):
    def time_ours(case, backend, *_, **__):
        if backend == "pallas":
            raise KeyboardInterrupt
        return timing.Timing((1.0,), "wall")

    monkeypatch.setattr(ops, "time_ours", time_ours)
    case = importlib.import_module("jaxllm.ops.norm.cases").CASES[0]
    options = argparse.Namespace(
        backend=["cuda", "pallas", "xla"],
        direction=["forward"],
        dtype="float32",
        no_peers=True,
        sets=2,
        least_sets=2,
        smoke=True,
        timer="wall",
    )
    assert [key[3] for key in ops.run_ours([case], options)] == ["cuda"]


def test_complete_rounds_are_pooled(monkeypatch, tmp_path):
    times = iter((4.0, 1.0, 3.0, 2.0))  # for cuda and xla, two rounds; the third is interrupted

    def time_ours(case, backend, *_, **__):
        try:
            return timing.Timing((next(times),), "wall")
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(ops, "time_ours", time_ours)
    command = ["norm", "--smoke", "--no-peers", "--op", "rms_norm", "--case", "gpt2_row"]
    command += ["--direction", "forward", "--backend", "cuda", "xla", "--rounds", "9"]
    assert ops.main([*command, "--csv", str(tmp_path / "rows.csv")]) == 0
    with (tmp_path / "rows.csv").open() as file:
        medians = {row["implementation"]: row["median_us"] for row in csv.DictReader(file)}
    assert medians == {"cuda": "3.50", "xla": "1.50"}


def test_failure_in_one_round_fails_the_row():
    key = ("rms_norm", "gpt2_row", "forward", "cuda")
    once: ops.Results = {key: timing.Timing((1.0,), "wall")}
    twice: ops.Results = {key: timing.Timing((2.0,), "wall")}
    assert ops.pool({}, once) == once
    assert ops.pool(once, twice) == {key: timing.Timing((1.0, 2.0), "wall")}
    failed: ops.Results = {key: "no kernel"}
    assert ops.pool(once, failed) == ops.pool(failed, once) == failed


def test_long_calls_have_few_repetitions(monkeypatch):
    clock = iter(range(0, 10**6, 20))  # 20 seconds between two reads
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert len(timing._wall(lambda count: None, 1, 30).times_us) == 3
