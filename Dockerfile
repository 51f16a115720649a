# Paceline in a container. Not tried by CI, which has no container runtime; the commands are those of README.md.
#
#   docker build -t paceline .                                                    CPU
#   docker build -t paceline:cuda --build-arg CONSTRAINTS= .                      CUDA: torch brings its own libraries
#   docker run --rm -it --gpus all --ipc=host -v "$PWD":/work paceline:cuda train asr --train-manifest ...
#
# `--ipc=host` (or `--shm-size`): worker processes hand data over in shared memory, of which a container has 64 MB.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
# torch==2.13.0 of constraints.txt is a CPU build where the index has one; without constraints the newest torch is taken.
ARG CONSTRAINTS=constraints.txt
ARG EXTRAS=asr,report,tensorboard
# A C compiler: torch.compile on a CPU and Triton's launchers need one.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir ${CONSTRAINTS:+--constraint /src/${CONSTRAINTS}} "/src[${EXTRAS}]"
WORKDIR /work
ENTRYPOINT ["paceline"]
CMD ["--help"]
