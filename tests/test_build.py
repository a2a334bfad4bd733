"""What CMake does without nvcc, which GPUs it builds for, and how it finds the FFI handlers.

Nothing is compiled.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kernel_table
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def cmake():
    """Runs CMake; returns its exit status and what it says, without its line breaks."""
    beside_python = Path(sys.executable).parent
    cmake = shutil.which("cmake", path=os.pathsep.join([str(beside_python), os.environ["PATH"]]))
    if cmake is None:
        pytest.skip('no cmake; run: pip install "cmake>=3.24"')

    def run(*arguments, **environment):
        done = subprocess.run(
            [cmake, *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run


@pytest.fixture
def configure(tmp_path, cmake):
    """Runs CMake's configuration on a machine that seems to have no nvcc."""

    def run(**options):
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        # CMake looks for nvcc beyond the PATH, but nowhere else once CUDACXX names one.
        nvcc = str(tmp_path / "no-such-nvcc")
        return cmake("-S", ROOT, "-B", tmp_path / "build", *definitions, CUDACXX=nvcc)

    return run


@pytest.fixture
def resolve(tmp_path, cmake):
    """What CMake makes of a choice of GPUs, with an nvcc 12.3; returns the status and its words."""
    script = tmp_path / "resolve.cmake"
    script.write_text(
        f'include("{ROOT}/cmake/architectures.cmake")\n'
        'jaxllm_resolve_architectures("${CHOICE}" "${SOURCE}" "${MODE}" 12.3.107 "${KNOWN}" out)\n'
        'message("found: ${out}")\n'
    )

    def run(choice, *, source="CUDAARCHS", mode="AUTO", known="50;75;80;86;87;89;90", gpu=None):
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\nprintf '{gpu}'\n" if gpu else "#!/bin/sh\nexit 9\n")
        smi.chmod(0o755)
        options = {"CHOICE": choice, "SOURCE": source, "MODE": mode, "KNOWN": known}
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
        return cmake(*definitions, "-P", script, PATH=path)

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
    reason = "no working nvcc found, or no C++ compiler, so the CUDA kernels are not built."
    assert f"jaxllm: {reason}" in output


def test_cuda_off_builds_no_kernels(configure):
    code, output = configure(JAXLLM_CUDA="OFF")
    assert code == 0, output
    assert "jaxllm: JAXLLM_CUDA is OFF, so the CUDA kernels are not built." in output


@pytest.mark.parametrize("value", ["on", "YES", ""])
def test_another_value_is_an_error_that_names_the_three(configure, value):
    code, output = configure(JAXLLM_CUDA=value)
    assert code != 0
    assert f"JAXLLM_CUDA is '{value}'; it must be AUTO, ON or OFF." in output


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ("80-real;90a-real;90-virtual", "80-real;90a-real;90-virtual"),
        ("86", "86"),
        ("90;90", "90"),
        ("all", "80-real;86-real;87-real;89-real;90a-real;90-virtual"),
        ("all-major", "80-real;90a-real;90-virtual"),
    ],
)
def test_architectures_that_nvcc_has_are_taken(resolve, choice, found):
    code, output = resolve(choice, mode="ON")
    assert code == 0 and output == f"found: {found}"


def test_native_is_the_gpus_of_this_machine(resolve):
    code, output = resolve("native", gpu="9.0\\n8.0\\n9.0\\n", mode="ON")
    assert code == 0 and output == "found: 90a-real;80-real"
    code, output = resolve("native", mode="ON")
    assert code != 0
    assert "CUDAARCHS is native, but nvidia-smi finds no GPU here; name an architecture" in output


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            "120",
            "CUDAARCHS has '120', which nvcc 12.3.107 does not know; install CUDA 12.8 or newer",
        ),
        ("90a;103-real", "has '103-real', which nvcc 12.3.107 does not know; install CUDA 12.9 or"),
        ("999", "does not know; install a newer CUDA toolkit, or name one that it knows (80, 86, "),
    ],
)
def test_an_architecture_that_nvcc_lacks_is_an_error_where_kernels_are_asked_for(
    resolve, choice, message
):
    code, output = resolve(choice, mode="ON")
    assert code != 0 and message in output


@pytest.mark.parametrize(
    ("choice", "found"),
    [("120", "90-virtual"), ("90a-real;120-real", "90a-real;90-virtual"), ("88", "87-virtual")],
)
def test_the_newest_older_ptx_serves_other_gpus_with_a_warning(resolve, choice, found):
    code, output = resolve(choice)
    assert code == 0 and output.endswith(f"found: {found}")
    older = found.split(";")[-1].removesuffix("-virtual")
    assert "CMake Warning" in output and f"built as PTX for compute_{older}, which the" in output


