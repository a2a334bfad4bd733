"""The training and generation benchmarks, their kernel categories and records."""

import argparse
import csv
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import energy, generate, ops, record, sharded, timing, train
from jaxllm.models import llama3
from jaxllm.models.common import merge_heads
from jaxllm.ops import RopeScaling
from jaxllm.testing import error

pytestmark = pytest.mark.usefixtures("small_processes")


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# Train


def test_train_smoke_run_writes_a_row(tmp_path):
    path = tmp_path / "rows.csv"
    command = ["--smoke", "--implementation", "plain", "--csv", str(path), "--profile"]
    assert train.main(command) == 0
    (row,) = read_csv(path)
    assert tuple(row) == train.COLUMNS
    assert float(row["tokens_per_s"]) > 0
    assert float(row["loss"]) == pytest.approx(5.5, abs=0.3)


def test_sharded_smoke_run_writes_a_row_for_each_run(tmp_path, monkeypatch):
    runs = (
        sharded.Run("llama3", mesh=""),
        sharded.Run("llama3", mesh="fsdp", axes="explicit"),
        sharded.Run(sharded.LM_HEAD, mesh="tensor"),
    )
    monkeypatch.setattr(sharded, "RUNS", runs)
    path = tmp_path / "rows.csv"
    command = ["--smoke", "--backend", "auto", "--steps", "1", "--csv", str(path)]
    assert sharded.main(command) == 0
    rows = read_csv(path)
    assert [(row["mesh"], row["gpus"], row["batch_size"]) for row in rows] == [
        ("", "1", "2"),
        ("fsdp=2", "2", "4"),
        ("tensor=2", "2", "2"),
    ]
    assert all(float(row["loss"]) == pytest.approx(5.5, abs=0.3) for row in rows)


def test_sharded_smoke_run_times_attention_of_a_sequence_in_shards(tmp_path, monkeypatch):
    runs = tuple(run for run in sharded.RUNS if run.model == "attention")
    monkeypatch.setattr(sharded, "RUNS", runs)
    path = tmp_path / "rows.csv"
    command = ["--smoke", "--backend", "auto", "--steps", "1", "--csv", str(path)]
    assert sharded.main(command) == 0
    rows = read_csv(path)
    found = [(row["mesh"], row["gpus"], row["batch_size"], row["seq_len"]) for row in rows]
    assert found == [("", "1", "1", "16"), ("context=2", "2", "1", "16")]
    assert rows[0]["loss"] == rows[1]["loss"]


