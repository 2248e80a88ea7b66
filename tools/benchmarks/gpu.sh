#!/bin/bash
# Run all checks and measurements for a new GPU, each with a log and a JSON in OUT_DIR.
#
#     tools/benchmarks/gpu.sh OUT_DIR
#
# A part is stopped after 170 s, checks and memchecks after 600. A second call of the same commit skips
# what succeeded. PYTHON is the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath -m "${1:?OUT_DIR must be a folder}")
# The kernels in CUDA C++, which no GPU has run yet.
new=cuda,triton,eager
python="${PYTHON:-python}"
if ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
    echo 'Error: torch finds no CUDA device to measure' >&2
    exit 1
fi
commit=$(git describe --always --dirty 2>/dev/null || echo unknown)
failed=0
mkdir -p "$out"

part() {  # NAME COMMAND...
    local log=$out/$1.log passed=$out/$1.$commit
    if [ -e "$passed" ]; then return; fi
    rm -rf "$out/$1.json" "${out:?}/$1"  # numbers of an earlier commit
    echo "$1: ${*:2}"
    if timeout -k 10 "${limit:-170}" "${@:2}" >"$log" 2>&1; then touch "$passed"; else failed=1; fi
    tail -n 1 "$log"
}
ops() { part "$1" "$python" tools/benchmarks/benchmark_ops.py --json "$out/$1.json" "${@:2}"; }
memcheck() {
    if ! command -v compute-sanitizer >/dev/null; then
        echo "$1: skipped without compute-sanitizer"
        return
    fi
    limit=600 part "$1" compute-sanitizer --tool memcheck --error-exitcode 1 "$python" \
        tools/benchmarks/benchmark_ops.py --json "$out/$1.json" --check "${@:2}"
}
models() {  # NAME SIZE FORM ENVIRONMENT
    part "$1" env "${@:4}" "$python" tools/benchmarks/benchmark_models.py --json "$out/$1.json" --size "$2" \
        --forms "$3" --models deit-small aft-small-h384-k11 bound-small-h384-k11 --rounds 10
}
train() {  # NAME ENVIRONMENT
    part "$1" env "${@:2}" "$python" -m torch.distributed.run --standalone --nproc_per_node 1 tools/train.py \
        configs/image_classification/aft-conv-quickstart_1xb64-50e_digits.py --launcher pytorch --amp \
        --work-dir "$out/$1" --cfg-options train_cfg.max_epochs=1
}

part system "$python" -m torch.utils.collect_env
ops cuda-parity --check --cases '*conv-b*h384-k11' --dtype bfloat16 float16 --backends cuda
memcheck cuda-memcheck --cases small-conv --dtype bfloat16 float16 --backends cuda
for case in conv-b128-14x14-d384-h384-k11 conv-b32-32x32-d384-h384-k11 conv-b128-14x14-d384-h16-k11; do
    ops "cuda-$case" --cases $case --dtype bfloat16 --rounds 5 --backends cuda triton eager
done
for form in compiled eager; do
    for size in 224 512; do
        models "models-$size-$form-cuda" $size $form AFT_MM_BACKEND=$new
        models "models-$size-$form" $size $form
    done
done
for op in simple full_batched conv local full; do
    limit=600 part check-$op "$python" -m aft_mm doctor --kernels aft_$op
done
limit=600 part check-steps "$python" -m aft_mm doctor --kernels aft_{conv,simple,local,full,local_hard}_step
train training-cuda AFT_MM_BACKEND=$new
train training
for dtype in bfloat16 float32; do
    for op in simple conv local full; do
        ops ops-$op-$dtype --cases "$op-b*" --dtype $dtype --rounds 5
    done
done
for tokens in 3072 16384; do
    part step-$tokens "$python" tools/benchmarks/training_step.py --json "$out/step-$tokens.json" \
        --dtype bfloat16 --rounds 10 --tokens $tokens
done
memcheck memcheck --cases 'small-*' --backends triton
part backends "$python" -m aft_mm.ops
exit $failed
