#!/bin/bash
#PBS -N quartznet
#PBS -l select=4:ncpus=48:mpiprocs=8:ngpus=8:mem=65536mb
#PBS -l place=scatter
#PBS -l walltime=36:00:00
#PBS -q gpu
#PBS -A speech
#PBS -j oe
#PBS -o "/home/ada/it's here/runs/quartz net/batch/pbs.log"
#PBS -r y
#PBS -m e

cd -- '/home/ada/it'"'"'s here' || exit 1
export NCCL_DEBUG=INFO
export NOTE='two words, $HOME'
module load cuda
export PACELINE_SECRET="${PACELINE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \n")}"
MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")
export MASTER_ADDR

(sleep 129480; kill -USR1 $$) &
clock=$!
set -m
told= ranks=
trap 'told=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' USR1
trap 'kill -TERM "$ranks"' TERM
mpirun -np 32 --map-by ppr:8:node:PE=6 -x MASTER_ADDR -x PACELINE_SECRET -x NCCL_DEBUG -x NOTE /opt/py/bin/python -m paceline train asr --out 'runs/quartz net' --resume auto &
ranks=$!
[ -z "$told" ] || kill -USR1 "$ranks"
while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done
kill "$clock" 2>/dev/null
if [ -n "$told" ] && [ "$code" -eq 0 ]; then
  qsub '/home/ada/it'"'"'s here/pbs.sh'
fi
exit "$code"
