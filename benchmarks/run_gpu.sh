#!/usr/bin/env bash
# Everything that is to be known on a GPU, in one run of at most 40 minutes and one folder: builds the CUDA kernels, runs
# the ops' tests and those of graphs and streams on the device, and measures. A stage that fails is noted, and the next
# one runs. Usage, from the repository: benchmarks/run_gpu.sh [FOLDER]    (PYTHON=... chooses an interpreter with torch)
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-build/gpu}")
python=${PYTHON:-python3}
mkdir -p "$out"
deadline=$((SECONDS + 2400))
export PYTHONPATH=$PWD:$PWD/python HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export TINYSERVE_BUILD_DIR=${TINYSERVE_BUILD_DIR:-$PWD/build/gpu-native}

stage() { # name, most seconds, command
  local name=$1 most=$2 left=$((deadline - SECONDS))
  shift 2
  ((left < most)) && most=$left
  if ((most <= 0)); then
    echo "$name: not run, no time left" | tee -a "$out/summary.txt"
    return
  fi
  local begin=$SECONDS
  timeout "$most" "$@" >"$out/$name.log" 2>&1
  echo "$name: exit status $? after $((SECONDS - begin)) s" | tee -a "$out/summary.txt"
  tail -n 3 "$out/$name.log"
}

: >"$out/summary.txt"
stage machine 30 bash -c "nvidia-smi; $python -c 'import torch; print(torch.__version__, torch.version.cuda)'; git log -1 --oneline"
export CMAKE_ARGS="${CMAKE_ARGS:-} -DTINYSERVE_CUDA=ON"
stage build 900 "$python" setup.py -q build_ext --inplace
stage loading 60 "$python" -c "import torch, tinyserve_ops; from tinyserve_ops import ops; \
print(ops.merge_states(torch.zeros(1, 1, 1, 8, device='cuda'), torch.zeros(1, 1, 1, device='cuda')))"
stage ops_tests 480 "$python" -m pytest -q tests/ops -k cuda -p no:cacheprovider --maxfail 30
stage measure 780 "$python" -m benchmarks.ops --device cuda --output "$out"
if command -v compute-sanitizer >/dev/null; then
  stage memcheck 300 compute-sanitizer --tool memcheck "$python" -m pytest -q -x tests/ops/test_sparse_decode.py -k "cuda and bounds-mean" -p no:cacheprovider
fi
cat "$out/summary.txt"
