"""`paceline predict` beside published scaling that its model was not fitted to: NVIDIA's QuartzNet and Jasper nodes.

The figures are of NVIDIA/DeepLearningExamples, PyTorch/SpeechRecognition/{QuartzNet,Jasper}/README.md: utterances per
second on 1 to 16 GPUs, inputs padded to 16.7 s, so that no rank has more to do than another. Nothing runs here.

Known: throughput on 1 GPU (and on 4, or 8 where there is no 4), batch per GPU, accumulation for QuartzNet (1,152
utterances per step in any case, so an accumulated micro-batch is a grain), parameters of the models.
Assumed: links (bus bandwidth of NCCL's all-reduce: 230 GB/s on A100 nodes, 120 GB/s on V100 nodes; 5 us), gradients in
fp32 in buckets of 25 MB that are ready evenly over backward, which is two thirds of a micro-batch; a spread of 1 % of
computing times; no accumulation for Jasper.
Not known, and not in the one-GPU rows: update of the weights, input pipeline, and what GPUs of a node share.

    from 1        calibrated on one GPU alone: what can be said without any measurement on several
    from 1 and N  calibrated on the first two rows, as on runs of 1 and 2 ranks; predicts the others
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from table import machine, parser

from paceline.lab.predict.calibration import Calibration, MeasuredRun, Reduction
from paceline.lab.predict.communication import LinkSpeed
from paceline.lab.predict.prediction import predict
from paceline.observe.records import Profile

NUM_STEPS, SPREAD = 64, 0.01
BUCKET = 25 << 20
A100, V100 = LinkSpeed(230e9, 5e-6), LinkSpeed(120e9, 5e-6)
QUARTZNET, JASPER = 18_924_000, 332_630_000
REDUCTION = Reduction(sums="fast")


@dataclass(frozen=True)
class Node:
    """A row of a published table: one kind of machine, one batch, several numbers of GPUs."""

    name: str
    weights: int
    link: LinkSpeed
    batch: int
    """Of a GPU and a micro-batch."""
    global_batch: int | None
    """Of a step on any number of GPUs; None: `batch` on each."""
    speeds: Mapping[int, float]
    """Utterances per second by number of GPUs."""

    def step_s(self, gpus: int) -> float:
        return (self.global_batch or self.batch * gpus) / self.speeds[gpus]


NODES = (
    Node("QuartzNet, A100, AMP, 48", QUARTZNET, A100, 48, 1152, {1: 89.69, 4: 343.06, 8: 644.27}),
    Node("QuartzNet, A100, AMP, 72", QUARTZNET, A100, 72, 1152, {1: 88.70, 4: 341.95, 8: 651.60}),
    Node("QuartzNet, A100, TF32, 48", QUARTZNET, A100, 48, 1152, {1: 78.89, 4: 303.16, 8: 576.37}),
    Node("QuartzNet, A100, TF32, 72", QUARTZNET, A100, 72, 1152, {1: 79.01, 4: 304.47, 8: 583.31}),
    Node("QuartzNet, V100, AMP, 24", QUARTZNET, V100, 24, 1152, {1: 67.95, 4: 258.56, 8: 495.52, 16: 872.99}),
    Node("QuartzNet, V100, FP32, 24", QUARTZNET, V100, 24, 1152, {1: 44.65, 4: 170.18, 8: 330.53, 16: 616.51}),
    Node("Jasper, A100, AMP, 32", JASPER, A100, 32, None, {1: 64.32, 4: 239.23, 8: 470.09}),
    Node("Jasper, A100, AMP, 64", JASPER, A100, 64, None, {1: 75.59, 4: 289.16, 8: 547.91}),
    Node("Jasper, A100, TF32, 32", JASPER, A100, 32, None, {1: 42.18, 4: 157.49, 8: 310.10}),
    Node("Jasper, A100, TF32, 64", JASPER, A100, 64, None, {1: 49.64, 4: 192.66, 8: 371.41}),
    Node("Jasper, DGX-1 V100, AMP, 32", JASPER, V100, 32, None, {1: 34.08, 4: 128.39, 8: 249.00}),
    Node("Jasper, DGX-1 V100, AMP, 64", JASPER, V100, 64, None, {1: 39.30, 4: 150.18, 8: 282.68}),
    Node("Jasper, DGX-1 V100, FP32, 32", JASPER, V100, 32, None, {1: 12.22, 4: 46.97, 8: 92.44}),
    Node("Jasper, DGX-2 V100, AMP, 64", JASPER, V100, 64, None, {1: 43.86, 8: 318.10, 16: 567.47}),
)


@dataclass(frozen=True)
class Line:
    """A predicted number of GPUs."""

    node: Node
    known: tuple[int, ...]
    """GPUs of the rows that it was calibrated on."""
    gpus: int
    low: float
    predicted: float
    """Utterances per second."""
    high: float

    @property
    def published(self) -> float:
        return self.node.speeds[self.gpus]

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def is_inside(self) -> bool:
        return self.low <= self.published <= self.high


def calibration(node: Node, known: tuple[int, ...], gpus: int) -> Calibration:
    """Return what the rows of `known` GPUs tell about a step of `gpus`."""
    batch = node.global_batch or node.batch * gpus
    grains = batch // node.batch
    grain_s = node.batch / node.speeds[1]
    noise = 1 + SPREAD * np.array([statistics.NormalDist().inv_cdf((n + 0.5) / NUM_STEPS) for n in range(NUM_STEPS)])
    num_buckets = -(-4 * node.weights // BUCKET)
    return Calibration(
        runs=[_run(node, number, grains, grain_s, noise) for number in known],
        grain_s=0.0,
        cost_s=grain_s / node.batch,
        ratios=noise,
        profile=Profile(device="cuda", buckets=[4 * node.weights // num_buckets] * num_buckets, weights=node.weights),
        has_asked_grains=True,
        global_batch=batch,
        link=node.link,
    )


def _run(
    node: Node, gpus: int, grains: int, grain_s: float, noise: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> MeasuredRun:
    """Return a row as a run of steps of `grains`: what a published step took beyond computing went to the others."""
    beyond_s = node.step_s(gpus) - grain_s * (node.global_batch or node.batch * gpus) / node.batch / gpus
    zeros = np.zeros((gpus, NUM_STEPS))
    return MeasuredRun(
        node.name,
        gpus,
        1,
        grains,
        REDUCTION,
        [[float(node.batch)] * grains] * NUM_STEPS,
        data_s=zeros,
        compute_s=zeros + grain_s * grains / gpus * noise,
        communication_s=zeros + max(0.0, beyond_s),
        update_s=zeros,
        other_s=zeros,
        meeting_s=0.0,
    )


def lines(node: Node) -> Iterator[Line]:
    second = sorted(node.speeds)[1]
    for known in ((1,), (1, second)):
        for gpus in node.speeds:
            if gpus <= max(known):
                continue
            read = calibration(node, known, gpus)
            (row,) = predict(read, ranks=(gpus,), between=node.link).rows
            speed = row.samples_per_s
            yield Line(node, known, gpus, speed.low, speed.value, speed.high)


def main() -> None:
    parser(__doc__ or "").parse_args()
    everything = [line for node in NODES for line in lines(node)]
    print(machine())
    print("| node, precision, batch | from GPUs | GPUs | predicted utt/s (interval) | published | error | inside |")
    print("|---|---|---|---|---|---|---|")
    for line in everything:
        known = " and ".join(map(str, line.known))
        speed = f"{line.predicted:.0f} ({line.low:.0f} to {line.high:.0f})"
        inside = "yes" if line.is_inside else "**no**"
        error = f"{100 * line.error:+.1f} %"
        print(f"| {line.node.name} | {known} | {line.gpus} | {speed} | {line.published:.0f} | {error} | {inside} |")
    for title, is_alone in (("1 GPU", True), ("two rows", False)):
        chosen = [line for line in everything if (len(line.known) == 1) == is_alone]
        errors = [abs(line.error) for line in chosen]
        inside = sum(line.is_inside for line in chosen)
        print(
            f"calibrated on {title}: {len(chosen)} rows, error {100 * statistics.mean(errors):.1f} % mean, "
            f"{100 * max(errors):.1f} % worst, {inside} inside the interval"
        )


if __name__ == "__main__":
    main()
