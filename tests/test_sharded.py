"""Runs the tests of ``tests/sharded`` in processes with eight devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GROUPS = {
    "ops-auto": ("test_ops.py", "Auto"),
    "ops-explicit": ("test_ops.py", "Explicit"),
    "gathers": ("test_gathers.py", ""),
    "context": ("test_context.py", ""),
    "models": ("test_models.py", ""),
    "fused_models": ("test_fused_models.py", ""),
    "transforms": ("test_transforms.py", ""),
    "manual": ("test_manual.py", ""),
    "whole_arrays": ("test_whole_arrays.py", ""),
    "vocabulary": ("test_vocabulary.py", ""),
    "float8_linear": ("test_float8_linear.py", ""),
    "planned_moves": ("test_planned_moves.py", ""),
}


def test_each_file_is_in_a_group():
    files = {path.name for path in (ROOT / "tests" / "sharded").glob("test_*.py")}
    assert files == {file for file, _ in GROUPS.values()}


@pytest.mark.parametrize("group", GROUPS)
def test_on_eight_devices(group, request):
    file, keyword = GROUPS[group]
    # The options of this process, with which its conftest has compiled, and eight devices.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    covering = ["--covering"] if request.config.getoption("--covering") else []
    run = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
            *covering, *("-k", keyword), str(ROOT / "tests" / "sharded" / file),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
