#!/bin/bash
#$ -S /bin/bash
#$ -N quartznet
#$ -V
#$ -pe orte 32
#$ -q gpu
#$ -A speech
#$ -l h_rt=129600,s_rt=129480
#$ -l mem_free=8192M
#$ -l ngpus=1
#$ -notify
#$ -j y
#$ -o "/home/ada/it's here/runs/quartz net/batch/sge-$JOB_ID.log"
#$ -r y
#$ -P speech

cd -- '/home/ada/it'"'"'s here' || exit 1
export NCCL_DEBUG=INFO
export NOTE='two words, $HOME'
module load cuda
export PACELINE_SECRET="${PACELINE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \n")}"
MASTER_ADDR=$(head -n 1 "$PE_HOSTFILE" | cut -d " " -f 1)
export MASTER_ADDR

set -m
told= ranks=
trap 'told=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' USR1 USR2
trap 'kill -TERM "$ranks"' TERM
mpirun -np 32 --bind-to none -x MASTER_ADDR -x PACELINE_SECRET -x NCCL_DEBUG -x NOTE /opt/py/bin/python -m paceline train asr --out 'runs/quartz net' --resume auto &
ranks=$!
[ -z "$told" ] || kill -USR1 "$ranks"
while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done
if [ -n "$told" ] && [ "$code" -eq 0 ]; then
  qsub "$JOB_SCRIPT" || exit 99
fi
exit "$code"
