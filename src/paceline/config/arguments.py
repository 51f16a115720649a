"""The settings as keyword arguments of `fit`, `Engine` and `Engine.batches`, for type checkers and editors.

Written by tools/docs/arguments.py from the settings themselves: change those, not this file. A type here is what may be
given: a path also as text, a tuple as any sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from typing_extensions import TypedDict

from paceline.config.settings import GroupSettings


class EngineArguments(TypedDict, total=False):
    """Settings of `paceline.Engine`."""

    device: Literal["auto", "cpu", "cuda"]
    """`auto` takes CUDA where there is one."""
    threads: int | None
    """CPU threads per rank; if not set, the environment's `OMP_NUM_THREADS`, else the cores shared evenly."""
    start_timeout_s: float
    """Seconds to wait at the start for ranks that have not arrived."""
    timeout_s: float
    """Seconds a collective may wait for a rank."""
    reduce: Literal["grad", "param"]
    """`grad`: gradients are summed at every step. `param`: ranks step apart and average their weights now and then."""
    sums: Literal["exact", "fast"] | None
    """`exact`: sums over the grains of a step have one order, so that results are the same bits on any number of
    ranks. `fast`: as the library adds. If not set, exact; a resumed run goes on as it began."""
    shard: Literal["none", "full", "node"] | str | bool
    """`full` (FSDP2): each rank keeps its piece of weights, gradients and optimizer state; for large models. `node`
    (HSDP): pieces for the ranks of a machine, gradients summed across machines."""
    shard_modules: Sequence[str]
    """Name patterns of modules that are gathered one at a time; large children of Sequential, ModuleList if not
    set."""
    mirror: bool
    """Where a rank has what no other has (`shard`; `param` between averages): keep what survivors of its death need in
    memory, every rank's pieces on a second rank, too. Without it they go back to the newest checkpoint."""
    sync_step: int | None
    """Steps between two averages (`param`); the end of an epoch is always one."""
    sync_seconds: float | None
    """Seconds between two averages, instead of `sync_step`; the ranks agree how many steps that is."""
    sync_state: Literal["average", "keep", "reset"]
    """The optimizer's state when weights are averaged: averaged too, each rank's own, or begun anew."""
    sync_overlap: int
    """Steps that go on while an average is under way, before it is applied (0: wait for it)."""
    wire: Literal["full", "fp16", "bf16", "int8"]
    """How numbers travel between ranks; `param` sends differences and feeds back what rounding lost."""
    outer: Literal["plain", "momentum", "nesterov"]
    """What is done with an average: taken as it is, with block momentum (BMUF, SlowMo), or Nesterov's (DiLoCo)."""
    outer_lr: float | None
    """Step of the outer optimizer; 1 for momentum, 0.7 for Nesterov if not set."""
    outer_momentum: float | None
    """Of the outer optimizer; 1 - 1/ranks for momentum, 0.9 for Nesterov if not set."""
    sync_batchnorm: Literal["no", "all"] | int
    """Batch norm over the joined grains of `all` ranks, or of groups of so many; needs one grain per rank."""
    seed: int
    """Keys all randomness: initial weights, data order, dropout, augmentation."""
    level: Literal["auto", 0, 1, 2, 3, 4]
    """0 strict fp32, 1 TF32, 2 bf16, 3 bf16 + compile, 4 the fastest by measurement; `auto` is the fastest way that is
    known for the task where a GPU has bf16, else 0."""
    precision: Literal["fp16", "fp16-master", "fp16-pure", "fp64"] | str | None
    """fp16 autocast, fp16 weights with fp32 masters, all fp16, or all fp64, instead of the level's dtype. `bf16`,
    `tf32` and `32` (also as `bf16-mixed`, `32-true`) stand for the level that brings them."""
    compile_mode: Literal["default", "max-autotune"]
    """How hard the compiler of level 3 tries: `max-autotune` measures kernels, for minutes at the start."""
    cuda_graphs: bool
    """Replay steps from CUDA graphs where `auto` or level 4 chooses them; `no` to see if a failure comes from them."""
    loss_scale: Literal["backoff", "logmax"] | float
    """How fp16 losses are scaled: dynamic, by gradient statistics, or a constant."""
    clip_norm: float | None
    """Clip the global gradient norm."""
    clip_value: float | None
    """Clip each gradient element."""
    max_skipped: int
    """Steps in a row skipped for non-finite gradients before the run fails."""
    freeze: Sequence[str]
    """Name patterns of parameters that are not trained."""
    checkpoint_activations: Sequence[str]
    """Name patterns of modules whose activations are recomputed in backward."""
    ema: float
    """Decay of an exponential moving average of the weights (0: none); validation then uses the average."""
    swa_start: int | None
    """Stochastic weight averaging: from this step on, the mean of the weights is kept, validated and saved."""
    swa_every: int
    """Steps between two weights that go into the mean."""
    swa_lr: float | None
    """Constant learning rate from `swa_start` on; that of the schedule if not set."""
    swa_statistics: int
    """Batches of training data on which batch-norm statistics of the mean are measured before it is validated or
    saved."""


