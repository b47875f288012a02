#!/usr/bin/env bash
# Fill a build context with the wheels of one commit of this repository and of everything that serving needs.
#   usage: wheelhouse.sh CONTEXT        TORCH=torch==2.13.0 PYTHON=.venv/bin/python
# pip runs outside of the build, where it knows its index and certificates; for torch without CUDA's libraries set
# PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath -m "${1:?context folder}"); python=$(realpath -s "${PYTHON:-.venv/bin/python}")
mkdir -p "$out/wheels" "$out/own" "$out/debs"
src=$(mktemp -d); trap 'rm -rf "$src"' EXIT
git archive HEAD | tar -x -C "$src"
rm -f "$out"/own/*.whl
"$python" -m pip wheel -q --no-deps --no-build-isolation --disable-pip-version-check -w "$out/own" "$src"
"$python" - "$src/pyproject.toml" "$out" "${TORCH:-torch==2.13.0}" <<'PY'
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())["project"]
gateway, worker = project["dependencies"], project["optional-dependencies"]["worker"]
for name, lines in (("gateway.txt", gateway), ("worker.txt", [sys.argv[3], *worker])):
    path, text = pathlib.Path(sys.argv[2], name), "\n".join(lines) + "\n"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
PY
cp deploy/image/slim.sh "$out"
ls "$out"/debs/*.deb >/dev/null 2>&1 || (cd "$out/debs" && apt-get -o APT::Sandbox::User=root -qq download libbinutils binutils-x86-64-linux-gnu)
if ! cat constraints.txt "$out/gateway.txt" "$out/worker.txt" | cmp -s - "$out/.have"; then
  "$python" -m pip download -q --disable-pip-version-check -c constraints.txt -d "$out/wheels" pip \
    -r "$out/gateway.txt" -r "$out/worker.txt"
  cat constraints.txt "$out/gateway.txt" "$out/worker.txt" > "$out/.have"
fi
