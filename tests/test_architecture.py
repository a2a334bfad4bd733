"""Who may import whom: the layers of the house, read off the sources."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "jaxllm").rglob("*.py"))
PALLAS = ("pallas", "pallas_decode", "pallas_flash")
IMPLEMENTATIONS = ("reference", "reference_decode", "xla", *PALLAS, "cuda", "cuda_decode")
BRIDGE = ("jaxllm.core.ffi", "jaxllm.ops.pallas_call")  # by which they call kernels
LEAVES = [f"jaxllm.{name}" for name in ("checksum", "compression", "files", "flops", "precision")]
KERNELS = sorted([*(ROOT / "cuda").rglob("*.cu"), *(ROOT / "cuda").rglob("*.cuh")])


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "jaxllm" / "py.typed").exists()


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Every module that a file imports, as dotted names; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_under(name, *packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def allowed(module):
    """The jaxllm modules that a module may import, and the heavy packages; None for no limit."""
    family = re.match(r"jaxllm\.ops\.(\w+)\.(\w+)$", module)
    if module in ("jaxllm.core.backend", "jaxllm.core.promotion"):
        return ()
    if module == "jaxllm.core.derivatives":
        return ("jaxllm.core.backend", "jaxllm.core.promotion")
    if module == "jaxllm.core.vma":
        return ("jaxllm.core.derivatives",)
    if module == "jaxllm.core.ffi":
        return ("jaxllm._cuda", "jaxllm.core.backend", "jaxllm.core.vma")
    if module == "jaxllm.core.dispatch":
        return (
            "jaxllm.core.backend",
            "jaxllm.core.ffi",
            "jaxllm.core.promotion",
            "jaxllm.core.vma",
        )
    if module == "jaxllm.ops.pallas_call":
        return ("jaxllm.core.vma",)
    if module in ("jaxllm.testing", "jaxllm.ops.checks", *LEAVES):
        return ()
    if module == "jaxllm.data.documents":
        return ("jaxllm.data.compression", "jaxllm.data.files")
    if module == "jaxllm.ops.streams":
        return ("jaxllm.ops.checks",)
    if family and family[1] == "gemm" and family[2] in ("reference", "pallas", "cuda"):
        # What follows a product is an activation or a norm of the same backend.
        after = [f"jaxllm.ops.{part}.{family[2]}" for part in ("activation", "norm")]
        shared = ("jaxllm.ops.gemm.products", "jaxllm.ops.gemm.slopes")
        return (*after, *shared, *BRIDGE)
    if family and family[1] == "decoding" and family[2] in IMPLEMENTATIONS:
        # A block is made of products and attention of the same backend.
        parts = ("attention", "gemm", "quantization")
        names = (family[2], f"{family[2]}_decode")
        own = [f"jaxllm.ops.{part}.{name}" for part in parts for name in names]
        return (*own, "jaxllm.ops.decoding.composed", *BRIDGE)
    if family and family[1] == "attention" and family[2] in IMPLEMENTATIONS:
        # Queries and keys turn by the rotary embeddings of the same backend; cuDNN's by XLA's. The
        # layer after attention is of the same backend too.
        same = {"pallas_flash": "pallas", "xla": "reference"}.get(family[2], family[2])
        own = [f"jaxllm.ops.{part}.{same}" for part in ("rotary", "gemm", "norm")]
        return (*own, "jaxllm.ops.attention.packing", *BRIDGE)
    if family and family[1] == "loss" and family[2] in IMPLEMENTATIONS:
        # What makes the logits is a product of the same backend, or XLA's.
        return (f"jaxllm.ops.gemm.{family[2]}", "jaxllm.ops.loss.head", *BRIDGE)
    if family and family[2] in IMPLEMENTATIONS:
        return BRIDGE
    if family and family[2] == "cases":
        return ("jaxllm.testing",)
    if family and family[2] == "api":
        core = ("core.backend", "core.dispatch", "ops.checks", "core.promotion", "core.vma")
        shared = tuple(f"jaxllm.{name}" for name in core)
        streams = ("jaxllm.ops.streams",) if family[1] in ("norm", "gemm", "attention") else ()
        # The projection before attention is XLA's, whatever the backend. A layer and a norm follow.
        after = ("gemm.products", "gemm.api", "norm.api") if family[1] == "attention" else ()
        others = (*streams, *(f"jaxllm.ops.{name}" for name in after))
        return (*shared, *others, f"jaxllm.ops.{family[1]}")
    if is_under(module, "jaxllm.models"):
        return ("jaxllm.ops", "jaxllm.models")
    if is_under(module, "jaxllm.ops"):
        return ("jaxllm.ops",)
    return ("jaxllm",)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_downwards(path):
    module = name_of(path)
    for imported in imports(path):
        if is_under(imported, "jaxllm"):
            assert is_under(imported, *allowed(module)), f"{module} imports {imported}"
        if is_under(imported, "jax.experimental.pallas"):
            assert path.stem in (*PALLAS, "pallas_call"), f"{module} imports Pallas"
        if is_under(imported, "jaxllm._cuda"):
            assert module == "jaxllm.core.ffi", f"{module} imports the extension"
        if is_under(imported, "optax"):
            assert is_under(module, "jaxllm.training"), f"{module} imports optax"


@pytest.mark.parametrize("path", [path for path in MODULES if path.stem in PALLAS], ids=name_of)
def test_pallas_kernels_are_called_in_one_place(path):
    assert "pl.pallas_call" not in path.read_text(), "jaxllm/ops/pallas_call.py is for that"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_dispatch_calls_an_implementation(path):
    module = name_of(path)
    if re.match(r"jaxllm\.ops\.\w+\.api$", module):
        calls = [
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        ]
        for call in calls:
            assert call.split(".")[0] not in IMPLEMENTATIONS, (module, call)


def test_a_model_names_no_backend():
    for path in (ROOT / "jaxllm" / "models").glob("*.py"):
        assert "backend" not in {
            keyword.arg
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            for keyword in node.keywords
        }, path


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_a_kernel_file_knows_nothing_of_xla(path):
    includes = re.findall(r'#include [<"]([^>"]+)', path.read_text())
    assert not [
        name for name in includes if "xla" in name or name.endswith(("ffi.h", "handlers.h"))
    ]


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "cuda").rglob("*ffi.cc")),
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_a_handler_file_holds_no_kernel(path):
    assert "__global__" not in path.read_text() and "<<<" not in path.read_text()


def test_every_handler_has_a_python_caller():
    handlers = re.findall(r"HANDLER\((\w+), (\w+)\)", (ROOT / "cuda" / "handlers.h").read_text())
    assert handlers
    callers = "".join(path.read_text() for path in (ROOT / "jaxllm" / "ops").rglob("cuda*.py"))
    for stem, handler in handlers:
        assert handler == "".join(word.capitalize() for word in stem.split("_"))
        assert f'"{stem}"' in callers, f"nothing calls {stem}"
