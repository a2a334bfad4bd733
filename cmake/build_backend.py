"""The build backend: scikit-build-core's, with a CUDA compiler from PyPI where there is none.

A build under isolation on a machine without nvcc asks for NVIDIA's compiler as wheels, about 104 MB
(PEP 517's ``get_requires_for_build_wheel``), and shows it to CMake. It does so on Linux, unless
kernels are switched off (``JAXLLM_CUDA=OFF``). Without isolation nothing is installed, but a
compiler that is in the environment, as with ``jax[cuda13]`` and the wheels below, is found.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
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
    return COMPILER if wants_kernels(settings) and not has_nvcc(settings) else ()


def wants_kernels(settings: Settings) -> bool:
    """Whether kernels are not switched off, and NVIDIA has a compiler for this platform."""
    is_there = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    return is_there and (_defined("JAXLLM_CUDA", settings) or "AUTO") != "OFF"


def has_nvcc(settings: Settings) -> bool:
    """Whether CMake finds a compiler without help."""
    if os.environ.get("CUDACXX") or _defined("CMAKE_CUDA_COMPILER", settings):
        return True
    at_path = Path(os.environ.get("CUDA_PATH", "")) / "bin" / "nvcc"
    return bool(shutil.which("nvcc")) or at_path.is_file() or _OF_TOOLKITS.is_file()


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
    root = None
    if wants_kernels(settings) and not has_nvcc(settings):
        root = find_compiler()
    forget_removed_compilers()
    if root is None:
        yield
        return
    before = dict(os.environ)
    # The wheels have lib, where nvcc and the host's linker look in lib64.
    libraries = str(root / "lib")
    more = os.environ.get("LIBRARY_PATH")
    os.environ["CUDACXX"] = str(root / "bin" / "nvcc")
    os.environ["LIBRARY_PATH"] = os.pathsep.join([libraries, *([more] if more else [])])
    os.environ["NVCC_APPEND_FLAGS"] = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} -L{libraries}"
    print(f"jaxllm: no nvcc found; building with {os.environ['CUDACXX']}", file=sys.stderr)
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
