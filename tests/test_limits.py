"""Every call that a predicate accepts fits the GPU, for all ops and many GPUs, without a GPU.

The limits are the launchers' constants; see docs/architectures.py.
"""

import dataclasses
import importlib
import math
import pkgutil

import architectures
import jax
import jax.numpy as jnp
import pytest

import jaxllm
import jaxllm.ops
from jaxllm import testing
from jaxllm.core import ffi
from jaxllm.core.backend import BackendError
from jaxllm.models import gpt2
from jaxllm.ops.gemm import cuda_fused as gemm

if ffi._fault is not None:
    pytest.skip(
        f"the launchers' limits are in the extension: {ffi._fault}", allow_module_level=True
    )


def hopper(sms, **changes):
    """A Hopper GPU with ``sms`` SMs and clusters of two."""
    return dataclasses.replace(ffi.H100, multiprocessors=sms, clusters=sms // 2, **changes)


# Hopper GPUs with fewer SMs: an H100 PCIe, an H20, MIG slices. Then a GPU with few clusters, one
# without clusters, and an unknown GPU.
GPUS = {f"sm_{name}": gpu for name, gpu in architectures.GPUS.items()} | {
    **{f"sm_90a with {sms} SMs": hopper(sms) for sms in (114, 78, 60, 14)},
    "sm_90a with 3 clusters": dataclasses.replace(ffi.H100, clusters=3),
    "sm_90a without clusters": dataclasses.replace(ffi.H100, clusters=0),
    "unknown": None,
}
FAMILIES = [module.name for module in pkgutil.iter_modules(jaxllm.ops.__path__) if module.ispkg]
LEAST_SHARED_BYTES = 99 << 10  # the minimum of all GPUs: sm_86, sm_89 and sm_120


def cases_of(family):
    """The large cases, and two small cases of each op."""
    cases = importlib.import_module(f"jaxllm.ops.{family}.cases").CASES
    few = [
        case
        for op in dict.fromkeys(case.op for case in cases)
        for case in [case for case in cases if case.op == op and not case.large][:2]
    ]
    return [case for case in (*few, *(case for case in cases if case.large)) if not refused(case)]


def refused(case):
    return "cuda" in case.refused_by


def tiles(rows, columns, tile):
    return math.prod(
        -(-size // of_tile) for size, of_tile in zip((rows, columns), tile, strict=True)
    )


def assert_launches(launch, gpu):
    """Asserts the conditions for which launchers return an error."""
    for kernel in architectures.kernels_of(launch, gpu):
        need = ffi.shared_needs().get(kernel, 0)
        assert need <= (LEAST_SHARED_BYTES if gpu is None else gpu.shared_bytes), kernel
    if launch.stem in architectures.HOPPER_STEMS:
        assert gpu is not None and gpu.capability == 90 and gpu.has_sm90a, launch.stem
        # wgrad_pair has no clusters.
        assert gpu.clusters > 0 or launch.stem == "wgrad_pair"
    if gpu is None:
        return
    if launch.stem in ("matmul_residual_norm", "matmul_norm_backward"):
        # The column tiles of a row run at once. The gradient has rows of partial sums for each
        # group of clusters that has a row, 16 for each of its clusters' CTAs' warps.
        columns = launch.results[0].shape[-1]
        assert tiles(1, columns, (1, 192)) <= gpu.clusters
        if launch.stem == "matmul_norm_backward":
            assert launch.results[2].shape[0] >= 16
    if launch.stem == "wgrad_pair":
        *weights, partial = (result.shape for result in launch.results)
        count = sum(tiles(rows, columns, (256, 192)) for rows, columns in weights)
        assert count <= min(gpu.multiprocessors, partial[0] - count)


def family_and_gpu():
    """Families with a few GPUs; with all GPUs, in bfloat16, if their kernels differ."""
    few = ("sm_80", "sm_86", "sm_90a", "sm_120", "unknown")
    for family in FAMILIES:
        differs = family in ("attention", "block", "gemm", "loss")
        for name in GPUS if differs else few:
            dtypes = ("bfloat16", "float32") if name in few else ("bfloat16",)
            yield pytest.param(family, GPUS[name], dtypes, id=f"{family}-{name}")


@pytest.mark.parametrize(("family", "gpu", "dtypes"), list(family_and_gpu()))
@pytest.mark.covering(("family", "dtypes"), ("gpu",))
def test_accepted_calls_fit_the_gpu(family, gpu, dtypes):
    # Other ops than those of HOPPER_STEMS have kernels for sm_80 and later.
    for case in cases_of(family):
        for dtype in dtypes:
            program = architectures.program_of(case, "cuda")
            with architectures.on(gpu):
                runs = ffi.runs_hopper_kernels() and gpu.clusters > 0
                if case.op in architectures.HOPPER_STEMS and not runs:
                    with pytest.raises(BackendError, match=f"cannot serve {case.op}: "):
                        architectures.launches(program, *testing.input_types(case, dtype))
                    continue
                launches = architectures.launches(program, *testing.input_types(case, dtype))
            # Without activation and bias, XLA runs a linear layer and its gradients.
            assert launches or case.op == "linear", case
            for launch in launches:
                assert_launches(launch, gpu)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("width", [8, 32, 40, 64, 80, 96, 128, 129, 192, 200, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.covering(("gpu", "dtype"), ("gpu", "width"))
def test_attention_of_any_head_width_fits_every_gpu(dtype, width, gpu):
    case = architectures._heads(1, 70, 4, width)
    program = architectures.program_of(case, "cuda")
    with architectures.on(gpu):
        forward, backward = architectures.launches(program, *testing.input_types(case, dtype))
    assert_launches(forward, gpu)
    assert_launches(backward, gpu)
    if gpu is not None and gpu.has_sm90a and dtype == "bfloat16" and width % 8 == 0:
        assert architectures.kernels_of(forward, gpu) == ("flash_attention_forward_hopper",)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_attention_with_narrow_values_runs_on_hopper_alone(gpu):
    case = architectures._heads(1, 70, 4, 192, 128)
    program = architectures.program_of(case, "cuda")
    for dtype in ("bfloat16", "float32"):
        with architectures.on(gpu):
            if gpu is None or not gpu.has_sm90a or dtype == "float32":
                with pytest.raises(BackendError, match="keys are 192 wide and values 128"):
                    architectures.launches(program, *testing.input_types(case, dtype))
                continue
            launches = architectures.launches(program, *testing.input_types(case, dtype))
        names = [architectures.kernels_of(launch, gpu) for launch in launches]
        ways = ("forward", "backward")
        assert names == [(f"flash_attention_{way}_hopper",) for way in ways]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_hopper_kernels_are_selected_if_they_fit(gpu):
    rows, width, hidden = 65536, 768, 3072
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    of_hidden = jax.ShapeDtypeStruct((rows, hidden), jnp.bfloat16)
    with architectures.on(gpu):
        fused = gemm.gemm_unsupported(x, hidden)
        norm = gemm.row_gemm_unsupported(of_hidden, width)
        gradients = gemm.wgrad_pair_unsupported(x, x, x, x, min_rows=0, sms_of_tile=2)
    if gpu is None or not gpu.has_sm90a:
        assert None not in (fused, norm, gradients)
        return
    assert (fused is None) == (gpu.clusters > 0)
    # A row of 768 columns has four tiles, and two weights of 768 x 768 have 24.
    assert (norm is None) == (gpu.clusters >= 4)
    assert (gradients is None) == (gpu.multiprocessors >= 48)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_gpt2_step_fits_every_gpu(gpu):
    config = gpt2.GPT2Config(layers=2)
    tokens = jax.ShapeDtypeStruct((64, 1024), jnp.int32)

    def step(params, tokens):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return jax.grad(gpt2.loss)(params, tokens, tokens, config)

    params = jax.eval_shape(lambda: gpt2.init(jax.random.key(0), config))
    with architectures.on(gpu), jaxllm.use_backend("auto"):
        launches = architectures.launches(step, params, tokens)
    stems = {launch.stem for launch in launches}
    for launch in launches:
        assert_launches(launch, gpu)
    runs_rows_at_once = gpu is not None and gpu.has_sm90a and gpu.clusters >= 4
    assert ("matmul_norm_backward" in stems) == runs_rows_at_once


def test_shared_memory_error_has_both_sizes():
    # Smaller than on any real GPU, so the kernels for wide heads do not fit.
    small = dataclasses.replace(architectures.GPUS["86"], shared_bytes=64 << 10)
    case = architectures._heads(1, 70, 4, 256)
    with architectures.on(small), pytest.raises(BackendError, match=r"99.0 KiB .* has 64 KiB"):
        architectures.launches(
            architectures.program_of(case, "cuda"), *testing.input_types(case, "bfloat16")
        )


def test_shared_memory_is_known_for_all_kernels():
    needs = ffi.shared_needs()
    widths = ("32", "64", "96", "128", "256")
    attention = {f"flash_attention_{way}_{w}" for way in ("forward", "backward") for w in widths}
    attention |= {f"flash_attention_float32_{width}" for width in ("64", "128", "256")}
    attention |= {
        f"flash_attention_{way}_bias_{width}"
        for way in ("forward", "backward")
        for width in ("64", "128", "256")
    }
    decode = {"decode_attention", "decode_attention_any_width"}
    products = {"matmul_mma_16_bits", "matmul_mma_float32"}
    products |= {f"matmul_float32_{size}" for size in ("large", "square", "small")}
    # A kernel that is missing here has no test of its limits.
    assert set(needs) == attention | decode | products
    assert all(0 < need <= LEAST_SHARED_BYTES for need in needs.values())


def test_architectures_page_is_current():
    assert architectures.page() == architectures.PAGE.read_text(), "python docs/architectures.py"
