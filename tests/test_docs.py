"""The pages in docs: links resolve, examples run, and measurements are rows of the results."""

import csv
import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import kernel_table
import numpy as np
import optax
import pytest

import jaxllm.ops
from jaxllm import ops, training
from jaxllm.training import optim

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
# Pages whose examples test_examples_run does not run, with the reason.
NOT_RUN = {
    "backends": "run by test_example_of_backends_gives_one_result",
    "export": "run by tests/test_export.py",
    "inference": "run by test_example_of_inference_generates_and_shrinks",
    "sharding": "needs 16 devices",
    "training": "run by test_example_of_training_learns",
    "use_from_your_model": "run by tests/test_examples_nn.py",
    "your_own_op": "is a part of examples/add_your_own_op.py",
}
MEASURED = "| commit | op | case | direction | implementation | us | share of copy |"


@pytest.fixture(scope="module")
def results():
    with (ROOT / "benchmarks" / "results" / "h200.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def links(page):
    return re.findall(r"\[([^\]]*)\]\(([^)]*)\)", page.read_text().replace("\n", " "))


def examples(page):
    """The code blocks of a page that are marked as Python."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def run_examples(stem):
    """Runs the examples of a page in order, and returns the names that they define."""
    page = ROOT / "docs" / f"{stem}.md"
    names: dict[str, Any] = {}
    exec(compile("\n".join(examples(page)), str(page), "exec"), names)
    return names


def test_kernel_table_is_current():
    assert kernel_table.table() == kernel_table.TABLE.read_text(), "python docs/kernel_table.py"


def test_kernel_table_has_files_for_every_op():
    for name, op in {**kernel_table.op_objects(), **kernel_table.fused_ops()}.items():
        assert kernel_table.targets_of(op), name
        for target in kernel_table.targets_of(op):
            assert len(kernel_table.kernel_files(kernel_table.handlers()[target])) > 1, target


def test_every_op_has_three_backends_cases_and_measurements():
    ops = kernel_table.op_objects()
    del ops["flash_attention_float8"]  # the page gives the reason
    for name, op in ops.items():
        # The page gives the reason.
        has_pallas = op.pallas or name == "float8_matmul"
        assert op.cuda and (op.parts or (has_pallas and op.reference)), name
    for name in {**ops, **kernel_table.compositions()}:
        assert kernel_table.cases_of(name), name
        assert kernel_table.rows_of(name), name


def test_kernel_table_has_the_fused_ops_of_the_blocks():
    used = kernel_table.compositions()
    assert {"matmul_residual_norm", "matmul_norm_backward", "fold_norm"} <= {*used["ffn_block"]}
    assert "matmul_delta" in used["attention_block"]
    assert "matmul_delta" not in used["ffn_block"]
    assert used["mlp"] == ["matmul_bias_gelu", "matmul_dgelu"]


def test_listed_kernels_belong_to_ops():
    named = {
        op for kernels in kernel_table.SOURCES.values() for ops in kernels.values() for op in ops
    }
    assert named <= set(jaxllm.ops.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_resolve_to_the_named_symbols(page):
    assert links(page)
    for text, target in links(page):
        file = page.parent / target
        assert file.exists(), target
        if re.fullmatch(r"`\w+`", text):
            assert re.search(rf"\b{text.strip('`')}\b", file.read_text()), (text, target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_is_in_the_index(page):
    indexes = [ROOT / "docs" / name for name in ("README.md", "kernels.md")]
    listed = {target for index in indexes for _, target in links(index)}
    assert page.name in {"README.md", *listed}


@pytest.mark.parametrize(
    "stem", [page.stem for page in PAGES if examples(page) and page.stem not in NOT_RUN]
)
def test_examples_run(stem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_examples(stem)


def test_examples_that_are_not_run_exist():
    assert NOT_RUN.keys() <= {page.stem for page in PAGES if examples(page)}
    (example,) = examples(ROOT / "docs" / "your_own_op.md")
    assert example.strip() in (ROOT / "examples" / "add_your_own_op.py").read_text()


def test_example_of_backends_gives_one_result(capsys):
    names = run_examples("backends")
    for name in ("y_pallas", "y_xla"):
        difference = np.abs(names[name].astype("float32") - names["y"].astype("float32"))
        assert difference.max() < 0.05, name
    assert "flash_attention_backward" in capsys.readouterr().out


def test_example_of_training_learns():
    losses = run_examples("training")["losses"]
    assert losses[-1] < 0.8 * losses[0]


def test_example_of_inference_generates_and_shrinks():
    names = run_examples("inference")
    assert [len(text) for text in names["texts"]] == [8, 8] and len(names["tokens"]) == 4
    assert names["ratio"] < 0.6


def measured_rows(page):
    """The rows of measurement tables, as lists of cells."""
    rows = None
    for line in page.read_text().splitlines():
        if line == MEASURED:
            rows = []
        elif rows is not None and line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows is not None:
            yield from rows[1:]  # skip the line below the header
            rows = None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_measurements_are_rows_of_the_results(page, results):
    names = ("commit", "op", "case", "direction", "implementation", "median_us", "share_of_copy")
    known = [[row[name] for name in names] for row in results]
    for row in measured_rows(page):
        assert row in known


# docs/conventions.md


def draw_qkv(T, S, heads=2, width=8):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, T, heads, width), (2, S, heads, width), (2, S, heads, width))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@jax.jit
def attend(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])


@pytest.mark.parametrize(("T", "S"), [(2, 5), (5, 2), (4, 4)])
def test_causal_mask_is_bottom_right_and_that_of_jax_top_left(T, S):
    q, k, v = draw_qkv(T, S)
    top_left = jnp.tril(jnp.ones((T, S), bool))
    bottom_right = jnp.tril(jnp.ones((T, S), bool), S - T)
    sees_a_key = bottom_right.any(axis=1)[None, :, None, None]
    ours = ops.flash_attention(q, k, v, causal=True)
    expected = jnp.where(sees_a_key, attend(q, k, v, bottom_right), 0)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(theirs, attend(q, k, v, top_left), atol=1e-5)
    assert (T == S) == np.allclose(ours, theirs, atol=1e-3)
    probabilities = ops.softmax(jnp.zeros((T, S)), causal=True)
    np.testing.assert_array_equal(probabilities > 0, bottom_right)


def test_causal_mask_of_torch_is_top_left():
    torch = pytest.importorskip("torch")
    q, k, v = draw_qkv(2, 5)
    given = (torch.tensor(np.asarray(x)).transpose(1, 2) for x in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(theirs.transpose(1, 2).numpy(), expected, atol=1e-5)


def test_query_without_keys_gives_zeros_and_in_jax_the_mean():
    q, k, v = draw_qkv(3, 1)
    assert not ops.flash_attention(q, k, v, causal=True)[:, :2].any()
    nothing = jnp.zeros((3, 1), bool)
    np.testing.assert_allclose(attend(q, k, v, nothing)[:, 0], v.mean(axis=1), atol=1e-6)


@pytest.mark.parametrize("window", [1, 3, 4])
def test_window_counts_the_own_position_and_local_window_size_does_not(window):
    q, k, v = draw_qkv(9, 9)
    before = window - 1
    for causal, size in ((True, (before, 0)), (True, before), (False, (before, before))):
        ours = ops.flash_attention(q, k, v, window=window, causal=causal)
        options = {"is_causal": causal, "local_window_size": size}
        theirs = jax.nn.dot_product_attention(q, k, v, **options)  # pyright: ignore
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    by_mean = ops.flash_attention(jnp.zeros_like(q), k, v, window=window, causal=True)
    np.testing.assert_allclose(by_mean[:, -1], v[:, -window:].mean(axis=1), atol=1e-5)


def default(function, name):
    return inspect.signature(function).parameters[name].default


def test_adamw_defaults_differ_from_those_of_optax():
    names = ("b1", "b2", "eps", "weight_decay")
    for function in (training.adamw, optim.adamw, ops.adamw_update):
        assert [default(function, name) for name in names] == [0.9, 0.95, 1e-8, 0.1]
    assert [default(optax.adamw, name) for name in names] == [0.9, 0.999, 1e-8, 1e-4]
    assert default(training.adamw, "max_grad_norm") == 1.0
    assert default(optim.adamw, "max_grad_norm") is None
    assert default(optim.adamw, "mask") is default(ops.adamw_update, "mask") is None
    # Weight decay alone, for a zero gradient: training.adamw leaves vectors out.
    params = {"weight": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    for optimizer, decayed in (
        (training.adamw(1.0), {"weight"}),
        (optim.adamw(1.0), {"weight", "bias"}),
        (optax.adamw(1.0), {"weight", "bias"}),
    ):
        updates: Any
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
        assert {name for name, x in updates.items() if x.any()} == decayed


def test_torch_has_the_listed_defaults():
    torch = pytest.importorskip("torch")
    assert default(torch.optim.AdamW, "betas") == (0.9, 0.999)
    assert default(torch.optim.AdamW, "weight_decay") == 1e-2
    assert default(torch.nn.LayerNorm, "eps") == 1e-5
    assert default(torch.nn.RMSNorm, "eps") is None
    assert default(torch.nn.CrossEntropyLoss, "ignore_index") == -100
    x = 1e-3 * torch.randn(2, 8)
    expected = torch.nn.functional.rms_norm(x, (8,), eps=torch.finfo(x.dtype).eps)
    torch.testing.assert_close(torch.nn.functional.rms_norm(x, (8,)), expected)


def test_norms_have_the_listed_epsilon():
    norms = (ops.layer_norm, ops.rms_norm, ops.add_layer_norm, ops.add_rms_norm, ops.residual)
    assert {default(norm, "eps") for norm in norms} == {1e-5}
    assert default(jax.nn.standardize, "epsilon") == 1e-5
    x = jnp.linspace(-1, 1, 8)
    np.testing.assert_allclose(ops.gelu(x), jax.nn.gelu(x), atol=1e-6)