def test_each_backend_has_a_row(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    report = {"row": dict.fromkeys(train.PROVENANCE, "-"), "profile": ""}
    monkeypatch.setattr(train, "run_worker", lambda *_: report)
    command = ["--implementation", "plain", "jaxllm", "--backend", "cuda", "xla"]
    command += ["--precision", "none", "row", "--documents", "0", "512"]
    assert train.main([*command, "--csv", str(path)]) == 0
    ran = [" ".join(row[name] for name in ("implementation", "backend", "dtype"))
           for row in read_csv(path)]  # fmt: skip
    assert ran == ["plain  bfloat16"] + [
        f"jaxllm{documents} {backend} {dtype}"
        for backend in ("cuda", "xla")
        for dtype in ("bfloat16", "bfloat16 row")
        for documents in ("", " documents=512")
    ]


def test_packed_documents_have_the_mean_length():
    options = argparse.Namespace(documents=[50], seq_len=4000)
    drawn = train._documents(options, rows=8)
    counts = [segment_ids[:, -1] + 1 for segment_ids, _ in drawn]
    assert len(drawn) == train._BATCHES
    assert 4000 / np.mean(counts) == pytest.approx(50, rel=0.1)
    again = train._documents(options, rows=8)
    assert all(np.array_equal(a, b) for a, b in zip(drawn[1], again[1], strict=True))


def test_failed_worker_is_a_row_with_the_reason(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    monkeypatch.setenv("JAX_PLATFORMS", "nothing")
    command = ["--smoke", "--implementation", "plain", "--csv", str(path)]
    assert train.main(command) == 1
    (row,) = read_csv(path)
    assert "nothing" in row["note"]
    assert not row["step_ms"]


def test_torch_process_does_not_start_jax(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    path = tmp_path / "rows.csv"
    # JAX would fail to start with this platform.
    monkeypatch.setenv("JAX_PLATFORMS", "nothing")
    command = ["--smoke", "--implementation", "torch_compile", "--csv", str(path), "--profile"]
    assert train.main(command) == 0
    (row,) = read_csv(path)
    assert float(row["tokens_per_s"]) > 0
    assert float(row["loss"]) == pytest.approx(5.5, abs=0.3)
    assert row["gpu"]
    assert row["note"].startswith("groups")


def named_like_torch(params):
    """The parameters of ``plain_gpt2`` with the names and layout of ``torch_gpt2``."""
    named = {f"{table}.weight": params[table] for table in ("wte", "wpe")}
    named |= {"ln_f.weight": params["ln_f_scale"], "ln_f.bias": params["ln_f_bias"]}
    for name, layers in params["blocks"].items():
        module, kind = name.split("_")
        for i, x in enumerate(layers):
            matrix = kind == "weight"
            named[f"blocks.{i}.{module}.{kind.replace('scale', 'weight')}"] = x.T if matrix else x
    return named


def test_torch_gpt2_trains_like_plain_jax():
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
    # Four of the positions do not occur, so only weight decay changes them.
    batches = jax.random.randint(jax.random.key(1), (3, 2, 2, 8), 0, 128)
    for tokens, labels in batches:
        state, loss = plain_step(state, tokens, labels)
        theirs = step(*(torch.tensor(part.tolist()) for part in (tokens, labels)))
        assert float(theirs) == pytest.approx(float(loss), abs=5e-5)
    expected = named_like_torch(state[0])
    for name in ("wpe.weight", "ln_f.weight", "blocks.1.ln2.bias", "blocks.0.up.weight"):
        theirs = jnp.asarray(drawn[name].tolist())
        # Adam's steps are 6e-4 for any gradient, and 2e-6 for weight decay alone.
        assert jnp.allclose(theirs, expected[name], rtol=1e-6, atol=2e-5), name
    unseen = jnp.asarray(drawn["wpe.weight"][8:].tolist())
    assert jnp.allclose(unseen, expected["wpe.weight"][8:], rtol=1e-5, atol=0)


def named_like_plain(params):
    """The parameters of jaxllm's Llama 3 with the names of ``plain_llama3``."""
    blocks = params["blocks"]
    attention, mlp = (
        {name: linear["weight"] for name, linear in blocks[part].items()}
        for part in ("attention", "mlp")
    )
    q, k, v = jnp.split(merge_heads(attention["qkv"]), (64, 80), axis=-1)
    gate, up = jnp.moveaxis(mlp["gate_up"], -2, 0)
    named = {"q": q, "k": k, "v": v, "out": attention["out"]}
    named |= {"gate": gate, "up": up, "down": mlp["down"]}
    norms = {f"{norm}_scale": blocks[norm]["scale"] for norm in ("norm1", "norm2")}
    weights = {f"{name}_weight": weight for name, weight in named.items()}
    norm_f = params["norm_f"]["scale"]
    return {"wte": params["wte"], "blocks": norms | weights, "norm_f_scale": norm_f}


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=4.0)])
@pytest.mark.covering(("scaling",), ("unrolled",))
def test_plain_llama_matches_llama3(unrolled, scaling):
    from benchmarks import plain_llama3

    # With this base, some frequencies are kept, some interpolated and some scaled.
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
    ours, gradients = jax.jit(jax.value_and_grad(llama3.loss), static_argnums=3)(
        params, tokens, labels, model
    )
    theirs = jax.jit(jax.value_and_grad(plain_llama3.loss), static_argnums=3)(
        named_like_plain(params), tokens, labels, config
    )
    assert error(theirs[0], ours) <= 1e-5
    for a, b in zip(
        jax.tree.leaves(theirs[1]), jax.tree.leaves(named_like_plain(gradients)), strict=True
    ):
        assert error(a, b) <= 1e-4


@pytest.mark.covering(("model",), ("implementation",))
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
def test_all_implementations_train(model, implementation, capsys):
    assert train.main(["--smoke", "--model", model, "--worker", implementation]) == 0
    out = capsys.readouterr().out
    assert '"tokens_per_s"' in out


