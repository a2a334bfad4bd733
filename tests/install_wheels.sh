#!/usr/bin/env bash
# Installs each wheel beside JAX for CUDA 12 and for CUDA 13, in fresh environments, and tries it:
#
#     tests/install_wheels.sh dist/*.whl
#
# Needs no GPU. EXTRAS="cuda13" leaves one out. An environment takes about 6 GB while it is tried.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Without the package itself: only what is installed can be imported.
mkdir "$work/clone"
(cd "$root" && tar -c --exclude=./jaxllm --exclude='./.*' --exclude=./build --exclude=./dist \
  --exclude=./data --exclude=./runs .) | tar -x -C "$work/clone"

for wheel in "$@"; do
  wheel=$(realpath "$wheel")
  case $wheel in
    *-cp311-cp311-*) python=$("$root/cmake/find_python.sh" 3.11) ;;
    *-cp312-abi3-*) python=$("$root/cmake/find_python.sh" 3.12 3.13 3.14) ;;
    *) echo "$wheel: cp311-cp311 and cp312-abi3 are known" >&2 && exit 1 ;;
  esac
  for extra in ${EXTRAS:-cuda12 cuda13}; do
    printf '\n== %s beside jax[%s] (%ds)\n' "$(basename "$wheel")" "$extra" "$SECONDS"
    rm -rf "$work/venv"
    "$python" -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet "$wheel[$extra,test]"
    cd "$work/clone"
    "$work/venv/bin/python" -m jaxllm info
    "$work/venv/bin/python" tests/installed_wheel.py
    # The choice of a kernel, and the quickstart.
    JAX_PLATFORMS=cpu "$work/venv/bin/python" -m pytest -q -n 2 tests/test_dispatch.py \
      "tests/test_docs.py::test_examples_run[quickstart]"
  done
done
echo "done (${SECONDS}s)"