class DataArguments(TypedDict, total=False):
    """Settings of `Engine.batches`."""

    global_batch: int | None
    """Samples per step over all ranks. With `batch_cost` it is the cap on samples."""
    batch_per_device: int | None
    """Samples per step and rank, instead of `global_batch`: more ranks then make a larger batch, see `scale_lr`."""
    batch_cost: float | None
    """Total length (seconds, tokens: the unit of the lengths) per step over all ranks, padding counted."""
    batch_schedule: Sequence[str]
    """Sizes of the batch that follow: `64@1000` from step 1000 of the stage on, `64@e3` from epoch 3; of `batch_cost`
    where that is set, else of samples. Grains grow with it."""
    length_schedule: Sequence[str]
    """Length of the longest samples that are trained on: `100@0 200@1000 none@5000`; longer ones wait, and are left
    out of an epoch that ends before."""
    grains: int | None
    """Micro-batches per step, the unit of numerics; one per rank of the first launch if not set."""
    regrain: bool
    """Allow a resumed run to be cut into another number of grains; losses then differ from the first launch."""
    order: Literal["none", "random", "sorted", "laplace", "bucket"]
    """Order of the samples in an epoch; the last three need lengths."""
    bins: int | None
    """Bins of `laplace` (2) or length buckets of `bucket` (16)."""
    drop_last: bool
    """Leave out the last batch of an epoch if it is not full: other samples in each epoch, unless `order` is none."""
    partition_epoch: int
    """Sub-epochs that one pass over the data is cut into."""
    dataset_distribution: Literal["shard", "random_seed_offset"]
    """`shard`: ranks share one pass. `random_seed_offset`: every rank walks all data in its own order."""
    eval_batch: int | None
    """Samples per validation batch; the training grain's size if not set."""
    workers: int | Literal["auto"]
    """Loader processes per rank (threads for packed data on a GPU); `auto` measures how long a grain takes to read."""
    train_files: Sequence[str | Path]
    """Packed files (RETURNN's HDF, too) to train on instead of the task's own data: together one data set."""
    val_files: Sequence[str]
    """Packed files to validate on instead of the task's own sets, each a set named by its file or as `name=a.hdf`;
    several files of one set are `name=a.hdf+b.hdf`."""
    limit_batches: int | None
    """Steps per epoch and batches per validation set at most, for a quick try."""


