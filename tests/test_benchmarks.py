"""The benchmarks' machinery: everything but the numbers."""

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
from benchmarks import generate, ops, peer_ops, peers, record, timing, train
from jaxllm.models import llama3
from jaxllm.ops import RopeScaling
from jaxllm.testing import Case, Integers, Normal, cotangents_like, error, make_inputs

CASES = [
    case
    for family in ops.families()
    for case in importlib.import_module(f"jaxllm.ops.{family}.cases").CASES
]


@pytest.fixture(autouse=True)
def small_processes(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def small_case(op):
    return next(case for case in CASES if case.op == op and not case.large)


# Timing


def test_split_gives_each_repetition_its_busy_time():
    # Two kernels a repetition; in the second they overlap, and the overlap counts once.
    events = [(0, 1000, "a"), (1500, 2000, "b"), (10000, 1000, "a"), (10500, 2000, "b")]
    times, note = timing.split([timing.Event(*event) for event in reversed(events)], 2)
    assert times == (3.0, 2.5)
    assert note == "kernels=2"


@pytest.mark.parametrize(
    "names", [("a", "b", "a"), ("a", "b", "a", "a")], ids=["count", "other_kernels"]
)
def test_split_falls_back_to_the_mean_and_says_so(names):
    events = [timing.Event(i * 100, 50, name) for i, name in enumerate(names)]
    times, note = timing.split(events, 2)
    assert times == (pytest.approx(len(names) * 50 / 2 / 1e3),)
    assert "mean only" in note


def test_only_stream_lines_of_a_gpu_are_read():
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
    ]
    assert [event.start_ns for event in timing.read_planes(planes)] == [1.0, 4.0, 9.0]


def test_a_trace_without_kernels_names_its_planes_and_wall_takes_over(monkeypatch, capsys):
    monkeypatch.setattr(timing, "read_planes", lambda planes: [])
    fn = jax.jit(jnp.sin)
    with pytest.raises(timing.NoKernelsError, match="host"):
        timing.record_jax(lambda: fn(jnp.ones(8)).block_until_ready())
    result = timing.time_jax(fn, [(jnp.ones(8),), (jnp.ones(8),)], repetitions=2, timer="trace")
    assert result.timer == "wall"
    assert len(result.times_us) == 2
    assert "falling back" in capsys.readouterr().err


def test_annotations_of_a_torch_trace_do_not_count():
    def event(kind, start, ph="X"):
        return {"ph": ph, "cat": kind, "ts": start, "dur": 2.0, "name": kind}

    kinds = ("gpu_user_annotation", "kernel", "gpu_memset", "cuda_runtime", "gpu_memcpy")
    trace = {"traceEvents": [event(kind, i) for i, kind in enumerate(kinds)] + [{"ph": "M"}]}
    assert timing.read_chrome_trace(trace) == [
        timing.Event(1000, 2000, "kernel"),
        timing.Event(2000, 2000, "gpu_memset"),
        timing.Event(4000, 2000, "gpu_memcpy"),
    ]


def test_inputs_rotate_through_more_than_the_cache():
    assert timing.number_of_sets(100 * 10**6) == (3, "")
    assert timing.number_of_sets(10**9) == (2, "")
    assert timing.number_of_sets(1000) == (timing.MAX_SETS, "inputs fit in L2")
    assert timing.number_of_sets(100 * 10**6, least=11) == (11, "")
    assert timing.number_of_sets(100 * 10**6, least=100) == (100, "")


# Ours


