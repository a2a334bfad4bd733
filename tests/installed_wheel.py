"""Checks the jaxllm that is installed, beside JAX's CUDA plugin; needs no GPU.

    python installed_wheel.py

The extension must load and register its kernels, and the plugin must find them: a program with
kernels is compiled for an H100 that need not be there. ``tests/install_wheels.sh`` runs this.
"""

import importlib
import importlib.metadata
import os
import re
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Prints what was found; fails where something is missing."""
    os.environ["JAX_PLATFORMS"] = ""
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # which would need a GPU
    plugins = [of for of in ("12", "13") if _version(f"jax-cuda{of}-plugin")]
    assert len(plugins) == 1, f"JAX's plugins here are for CUDA {plugins}, and not for one version"
    plugin: Any = importlib.import_module(f"jax_plugins.xla_cuda{plugins[0]}")
    plugin._check_cuda_versions = lambda **_: None  # it asks the driver

    import jax

    import jaxllm
    from jaxllm.core import ffi

    folder = Path(jaxllm.__file__).parent
    assert "site-packages" in folder.parts, f"{folder} is no installed wheel"
    libraries = list(folder.parent.glob("jaxllm.libs/*"))
    assert not libraries, f"the wheel bundles {libraries}"
    assert ffi.unavailable_reason() is None, ffi.unavailable_reason()
    assert ffi.targets(), "the extension registers no kernel"
    kernels = compile_kernels(jax, jaxllm, ffi)
    print(
        f"Python {sys.version.split()[0]}, JAX {jax.__version__} with its plugin for CUDA "
        f"{plugins[0]}; extension of CUDA {ffi.build_facts()['cuda']} for "
        f"{ffi.build_facts()['architectures']}, {len(ffi.targets())} kernels; compiled a program "
        f"with {', '.join(kernels)}"
    )


def compile_kernels(jax, jaxllm, ffi) -> list[str]:
    """The kernels in the program of a loss and its gradients, compiled for an H100."""
    import jax.numpy as jnp
    from compile_for_gpus import H100
    from jax.experimental import topologies

    ffi.device = lambda: ffi.H100
    ffi._survey = lambda: ((), None)  # no GPU is asked
    topology = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x1")
    mesh = jax.sharding.Mesh(topology.devices, "gpu")
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def loss(x, scale):
        y = jaxllm.ops.rms_norm(x, scale).reshape(2, 128, 4, 64)
        return jnp.sum(jaxllm.ops.flash_attention(y, y, y, causal=True).astype(jnp.float32))

    x = jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16, sharding=whole)
    scale = jax.ShapeDtypeStruct((256,), jnp.float32, sharding=whole)
    with jaxllm.use_backend("cuda"):
        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, scale).compile()
    kernels = sorted(set(re.findall(r'custom_call_target="jaxllm_(\w+)"', program.as_text())))
    assert {"rms_norm_forward", "rms_norm_backward"} <= set(kernels), kernels
    return kernels


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
