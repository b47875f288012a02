# Makes this repository runnable on a bare machine with a GPU that has torch but not our other dependencies, and no network.
# Source it from the repository's root (`. benchmarks/gpu_setup.sh`); wheels lie in wheels/gpu, made beforehand with
#   python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 ... -d wheels/gpu NAME==VERSION
# Leaves the machine's own packages as they are: ours go to a folder in front of them.
export PYTHONUNBUFFERED=1
TANDEM_SITE=${TANDEM_SITE:-/tmp/tandem-site}
if [ ! -d "$TANDEM_SITE" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$TANDEM_SITE" wheels/gpu/*.whl 2>&1 | grep -v WARNING
fi
export PYTHONPATH="$TANDEM_SITE:$PWD:$PWD/proto"
# NIXL's CUDA part asks the loader for the runtime that torch brings along.
TANDEM_CUDART=$(python3 -c 'import glob, site; print(*glob.glob(site.getsitepackages()[0] + "/nvidia/*/lib/libcudart.so.1?"))' | cut -d" " -f1)
[ -z "$TANDEM_CUDART" ] || export LD_LIBRARY_PATH="$(dirname "$TANDEM_CUDART")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
python3 -c 'import grpc, google.protobuf, msgspec, tokenizers, torch, uvicorn; print("torch", torch.__version__, "gpus", torch.cuda.device_count())'
