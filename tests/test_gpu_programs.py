"""Training steps compiled for 8 to 64 H100s: what their programs move.

``JAXLLM_CUDA_PLUGIN`` names the folder of :mod:`compile_for_gpus`; ``.ci/run`` makes one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compile_for_gpus import CASES

from jaxllm.core import ffi
from jaxllm.training import parallel

ROOT = Path(__file__).parent.parent
JOINED = 2**27  # bytes that XLA joins into one all-gather
PLUGIN = os.environ.get("JAXLLM_CUDA_PLUGIN", "")

pytestmark = [
    pytest.mark.skipif(not PLUGIN, reason="JAXLLM_CUDA_PLUGIN names no folder of the plugin"),
    pytest.mark.skipif(not ffi.is_available(), reason="the CUDA extension is not built"),
]


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.covering(("name",), ("first",))  # half of the meshes with each model
def test_programs_for_many_gpus_gather_weights_alone_and_never_all(name, first):
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "compile_for_gpus.py"), PLUGIN, name, str(first)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    programs = list(map(json.loads, run.stdout.splitlines()))
    assert [tuple(found["case"]) for found in programs] == list(CASES[first::2])
    for found in programs:
        check(found)


def check(found):
    case, sizes = found["case"], parallel.parse_mesh(found["case"][0])
    assert not found["warnings"], case
    gathered = [of for kind, of in found["moved"] if kind == "all-gather"]
    keys = [found["keys"]] if sizes["context"] > 1 else []
    sizes_gathered = {size for of in gathered for size in of}
    scales = {size for size in sizes_gathered if size < 2**14} if case[2] else set()
    assert gathered and sizes_gathered <= {*found["weights"], *keys, *scales}, case
    # After the rounding, in half the bytes, forward and backward.
    assert found["in_float8"] == (2 * found["in_blocks"] if case[2] else 0), case
    width = 1 if case[2] else 2
    assert all(len(of) == 1 or width * sum(of) <= JOINED for of in gathered), case
    assert 2 * found["parameters"] > JOINED
    others = {kind for kind, _ in found["moved"]} - {"all-gather", "all-reduce", "reduce-scatter"}
    assert others == ({"collective-permute"} if sizes["context"] > 1 else set()), case
    if sizes["tensor"] == sizes["context"] == 1:  # biases, scales of norms and scalars
        summed = [size for kind, of in found["moved"] if kind == "all-reduce" for size in of]
        # In float8 also a maximum for each column of a weight, of which gate_up has 2^14.
        assert max(summed) < (2**14 + 1 if case[2] else 2**14), case
        assert any(kind == "reduce-scatter" for kind, _ in found["moved"]), case
    assert "adamw_update" in found["kernels"]
    assert any(kernel.startswith("flash_attention") for kernel in found["kernels"]), case
