"""The right finding on values, with the words to type; none in a healthy epoch."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from paceline.config.settings import DataSettings, ReduceSettings, TrainConfig
from paceline.observe import verdict as verdicts
from paceline.observe.clock import PHASES
from paceline.observe.epoch import RankEpoch, epoch_record
from paceline.observe.records import EpochRecord, Finding, Kind
from paceline.observe.throughput import Units
from paceline.observe.verdict import enough_workers, is_judged, news

WAY = {
    "level": 0,
    "highest_level": 4,
    "precision": None,
    "order": "random",
    "bins": None,
    "reduce": "grad",
    "wire": "full",
    "shard": "none",
    "sync_step": None,
    "sync_overlap": 0,
    "workers": 0,
    "is_stream": False,
    "is_packed": False,
    "cores": 16,
    "local_size": 1,
    "grains_per_rank": 1,
    "has_bf16": False,
    "depthwise": False,
}


def seconds(**phases: float) -> dict[str, float]:
    return {**dict.fromkeys(PHASES, 0.0), **phases}


def epoch(*ranks: dict[str, float], way: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A healthy epoch of 100 seconds on each rank, but for what is given."""
    split = list(ranks) or [seconds(compute=90.0, optimizer=6.0, data=4.0)]
    return {
        "kind": "epoch",
        "steps": 1000,
        "padding": 0.05,
        "seconds": split,
        "hosts": ["alpha", "alpha", "beta", "beta"][: len(split)],
        "work": [100.0] * len(split),
        "core_wait": [1.0] * len(split),
        "way": {**WAY, **(way or {})},
        **more,
    }


def verdict(line: dict[str, Any]) -> list[Finding]:
    """Of a line as a journal has it."""
    return verdicts.verdict(EpochRecord.from_json(json.loads(json.dumps(line))))


def only(record: dict[str, Any]) -> Finding:
    (finding,) = verdict(record)
    return finding


def test_a_healthy_epoch_has_no_finding() -> None:
    gpu = {"name": "NVIDIA H200", "sampled_steps": 60, "caught_up": [0.1], "ms": [{}]}
    assert verdict(epoch()) == []
    assert verdict(epoch(device=gpu, way={"level": 2, "has_bf16": True})) == []
    several = [seconds(compute=85.0, communication=10.0, data=5.0)] * 4
    met = {"exchange": 0.06, "waiting": 0.04, "last": [0.25] * 4}
    assert verdict(epoch(*several, meetings=met, way={"local_size": 4})) == []


@pytest.mark.parametrize("few", [{"steps": 9}, {"seconds": [seconds(data=0.9)]}, {"seconds": []}])
def test_too_little_was_seen(few: dict[str, Any]) -> None:
    waiting = epoch(seconds(data=60.0, compute=40.0))
    assert only(waiting).kind == "data"
    assert verdict({**waiting, **few}) == []


@pytest.mark.parametrize(("steps", "since_s", "judged"), [(10, 1.0, True), (9, 50.0, False), (900, 0.9, False)])
def test_after_a_resume_that_launch_is_judged(steps: int, since_s: float, judged: bool) -> None:
    record = {**epoch(), "launch": {"steps": steps, "seconds": since_s}}
    assert is_judged(EpochRecord.from_json(record)) == judged


def test_a_record_of_an_older_run_is_judged_by_what_it_has() -> None:
    old = {"kind": "epoch", "steps": 100, "seconds": [{"data": 50.0, "compute": 50.0}], "padding": 0.4}
    assert [finding.kind for finding in verdict(old)] == ["data", "padding"]


# -- data --------------------------------------------------------------------------------------------------------------


def test_data_bound_names_the_rank_and_what_to_type() -> None:
    ranks = [seconds(compute=98.0, data=2.0)] * 3 + [seconds(compute=69.0, data=31.0)]
    found = only(epoch(*ranks, way={"workers": 5, "local_size": 2}))
    assert found.line == "data wait 31 % on rank 3 (beta): `--workers 8`, or `paceline pack`"
    assert (found.rank, found.host, found.share) == (3, "beta", pytest.approx(0.31))


def test_ranks_that_all_wait_are_not_named() -> None:
    found = only(epoch(*[seconds(compute=70.0, data=30.0), seconds(compute=67.0, data=33.0)], way={"local_size": 2}))
    assert found.text == "data wait 33 % on all ranks"
    assert (found.rank, found.host) == (None, None)


