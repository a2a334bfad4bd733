"""What CMake does where there is no nvcc; nothing is compiled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def configure(tmp_path):
    """Runs CMake's configuration on a machine that seems to have no nvcc."""
    beside_python = Path(sys.executable).parent
    cmake = shutil.which("cmake", path=os.pathsep.join([str(beside_python), os.environ["PATH"]]))
    if cmake is None:
        pytest.skip('no cmake; run: pip install "cmake>=3.24"')

    def run(**options):
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        # CMake looks for nvcc beyond the PATH, but nowhere else once CUDACXX names one.
        environment = os.environ | {"CUDACXX": str(tmp_path / "no-such-nvcc")}
        done = subprocess.run(
            [cmake, "-S", ROOT, "-B", tmp_path / "build", *definitions],
            env=environment,
            capture_output=True,
            text=True,
        )
        # CMake wraps its messages.
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run


def test_cuda_on_without_nvcc_is_an_error_that_names_it(configure):
    code, output = configure(JAXLLM_CUDA="ON")
    assert code != 0
    assert "JAXLLM_CUDA is ON but no working nvcc was found; put nvcc >= " in output
    assert output.count("CMake Error") == 1


@pytest.mark.parametrize("options", [{}, {"JAXLLM_CUDA": "AUTO"}])
def test_by_default_no_nvcc_means_no_kernels(configure, options):
    code, output = configure(**options)
    assert code == 0, output
    assert "jaxllm: no nvcc found, so the CUDA kernels are not built." in output


def test_cuda_off_builds_no_kernels(configure):
    code, output = configure(JAXLLM_CUDA="OFF")
    assert code == 0, output
    assert "jaxllm: JAXLLM_CUDA is OFF, so the CUDA kernels are not built." in output


@pytest.mark.parametrize("value", ["on", "YES", ""])
def test_another_value_is_an_error_that_names_the_three(configure, value):
    code, output = configure(JAXLLM_CUDA=value)
    assert code != 0
    assert f"JAXLLM_CUDA is '{value}'; it must be AUTO, ON or OFF." in output
