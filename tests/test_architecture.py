"""Who may import whom: the layers of the house, read off the sources."""

import ast
import functools
import re
from pathlib import Path

import kernel_table
import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "jaxllm").rglob("*.py"))
# Each module of the core, and each family of ops, may import those before it.
CORE = (
    "backend", "promotion", "precision", "derivatives", "vma", "ffi", "layout", "meshes",
    "sharding_rule", "shards", "gathers", "partition", "dispatch", "op", "hoisting",
)  # fmt: skip
FAMILIES = (
    "activation", "norm", "rotary", "embedding", "reduction", "optimizer", "vision",
    "quantization", "gemm", "attention", "loss", "block",
)  # fmt: skip
# By all families.
SHARED = tuple(
    f"jaxllm.ops.{name}" for name in ("checks", "pages", "rounding", "weights", "window")
)
# The packages above the ops, and those that each may import.
PACKAGES = {
    "jaxllm.nn": ("jaxllm.core", "jaxllm.ops"),
    "jaxllm.models": ("jaxllm.ops",),
    "jaxllm.data": (),
    "jaxllm.inference": ("jaxllm.ops", "jaxllm.models"),
    "jaxllm.convert": tuple(
        f"jaxllm.{name}" for name in ("core", "ops", "models", "data", "inference")
    ),
    "jaxllm.training": tuple(
        f"jaxllm.{name}" for name in ("core", "ops", "models", "data", "convert")
    ),
}
KINDS = ("reference", "xla", "pallas", "cuda")  # of implementations, which begin with these words
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


def kind_of(stem):
    """Which implementation a module of a family is; None for any other module."""
    return next((kind for kind in KINDS if stem.split("_")[0] == kind), None)


def before(names, name):
    return names[: names.index(name)]


def allowed(module):
    """Whether a module may import another one of jaxllm, as a function of that one."""
    layer, *rest = module.split(".")[1:] or [""]
    if layer == "core" and rest:
        earlier = [f"jaxllm.core.{name}" for name in before(CORE, rest[0])]
        extension = ["jaxllm._cuda"] if rest == ["ffi"] else []
        return lambda name: is_under(name, *earlier, *extension)
    if layer == "ops" and len(rest) == 2:
        return functools.partial(is_allowed_in_a_family, *rest)
    if layer == "ops" and rest:
        return lambda name: is_under(name, "jaxllm.core", *SHARED)
    if (package := f"jaxllm.{layer}") in PACKAGES:
        return lambda name: is_under(name, package, *PACKAGES[package])
    return lambda name: layer != "testing" and is_under(name, "jaxllm")


def is_allowed_in_a_family(family, stem, name):
    """Whether a module of a family may import ``name``.

    An implementation may use the same backend's of an earlier family, and helpers of its own. All
    other modules may use the core, their own family, and what is no implementation of earlier ones.
    """
    kind = kind_of(stem)
    if is_under(name, *SHARED):
        return True
    if stem == "cases":
        return is_under(name, "jaxllm.testing", f"jaxllm.ops.{family}")
    if is_under(name, "jaxllm.core"):
        return kind is None or is_under(name, "jaxllm.core.ffi", "jaxllm.core.precision")
    if is_under(name, "jaxllm.ops.pallas_call"):
        return kind == "pallas"
    match = re.match(r"jaxllm\.ops\.(\w+)\.(\w+)", name)
    if not match or match[1] not in FAMILIES:
        return False
    other, other_kind = match[1], kind_of(match[2])
    if other == family:
        return kind is None or other_kind in (None, kind)
    if other not in before(FAMILIES, family):
        return False
    return other_kind == ("reference" if kind == "xla" else kind)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_downwards(path):
    module = name_of(path)
    for imported in imports(path):
        if is_under(imported, "jaxllm"):
            assert allowed(module)(imported), f"{module} imports {imported}"
        if is_under(imported, "jax.experimental.pallas"):
            assert path.stem.startswith("pallas"), f"{module} imports Pallas"
        if is_under(imported, "jaxllm._cuda"):
            assert module == "jaxllm.core.ffi", f"{module} imports the extension"
        if is_under(imported, "optax"):
            assert is_under(module, "jaxllm.training"), f"{module} imports optax"


@pytest.mark.parametrize("path", list((ROOT / "jaxllm" / "ops").glob("*/pallas*.py")), ids=name_of)
def test_pallas_kernels_are_called_in_one_place(path):
    assert "pl.pallas_call" not in path.read_text(), "jaxllm/ops/pallas_call.py is for that"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_dispatch_calls_an_implementation(path):
    module = name_of(path)
    if re.match(r"jaxllm\.ops\.\w+\.api", module):
        calls = [
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        ]
        for call in calls:
            assert kind_of(call.split(".")[0]) is None, (module, call)


@pytest.mark.parametrize("path", [path for path in MODULES if kind_of(path.stem)], ids=name_of)
def test_only_predicates_ask_why_a_kernel_cannot_serve(path):
    """An implementation that asks and then runs something else would fall back in silence."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            calls = [ast.unparse(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)]
            asked = [
                name for name in calls if name.endswith(("_unsupported", "_slower", "_reason"))
            ]
            is_predicate = function.name.endswith(("unsupported", "slower", "reason"))
            # packing.unsupported(...) makes a predicate of another.
            assert is_predicate or not asked, f"{path}: {function.name} asks {asked}"


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
    handlers = kernel_table.handlers()
    assert handlers
    callers = "".join(path.read_text() for path in (ROOT / "jaxllm" / "ops").rglob("cuda*.py"))
    for stem, handler in handlers.items():
        assert handler == "".join(word.capitalize() for word in stem.split("_"))
        assert f'"{stem}"' in callers, f"nothing calls {stem}"
