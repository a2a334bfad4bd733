"""The build backend: scikit-build-core's, with a CUDA compiler from PyPI where there is none.

A build under isolation on a machine without nvcc, or with one that is too old, asks for NVIDIA's
compiler as wheels, about 104 MB (PEP 517's ``get_requires_for_build_wheel``), and shows it to
CMake. It does so on Linux, unless kernels are switched off (``JAXLLM_CUDA=OFF``). Without isolation
nothing is installed, but a compiler that is in the environment, as with ``jax[cuda13]`` and the
wheels below, is found. So is that of a toolkit in its usual folder, where CMake does not look.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

# One release of all of them: nvcc refuses the files of another. The earliest of CUDA 13, because
# its static runtime then accepts the oldest driver, 580.
COMPILER = (
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
)
_PARTS = ("bin/nvcc", "nvvm/bin/cicc", "include/cuda_runtime.h", "lib/libcudart_static.a")
_OF_TOOLKITS = Path("/usr/local/cuda/bin/nvcc")
MIN_CUDA = (12, 3)  # JAXLLM_MIN_CUDA of CMakeLists.txt
Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What a build needs beside ``build-system.requires``."""
    return [*_build.get_requires_for_build_wheel(config_settings), *_compiler(config_settings)]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Likewise for an editable one."""
    return [*_build.get_requires_for_build_editable(config_settings), *_compiler(config_settings)]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds a wheel; returns its name."""
    with _compiler_in_environment(config_settings):
        return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Likewise an editable one."""
    with _compiler_in_environment(config_settings):
        return _build.build_editable(wheel_directory, config_settings, metadata_directory)


def _compiler(settings: Settings) -> tuple[str, ...]:
    is_missing = not names_nvcc(settings) and find_nvcc() is None
    return COMPILER if wants_kernels(settings) and is_missing else ()


def wants_kernels(settings: Settings) -> bool:
    """Whether kernels are not switched off, and NVIDIA has a compiler for this platform."""
    is_there = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    return is_there and (_defined("JAXLLM_CUDA", settings) or "AUTO") != "OFF"


def names_nvcc(settings: Settings) -> bool:
    """Whether the user names a compiler: then CMake takes that one."""
    return bool(os.environ.get("CUDACXX") or _defined("CMAKE_CUDA_COMPILER", settings))


def find_nvcc() -> Path | None:
    """The first nvcc of the machine that runs and is new enough; None without one."""
    on_path, of_variable = shutil.which("nvcc"), os.environ.get("CUDA_PATH")
    found = [Path(on_path)] if on_path else []
    found += [Path(of_variable) / "bin" / "nvcc"] if of_variable else []
    return next((nvcc for nvcc in (*found, _OF_TOOLKITS) if _version_of(nvcc) >= MIN_CUDA), None)


def _version_of(nvcc: Path) -> tuple[int, ...]:
    """As (13, 0); () for what does not run."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    release = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(release[1]), int(release[2])) if release else ()


def _defined(name: str, settings: Settings) -> str | None:
    """The value of a CMake variable, from wherever scikit-build-core and CMake take one."""
    settings = settings or {}
    for key in (f"cmake.define.{name}", f"skbuild.cmake.define.{name}"):
        if key in settings:
            value = settings[key]
            return value if isinstance(value, str) else value[-1]
    texts = [os.environ.get("SKBUILD_CMAKE_DEFINE", "").replace(";", " ")]
    texts += [os.environ.get(of, "") for of in ("SKBUILD_CMAKE_ARGS", "CMAKE_ARGS")]
    texts += [" ".join(_listed(settings.get(key))) for key in ("cmake.args", "skbuild.cmake.args")]
    for text in texts:
        found = re.findall(rf"(?:^|[\s;]|-D\s?){name}(?::\w+)?=([^\s;]*)", text)
        if found:
            return found[-1]
    return None


def _listed(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def find_compiler() -> Path | None:
    """The root of a compiler that was installed as wheels; None where a part is missing."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec else []
    roots = sorted((root for of in folders for root in Path(of).glob("cu1*")), reverse=True)
    return next((root for root in roots if all((root / of).is_file() for of in _PARTS)), None)


@contextlib.contextmanager
def _compiler_in_environment(settings: Settings) -> Iterator[None]:
    shows_one = wants_kernels(settings) and not names_nvcc(settings)
    nvcc = find_nvcc() if shows_one else None
    root = find_compiler() if shows_one and nvcc is None else None
    forget_removed_compilers()
    if nvcc is None and root is None:
        yield
        return
    before = dict(os.environ)
    if root is not None:
        nvcc = root / "bin" / "nvcc"
        # The wheels have lib, where nvcc and the host's linker look in lib64.
        libraries = str(root / "lib")
        more = os.environ.get("LIBRARY_PATH")
        os.environ["LIBRARY_PATH"] = os.pathsep.join([libraries, *([more] if more else [])])
        os.environ["NVCC_APPEND_FLAGS"] = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} -L{libraries}"
        print(f"jaxllm: no nvcc found; building with {nvcc}", file=sys.stderr)
    os.environ["CUDACXX"] = str(nvcc)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def forget_removed_compilers(folder: Path | None = None) -> None:
    """Removes what CMake remembers of a compiler that is gone, as an isolated build's is after it.

    Args:
        folder: That of the builds; None for the project's.
    """
    folder = folder or Path(__file__).parent.parent / "build"
    for cache in folder.glob("*/CMakeCache.txt"):
        found = re.search(r"^CMAKE_CUDA_COMPILER:\w+=(.+)$", cache.read_text(), re.MULTILINE)
        if found and not found[1].endswith("NOTFOUND") and not Path(found[1]).exists():
            cache.unlink()
            shutil.rmtree(cache.parent / "CMakeFiles", ignore_errors=True)