@pytest.mark.parametrize(
    ("op", "outputs", "statistics"), [("rms_norm", 1, 1), ("add_layer_norm", 2, 2)]
)
def test_the_timed_forward_keeps_what_a_backward_needs_and_copies_nothing(op, outputs, statistics):
    case = small_case(op)
    inputs = make_inputs(case, "float32")
    shapes = [x.shape for x in jax.tree.leaves(ops.forward_call(case, "pallas")(*inputs))]
    assert shapes == outputs * [inputs[0].shape] + statistics * [inputs[0].shape[:-1]]
    # XLA fuses more without the statistics, and is timed as it is fastest.
    assert len(jax.tree.leaves(ops.forward_call(case, "xla")(*inputs))) == outputs


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm"])
def test_the_timed_backward_has_nothing_of_the_forward(op, backend):
    case = small_case(op)
    inputs = make_inputs(case, "float32")
    outputs, pullback = ops.make_pullback(case, backend)(*inputs)
    cotangents = cotangents_like(outputs)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(pullback))
    # The forward takes a root; the backward finds it among what the forward saved.
    forward = ops.forward_call(case, backend).lower(*inputs).as_text()
    backward = ops.backward_call().lower(pullback, cotangents).as_text()
    assert "rsqrt" in forward
    assert "rsqrt" not in backward
    # dx is one output, also where two inputs share it.
    gradients = ops.backward_call()(pullback, cotangents)
    shapes = [gradient.shape for gradient in gradients]
    assert shapes == [inputs[0].shape, inputs[-1].shape, inputs[-1].shape]


def test_integer_inputs_have_no_gradient(monkeypatch):
    def take(x, index, *, backend):
        return x[index]

    monkeypatch.setattr(ops.jaxllm.ops, "take", take, raising=False)
    case = Case("take", "small", {"x": Normal((5, 3)), "index": Integers((4,), high=5)})
    outputs, pullback = ops.make_pullback(case, "xla")(*make_inputs(case, "float32"))
    (gradient,) = ops.backward_call()(pullback, cotangents_like(outputs))
    assert gradient.shape == (5, 3)


def test_ops_smoke_run_has_a_row_for_everything(tmp_path, capsys):
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
def test_outputs_and_gradients_are_timed_in_one_program(backend):
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


def test_the_peers_compute_what_our_ops_compute():
    torch = pytest.importorskip("torch")
    for op, fn in peer_ops.torch_ops().items():
        case = next(case for case in CASES if case.op == op and not case.large)
        inputs = make_inputs(case, "float32")
        ours = jax.tree.leaves(ops.op_call(case, "xla")(*inputs))
        theirs = fn(*(torch.tensor(x.tolist()) for x in inputs), **peers._peer_options(case))
        theirs = theirs if isinstance(theirs, tuple) else (theirs,)
        for our, their in zip(ours, theirs, strict=True):
            assert jnp.allclose(our, jnp.asarray(their.numpy()), atol=1e-4)


def test_every_peer_belongs_to_an_op_that_has_cases():
    assert {*peer_ops.PEERS, *peer_ops.JAX_PEERS} <= {case.op for case in CASES}


def test_optax_computes_what_our_op_computes():
    case = next(case for case in CASES if str(case) == "adamw_update-awkward_tree")
    inputs = make_inputs(case, "float32")
    case = dataclasses.replace(case, in_place=(), static=case.static | {"copy_dtype": "bfloat16"})
    ours = ops.forward_call(case, "xla")(*inputs)
    theirs = ops.forward_call(case, "optax")(*inputs)
    close = jax.tree.map(functools.partial(jnp.allclose, atol=1e-5), ours, theirs)
    assert all(jax.tree.leaves(close))


@pytest.mark.parametrize("name", ["causal_window", "symmetric_window", "packed_documents"])
def test_cudnn_with_a_mask_computes_what_our_op_computes(name, monkeypatch):
    attention = jax.nn.dot_product_attention  # in plain JAX, which a CPU has too
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
def test_an_op_in_place_is_timed_on_what_it_left(timer):
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


def test_an_op_without_derivative_has_forward_rows_alone(tmp_path):
    path = tmp_path / "rows.csv"
    command = ["optimizer", "--op", "global_norm", "--smoke", "--no-peers", "--csv", str(path)]
    assert ops.main(command) == 0
    rows = [(row["direction"], row["implementation"]) for row in read_csv(path)]
    assert sorted(rows) == [("forward", name) for name in sorted(ops.BACKENDS)]


def test_the_shape_of_a_tree_is_its_size():
    assert ops.describe_shape(Normal((8, 768))) == "8x768"
    assert ops.describe_shape({"a": Normal((2, 3)), "b": Normal(())}) == "2 arrays of 7"