def test_one_rank_needs_no_name() -> None:
    assert only(epoch(seconds(compute=70.0, data=30.0))).text == "data wait 30 %"
    assert verdict(epoch(seconds(compute=90.1, data=9.9))) == []


@pytest.mark.parametrize(
    ("share", "workers", "enough"),
    [
        (0.5, 0, 1),  # reading takes as long as the rest: one reader beside it
        (0.8, 0, 4),  # four times as long
        (0.1, 0, 1),
        (0.5, 2, 4),  # two readers give a step in twice the time it needs
        (0.31, 5, 8),
        (1.0, 1, 1000),
    ],
)
def test_enough_workers(share: float, workers: int, enough: int) -> None:
    assert enough_workers(share, workers) == enough


def test_no_more_workers_than_cores() -> None:
    record = epoch(seconds(compute=20.0, data=80.0), way={"workers": 2, "cores": 4, "local_size": 2})
    assert only(record).advice == "`paceline pack`"


def test_what_is_packed_is_not_to_be_packed() -> None:
    waiting = seconds(compute=69.0, data=31.0)
    assert only(epoch(waiting, way={"workers": 5, "is_packed": True})).advice == "`--workers 8`"
    enough = only(epoch(waiting, way={"workers": 16, "is_packed": True}))
    assert enough.advice.startswith("it is packed already: less to do for each sample")


def test_an_iterable_has_no_workers() -> None:
    assert "__getitem__" in only(epoch(seconds(compute=20.0, data=80.0), way={"is_stream": True})).advice


# -- ranks -------------------------------------------------------------------------------------------------------------


def met(exchange: float, waiting: float, *last: float) -> dict[str, Any]:
    return {"exchange": exchange, "waiting": waiting, "last": list(last)}


PAIR = [seconds(compute=60.0, communication=40.0)] * 2


def test_communication_bound_says_how_to_send_less() -> None:
    found = only(epoch(*PAIR, meetings=met(0.38, 0.02, 0.5, 0.5), core_wait=[0.0, 0.0]))
    assert found.text == "sums of gradients take 38 % of the time"
    assert found.advice == "`--wire bf16` sends half of it; `--reduce param --sync-step 100` meets once in 100 steps"


def test_sums_with_one_order_that_cost_much() -> None:
    assert not verdict(epoch(*PAIR, sums=[0.0, 0.02 * sum(PAIR[0].values())]))
    found = only(epoch(*PAIR, sums=[0.0, 0.05 * sum(PAIR[1].values())]))
    assert (found.kind, found.text) == ("sums", "adding in one order takes 5 % of the time")
    assert "`--sums fast`" in found.advice


@pytest.mark.parametrize(
    ("way", "advice"),
    [
        ({"wire": "bf16"}, "`--reduce param --sync-step 100` meets once in 100 steps"),
        ({"reduce": "param", "sync_step": 50}, "`--sync-overlap 10` goes on stepping meanwhile; `--wire int8`"),
        ({"reduce": "param", "sync_step": 50, "sync_overlap": 50}, "`--wire int8` sends a quarter of it"),
        ({"reduce": "param", "sync_step": 50, "sync_overlap": 5, "wire": "int8"}, "`--sync-step 100`"),
        ({"reduce": "param", "sync_overlap": 5, "wire": "int8"}, "a larger `--sync-seconds`"),
        ({"shard": "full"}, "`--shard none`, if the model fits, sends less; or a larger"),
    ],
)
def test_the_lighter_way_depends_on_the_one_taken(way: dict[str, Any], advice: str) -> None:
    assert only(epoch(*PAIR, meetings=met(0.38, 0.02, 0.5, 0.5), way=way)).advice.startswith(advice)


def test_what_may_be_a_missing_core_is_not_blamed_on_the_link() -> None:
    record = epoch(*PAIR, meetings=met(0.25, 0.02, 0.5, 0.5), core_wait=[30.0, 45.0], way={"cores": 2})
    found = only(record)
    assert (
        found.line == "no core was free for 45 % of the time on rank 1: more runs on alpha than its 2 cores: see `top`"
    )
    assert found.rank == 1