def test_microbatches_with_float8_train(capsys):
    options = ["--model", "llama3", "--preset", "1.3b", "--accumulate", "2", "--precision", "row"]
    options += ["--documents", "5"]
    assert train.main(["--smoke", *options, "--worker", "jaxllm"]) == 0
    out = capsys.readouterr().out
    assert '"tokens_per_s"' in out
    assert "packed documents of 5 tokens on average; 2 microbatches" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--preset", "nothing"], "--preset 'nothing' is none of"),
        (["--model", "llama3", "--preset", "d24"], "'d24' is none of d6, d12, 3-8b"),
        (["--model", "llama3", "--implementation", "torch_compile"], "torch_compile has no llama3"),
        (["--data", "nowhere"], "has no train_*.bin"),
        (["--accumulate", "0"], "--accumulate is 0"),
        (["--documents", "256", "-1"], "--documents is -1"),
        (["--accumulate", "2"], "--accumulate is for --implementation jaxllm alone"),
        (["--implementation", "nothing"], "invalid choice"),
    ],
)
def test_train_command_line_rejects_invalid_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        train.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "--gpus is 0; it must be at least 1"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--mesh", "fsdp", "fdsp"], "--mesh 'fdsp' is none of data  fsdp  tensor"),
        (["--model", "gpt2", "--mesh", "context"], "--mesh 'context' is none of data  fsdp\n"),
    ],
)
def test_sharded_command_line_rejects_invalid_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        sharded.main(["--smoke", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "arguments"), [(ops.main, ["norm"]), (train.main, []), (sharded.main, [])]
)
def test_files_of_other_columns_are_rejected_before_anything_is_timed(
    main, arguments, tmp_path, capsys
):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--smoke", "--csv", str(path)])
    assert "--csv: " in (found := capsys.readouterr().err) and "has the header" in found
    assert path.read_text() == "a,b\n1,2\n"


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
def test_kernel_names_have_categories(kernel, expected):
    assert train.category(kernel) == expected


def test_breakdown_is_per_step_and_sorted():
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


def test_slug_of_gpu_names():
    assert record.slug("NVIDIA H200") == "h200"
    assert record.slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"


def test_environment_has_the_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.delenv("JAXLLM_COMMIT", raising=False)
    assert record.commit() == "unknown"
    monkeypatch.setenv("JAXLLM_COMMIT", "abc1234")
    assert record.commit() == "abc1234"


def test_rows_are_appended_with_one_header(tmp_path):
    path = tmp_path / "results" / "rows.csv"
    for i in range(2):
        record.append_rows(path, ("a", "b"), [{"a": i}])
    assert path.read_text() == "a,b\n0,\n1,\n"
    with pytest.raises(ValueError, match="has the header"):
        record.append_rows(path, ("a", "c"), [{"a": 2}])


def test_committed_results_have_the_current_columns():
    of_kind = {"train": train.COLUMNS, "sharded": sharded.COLUMNS}
    for path in (record.ROOT / "benchmarks" / "results").glob("*.csv"):
        columns = of_kind.get(path.stem.rpartition("_")[2], ops.COLUMNS)
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
        assert tuple(rows[0]) == columns, path
        assert {len(row) for row in rows} == {len(columns)}, path


# Generation


def test_generate_times_prefill_and_decode(capsys, monkeypatch):
    # The preset's 128256 tokens would take most of the time on a CPU.
    small = dataclasses.replace(llama3.PRESETS["d6"], vocab_size=1000)
    monkeypatch.setitem(llama3.PRESETS, "d6", small)
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


def test_generate_rejects_zero_layers(capsys):
    with pytest.raises(SystemExit, match="2"):
        generate.main(["--layers", "0"])
    assert "--layers is 0; it must be at least 1" in capsys.readouterr().err


def test_prefill_flops_count_causal_scores_and_one_lm_head_token():
    config = llama3.PRESETS["d6"]
    D, T = config.width, 7
    factors = D * (sum(config.qkv_widths) + D + 3 * config.mlp_width)
    layer = 2 * T * factors + 2 * T * T * D
    head = 2 * config.padded_vocab_size * D
    assert generate.prefill_flops(config, T) == config.layers * layer + head


# Energy


class Nvml:
    """The driver's library, as ctypes loads it, with a counter in millijoules."""

    def __init__(self, gpus=1, millijoules=123_456, fails=""):
        self.gpus, self.millijoules, self.fails, self.open = gpus, millijoules, fails, 0

    def nvmlInit_v2(self):  # noqa: N802
        self.open += self.fails != "nvmlInit_v2"
        return self.fails == "nvmlInit_v2"

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        count._obj.value = self.gpus
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, gpu):  # noqa: N802
        gpu._obj.value = 7 + index.value
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu, energy):  # noqa: N802
        assert gpu.value == 7
        energy._obj.value = self.millijoules
        return self.fails == "nvmlDeviceGetTotalEnergyConsumption"


@pytest.mark.parametrize(
    ("nvml", "joules"),
    [
        (Nvml(), 123.456),
        (Nvml(gpus=2), None),
        (Nvml(fails="nvmlInit_v2"), None),
        (Nvml(fails="nvmlDeviceGetTotalEnergyConsumption"), None),
    ],
    ids=["one", "several_gpus", "no_driver", "no_counter"],
)
def test_energy_is_that_of_the_only_gpu(monkeypatch, nvml, joules):
    monkeypatch.setattr("ctypes.CDLL", lambda name: nvml)
    assert energy.joules_so_far() == joules
    assert nvml.open == 0


def test_there_is_no_energy_without_the_drivers_library(monkeypatch):
    def load(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", load)
    assert energy.joules_so_far() is None