def test_a_gradient_that_nothing_computes_is_not_timed():
    torch = pytest.importorskip("torch")
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    with pytest.raises(ValueError, match="there is nothing to time"):
        peers._backward_call(lambda x, y: x + y, (x, y))
    case = small_case("add")
    out, pullback = ops.make_pullback(case, "xla")(*make_inputs(case, "float32"))
    with pytest.raises(ValueError, match="there is nothing to time"):
        ops.backward_call()(pullback, cotangents_like(out))


def test_a_gradient_that_is_a_cotangent_is_left_out():
    case = small_case("bias_add")
    out, pullback = ops.make_pullback(case, "xla")(*make_inputs(case, "float32"))
    gradients = ops.backward_call()(pullback, cotangents_like(out))
    assert [gradient.shape for gradient in gradients] == [(768,)]


def test_what_the_peers_do_not_report_has_a_reason():
    lines = [
        "a library's chatter",
        "[1]",
        '{"kind": "limits", "copy_gb_per_s": 2.0, "matmul_tflop_per_s": 3.0, "source": "torch"}',
        '{"kind": "failure", "op": "o", "case": "c", "direction": "d", "peer": "p", "reason": "r"}',
    ]
    limits, results = ops.read_peers(lines)
    assert limits == timing.Limits(2.0, 3.0, "torch")
    assert results == {("o", "c", "d", "p"): "r"}


def test_a_row_has_the_rates_that_follow_from_the_median():
    case = next(case for case in CASES if str(case) == "layer_norm-gpt2_124m")
    key = (case.op, case.name, "forward", "cuda")
    limits = timing.Limits(4000.0, 800.0, "torch")
    row = ops.make_row(case, "bfloat16", key, timing.Timing((100.0,), "trace"), limits)
    assert row["bytes"] == 2 * 65536 * 768 * 2
    assert float(row["gb_per_s"]) == pytest.approx(row["bytes"] / 100e-6 / 1e9, rel=1e-4)
    assert float(row["share_of_copy"]) == pytest.approx(2013.3 / 4000, rel=1e-2)


