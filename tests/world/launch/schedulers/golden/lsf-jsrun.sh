#!/bin/bash
#BSUB -J quartznet
#BSUB -nnodes 4
#BSUB -W 36:00
#BSUB -wa 'USR1' -wt '2'
#BSUB -R "rusage[mem=65536MB]"
#BSUB -q gpu
#BSUB -P speech
#BSUB -o "/home/ada/it's here/runs/quartz net/batch/lsf-%J.log"
#BSUB -r
#BSUB -Q "99"

cd -- '/home/ada/it'"'"'s here' || exit 1
export NCCL_DEBUG=INFO
export NOTE='two words, $HOME'
module load cuda
export PACELINE_SECRET="${PACELINE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \n")}"

set -m
told= ranks=
trap 'told=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' USR1 USR2
trap 'kill -TERM "$ranks"' TERM
jsrun -n 32 -r 8 -a 1 -c 6 -g 1 -b none /opt/py/bin/python -m paceline train asr --out 'runs/quartz net' --resume auto &
ranks=$!
[ -z "$told" ] || kill -USR1 "$ranks"
while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done
[ -z "$told" ] || [ "$code" -ne 0 ] || exit 99
exit "$code"