class TrainArguments(EngineArguments, DataArguments, total=False):
    """Settings of `paceline.fit`."""

    out: str | Path | None
    """Run folder, or an address such as `s3://bucket/run`. Made if absent; an existing run is only touched with
    `resume`."""
    resume: Literal["no", "auto"] | str | Path
    """`auto`: from the newest sound checkpoint in `out`, or from the start if there is none; or a checkpoint's
    path."""
    allow_change: bool
    """Resume although settings that change numerics differ from the run's."""
    init_from: str | Path | None
    """For fine-tuning: weights that are loaded by name before the first step. A checkpoint, a `.safetensors` or `.pt`
    file, a Hugging Face folder, or a torch.distributed.checkpoint."""
    exp_name: str | None
    """Name of the run: its folder is `runs_dir/exp_name`, numbered where that name is taken; `out` goes before it."""
    runs_dir: str | Path
    """Where named runs live."""
    log_every: int
    """Steps between log lines; device counters are read then and only then."""
    optimizer: Literal["sgd", "adam", "adamw", "novograd", "lamb", "lars", "muon"] | str
    """Rule of the update; a plugin may bring more."""
    lr: float
    """Learning rate at the top of the schedule."""
    larc: Literal["clip", "scale"] | None
    """Layer-wise adaptive rates around the optimizer: at most `lr` (clip), or as the norms say (scale)."""
    larc_eta: float | None
    """Step of a tensor relative to its weights; 0.002 for LARC, 0.001 for LARS if not set."""
    larc_epsilon: float
    """Added to the norm of the gradient."""
    larc_min_update: float
    """Least factor on a gradient."""
    larc_decay: Literal["apart", "inside"]
    """Weight decay left to the optimizer (OpenSeq2Seq), or inside the norms and the scaled gradient (Apex)."""
    larc_zero: Literal["freeze", "skip"]
    """Tensors whose weights or gradients are all 0: as the formula says, all but frozen, or left alone (Apex)."""
    larc_exclude: Literal["none", "vectors"]
    """Which parameters keep their gradients: none, or those of one dimension (biases, norms)."""
    scale_lr: Literal["none", "linear", "sqrt"] | bool
    """With `batch_per_device`: `lr` is for one rank, and grows with their number or its root; warm-up is advised."""
    momentum: float
    """Of SGD and LARS."""
    betas: Sequence[float] | None
    """Decay of the moments; each optimizer's own default if not set (NovoGrad 0.95, 0.25; the others 0.9, 0.999)."""
    muon_match: Sequence[str]
    """Patterns of the parameters that Muon updates, as far as they are matrices, such as `encoder.*`; all hidden
    matrices if not set. AdamW updates the rest."""
    muon_convolutions: bool
    """Kernels of convolutions are matrices for Muon, too: output channels by all else."""
    muon_scale: Literal["match-rms-adamw", "original"]
    """Length of Muon's steps: as AdamW's, so that its `lr` fits, or as first published (an `lr` of 0.02, say)."""
    muon_momentum: float
    """Of Muon, after Nesterov."""
    muon_steps: int
    """Newton-Schulz steps of Muon."""
    muon_dtype: Literal["auto", "bf16", "fp32"]
    """What Muon multiplies matrices in; `auto` is bf16 on a GPU, as published, and fp32 on a CPU."""
    adamw_lr: float | None
    """Top of the learning rate of what AdamW updates beside Muon; `lr` if not set."""
    weight_decay: float
    """Pull of the weights towards 0."""
    groups: Sequence[GroupSettings | Mapping[str, object]]
    """Parameter groups by name pattern, first match wins."""
    schedule: (
        Literal[
            "constant",
            "cosine",
            "square",
            "sqrt",
            "linear",
            "inverse-sqrt",
            "polynomial",
            "exponential",
            "piecewise",
            "noam",
            "newbob",
        ]
        | str
    )
    """How the learning rate goes on after the warm-up."""
    warmup_steps: int
    """Steps in which the learning rate rises to `lr`."""
    warmup_ratio: float | None
    """The same as a share of all steps, instead of `warmup_steps`."""
    hold_steps: int
    """Steps at `lr` between warm-up and decay (polynomial, exponential)."""
    min_lr: float
    """Where the decay ends."""
    power: float
    """Of the polynomial."""
    decay: float
    """Factor per `decay_steps` (exponential), per milestone (piecewise), or when scores stop improving (newbob)."""
    decay_steps: int | None
    """Steps per `decay` (exponential)."""
    milestones: Sequence[int]
    """Steps at which the learning rate is multiplied by `decay` (piecewise)."""
    model_size: int | None
    """Width of the model (Noam)."""
    newbob_threshold: float
    """Newbob decays when the monitored score improves by less than this, relative to itself."""
    loggers: Sequence[Literal["tensorboard", "wandb", "mlflow"] | str]
    """Where metrics go beside `metrics.jsonl`; needs the package of that name, or a plugin."""
    progress: Literal["auto", "bar", "lines", "none"]
    """A bar on a terminal or in a notebook, plain lines elsewhere and under mpirun."""
    rank_logs: bool
    """Each rank's own log file in the run folder, when there are several."""
    profile: str | bool
    """Steps to write a timeline of, as `20:25` (steps 20 to 24); `auto`, or no value, is 5 steps after the first
    10."""
    profile_ranks: Sequence[int]
    """Ranks whose own torch events are in the timeline, beside the phases of all; the first 8 if not set."""
    profile_file: str | Path | None
    """File for the timeline, beside the one in the run folder: as JSON, packed if it ends in .gz. The environment's
    HOROVOD_TIMELINE is the same."""
    profile_memory: bool
    """Memory in the timeline too; on a GPU also the history of its memory, as a snapshot."""
    epochs: int | None
    """Passes over the data (sub-epochs, with `partition_epoch`) of a stage that does not say its own."""
    steps: int | None
    """Steps of a stage; whichever of `epochs` and `steps` ends first."""
    val_every_steps: int | None
    """Steps between validations, beside those of `val_every_epochs`."""
    val_every_epochs: int | None
    """Epochs between validations."""
    val_at_end: bool
    """Validate after the run's last step too, so that its last checkpoint has a score; not if a signal ends it."""
    monitor: str | None
    """Metric that names the best checkpoint, as `set/metric`; the first validation set's loss if not set."""
    monitor_mode: Literal["min", "max"]
    """Whether a lower or a higher `monitor` is better."""
    patience: int | None
    """Stop after so many validations without a better `monitor`."""
    max_loss_ratio: float | None
    """The run has diverged, and ends, when its loss stays above so many times the first (or 1); `none`: never."""
    save_every_steps: int | Literal["auto"] | None
    """Steps between checkpoints, beside those of `save_every_epochs`; `auto`: as many as lose least time, from what a
    checkpoint takes here and how often nodes fail (`failures`)."""
    failures: str
    """Failures per node-days that `save_every_steps: auto` goes by, such as `4/1000nd`, or a range of them."""
    save_every_epochs: int | None
    """Epochs between checkpoints; one is always saved at the end."""
    mode: Literal["train", "eval", "train_eval", "infer"]
    """`train` without validation, `train_eval` with it, `eval` only validates, `infer` only predicts."""
    split_on_oom: bool
    """Where a grain does not fit the memory: cut the batch into twice as many grains and go on, from the newest
    checkpoint or anew. Results are those of that many `grains`. For one rank."""
    benchmark: bool
    """Measure speed instead of training: `bench_steps` steps, timed from `bench_start` on, nothing saved."""
    bench_steps: int
    """Steps of a benchmark."""
    bench_start: int
    """First step of a benchmark that is timed."""
    checkpoint_form: Literal["full", "sharded"]
    """With `shard`: gathered and written by the first rank, or by every rank its own pieces; either is resumed."""
    keep_last: int
    """How many of the newest checkpoints are kept."""
    keep_best: int
    """How many of the best ones (by `monitor`) are kept beside them."""
