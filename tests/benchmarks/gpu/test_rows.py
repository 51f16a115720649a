"""`benchmarks/gpu/rows.py`: which jobs run, in which order, and how they end."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import soundfile

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"


def load() -> ModuleType:
    name = "paceline_benchmark_rows"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FOLDER / "rows.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


rows = load()


def job(name: str, seconds: int = 10, *, cores: int = 0, area: str = "a") -> object:
    """A timing, or with `cores` one that others may run beside."""
    return rows.Job(name, area, "", "", seconds, 2 * seconds, "", is_timing=not cores, cores=cores or 16)


def test_jobs_are_chosen_by_name_in_that_order_or_by_area() -> None:
    one, two, three = job("one"), job("two", area="b"), job("three")
    jobs = [one, two, three]
    assert rows.chosen(jobs, ["three", "one", "three"], None) == [three, one]
    assert rows.chosen(jobs, [], "a") == [one, three]
    assert rows.chosen(jobs, [], None) == jobs
    with pytest.raises(rows.UnknownJobs, match="no job is called four; there are one, two, three"):
        rows.chosen(jobs, ["one", "four"], None)


def test_a_timing_is_alone() -> None:
    timing, beside = job("timing"), job("beside", cores=4)
    assert rows.next_jobs([timing, beside], [], 16, 100) == [timing]
    assert rows.next_jobs([beside], [timing], 16, 100) == []
    assert rows.next_jobs([timing], [beside], 16, 100) == []


def test_others_run_side_by_side_up_to_the_next_timing() -> None:
    first, second, timing, later = job("first", cores=6), job("second", cores=6), job("timing"), job("later", cores=1)
    assert rows.next_jobs([first, second, timing, later], [], 16, 100) == [first, second]
    assert rows.next_jobs([second, timing, later], [first], 10, 100) == [], "no cores are left"
    assert rows.next_jobs([second, later], [first], 10, 100) == [later], "a smaller one has room"
    assert rows.next_jobs([first], [], 2, 100) == [first], "one that is larger than the machine runs alone"


def test_a_job_that_does_not_fit_is_passed_over_and_one_that_may_is_cut_at_the_end() -> None:
    long, short = job("long", 90), job("short", 20)
    assert rows.next_jobs([long, short], [], 16, 50) == [short]
    assert rows.next_jobs([long], [], 16, 50) == []
    assert rows.limit_s(short, 500) == 40
    assert rows.limit_s(short, 30) == 30 - rows.GRACE_S


def test_an_earlier_call_is_not_written_over(tmp_path: Path) -> None:
    assert rows.fresh(tmp_path, "muon") == tmp_path / "muon"
    (tmp_path / "muon").mkdir()
    (tmp_path / "muon-2.log").touch()
    assert rows.fresh(tmp_path, "muon") == tmp_path / "muon-3"


def test_jobs_have_bounds_data_and_scripts_that_exist(tmp_path: Path) -> None:
    assert len({each.name for each in rows.JOBS}) == len(rows.JOBS)
    for each in rows.JOBS:
        assert 0 < each.usual_s < each.bound_s < 600, f"{each.name} fits into a call"
        for words in filter(None, (each.words, each.dry)):
            script = shlex.split(words)[0]
            assert not script.endswith(".py") or (FOLDER / script).is_file()
            for name in each.data:
                assert "{data}" in words, f"{each.name} reads {name}"
    quality = next(each for each in rows.JOBS if each.name == "speech-quality")
    (tmp_path / "librispeech").mkdir()
    assert rows.missing(quality, tmp_path) == ["mini-librispeech"]
    assert rows.missing(quality, None) == ["mini-librispeech", "librispeech"]


def test_children_in_sessions_of_their_own_end_with_their_job(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "code = 'import time; time.sleep(60)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert rows.descendants(process.pid) == [process.pid, child]
    rows.end(process)
    process.stdout.close()
    assert process.returncode is not None
    until = time.monotonic() + 10
    while is_running(child) and time.monotonic() < until:
        os.sched_yield()
    assert not is_running(child)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_job_over_its_bound_is_ended_and_what_it_printed_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import time; print(7, flush=True); time.sleep(60)"
    slow = rows.Job("slow", 1, "", f"python -c {shlex.quote(code)}", 1, 2)
    quick = rows.Job("quick", 1, "", "python -c 'import sys; print(8); sys.exit(3)'", 1, 20)
    late = rows.Job("late", 1, "", "python -c 'print(9)'", 500, 550)
    options = argparse.Namespace(
        device="cuda", data=None, out=tmp_path / "out", caches=tmp_path / "caches", budget_s=100.0
    )
    runner = rows.Runner(options)
    done = {each.job.name: each for each in runner.run([slow, late, quick], 2)}
    assert set(done) == {"slow", "quick"}
    assert done["slow"].is_cut
    assert done["slow"].lines == ["7"]
    assert done["quick"].code == 3
    assert (tmp_path / "out" / "quick.log").read_text(encoding="utf-8") == "8\n"
    rows.show_summary(list(done.values()), runner)
    printed = capsys.readouterr().out
    assert "slow was ended at its limit" in printed
    assert "late was not begun: it takes 500 s" in printed
    assert "what ran" in printed


@pytest.mark.long
@pytest.mark.parametrize("name", [each.name for each in rows.JOBS if each.dry is not None])
def test_every_benchmark_runs_to_its_end_on_a_cpu(name: str, tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    assert f"{name} ended with 0" in dry_run(tmp_path, name)


def dry_run(folder: Path, *names: str) -> str:
    words = ["--device", "cpu", "--data", folder / "data", "--out", folder / "out", "--caches", folder / "caches"]
    words += ["--budget-s", "3000"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, FOLDER / "rows.py", *names, *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_data(folder: Path) -> None:
    """A little noise and a few sentences, in the folders that jobs read."""
    dice = np.random.default_rng(0)
    for name, sets in {"mini-librispeech": ["train"], "librispeech": ["train", "test"]}.items():
        (folder / name).mkdir(parents=True)
        for part in sets:
            lines = []
            for number in range(8):
                path = folder / name / f"{part}-{number}.wav"
                soundfile.write(path, dice.integers(-8000, 8000, 16000, dtype=np.int16), 16000)
                text = " ".join(dice.choice(["seven", "eight", "nine", "lines", "of", "noise"], 3))
                lines.append(json.dumps({"audio_filepath": path.name, "duration": 1.0, "text": text}))
            (folder / name / f"{part}.json").write_text("\n".join(lines))
    (folder / "multi30k").mkdir()
    words = {"en": ["a", "man", "sees", "two", "dogs"], "de": ["ein", "mann", "sieht", "zwei", "hunde"]}
    for part, number in {"train": 60, "val": 4, "test_2016_flickr": 4}.items():
        for language, some in words.items():
            with gzip.open(folder / "multi30k" / f"{part}.{language}.gz", "wt", encoding="utf-8") as file:
                file.writelines(f"{' '.join(dice.choice(some, 5))}\n" for _ in range(number))
