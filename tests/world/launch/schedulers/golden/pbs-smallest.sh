#!/bin/bash
#PBS -N small
#PBS -l select=1:ncpus=1:mpiprocs=1
#PBS -l place=pack
#PBS -j oe
#PBS -o "/tmp/pbs.log"
#PBS -r n

cd -- /tmp || exit 1
export PACELINE_SECRET="${PACELINE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \n")}"
MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")
export MASTER_ADDR

set -m
told= ranks=
trap 'told=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' USR1
trap 'kill -TERM "$ranks"' TERM
mpiexec -np 1 -ppn 1 paceline train digits &
ranks=$!
[ -z "$told" ] || kill -USR1 "$ranks"
while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done
exit "$code"
