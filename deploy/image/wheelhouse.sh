#!/usr/bin/env bash
# Fill FOLDER with the wheels of one commit of this repository and everything that serving needs.
#   usage: wheelhouse.sh FOLDER        TORCH=torch==2.13.0 PYTHON=.venv/bin/python
# pip runs outside of the build, where it knows its index and certificates; for torch without CUDA's libraries set
# PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath -m "${1:?folder}"); python=$(realpath -s "${PYTHON:-.venv/bin/python}")
mkdir -p "$out"
src=$(mktemp -d); trap 'rm -rf "$src"' EXIT
git archive HEAD | tar -x -C "$src"
rm -f "$out"/tandem_serving-*.whl
"$python" -m pip wheel -q --no-deps --no-build-isolation --disable-pip-version-check -w "$out" "$src"
if [ ! -e "$out/.complete" ] || ! cmp -s constraints.txt "$out/.complete"; then
  "$python" -m pip download -q --disable-pip-version-check -c constraints.txt -d "$out" "${TORCH:-torch==2.13.0}" pip \
    "$(echo "$out"/tandem_serving-*.whl)[worker]"
  cp constraints.txt "$out/.complete"
fi
