#!/usr/bin/env bash
# Compiles every kernel for some architectures, and keeps nothing: cuda/compile.sh 80 90a 120
#
# Architectures that nvcc lacks are left out, and named. With NVCC_APPEND_FLAGS=-Ofc=max, which newer
# versions of nvcc have, it takes a third of the time and still finds what does not compile.
set -euo pipefail
cd "$(dirname "$0")"

known=" $(nvcc --list-gpu-code | tr '\n' ' ')"
targets=() names=()
for name in "$@"; do
  if [[ $known == *" sm_${name%a} "* ]]; then
    targets+=(-gencode "arch=compute_$name,code=sm_$name")
    names+=("sm_$name")
  else
    echo "not compiled for sm_$name: $(nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/CUDA \1/p') lacks it"
  fi
done
if [ ${#targets[@]} -eq 0 ]; then exit 0; fi

output=$(mktemp -d)
trap 'rm -rf "$output"' EXIT
# The largest files take longest: they come first. xargs fails where a command does.
find . -name '*.cu' -printf '%s %P\n' | sort -rn | cut -d' ' -f2 | xargs -P "$(nproc)" -I{} sh -c '
  file=$1 output=$2; shift 2
  nvcc -std=c++17 -I. -fatbin -o "$output/$(echo "$file" | tr / -)" "$@" "$file" ||
    { echo "does not compile: cuda/$file" >&2; exit 1; }' sh {} "$output" "${targets[@]}"
echo "compiled $(find . -name '*.cu' | wc -l) files for ${names[*]}"
