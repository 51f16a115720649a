#!/bin/bash
# One machine with several GPUs: DDP, Lightning and Paceline side by side on 1, 2, 4, ... of them; one table at the end.
#
#   benchmarks/gpu/node.sh                                    all GPUs of this machine, QuartzNet 15x5, 64 and 256 utterances each
#   benchmarks/gpu/node.sh --ranks "1 8" --batches 256        fewer cases
#   benchmarks/gpu/node.sh --network jasper10x5dr --batches 64
#   benchmarks/gpu/node.sh --device cpu --ranks "1 2" --network small --batches 2 --frames 160 --steps 2    its logic, anywhere
#   benchmarks/gpu/node.sh --dry-run                          only show what would run
#
# Each case is a launch of its own (torchrun), so that one that fails leaves the others: its log is named. --ours takes a way by name
# (O2+kernels+graphs); without it the one that `-O4` has been found to take. The 8 GPUs of an H200 machine take about 20 minutes.
set -u
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}
device=cuda ranks="" batches="64 256" ways="ddp-bf16 ddp-fp16 lightning ours" out="" dry="" more=()
usage() { sed -n '2,/^set -u/p' "$0" | sed '$d; s/^# \{0,1\}//' >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry=1; shift; continue ;;
    --help|-h) usage ;;
    --device|--ranks|--batches|--ways|--out|--network|--frames|--steps|--rounds|--ours) ;;
    *) echo "node.sh: $1 is no option of it" >&2; usage ;;
  esac
  [ $# -ge 2 ] || { echo "node.sh: $1 wants a value" >&2; usage; }
  case $1 in
    --device) device=$2 ;;
    --ranks) ranks=$2 ;;
    --batches) batches=$2 ;;
    --ways) ways=$2 ;;
    --out) out=$2 ;;
    *) more+=("$1" "$2") ;;
  esac
  shift 2
done
case $device in cuda|cpu) ;; *) echo "node.sh: --device is cuda or cpu, not $device" >&2; exit 2 ;; esac
if [ -z "$ranks" ]; then
  [ "$device" = cuda ] || { echo "node.sh: on a CPU say how many ranks: --ranks \"1 2\"" >&2; exit 2; }
  gpus=$("$python" -c "import torch; print(torch.cuda.device_count())") || exit 1
  [ "$gpus" -gt 0 ] || { echo "node.sh: PyTorch sees no GPU here; its logic runs with --device cpu --ranks \"1 2\" --network small" >&2; exit 2; }
  for ((n = 1; n <= gpus; n *= 2)); do ranks+=" $n"; done
  [ $((n / 2)) -eq "$gpus" ] || ranks+=" $gpus"
fi
out=${out:-node-$(date +%Y%m%d-%H%M%S)}
[ -n "$dry" ] || mkdir -p "$out" || exit 1
failed=0
for batch in $batches; do
  for n in $ranks; do
    for way in $ways; do
      name=$way-$batch-$n
      command=("$python" -m torch.distributed.run --standalone --nproc-per-node "$n" "$here/node.py" measure --way "$way"
        --batch "$batch" --device "$device" --out "$out/$name.json" ${more[@]+"${more[@]}"})
      if [ -n "$dry" ]; then printf '%q ' "${command[@]}"; echo; continue; fi
      echo "$way, $batch utterances on each of $n rank(s)" >&2
      if ! "${command[@]}" >"$out/$name.log" 2>&1; then
        failed=$((failed + 1))
        grep -E "Error|error:" "$out/$name.log" | tail -2 >&2
        echo "  failed; all of it is in $out/$name.log" >&2
      fi
    done
  done
done
[ -n "$dry" ] && exit 0
"$python" "$here/node.py" table "$out" | tee "$out/table.txt"
[ "$failed" -eq 0 ]