def test_what_a_missing_core_cannot_explain_is_said_beside_it() -> None:
    busy = epoch(*PAIR, meetings=met(0.54, 0.05, 0.5, 0.5), core_wait=[21.0, 19.0])
    assert [finding.kind for finding in verdict(busy)] == ["communication", "cores"]
    ranks = [seconds(compute=28.0, communication=72.0), seconds(compute=96.0, communication=4.0)]
    busy = epoch(*ranks, meetings=met(0.03, 0.35, 0.0, 1.0), core_wait=[25.0, 35.0])
    assert [finding.kind for finding in verdict(busy)] == ["straggler", "cores"]


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_of_a_busy_machine_are_no_stragglers(late: int) -> None:
    """As measured: both lack cores, and the scheduler is harder on one of them."""
    ranks = [seconds(compute=92.0, communication=8.0), seconds(compute=66.0, communication=34.0)]
    waits, last = [28.0, 23.0], [0.94, 0.06]
    if late:
        ranks, waits, last = ranks[::-1], waits[::-1], last[::-1]
    assert only(epoch(*ranks, meetings=met(0.05, 0.14, *last), core_wait=waits)).kind == "cores"


def test_a_missing_core_hides_no_work_that_is_uneven() -> None:
    ranks = [seconds(compute=85.0, communication=15.0), seconds(compute=66.0, communication=34.0)]
    busy = epoch(*ranks, meetings=met(0.11, 0.12, 0.94, 0.06), core_wait=[32.0, 33.0], work=[200.0, 100.0])
    assert [finding.kind for finding in verdict(busy)] == ["cores", "balance"]


def test_cores_that_the_run_itself_takes() -> None:
    record = epoch(*PAIR, core_wait=[45.0, 30.0], way={"cores": 2, "local_size": 2, "workers": 3})
    assert only(record).advice == "8 processes of this run share 2 cores: fewer `--workers`, or fewer `--procs`"
    assert verdict(epoch(*PAIR, core_wait=[None, None])) == []


def test_a_rank_that_is_bound_to_a_core_of_its_own_shares_it_with_no_other_rank() -> None:
    """mpirun binds ranks to cores: two of them on two cores were told `2 processes of this run share 1 cores`."""
    bound = [{"ranks": 1, "cores": 1}] * 2
    record = epoch(*PAIR, core_wait=[45.0, 30.0], way={"cores": 1, "local_size": 2}, core_shares=bound)
    unbind = "`mpirun --bind-to none` and `srun --cpu-bind none` free the ranks to use all cores"
    assert only(record).advice == f"others run on the 1 core that the rank is bound to: {unbind}"
    record["way"]["workers"] = 2
    assert only(record).advice == (
        f"3 processes of this run share 1 core that they are bound to: {unbind}, or fewer `--workers`"
    )
    record |= {"core_shares": [{"ranks": 2, "cores": 1}] * 2}
    record["way"]["workers"] = 0
    assert only(record).advice == "2 processes of this run share 1 core: fewer `--procs`"


def test_a_straggler_is_named_by_rank_and_host() -> None:
    ranks = [seconds(compute=70.0, communication=30.0)] * 2 + [seconds(compute=97.0, communication=3.0)]
    found = only(epoch(*ranks, meetings=met(0.03, 0.2, 0.04, 0.04, 0.92)))
    assert found.kind == "straggler"
    assert (found.rank, found.host, found.share) == (2, "beta", pytest.approx(0.3)), "0.2 of three ranks' time"
    assert found.text == (
        "rank 2 on beta is late: others wait 30 % of their time for it (slower in forward and backward)"
    )


def _measured_keys(ranks: list[RankEpoch]) -> dict[str, Any]:
    line = epoch_record(ranks, Units()).to_json()
    return {name: line[name] for name in ("seconds", "meetings", "work", "rates", "computing") if name in line}


def measured(*ranks: dict[str, float], waits: list[list[float]], **more: Any) -> dict[str, Any]:
    """The record of what ranks measured, as a run makes it."""
    seen = [RankEpoch(each, seconds(), 1, waits=wait) for each, wait in zip(ranks, waits, strict=True)]
    return {**epoch(*ranks), **_measured_keys(seen), "core_wait": [0.0] * len(ranks), **more}