def test_a_row_of_a_product_notes_its_rate():
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
    ],
)
def test_ops_command_line_errors(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        ops.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.no_gpu
def test_ops_without_a_gpu_points_to_smoke(capsys):
    with pytest.raises(SystemExit, match="2"):
        ops.main(["norm"])
    assert "--smoke" in capsys.readouterr().err


def test_an_interruption_keeps_what_is_timed(monkeypatch):
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


def test_rounds_are_pooled_until_one_is_interrupted(monkeypatch, tmp_path):
    times = iter((4.0, 1.0, 3.0, 2.0))  # of cuda and xla, twice; the third round is interrupted

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


def test_no_rounds_are_refused(capsys):
    with pytest.raises(SystemExit):
        ops.main(["norm", "--smoke", "--rounds", "0"])
    assert "--rounds is 0; it must be at least 1" in capsys.readouterr().err


def test_a_failure_in_a_round_stands_for_all():
    key = ("rms_norm", "gpt2_row", "forward", "cuda")
    once: ops.Results = {key: timing.Timing((1.0,), "wall")}
    twice: ops.Results = {key: timing.Timing((2.0,), "wall")}
    assert ops.pool({}, once) == once
    assert ops.pool(once, twice) == {key: timing.Timing((1.0, 2.0), "wall")}
    failed: ops.Results = {key: "no kernel"}
    assert ops.pool(once, failed) == ops.pool(failed, once) == failed


def test_a_long_call_is_timed_a_few_times(monkeypatch):
    clock = iter(range(0, 10**6, 20))  # twenty seconds from one look to the next
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert len(timing._wall(lambda count: None, 1, 30).times_us) == 3


# Train


def test_train_smoke_run_has_a_row(tmp_path):
    path = tmp_path / "rows.csv"
    command = ["--smoke", "--implementation", "plain", "--csv", str(path), "--profile"]
    assert train.main(command) == 0
    (row,) = read_csv(path)
    assert tuple(row) == train.COLUMNS
    assert float(row["tokens_per_s"]) > 0
    assert float(row["loss"]) == pytest.approx(5.5, abs=0.3)


def test_each_backend_has_a_row_of_ours(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    report = {"row": dict.fromkeys(train.PROVENANCE, "-"), "profile": ""}
    monkeypatch.setattr(train, "run_worker", lambda *_: report)
    command = ["--implementation", "plain", "jaxllm", "--backend", "cuda", "xla"]
    assert train.main([*command, "--csv", str(path)]) == 0
    ran = [(row["implementation"], row["backend"]) for row in read_csv(path)]
    assert ran == [("plain", ""), ("jaxllm", "cuda"), ("jaxllm", "xla")]


def test_a_failed_worker_is_a_row_with_the_reason(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    monkeypatch.setenv("JAX_PLATFORMS", "nothing")
    command = ["--smoke", "--implementation", "plain", "--csv", str(path)]
    assert train.main(command) == 1
    (row,) = read_csv(path)
    assert "nothing" in row["note"]
    assert not row["step_ms"]


def test_torch_has_a_process_without_jax_on_the_device(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    path = tmp_path / "rows.csv"
    # JAX would fail, were it to start.
    monkeypatch.setenv("JAX_PLATFORMS", "nothing")
    command = ["--smoke", "--implementation", "torch_compile", "--csv", str(path), "--profile"]
    assert train.main(command) == 0
    (row,) = read_csv(path)
    assert float(row["tokens_per_s"]) > 0
    assert float(row["loss"]) == pytest.approx(5.5, abs=0.3)
    assert row["gpu"]
    assert row["note"].startswith("groups")


def named_like_torch(params):
    """The parameters of ``plain_gpt2`` by their names in ``torch_gpt2``, as torch has them."""
    named = {f"{table}.weight": params[table] for table in ("wte", "wpe")}
    named |= {"ln_f.weight": params["ln_f_scale"], "ln_f.bias": params["ln_f_bias"]}
    for name, layers in params["blocks"].items():
        module, kind = name.split("_")
        for i, x in enumerate(layers):
            matrix = kind == "weight"
            named[f"blocks.{i}.{module}.{kind.replace('scale', 'weight')}"] = x.T if matrix else x
    return named


def test_torch_trains_as_plain_jax_does():
    torch = pytest.importorskip("torch")
    from benchmarks import plain_gpt2, torch_gpt2

    shape = (2, 2, 64, 12, 128)  # layers, heads, width, max_seq_len, vocab_size
    config = plain_gpt2.Config(*shape, attention="xla", dtype="float32")
    init_state, plain_step = plain_gpt2.make_step(config)
    state = init_state(jax.random.key(0))
    peer = torch_gpt2.Config(*shape, dtype="float32", compiler="eager")
    model, step = torch_gpt2.make_step(peer, "cpu")
    torch.set_float32_matmul_precision("highest")
    drawn = dict(model.named_parameters())
    expected = named_like_torch(state[0])
    assert drawn.keys() == expected.keys()
    with torch.no_grad():
        for name, x in expected.items():
            assert float(drawn[name].std()) == pytest.approx(float(x.std()), rel=0.1, abs=1e-7)
            assert float(drawn[name].mean()) == pytest.approx(float(x.mean()), abs=5e-3)
            drawn[name].copy_(torch.tensor(x.tolist()))
    # Four of the positions are never seen: nothing but weight decay changes them.
    batches = jax.random.randint(jax.random.key(1), (3, 2, 2, 8), 0, 128)
    for tokens, labels in batches:
        state, loss = plain_step(state, tokens, labels)
        theirs = step(*(torch.tensor(part.tolist()) for part in (tokens, labels)))
        assert float(theirs) == pytest.approx(float(loss), abs=5e-5)
    expected = named_like_torch(state[0])
    for name in ("wpe.weight", "ln_f.weight", "blocks.1.ln2.bias", "blocks.0.up.weight"):
        theirs = jnp.asarray(drawn[name].tolist())
        # Adam makes steps of 6e-4 whatever the gradient, of 2e-6 where there is weight decay alone.
        assert jnp.allclose(theirs, expected[name], rtol=1e-6, atol=2e-5), name
    unseen = jnp.asarray(drawn["wpe.weight"][8:].tolist())
    assert jnp.allclose(unseen, expected["wpe.weight"][8:], rtol=1e-5, atol=0)


def named_like_plain(params):
    """The parameters of our Llama 3 by their names in ``plain_llama3``."""
    blocks = params["blocks"]
    attention, mlp = (
        {name: linear["weight"] for name, linear in blocks[part].items()}
        for part in ("attention", "mlp")
    )
    q, k, v = jnp.split(attention["qkv"], (64, 80), axis=-1)
    gate, up = jnp.split(mlp["gate_up"], 2, axis=-1)
    named = {"q": q, "k": k, "v": v, "out": attention["out"]}
    named |= {"gate": gate, "up": up, "down": mlp["down"]}
    norms = {f"{norm}_scale": blocks[norm]["scale"] for norm in ("norm1", "norm2")}
    weights = {f"{name}_weight": weight for name, weight in named.items()}
    norm_f = params["norm_f"]["scale"]
    return {"wte": params["wte"], "blocks": norms | weights, "norm_f_scale": norm_f}


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=4.0)])
def test_plain_llama_is_our_llama(unrolled, scaling):
    from benchmarks import plain_llama3

    # The frequencies of so large a base are kept, blended and stretched.
    model = llama3.Llama3Config(
        vocab_size=128, max_seq_len=24, layers=2, heads=4, kv_heads=1, width=64, mlp_width=48,
        tied_head=True, rope_theta=1e8, rope_scaling=scaling,
    )  # fmt: skip
    config = plain_llama3.Config(
        layers=2, heads=4, kv_heads=1, width=64, mlp_width=48, vocab_size=128, rope_theta=1e8,
        rope_factor=scaling.factor if scaling else 1.0,
        unrolled=unrolled, attention="xla", dtype="float32",
    )  # fmt: skip
    drawn = plain_llama3.init(jax.random.key(0), config)
    params = llama3.init(jax.random.key(0), model)
    expected = named_like_plain(params)
    for a, b in zip(jax.tree.leaves(drawn), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        assert float(a.std()) == pytest.approx(float(b.std()), rel=0.1)
    noise = iter(jax.random.split(jax.random.key(1), 9))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), params)
    tokens, labels = jax.random.randint(jax.random.key(2), (2, 3, 24), 0, 128)
    ours, gradients = jax.value_and_grad(llama3.loss)(params, tokens, labels, model)
    theirs = jax.value_and_grad(plain_llama3.loss)(named_like_plain(params), tokens, labels, config)
    assert error(theirs[0], ours) <= 1e-5
    for a, b in zip(
        jax.tree.leaves(theirs[1]), jax.tree.leaves(named_like_plain(gradients)), strict=True
    ):
        assert error(a, b) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "implementation"),
    [
        ("gpt2", "plain_unrolled"),
        ("gpt2", "jaxllm"),
        ("llama3", "plain"),
        ("llama3", "plain_unrolled"),
        ("llama3", "jaxllm"),
    ],
)
def test_every_implementation_trains(model, implementation, capsys):
    assert train.main(["--smoke", "--model", model, "--worker", implementation]) == 0
    out = capsys.readouterr().out
    assert '"tokens_per_s"' in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--preset", "nothing"], "--preset 'nothing' is none of"),
        (["--model", "llama3", "--preset", "d24"], "'d24' is none of d6, d12, 3-8b"),
        (["--model", "llama3", "--implementation", "torch_compile"], "torch_compile has no llama3"),
        (["--data", "nowhere"], "has no train_*.bin"),
        (["--implementation", "nothing"], "invalid choice"),
    ],
)
def test_train_command_line_errors(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        train.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16>", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "GEMM"),
        ("gemm_fusion_dot_12", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true>", "attention"),
        ("void jaxllm::(anonymous namespace)::gemm_kernel<float>(float*)", "ours"),
        ("void jaxllm::(anonymous namespace)::adamw_update_kernel<float>(float*)", "ours"),
        ("void jaxllm::elementwise_kernel<8, jaxllm::(anonymous namespace)::Gelu>(int)", "ours"),
        ("_ZN6jaxllm12_GLOBAL__N_117column_sum_kernelIfEEvPKfPT_", "ours"),
        ("_chunk_sums_kernel", "ours"),
        ("_forward_with_gradient_kernel_2", "ours"),
        ("flash_attention_backward_kernel", "ours"),
        ("add_layer_norm_forward", "ours"),
        ("void cub::detail::reduce_kernel<float>(float*)", "other"),
        ("MemcpyD2D", "copies and fills"),
        ("wrapped_copy_2", "copies and fills"),
        ("copy_fusion_1", "copies and fills"),
        ("copy_add_fusion", "XLA fusions"),
        ("loop_add_fusion_3", "XLA fusions"),
        ("wrapped_convert", "XLA fusions"),
        ("redzone_checker", "other"),
    ],
)
def test_kernels_have_their_category(kernel, expected):
    assert train.category(kernel) == expected


