"""Runs the tests of ``tests/sharded`` in processes with eight devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A process for each: few, as each imports and collects for five seconds.
GROUPS = {
    "ops-auto": (["ops"], "Auto"),
    "ops-explicit": (["ops"], "Explicit"),
    "models": (["models", "manual"], ""),
    "sequences": (["context", "gathers"], ""),
    "transforms": (["transforms", "vocabulary", "planned_moves"], ""),
    "layers": (["fused_models", "float8_linear"], ""),
    "whole_arrays": (["whole_arrays"], ""),
}


def test_each_file_is_in_a_group():
    files = {path.name for path in (ROOT / "tests" / "sharded").glob("test_*.py")}
    assert files == {f"test_{name}.py" for names, _ in GROUPS.values() for name in names}


@pytest.mark.parametrize("group", GROUPS)
def test_on_eight_devices(group, request):
    names, keyword = GROUPS[group]
    files = [str(ROOT / "tests" / "sharded" / f"test_{name}.py") for name in names]
    # The options of this process, with which its conftest has compiled, and eight devices.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    covering = ["--covering"] if request.config.getoption("--covering") else []
    run = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
            *covering, *("-k", keyword), *files,
        ],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
