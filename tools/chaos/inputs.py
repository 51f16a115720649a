"""Bad inputs for every command: refused with a message or understood, in bounded time and memory; nothing else happens.

What is found is kept: `case.json` in the evidence holds the whole input. `--keep` copies it to tools/chaos/cases, whose
cases are replayed in CI.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase

from tools.chaos import healthy
from tools.chaos.campaign import Bad, Outcome, Trial, remove
from tools.chaos.generators import FOLDER, KINDS, MISSING, Case, Samples
from tools.chaos.processes import Nursery, limit_memory

CASES = Path(__file__).with_name("cases")
FIRST_CHUNK, CHUNK = 10, 40
"""Cases of the first two draws of each kind, which are all that CI has, and of those after them: hypothesis draws its
first example as simple as it can, and varies from there."""
DEADLINE_S = 45.0
MEMORY = 2 * 2**30
"""Bytes that a command may have on top of what importing everything takes."""


def regression_cases() -> list[Path]:
    """Return the cases that were found once."""
    return sorted(CASES.glob("*.json"))


NUM_CASES = len(regression_cases())


@dataclass(frozen=True)
class InputFacts:
    """How a command took its input."""

    code: int | None
    out: str
    err: str
    ran_code: bool
    strays: tuple[str, ...]
    """Files that it wrote beside those it was asked to write."""


def judge_input(case: Case, facts: InputFacts) -> list[str]:
    """Return what did not hold."""
    if facts.code is None:
        return [f"still running after {DEADLINE_S:g} s"]
    troubles = []
    if facts.code not in case.codes:
        troubles.append(f"exit code {facts.code}")
    if "Traceback (most recent call last)" in facts.err + facts.out:
        last = [line for line in facts.err.splitlines() if line and not line.startswith(" ")]
        troubles.append(f"a traceback: {(last or [''])[-1][:200]}")
    if "MemoryError" in facts.err or "bad_alloc" in facts.err:
        troubles.append("out of memory")
    if any(each in facts.out + facts.err for each in ("\x1b", "\x9b")):
        troubles.append("a raw control sequence on the terminal")
    if facts.code == 2 and not facts.err.strip():
        troubles.append("exit code 2 without a message")
    if facts.ran_code:
        troubles.append("code in an input was run")
    troubles += [f"wrote {stray}" for stray in facts.strays[:3]]
    return troubles


class Inputs:
    """See the module."""

    name = "inputs"
    counts = (FIRST_CHUNK * len(KINDS), 10_000)
    mostly_waits = False

    def why_not(self) -> str | None:
        return None

    def prepare(self, folder: Path, nursery: Nursery) -> None:
        self._samples = Samples(healthy.make(folder.parent / "healthy", nursery))

    def run(self, trial: Trial) -> Outcome:
        """Draw a chunk of cases of one kind."""
        kind = KINDS[trial.index % len(KINDS)]
        bad: list[Bad] = []
        slowest_s, number = 0.0, 0

        @hypothesis.seed(trial.random.getrandbits(60))
        @hypothesis.settings(
            max_examples=FIRST_CHUNK if trial.index < 2 * len(KINDS) else CHUNK,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(kind(self._samples))
        def attack(case: Case) -> None:
            nonlocal slowest_s, number
            number += 1
            folder = trial.folder / f"{number:02d}"
            begun = time.monotonic()
            troubles = self.attack(case, folder, trial.nursery)
            slowest_s = max(slowest_s, time.monotonic() - begun)
            if troubles:
                reason = f"{case.kind}: {' '.join(case.words)[:150]!r}: {'; '.join(troubles)}"
                (folder / "case.json").write_text(case.to_json(), encoding="utf-8")
                bad.append(Bad(reason, f"python -m tools.chaos inputs --replay {folder}/case.json", str(folder)))
            else:
                remove(folder)

        attack()
        return Outcome(number, tuple(bad), slowest_s)

    def attack(self, case: Case, folder: Path, nursery: Nursery) -> list[str]:
        """Run the command of a case in a new folder, and return what did not hold."""
        remove(folder)
        inner = folder / "in"
        inner.mkdir(parents=True)
        for name in case.healthy:
            source = self._samples.folder / ("plain" if name == "other" else name)
            if source.is_dir():
                shutil.copytree(source, inner / name)
            else:
                shutil.copy(source, inner / name)
        for name, content in case.files.items():
            put(inner / name, content)
        before = listing(inner)
        process = nursery.start(
            list(case.words), folder, "command", {"HOME": str(inner)}, lambda: limit_memory(MEMORY), cwd=inner
        )
        nursery.wait([process], DEADLINE_S)
        left = nursery.left(3.0)
        nursery.clear()
        facts = InputFacts(
            process.code,
            process.out,
            process.err,
            ran_code(folder, case, process.out),
            strays(inner, before, case.words),
        )
        return judge_input(case, facts) + [f"left running: {line}" for line in left]


class Cases(Inputs):
    """The inputs that were found once, each of them again."""

    name = "cases"
    counts = (NUM_CASES, NUM_CASES)

    def run(self, trial: Trial) -> Outcome:
        path = regression_cases()[trial.index % NUM_CASES]
        case = Case.from_json(path.read_text(encoding="utf-8"))
        troubles = self.attack(case, trial.folder / "case", trial.nursery)
        return trial.judged([f"{path.name} ({case.reason[:200]}): {trouble}" for trouble in troubles])


def put(path: Path, content: bytes) -> None:
    """Write a file, or what stands in its place."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if content == FOLDER:
        path.mkdir(parents=True)
    elif content != MISSING:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of all files by their names."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            state = path.stat()
            found[str(path.relative_to(folder))] = (state.st_size, state.st_mtime_ns)
    return found


def strays(folder: Path, before: dict[str, tuple[int, int]], words: Sequence[str]) -> tuple[str, ...]:
    """Return new or changed files beside those a command is asked to write: `out...`, and a resumed run."""
    allowed = ["out", ".cache", "runs"]
    if words[0] == "train" and "--resume" in words:
        allowed.append(words[list(words).index("--out") + 1])
    if words[0] == "options":
        allowed.append("")
    after = listing(folder)
    changed = [name for name, state in after.items() if before.get(name) != state]
    changed += [f"{name} (removed)" for name in before if name not in after]
    return tuple(name for name in changed if not name.startswith(tuple(allowed)))


def ran_code(folder: Path, case: Case, out: str) -> bool:
    """Return True if a payload was run, by the command itself or by the batch script that it printed."""
    if case.words[0] == "submit" and out.startswith("#!"):
        script = folder / "script.sh"
        script.write_text(out, encoding="utf-8", errors="surrogateescape")
        # Only builtins of the shell can run there; the payload is one.
        subprocess.run(
            ["/bin/bash", str(script)],
            cwd=folder,
            env={"PATH": "/nowhere"},
            capture_output=True,
            timeout=20,
            check=False,
        )
    outside = [folder.parent / "pwned", Path("/tmp/pwned-by-chaos")]
    return any(folder.rglob("pwned")) or any(path.exists() for path in outside)