@pytest.mark.parametrize("mode", ["AUTO", "ON"])
def test_a_gpu_newer_than_nvcc_gets_ptx(resolve, mode):
    code, output = resolve("120-real", source="GPU", mode=mode)
    assert code == 0 and output.endswith("found: 90-virtual")
    assert "nvcc 12.3.107 does not know sm_120, the GPU of this machine" in output
    assert "install CUDA 12.8 or newer for machine code" in output
    code, output = resolve("native", gpu="12.0\\n", mode=mode)
    assert code == 0 and output.endswith("found: 90-virtual")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("75", "has '75', but the kernels need sm_80 or newer."),
        ("80a", "has '80a', but sm_80 has no variant a."),
        ("100f", "has '100f', but no kernel has instructions of a family; write 100."),
        ("sm_90", "CUDAARCHS has 'sm_90'; write numbers between semicolons"),
        ("80,90", "CUDAARCHS has '80,90'; write numbers between semicolons"),
        ("90a-ptx", "CUDAARCHS has '90a-ptx'; write numbers between semicolons"),
    ],
)
def test_what_is_no_architecture_is_refused(resolve, choice, message):
    for mode in ("AUTO", "ON"):
        code, output = resolve(choice, mode=mode)
        assert code != 0 and message in output


def test_nothing_stands_in_for_a_gpu_that_is_older_than_all_that_nvcc_knows(resolve):
    code, output = resolve("80", known="90;100")
    assert code != 0 and "CUDAARCHS has '80', which nvcc 12.3.107 does not know" in output


@pytest.mark.no_gpu  # a machine with a GPU may have no nvcc
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("mode", ["ON", "AUTO"])
def test_nvcc_is_asked_what_it_compiles_for(tmp_path, cmake, mode):
    # AUTO would go on to try the compilers, which takes long: it stops at another architecture.
    choice = "999" if mode == "ON" else "999;1"
    definitions = [f"-DJAXLLM_CUDA={mode}"]
    code, output = cmake("-S", ROOT, "-B", tmp_path / "build", *definitions, CUDAARCHS=choice)
    assert code != 0
    assert "CUDAARCHS has '999', which nvcc" in output
    if mode == "ON":
        assert re.search(r"name one that it knows \(80, .*90", output)
    else:
        assert re.search(r"built as PTX for compute_\d+, .*CUDAARCHS has '1', but", output)


@pytest.fixture
def project(tmp_path, cmake):
    """A project that only writes the list of handlers of its files; builds it, returns the list."""
    source = tmp_path / "project"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\n"
        "project(handlers LANGUAGES NONE)\n"
        f'include("{ROOT}/cmake/handlers.cmake")\n'
        "file(GLOB_RECURSE sources CONFIGURE_DEPENDS *.cc)\n"
        'jaxllm_write_handlers("${CMAKE_BINARY_DIR}/handlers.h" ${sources})\n'
    )

    def build(**files):
        for name, text in files.items():
            (source / f"{name}.cc").write_text(text)
        out = tmp_path / "build"
        for arguments in ([] if out.exists() else [("-S", source, "-B", out)]) + [("--build", out)]:
            code, output = cmake(*arguments)
            assert code == 0, output
        text = (out / "handlers.h").read_text()
        macro = re.search(r"define JAXLLM_HANDLERS\(HANDLER\)((?: \\\n.*)*)\n\n", text)
        assert macro, text
        return re.findall(r"^  HANDLER\((\w+), (\w+)\)", macro[1], re.M)

    return build


def test_a_new_handler_and_a_new_file_reach_the_list_of_handlers(project):
    forward = '\nJAXLLM_HANDLER(DotForward, DotForwardImpl<Half>,\n               "eps");\n'
    backward = "\nJAXLLM_HANDLER(\n    DotBackward, DotBackwardImpl);\n"
    commented = "\n// JAXLLM_HANDLER(DotTwice, DotTwiceImpl);\n"
    other = "\nJAXLLM_HANDLER(NmsFloat8, NmsImpl);\n"
    found = [("dot_forward", "DotForward")]
    assert project(dot=forward + commented) == found
    found.append(("dot_backward", "DotBackward"))
    assert project(dot=forward + commented + backward) == found
    found.append(("nms_float8", "NmsFloat8"))
    assert project(nms=other) == found


def test_cmake_and_python_find_the_same_handlers(project):
    files = {f"{path.parent.name}_{path.stem}": path for path in kernel_table.sources("*.cc")}
    found = project(**{name: path.read_text() for name, path in files.items()})
    assert found and dict(found) == kernel_table.handlers()
