#!/bin/bash
#BSUB -J quartznet
#BSUB -n 192
#BSUB -R "span[ptile=48]"
#BSUB -gpu "num=8"
#BSUB -W 36:00
#BSUB -wa 'USR1' -wt '2'
#BSUB -R "rusage[mem=65536MB]"
#BSUB -q gpu
#BSUB -P speech
#BSUB -o "/home/ada/it's here/runs/quartz net/batch/lsf-%J.log"
#BSUB -r
#BSUB -Q "99"
#BSUB -x

cd -- '/home/ada/it'"'"'s here' || exit 1
export NCCL_DEBUG=INFO
export NOTE='two words, $HOME'
module load cuda
export PACELINE_SECRET="${PACELINE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \n")}"
MASTER_ADDR=${LSB_MCPU_HOSTS%% *}
export MASTER_ADDR

set -m
told= ranks=
trap 'told=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' USR1 USR2
trap 'kill -TERM "$ranks"' TERM
mpirun -np 32 --map-by slot:PE=6 -x MASTER_ADDR -x PACELINE_SECRET -x NCCL_DEBUG -x NOTE /opt/py/bin/python -m paceline train asr --out 'runs/quartz net' --resume auto &
ranks=$!
[ -z "$told" ] || kill -USR1 "$ranks"
while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done
[ -z "$told" ] || [ "$code" -ne 0 ] || exit 99
exit "$code"