def test_breakdown_is_per_step_and_longest_first():
    names = ("nvjet", "loop_add_fusion", "nvjet", "loop_add_fusion")
    lengths = (2e6, 1e6, 2e6, 1e6)
    events = [
        timing.Event(i * 1e7, t, n) for i, (t, n) in enumerate(zip(lengths, names, strict=True))
    ]
    lines = [line.split() for line in train.breakdown(events, 2).splitlines()]
    assert ["GEMM", "2.000", "66.7%", "1"] in lines
    assert ["all", "3.000", "2"] in lines
    assert ["XLA", "fusions", "1.000", "1", "loop_add_fusion"] in lines


# Records


def test_slug():
    assert record.slug("NVIDIA H200") == "h200"
    assert record.slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"


def test_the_environment_names_the_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.delenv("JAXLLM_COMMIT", raising=False)
    assert record.commit() == "unknown"
    monkeypatch.setenv("JAXLLM_COMMIT", "abc1234")
    assert record.commit() == "abc1234"


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "results" / "rows.csv"
    for i in range(2):
        record.append_rows(path, ("a", "b"), [{"a": i}])
    assert path.read_text() == "a,b\n0,\n1,\n"
    with pytest.raises(ValueError, match="has the header"):
        record.append_rows(path, ("a", "c"), [{"a": 2}])


