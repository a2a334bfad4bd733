#!/usr/bin/env bash
# Prints the first interpreter of these versions that can make environments, from the PATH or
# pyenv; fails without one: cmake/find_python.sh 3.12 3.13
for version in "$@"; do
  for python in "python$version" "$(pyenv prefix "$version" 2>/dev/null)/bin/python$version"; do
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
      command -v "$python"
      exit
    fi
  done
done
exit 1
