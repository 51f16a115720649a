"""How long a checkpoint of 1 GB stops training: torch.save, DCP's async_save and Paceline, on the same tensors.

`stall` is how long the call keeps the training thread, `total` how long until the files are on disk, `step_slowdown`
the mean time of the training steps run while a write is in flight over that of steps run just before it, `lost` the
training time a save costs in all: the stall, and what the steps beside the write took longer. Every case is in steady
state: it has saved before, and has made the buffers that it keeps. `torch.save` and `torch.save-unsynced` keep the
thread to the end, so no step runs beside them; the second returns with the data in the page cache, not on disk. DCP
syncs its files; `dcp-async-kept` is given one stager for all saves, which keeps its buffers as ours are kept.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path

import torch
from table import Row, parser, show
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from paceline.train.checkpoint.writer import Checkpointer

WIDTH = 1024
STEPS_BEFORE = 30
PEER = "torch.save"
Parts = dict[str, dict[str, Tensor]]


class TorchSave:
    """The synchronous way: everything into one file, in the training thread."""

    def __init__(self, folder: Path, synced: bool) -> None:
        self.folder, self.synced = folder, synced

    def start(self, step: int, parts: Parts) -> None:
        with open(self.folder / f"{step}.pt", "wb") as file:
            torch.save({"parts": parts, "step": step}, file)
            if self.synced:
                file.flush()
                os.fsync(file.fileno())

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        """Nothing is in flight."""


class PacelineSave:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpointer = Checkpointer(folder, keep_last=1)

    def start(self, step: int, parts: Parts) -> None:
        self.path = self.folder / f"step-{step:08d}"
        self.checkpointer.save(step, parts, {"step": step})

    def done(self) -> bool:
        return self.path.exists()

    def finish(self) -> None:
        self.checkpointer.wait()


class DcpAsync:
    def __init__(self, folder: Path, stager: DefaultStager | None) -> None:
        self.folder, self.stager = folder, stager

    def start(self, step: int, parts: Parts) -> None:
        response = async_save(
            {**parts, "step": step}, checkpoint_id=self.folder / str(step), async_stager=self.stager, no_dist=True
        )
        assert isinstance(response, Future)
        self.response = response

    def done(self) -> bool:
        return self.response.done()

    def finish(self) -> None:
        self.response.result()


def cases(folder: Path, device: str) -> dict[str, TorchSave | PacelineSave | DcpAsync]:
    on_gpu = device == "cuda"
    kept = DefaultStager(StagingOptions(on_gpu, False, False, on_gpu))
    found: dict[str, TorchSave | PacelineSave | DcpAsync] = {
        PEER: TorchSave(folder / "synced", synced=True),
        "torch.save-unsynced": TorchSave(folder / "unsynced", synced=False),
        "dcp-async": DcpAsync(folder / "dcp", None),
        "dcp-async-kept": DcpAsync(folder / "dcp-kept", kept),
        "paceline": PacelineSave(folder / "paceline"),
    }
    for case in found.values():
        case.folder.mkdir(exist_ok=True)
    return found


class Training:
    """State of the wanted size (weights and two Adam moments), and a small step that computes meanwhile."""

    def __init__(self, gigabytes: float, device: str) -> None:
        num_layers = max(1, round(gigabytes * 1e9 / (3 * 4 * WIDTH * (WIDTH + 1))))
        shapes: dict[str, tuple[int, ...]] = {f"{layer}.weight": (WIDTH, WIDTH) for layer in range(num_layers)}
        shapes |= {f"{layer}.bias": (WIDTH,) for layer in range(num_layers)}
        self.parts: Parts = {
            "model": {name: torch.randn(shape, device=device) for name, shape in shapes.items()},
            "optimizer": {
                f"{name}.{moment}": torch.randn(shape, device=device)
                for name, shape in shapes.items()
                for moment in ("exp_avg", "exp_avg_sq")
            },
        }
        self.num_bytes = sum(tensor.nbytes for part in self.parts.values() for tensor in part.values())
        self.device = device
        self.net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.batch = torch.randn(128, 512, device=device)

    def step(self) -> float:
        """Seconds that one training step takes."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.net(self.batch).square().mean().backward()
        self.optimizer.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def measure(case: TorchSave | PacelineSave | DcpAsync, training: Training, step: int) -> dict[str, float]:
    """One save, with training steps before it and beside it."""
    if not isinstance(case, PacelineSave):  # which removes the one before by itself, in the time measured
        shutil.rmtree(case.folder)
        case.folder.mkdir()
    os.sync()  # so that no case pays for what the one before left in the page cache
    before = [training.step() for _ in range(STEPS_BEFORE)]
    beside = []
    start = time.perf_counter()
    case.start(step, training.parts)
    stall = time.perf_counter() - start
    while not case.done():
        beside.append(training.step())
    case.finish()
    measured = {"stall": stall, "total": time.perf_counter() - start, "lost": stall}
    if beside:
        usual = statistics.mean(before)
        measured["step_slowdown"] = statistics.mean(beside) / usual
        measured["lost"] += sum(beside) - usual * len(beside)
    return measured


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--gigabytes", type=float, default=1.0, help="size of the state")
    arguments.add_argument("--rounds", type=int, default=5, help="measured saves per case; medians are shown")
    arguments.add_argument("--warmups", type=int, default=2, help="saves per case that are not counted")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--folder", type=Path, default=Path(), help="where to write; cleaned up afterwards")
    options = arguments.parse_args()
    # DCP's note that it saves for one process only, which is what is asked of it here.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

    training = Training(options.gigabytes, options.device)
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="checkpoint-stall-", dir=options.folder) as folder:
        rivals = cases(Path(folder), options.device)
        for turn in range(options.warmups + options.rounds):
            for name, case in rivals.items():
                for metric, value in measure(case, training, turn).items():
                    if turn >= options.warmups:
                        figures[name][metric].append(value)

    medians = {
        name: {metric: statistics.median(found) for metric, found in each.items()} for name, each in figures.items()
    }
    rows = []
    for name, each in medians.items():
        for metric in ("stall", "total", "lost"):
            versus, ratio = (None, None) if name == PEER else (PEER, each[metric] / medians[PEER][metric])
            rows.append(Row(name, metric, each[metric], "s", versus, ratio))
        if "step_slowdown" in each:
            rows.append(Row(name, "step_slowdown", each["step_slowdown"], "x"))
    title = (
        f"{training.num_bytes / 1e9:.2f} GB of state, median of {options.rounds} interleaved saves, {options.device}"
    )
    show(rows, title, options.json)


if __name__ == "__main__":
    main()
