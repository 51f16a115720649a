"""Collectives of gloo over shaped links, in times of what the line needs: the factors of `lab/predict/cost.py`.

Hosts are network namespaces on a bridge, as in predict.py. Needs root, and says so. Ranks come to a collective up to
`--skew-ms` apart, as they do in training. `received first` is an all-to-all by hand, with all receives posted
before the first send, and `exact sum` is `parallel/tree/all_reduce.py`, which is built on it: both hops, of two partial
sums from each of two ranks, and one from each of more.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from predict import SEGMENTS, enter
from slow_hosts import NETWORK, build_network, limit, remove_network
from table import Row, parser, show

from paceline.core.sum_tree import Layout, layout
from paceline.parallel.tree.all_reduce import TreeAllReduce
from paceline.parallel.wire import all_gather_flat

PORT = 29_471
LINE = {"100mbit": 0.958 * 12.5e6, "1gbit": 0.958 * 125e6}
"""Bytes of payload per second."""


def rank_main(rank: int, ranks: int, rate: str, sizes: list[int], skew_s: float, rounds: int) -> list[Row]:
    enter(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{NETWORK}.1:{PORT}", rank=rank, world_size=ranks)
    draw, rows = random.Random(rank), []
    for size in sizes:
        piece = size // 4
        sent, received = torch.ones(ranks * piece), torch.empty(ranks * piece)

        def by_hand(piece: int = piece, sent: torch.Tensor = sent, received: torch.Tensor = received) -> None:
            others = [(rank + step) % ranks for step in range(1, ranks)]
            works = [dist.irecv(received[other * piece : (other + 1) * piece], other) for other in others]
            works += [dist.isend(sent[other * piece : (other + 1) * piece], other) for other in others]
            for work in works:
                assert work is not None
                work.wait()

        if ranks == 2:
            rows_a_rank, dealt = 2, layout((0, 6, 12))
        else:
            rows_a_rank, dealt = 1, layout(tuple(range(ranks + 1)))
        partials = [sent, torch.ones_like(sent)][:rows_a_rank]
        tree_sum = TreeAllReduce(dist.group.WORLD, torch.device("cpu"))
        getattr(tree_sum, "prepare", lambda dealt: None)(dealt)  # the way of before, which may be run by this file

        def exact(
            tree_sum: TreeAllReduce = tree_sum, partials: list[torch.Tensor] = partials, dealt: Layout = dealt
        ) -> None:
            tree_sum.start(partials[-1], partials, dealt)
            tree_sum.finish()

        ways: dict[str, Callable[[], object]] = {
            "all-reduce": lambda sent=sent: dist.all_reduce(sent),
            "all-gather": lambda sent=sent, piece=piece, received=received: all_gather_flat(received, sent[:piece]),
            "all-to-all": lambda sent=sent, received=received: dist.all_to_all_single(received, sent),
            "received first": by_hand,
            "exact sum": exact,
        }
        for name, call in ways.items():
            hops = {"all-reduce": 2, "exact sum": rows_a_rank + 1}.get(name, 1)
            line_s = hops * (ranks - 1) * 4 * piece / LINE[rate]
            times = [_time(call, draw.random() * skew_s) for _ in range(rounds + 1)][1:]
            case = f"{ranks} ranks at {rate}, pieces of {size // 1024} kB, {name}"
            rows += [
                Row(case, "median", 1e3 * statistics.median(times), "ms", "line", statistics.median(times) / line_s),
                Row(case, "mean", 1e3 * statistics.mean(times), "ms", "line", statistics.mean(times) / line_s),
            ]
    dist.destroy_process_group()
    return rows


def _time(call: Callable[[], object], wait_s: float) -> float:
    dist.barrier()
    time.sleep(0.05)
    dist.barrier()
    began = time.perf_counter()
    time.sleep(wait_s)
    call()
    return time.perf_counter() - began


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rate", choices=LINE, default="100mbit")
    arguments.add_argument("--ranks", default="2,4")
    arguments.add_argument("--sizes", default="262144,1048576", help="bytes of a piece")
    arguments.add_argument("--skew-ms", type=float, default=4.0)
    arguments.add_argument("--rounds", type=int, default=15)
    given = arguments.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("collectives.py makes network namespaces and limits them with tc: run it as root")
    sizes = [int(word) for word in given.sizes.split(",")]
    for ranks in map(int, given.ranks.split(",")):
        remove_network(ranks)
        build_network(ranks)
        try:
            limit(ranks, given.rate, queue="400ms", segment=SEGMENTS[given.rate])
            children = []
            for rank in range(ranks):
                child = os.fork()
                if child:
                    children.append(child)
                    continue
                rows = rank_main(rank, ranks, given.rate, sizes, given.skew_ms / 1e3, given.rounds)
                if rank == 0:
                    show(rows, f"gloo, ranks up to {given.skew_ms:g} ms apart", given.json)
                os._exit(0)
            if any(os.waitpid(child, 0)[1] for child in children):
                raise SystemExit("a rank failed")
        finally:
            remove_network(ranks)


if __name__ == "__main__":
    main()