def test_what_others_wait_is_a_share_of_their_own_time() -> None:
    """Two ranks share three grains of 10 ms: of the 20 ms of a step, the one with one grain waits 10."""
    ranks = [seconds(compute=10.0, communication=10.4), seconds(compute=20.0, communication=0.4)]
    waits = [[0.0104] * 1000, [0.0004] * 1000]
    found = only(measured(*ranks, waits=waits, work=[100.0, 200.0]))
    assert found.text == "rank 1 has 100 % more to compute: others wait 49 % of their time for it"
    assert found.share == pytest.approx((20.4 - 15.4) / 20.4), "15 ms of computing on both would be even"
    found = only(measured(*ranks, waits=waits, work=[100.0, 100.0]))
    assert found.kind == "straggler"
    assert "others wait 49 % of their time for it" in found.text
    assert found.share == pytest.approx((20.4 - 10.4) / 20.4), "10 ms on both, if it were as fast as the other"


def test_what_is_waited_for_others_is_not_blamed_on_the_straggler() -> None:
    """Rank 2 is late by 1 at eight meetings of ten, rank 0 by 4 at the other two."""
    waits = [[1.0] * 8 + [0.0] * 2, [1.0] * 8 + [4.0] * 2, [0.0] * 8 + [4.0] * 2]
    ranks = [
        seconds(compute=92.0, communication=8.0),
        seconds(compute=84.0, communication=16.0),
        seconds(compute=92.0, communication=8.0),
    ]
    record = measured(*ranks, waits=waits)
    assert record["meetings"]["waited_for"] == pytest.approx([16 / 200, 0.0, 16 / 200])
    assert verdict(record) == []


def test_ranks_that_are_late_in_turns_are_no_stragglers() -> None:
    assert verdict(epoch(*PAIR, meetings=met(0.03, 0.2, 0.6, 0.4))) == []
    assert verdict(epoch(*PAIR, meetings=met(0.03, 0.049, 0.0, 1.0))) == []


def test_a_rank_that_is_late_because_of_data_is_data_bound() -> None:
    ranks = [seconds(compute=60.0, communication=40.0), seconds(compute=60.0, data=37.0, communication=3.0)]
    assert only(epoch(*ranks, meetings=met(0.03, 0.2, 0.0, 1.0))).kind == "data"


def test_a_rank_with_more_to_compute_is_no_straggler() -> None:
    ranks = [seconds(compute=90.0, communication=10.0), seconds(compute=60.0, communication=40.0)]
    record = epoch(*ranks, meetings=met(0.05, 0.2, 0.95, 0.05), work=[150.0, 100.0])
    found = only(record)
    assert found.kind == "balance"
    assert found.line == (
        "rank 0 has 50 % more to compute: others wait 40 % of their time for it: "
        "`--grains 8` can be shared out more evenly"
    )
    assert only({**record, "work": [110.0, 100.0]}).kind == "straggler", "it is half again as slow for a tenth more"


def test_a_straggler_without_a_core() -> None:
    ranks = [seconds(compute=60.0, communication=40.0), seconds(compute=97.0, communication=3.0)]
    record = epoch(*ranks, meetings=met(0.03, 0.11, 0.0, 1.0), core_wait=[1.0, 19.0])
    assert only(record).kind == "straggler"
    assert only(record).text.endswith("(it had no free core)")
    assert only({**record, "core_wait": [1.0, 30.0]}).kind == "cores", "one matter, told once"


# -- the others --------------------------------------------------------------------------------------------------------


def test_padding_bound_says_which_order() -> None:
    found = only(epoch(padding=0.31))
    assert found.line == "31 % of what is computed is padding: `--order bucket` puts samples of like length together"
    assert "`--order bucket`" in only(epoch(padding=0.31, way={"order": "laplace"})).advice
    assert "`--bins 32`" in only(epoch(padding=0.31, way={"order": "bucket"})).advice
    assert "`--bins 80`" in only(epoch(padding=0.31, way={"order": "bucket", "bins": 40})).advice
    assert verdict(epoch(padding=0.31, way={"order": "sorted"})) == []
    assert verdict(epoch(padding=0.14)) == []
    assert verdict(epoch(padding=None)) == []


def test_recompiles() -> None:
    found = only(epoch(compile={"recompiles": 7, "seconds": 40.0}, way={"level": 3}))
    assert found.text == "the model was compiled again 7 times in this epoch, and compiling took 40 % of it"
    assert "`-O2`" in found.advice
    assert verdict(epoch(compile={"recompiles": 2, "seconds": 40.0}, way={"level": 3})) == []


