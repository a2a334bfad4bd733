"""Compiles training steps for many H100s without one, and tells what their programs move.

    python tests/compile_for_gpus.py FOLDER gpt2|llama3 FIRST

FOLDER has JAX's CUDA plugin (``pip install --no-deps --target FOLDER jax-cuda12-pjrt
jax-cuda12-plugin``, in the version of jaxlib); the CUDA extension must be built. The plugin stays
out of ``site-packages``, where JAX would start it in every process.
Prints a line of JSON for every second one of :data:`CASES`, from FIRST on.
"""

import dataclasses
import json
import math
import os
import re
import sys
import warnings

CASES = (
    ("data=8", "auto", None),
    ("fsdp=8", "auto", None),
    ("fsdp=8", "explicit", None),
    ("fsdp=8", "auto", "row"),
    ("fsdp=4,tensor=2", "auto", None),
    ("fsdp=2,context=2,tensor=2", "explicit", None),
    ("data=8,fsdp=8", "auto", None),
    ("fsdp=16,tensor=4", "auto", None),
    ("data=2,fsdp=8,context=2,tensor=2", "auto", None),
)
MOVES = r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def main(folder: str, name: str, first: str) -> None:
    """See the module's docstring."""
    sys.path.insert(0, folder)
    os.environ["JAX_PLATFORMS"] = ""
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # which would need a GPU
    import jax
    import jax_plugins.xla_cuda12 as plugin

    from jaxllm.core import ffi

    plugin._check_cuda_versions = lambda **_: None  # type: ignore[assignment]
    ffi.device = lambda: ffi.H100
    ffi._survey = lambda: ((), None)  # no GPU is asked
    for case in CASES[int(first) :: 2]:
        print(json.dumps(compile_step(jax, name, *case)), flush=True)


def compile_step(jax, name, mesh_text, kind, precision):
    """What a training step moves, beside what may be moved, in elements of a device."""
    import jax.numpy as jnp
    from jax.experimental import topologies

    import jaxllm
    from jaxllm import training
    from jaxllm.models import gpt2, llama3
    from jaxllm.models.common import unstack
    from jaxllm.training import parallel

    model, config, tokens = {
        "gpt2": (gpt2, dataclasses.replace(gpt2.PRESETS["d12"], layers=8), (4, 1024)),
        "llama3": (
            llama3,
            dataclasses.replace(llama3.PRESETS["3.2-1b"], layers=3, vocab_size=32768),
            (1, 4096),
        ),
    }[name]
    sizes = parallel.parse_mesh(mesh_text)
    count = math.prod(sizes.values())
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=H100, topology=f"1x{max(1, count // 8)}x{min(8, count)}"
    )
    mesh = parallel.make_mesh(**sizes, axis_type=kind, devices=topology.devices)
    optimizer = training.adamw(1e-3, max_grad_norm=1.0)
    shape = (1, tokens[0] * sizes["data"] * sizes["fsdp"], tokens[1])

    def create():
        params = unstack(model.init(jax.random.key(0), config))
        return training.init_state(params, optimizer, copy_dtype="bfloat16")

    def loss(params, tokens, labels):
        return model.loss(params, tokens, labels, config, precision=precision)

    with jax.set_mesh(mesh), jaxllm.use_backend("cuda"), warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        state = jax.eval_shape(create)
        shardings = parallel.state_shardings(mesh, state)
        state = jax.tree.map(
            lambda x, of: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of), state, shardings
        )
        batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=parallel.batch_sharding(mesh))
        step = training.make_train_step(
            loss, optimizer, compute_dtype="bfloat16", shardings=shardings
        )
        compiled = step.lower(state, batch, batch).compile()
    moved, in_float8 = [], 0
    for text, of, is_start in re.findall(MOVES, compiled.as_text()):
        arrays = re.findall(r"(\w+)\[([\d,]+)\]", text)
        # The type of a start has the operands before the results.
        arrays = arrays[len(arrays) // 2 :] if is_start else arrays
        elements = [math.prod(map(int, dims.split(","))) for _, dims in arrays]
        moved.append((of, elements))
        dtypes = [dtype for dtype, _ in arrays]
        in_float8 += sum(x for x, dtype in zip(elements, dtypes, strict=True) if "f8" in dtype)
    specs = jax.tree.leaves(jax.tree.map(lambda of: of.spec, shardings.copy))
    weights = set()
    for x, spec in zip(jax.tree.leaves(state.copy), specs, strict=True):
        axes = jax.tree.leaves(tuple(spec))
        whole = x.size // (sizes["tensor"] if "tensor" in axes else 1)
        weights |= {whole, whole // sizes["fsdp"]}  # as passes read it, and as it is stored
    in_blocks = jax.tree.leaves_with_path(state.copy["blocks"])
    keys = config.kv_heads if name == "llama3" else config.heads
    keys *= tokens[0] * tokens[1] * config.head_width // sizes["tensor"]
    return {
        "case": [mesh_text, kind, precision],
        "moved": moved,
        "in_float8": in_float8,
        "weights": sorted(weights),
        "keys": keys,
        "in_blocks": sum(x.size for path, x in in_blocks if path[-1].key == "weight"),
        "parameters": sum(x.size for x in jax.tree.leaves(state.copy)),
        "warnings": [str(x.message) for x in w if "Gather" in x.category.__name__],
        "kernels": sorted(
            set(re.findall(r'custom_call_target="jaxllm_(\w+)"', compiled.as_text()))
        ),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
