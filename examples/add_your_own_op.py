"""Adds an op with a CUDA kernel of your own, behind the same backend switch as jaxllm's ops.

    python examples/add_your_own_op.py

It compiles ``your_own_op/softsign.cu`` with nvcc, registers its handlers, and checks the op and its
gradient under each backend that this machine can run. Copy the two files into your project and edit
them; docs/your_own_op.md explains them.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxllm import testing
from jaxllm.core import ffi
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Op
from jaxllm.core.op import differentiable
from jaxllm.core.sharding_rule import ShardingRule

SOURCE = Path(__file__).parent / "your_own_op" / "softsign.cu"
SHAPE = (33, 257)


def compile_library(source: Path, library: Path) -> None:
    """Compiles a CUDA source into a shared library, for the GPU of this machine if it has one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit("nvcc is not on the PATH; install the CUDA toolkit")
    has_gpu = jax.default_backend() == "gpu"
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(nvcc, "-shared", "-Xcompiler", "-fPIC", "-O3", "-std=c++17"),
            *("-arch=native" if has_gpu else "-arch=sm_80", "-isystem", jax.ffi.include_dir()),
            *("-o", str(library), str(source)),
        ],
        check=True,
    )


class Reference:
    """The reference implementation in jax.numpy; it runs where there is no kernel."""

    @staticmethod
    def softsign_forward(x):
        """Returns ``out``."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return (wide / (1 + jnp.abs(wide))).astype(x.dtype)

    @staticmethod
    def softsign_backward(x, dout):
        """Returns ``dx``."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return (dout / (1 + jnp.abs(wide)) ** 2).astype(x.dtype)


class Kernels:
    """The calls of the handlers, with the same signatures."""

    @staticmethod
    def softsign_forward(x):
        """Returns ``out``."""
        return ffi.call("softsign_forward", [jax.ShapeDtypeStruct(x.shape, x.dtype)], x)[0]

    @staticmethod
    def softsign_backward(x, dout):
        """Returns ``dx``."""
        return ffi.call("softsign_backward", [jax.ShapeDtypeStruct(x.shape, x.dtype)], x, dout)[0]


# In a package each class would be a module.
SOFTSIGN = Op("softsign", reference=Reference, cuda=Kernels)

# The backward gets what ``saves`` returns, and then the cotangent. x and out have the same
# dimensions, and the op may be sharded along each. The rule need not name x again as saved.
_softsign = differentiable(SOFTSIGN, saves=lambda x, out: (x,), sharding=ShardingRule("... -> ..."))


def softsign(x: jax.Array, *, backend: Backend | None = None) -> jax.Array:
    """``x / (1 + abs(x))``, by the requested backend."""
    return _softsign(x, backend=resolve(backend))


def value_and_gradient(x: jax.Array, backend: Backend) -> tuple[jax.Array, jax.Array]:
    """The op, and the gradient of the sum of its squares."""
    total = jax.grad(lambda x: (softsign(x, backend=backend).astype(jnp.float32) ** 2).sum())
    return softsign(x, backend=backend), total(x)


def check(backend: Backend) -> None:
    """Compares a backend with JAX's own derivative of the reference, in every dtype."""
    plain = Reference.softsign_forward
    squares = jax.grad(lambda x: (plain(x) ** 2).sum())
    for dtype in testing.DTYPES:
        x = 3 * jax.random.normal(jax.random.key(0), SHAPE, dtype)
        wide = x.astype(jnp.float32)
        exact = plain(wide), squares(wide)
        found = jax.jit(value_and_gradient, static_argnums=1)(x, backend)
        testing.assert_close(found, exact, dtype, what=f"softsign under {backend} in {dtype}")
    print(f"{backend}: right in {', '.join(testing.DTYPES)}, forward and backward")


def main(library: Path | None = None) -> None:
    """Compiles, registers and checks the op.

    Args:
        library: The path of the library; None for runs/your_own_op in the checkout.
    """
    library = library or SOURCE.parents[2] / "runs" / "your_own_op" / "libsoftsign.so"
    compile_library(SOURCE, library)
    ffi.load(
        library, {"softsign_forward": "SoftsignForward", "softsign_backward": "SoftsignBackward"}
    )
    print(f"registered the handlers of {library}")
    check("xla")
    if jax.default_backend() == "gpu":
        check("cuda")
        return
    program = testing.lower_for_cuda(
        functools.partial(value_and_gradient, backend="cuda"),
        jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16),
    )
    calls = [name for name in ("softsign_forward", "softsign_backward") if name in program]
    print(f"cuda: no GPU here; the program for one calls {' and '.join(calls)}")


if __name__ == "__main__":
    sys.exit(main())