def gpu(name: str = "NVIDIA A100-SXM4-80GB", caught_up: float = 0.0) -> dict[str, Any]:
    return {"name": name, "sampled_steps": 60, "caught_up": [caught_up], "ms": [{}]}


def test_launch_bound_steps() -> None:
    way = {"level": 2, "has_bf16": True, "grains_per_rank": 4}
    found = only(epoch(device=gpu(caught_up=0.93), way=way))
    assert found.text == "in 93 % of the steps the GPU waited for the host to launch kernels"
    assert found.advice.startswith("`-O4`")
    assert "fewer `--grains`" in found.advice
    assert verdict(epoch(device={**gpu(caught_up=0.93), "sampled_steps": 0}, way={"level": 2})) == []


@pytest.mark.parametrize(("highest", "advice"), [(4, "`-O4`"), (3, "`-O3`"), (2, "fewer `--grains`")])
def test_no_level_is_advised_that_the_run_cannot_have(highest: int, advice: str) -> None:
    way = {"level": 2, "highest_level": highest, "has_bf16": True, "grains_per_rank": 4}
    assert only(epoch(device=gpu("NVIDIA H200", caught_up=0.93), way=way)).advice.startswith(advice)


def test_rules_of_higher_rooms_are_asked_as_well() -> None:
    own = Finding("precision", "it is slow", "another", share=0.2)
    record = EpochRecord.from_json(epoch(seconds(compute=70.0, data=30.0)))
    data, other = verdicts.verdict(record, [lambda record: [own]])
    assert (data.kind, other) == ("data", own)
    assert verdicts.verdict(EpochRecord(), [lambda record: [own]]) == [], "too little was seen"


def test_precision_off() -> None:
    found = only(epoch(device=gpu(), way={"has_bf16": True}))
    assert found.text == "-O0 computes in strict fp32, and NVIDIA A100-SXM4-80GB has bf16"
    assert found.advice == "`-O2`, or `-O1` for TF32"
    assert verdict(epoch(device=gpu(), way={"has_bf16": False})) == []
    assert verdict(epoch(device=gpu(), way={"has_bf16": True, "precision": "fp16"})) == []


# -- all of them -------------------------------------------------------------------------------------------------------


def everything_wrong() -> list[Finding]:
    ranks = [seconds(compute=30.0, data=35.0, communication=35.0), seconds(compute=60.0, data=35.0, communication=5.0)]
    return verdict(
        epoch(
            *ranks,
            padding=0.4,
            meetings=met(0.2, 0.12, 0.0, 1.0),
            compile={"recompiles": 9, "seconds": 3.0},
            device={**gpu(caught_up=0.9), "caught_up": [0.9, 0.8]},
            way={"has_bf16": True},
        )
    )


def test_the_costliest_comes_first() -> None:
    found = everything_wrong()
    kinds: list[Kind] = ["launches", "padding", "data", "straggler", "communication", "recompiles", "precision"]
    assert [finding.kind for finding in found] == kinds
    shares = [finding.share for finding in found]
    assert shares == sorted(shares, reverse=True)


def test_every_setting_that_is_advised_exists() -> None:
    fields = {**TrainConfig.model_fields, **DataSettings.model_fields, **ReduceSettings.model_fields}
    lines = [finding.advice for finding in everything_wrong()]
    options = {option for line in lines for option in re.findall(r"--([a-z][a-z-]+)", line)}
    assert options >= {"workers", "order", "wire", "reduce", "sync-step", "global-batch"}
    assert {option.replace("-", "_") for option in options} <= fields.keys()
    TrainConfig(epochs=1, workers=8, order="bucket", bins=32, wire="bf16", grains=8)
    TrainConfig(epochs=1, reduce="param", sync_step=100, sync_overlap=10, wire="int8")


def test_findings_go_into_a_record_and_out_again() -> None:
    for finding in everything_wrong():
        assert Finding(**json.loads(json.dumps(finding.to_json()))) == finding


def test_a_matter_is_told_once_and_again_when_it_has_changed() -> None:
    data, worse = Finding("data", "", "", 0, share=0.3), Finding("data", "", "", 0, share=0.41)
    same, other = Finding("data", "", "", 0, share=0.35), Finding("data", "", "", 1, share=0.3)
    told = {data.matter: data.share}
    assert news({}, [data]) == [data]
    assert news(told, [same]) == []
    assert news(told, [worse, other]) == [worse, other]