def test_committed_results_have_the_columns_of_today():
    for path in (record.ROOT / "benchmarks" / "results").glob("*.csv"):
        columns = train.COLUMNS if path.stem.endswith("_train") else ops.COLUMNS
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
        assert tuple(rows[0]) == columns, path
        assert {len(row) for row in rows} == {len(columns)}, path


# Generation


def test_generate_times_prefill_and_decoding(capsys):
    arguments = "--preset d6 --layers 1 --context 12 --steps 3 --repeats 1 --dtype bfloat16 int8"
    generate.main(arguments.split())
    limits, header, *rows = capsys.readouterr().out.splitlines()
    assert "TB/s" in limits and header.split()[:2] == ["model", "dtype"]
    found = [row.split() for row in rows]
    assert [(row[1], row[-2]) for row in found] == [
        *(("bfloat16", "prefill"), ("bfloat16", "decode")),
        *(("int8", "prefill"), ("int8", "decode")),
    ]
    for row in found:
        ms, tokens_per_s, limit, share = map(float, row[2:6])
        tokens = 12 if row[-2] == "prefill" else 1
        assert ms > 0 and tokens_per_s == pytest.approx(1e3 * tokens / ms, rel=0.02, abs=1)
        assert share == pytest.approx(limit / ms, rel=0.05, abs=2e-3)


def test_prefill_counts_causal_scores_and_one_token_of_the_head():
    config = llama3.PRESETS["d6"]
    D, T = config.width, 7
    factors = D * (sum(config.qkv_widths) + D + 3 * config.mlp_width)
    layer = 2 * T * factors + 2 * T * T * D
    head = 2 * config.padded_vocab_size * D
    assert generate.prefill_flops(config, T) == config.layers * layer + head
