"""When a build brings its own CUDA compiler, and how CMake is shown it. Nothing is compiled."""

import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core")
sys.path.insert(0, str(Path(__file__).parent.parent / "cmake"))
import build_backend


@pytest.fixture
def without_nvcc(monkeypatch, tmp_path):
    for name in (
        "CUDACXX",
        "CUDA_PATH",
        "CMAKE_ARGS",
        "SKBUILD_CMAKE_ARGS",
        "SKBUILD_CMAKE_DEFINE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_backend, "_OF_TOOLKITS", tmp_path / "toolkit" / "nvcc")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(build_backend.platform, "machine", lambda: "x86_64")
    return tmp_path


def brings_compiler(settings=None):
    found = [
        set(build_backend.COMPILER) <= set(requires(settings))
        for requires in (
            build_backend.get_requires_for_build_wheel,
            build_backend.get_requires_for_build_editable,
        )
    ]
    assert found[0] == found[1]
    return found[0]


def test_a_build_without_nvcc_brings_a_compiler(without_nvcc):
    assert brings_compiler()
    assert brings_compiler({"cmake.define.JAXLLM_CUDA": "ON"})
    assert len({of.partition("==")[2] for of in build_backend.COMPILER}) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"cmake.define.JAXLLM_CUDA": "OFF"},
        {"cmake.define.JAXLLM_CUDA": ["AUTO", "OFF"]},
        {"cmake.args": "-DJAXLLM_CUDA=OFF"},
        {"cmake.args": ["-G", "Ninja", "-DJAXLLM_CUDA:STRING=OFF"]},
        {"cmake.define.CMAKE_CUDA_COMPILER": "/opt/nvcc"},
    ],
)
def test_settings_that_switch_kernels_off_or_name_a_compiler_bring_none(without_nvcc, settings):
    assert not brings_compiler(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDACXX", "/opt/nvcc"),
        ("CMAKE_ARGS", "-DJAXLLM_CUDA=OFF"),
        ("SKBUILD_CMAKE_ARGS", "-DA=1;-DJAXLLM_CUDA=OFF"),
        ("SKBUILD_CMAKE_DEFINE", "A=1;JAXLLM_CUDA=OFF"),
    ],
)
def test_so_do_variables(without_nvcc, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert not brings_compiler()


def make_nvcc(path, release="13.0"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.1"\n')
    path.chmod(0o755)
    return path


PLACES = {"PATH": "nvcc", "CUDA_PATH": "of_variable/bin/nvcc", "toolkit": "toolkit/nvcc"}


@pytest.fixture(params=PLACES)
def place(request, without_nvcc, monkeypatch):
    """Where an nvcc may be."""
    if request.param == "CUDA_PATH":
        monkeypatch.setenv("CUDA_PATH", str(without_nvcc / "of_variable"))
    return without_nvcc / PLACES[request.param]


@pytest.mark.parametrize("release", ["12.3", "12.10", "13.0"])
def test_a_compiler_of_the_machine_is_shown_to_cmake(place, release, monkeypatch):
    make_nvcc(place, release)
    assert not brings_compiler()
    seen = {}
    monkeypatch.setattr(build_backend._build, "build_wheel", lambda *_: seen.update(os.environ))
    before = dict(os.environ)
    build_backend.build_wheel("out")
    assert seen["CUDACXX"] == str(place) and "NVCC_APPEND_FLAGS" not in seen.keys() - before.keys()
    assert dict(os.environ) == before


@pytest.mark.parametrize("release", ["12.2", "9.9", "none"])
def test_one_that_is_too_old_or_does_not_run_is_passed_over(place, without_nvcc, release):
    make_nvcc(place, release)
    assert brings_compiler()
    newer = make_nvcc(without_nvcc / PLACES["toolkit"])
    assert build_backend.find_nvcc() == newer and not brings_compiler()


def test_a_file_that_is_no_program_is_no_compiler(place):
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch(0o755)
    assert brings_compiler()


def test_the_oldest_compiler_is_that_of_cmake():
    text = (Path(__file__).parent.parent / "CMakeLists.txt").read_text()
    (version,) = re.findall(r"set\(JAXLLM_MIN_CUDA ([\d.]+)\)", text)
    assert tuple(map(int, version.split("."))) == build_backend.MIN_CUDA


@pytest.mark.parametrize(("platform", "machine"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_other_platforms_have_no_compiler(without_nvcc, monkeypatch, platform, machine):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(build_backend.platform, "machine", lambda: machine)
    assert not brings_compiler()


def make_wheels(folder, parts=build_backend._PARTS):
    root = folder / "nvidia" / "cu13"
    for part in parts:
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        (root / part).touch()
    return root


def test_cmake_is_shown_the_compiler_and_the_environment_stays(without_nvcc, monkeypatch):
    root = make_wheels(without_nvcc)
    monkeypatch.syspath_prepend(without_nvcc)
    monkeypatch.setenv("LIBRARY_PATH", "/mine")
    seen = {}

    def build(folder, settings, metadata):
        seen.update(os.environ, folder=folder, settings=settings)
        return "a.whl"

    monkeypatch.setattr(build_backend._build, "build_wheel", build)
    before = dict(os.environ)
    assert build_backend.build_wheel("out") == "a.whl"
    assert seen["folder"] == "out" and seen["CUDACXX"] == str(root / "bin" / "nvcc")
    assert seen["LIBRARY_PATH"] == f"{root / 'lib'}{os.pathsep}/mine"
    assert f"-L{root / 'lib'}" in seen["NVCC_APPEND_FLAGS"]
    assert dict(os.environ) == before
    seen.clear()
    build_backend.build_wheel("out", {"cmake.define.JAXLLM_CUDA": "OFF"})
    assert seen["folder"] == "out" and "CUDACXX" not in seen


@pytest.mark.parametrize("missing", build_backend._PARTS)
def test_wheels_without_a_part_are_no_compiler(without_nvcc, monkeypatch, missing):
    make_wheels(without_nvcc, [part for part in build_backend._PARTS if part != missing])
    monkeypatch.syspath_prepend(without_nvcc)
    found = build_backend.find_compiler()
    assert found is None or without_nvcc not in found.parents


def test_caches_of_a_compiler_that_is_gone_are_removed(tmp_path):
    for name, compiler in (("gone", "/no/nvcc"), ("here", sys.executable), ("none", "NOTFOUND")):
        (tmp_path / name / "CMakeFiles").mkdir(parents=True)
        cache = tmp_path / name / "CMakeCache.txt"
        cache.write_text(f"A:STRING=1\nCMAKE_CUDA_COMPILER:FILEPATH={compiler}\nB:BOOL=ON\n")
    build_backend.forget_removed_compilers(tmp_path)
    left = {path.parent.name for path in tmp_path.glob("*/CMakeCache.txt")}
    assert left == {"here", "none"} and not (tmp_path / "gone" / "CMakeFiles").exists()
