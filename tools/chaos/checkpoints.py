"""Damaged checkpoints: resume is right, or goes on from the one before and says so, or is refused. Never anything else.

Every file of a checkpoint is a target: bytes, length, name, presence, and single values of its JSON; also the names of
the checkpoint folders, and several damages at once.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.chaos.campaign import Outcome, Trial, made_once
from tools.chaos.kills import Round, start, undisturbed
from tools.chaos.processes import Nursery
from tools.chaos.runs import RunFacts, differences, leftovers, read_run
from tools.chaos.tasks import VARIANTS, pack

DEADLINE_S = 60.0
SOURCES: tuple[tuple[str, int], ...] = (
    ("plain", 1),
    ("ema", 1),
    ("ema", 2),
    ("fp64", 1),
    ("packed", 1),
    ("replay", 1),
    ("replay", 2),
    ("average", 2),
    ("shards", 2),
    ("gathered", 2),
)
"""Variants and ranks whose checkpoints are damaged."""
_EVIL = "cos\nsystem\n(S'touch pwned'\ntR."


# -- damages: each takes the folder of a run and a generator, and returns a line that says what was done ---------------


def _checkpoints(run: Path) -> list[Path]:
    return sorted(path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))


def _pick(run: Path, rng: random.Random) -> Path:
    """Return a file, mostly of the newest checkpoint."""
    paths = _checkpoints(run)
    path = paths[-1] if rng.random() < 0.8 else rng.choice(paths)
    return rng.choice(sorted(each for each in path.iterdir() if each.is_file()))


def _name(run: Path, file: Path) -> str:
    return str(file.relative_to(run / "checkpoints"))


def flip_bits(run: Path, rng: random.Random) -> str:
    file = _pick(run, rng)
    raw = bytearray(file.read_bytes())
    if not raw:
        return "nothing"
    places = [rng.randrange(len(raw)) for _ in range(rng.choice((1, 1, 1, 2, 20)))]
    for place in places:
        raw[place] ^= 1 << rng.randrange(8)
    file.write_bytes(raw)
    return f"bits flipped in {_name(run, file)} at {sorted(places)[:5]}"


def overwrite(run: Path, rng: random.Random) -> str:
    file = _pick(run, rng)
    raw = bytearray(file.read_bytes())
    at, length = rng.randrange(len(raw) + 1), rng.choice((1, 8, 64, len(raw)))
    raw[at : at + length] = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
    file.write_bytes(raw)
    return f"{length} bytes overwritten in {_name(run, file)} at {at}"


def truncate(run: Path, rng: random.Random) -> str:
    file = _pick(run, rng)
    raw = file.read_bytes()
    length = rng.choice((0, len(raw) - 1, rng.randrange(len(raw) + 1)))
    file.write_bytes(raw[:length])
    return f"{_name(run, file)} cut to {length} bytes"


def append(run: Path, rng: random.Random) -> str:
    file = _pick(run, rng)
    file.write_bytes(file.read_bytes() + rng.choice((b"\n", b" ", b"\0" * 8, rng.randbytes(40))))
    return f"bytes appended to {_name(run, file)}"


def remove(run: Path, rng: random.Random) -> str:
    file = _pick(run, rng)
    file.unlink()
    return f"{_name(run, file)} removed"


def rename(run: Path, rng: random.Random) -> str:
    file = _pick(run, rng)
    other = file.with_name(rng.choice((file.name.upper(), f"{file.name}.bak", f"x{file.name}", "ema.safetensors")))
    file.rename(other)
    return f"{_name(run, file)} renamed to {other.name}"


def swap(run: Path, rng: random.Random) -> str:
    """Two files of one checkpoint, or the same file of two checkpoints, change places."""
    file = _pick(run, rng)
    candidates = [path / file.name for path in _checkpoints(run) if path != file.parent and (path / file.name).exists()]
    if not candidates or rng.random() < 0.5:
        candidates = sorted(path for path in file.parent.iterdir() if path != file)
    if not candidates:
        return "nothing"
    other = rng.choice(candidates)
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)
    return f"{_name(run, file)} and {_name(run, other)} swapped"


def duplicate(run: Path, rng: random.Random) -> str:
    """A file becomes a copy of another one, which may be of another checkpoint."""
    file, other = _pick(run, rng), _pick(run, rng)
    file.write_bytes(other.read_bytes())
    return f"{_name(run, file)} is now a copy of {_name(run, other)}"


def add_part(run: Path, rng: random.Random) -> str:
    path = _checkpoints(run)[-1]
    source = rng.choice(sorted(path.glob("*.safetensors")))
    name = rng.choice(("ema", "extra", "rank-0", "rank-7", "task", "outer", "model.shard-0-of-2", "../out"))
    (path / f"{name}.safetensors").write_bytes(source.read_bytes())
    return f"{source.name} copied to {name}.safetensors"


def edit_json(run: Path, rng: random.Random) -> str:
    """Change, drop, rename or add one value of state.json or digests.json, anywhere in its tree."""
    path = _checkpoints(run)[-1] if rng.random() < 0.8 else rng.choice(_checkpoints(run))
    file = path / rng.choice(("state.json", "digests.json", "digests.json"))
    try:
        tree = json.loads(file.read_text())
    except (OSError, ValueError):
        return "nothing"
    places = list(_places(tree))
    if not places:
        return "nothing"
    holder, key = rng.choice(places)
    before = holder[key]
    action = rng.choice(("change", "change", "drop", "rename"))
    if action == "rename" and isinstance(holder, dict):
        holder[rng.choice((f"{key}x", str(key)[:-1], str(key).upper(), "ema.safetensors"))] = holder.pop(key)
    elif action == "drop":
        del holder[key]
    else:
        holder[key] = rng.choice(
            (None, True, 0, -1, 1, 2**63, 1e308, "", "x", [], {}, "0" * 32, [before], _EVIL, "../../x", "\x1b[2J")
        )
    file.write_text(json.dumps(tree, indent=rng.choice((None, 1))))
    return f"{_name(run, file)}: {action} of {key!r}, which was {str(before)[:60]!r}"


def _places(tree: Any) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)


def consistent_edit(run: Path, rng: random.Random) -> str:
    """Damage a file and make its digest right again, as somebody could who knows the format."""
    import xxhash

    file = _pick(run, rng)
    what = rng.choice((flip_bits, truncate, append))
    if file.name == "digests.json":
        return what(run, rng)
    raw = bytearray(file.read_bytes())
    if raw:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    file.write_bytes(raw)
    digests = file.parent / "digests.json"
    try:
        text = digests.read_text()
        tree = json.loads(text)
    except (OSError, ValueError):
        return "nothing"
    new = xxhash.xxh3_128_hexdigest(bytes(raw))
    _put_digest(tree, file.name, new, len(raw))
    digests.write_text(json.dumps(tree))
    return f"{_name(run, file)}: a bit flipped, and its digest made right"


def _put_digest(tree: Any, name: str, digest: str, num_bytes: int) -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == name and isinstance(value, dict):
                for inner, old in value.items():
                    value[inner] = num_bytes if isinstance(old, int) else digest
            elif key == name and isinstance(value, list):
                tree[key] = [num_bytes if isinstance(old, int) else digest for old in value]
            else:
                _put_digest(value, name, digest, num_bytes)


def pickle_file(run: Path, rng: random.Random) -> str:
    """A part becomes a pickle that would run a command."""
    file = _pick(run, rng)
    file.write_bytes(_EVIL.encode())
    return f"{_name(run, file)} is a pickle"


def rename_folder(run: Path, rng: random.Random) -> str:
    path = rng.choice(_checkpoints(run))
    names = ("step-00000099", "step-0000000", "step-99999999999", ".writing-step-00000008", ".replaced-step-00000008")
    other = path.with_name(rng.choice((*names, f"left-{path.name}", "step-x", "best")))
    if other.exists():
        return "nothing"
    path.rename(other)
    return f"folder {path.name} renamed to {other.name}"


def folder_for_file(run: Path, rng: random.Random) -> str:
    file = _pick(run, rng)
    file.unlink()
    file.mkdir()
    return f"{_name(run, file)} is a folder"


def link(run: Path, rng: random.Random) -> str:
    file = _pick(run, rng)
    target = rng.choice(("/etc/passwd", "/dev/null", file.name, "nowhere", "/dev/zero"))
    file.unlink()
    file.symlink_to(target)
    return f"{_name(run, file)} is a link to {target}"


Damage = Callable[[Path, random.Random], str]
DAMAGES: tuple[Damage, ...] = (
    flip_bits,
    flip_bits,
    overwrite,
    truncate,
    append,
    remove,
    rename,
    swap,
    duplicate,
    add_part,
    edit_json,
    edit_json,
    edit_json,
    consistent_edit,
    pickle_file,
    rename_folder,
    folder_for_file,
    link,
)


@dataclass(frozen=True)
class ResumeFacts:
    """How the resume of a damaged run ended."""

    codes: tuple[int | None, ...]
    stderr: str
    stdout: str
    was_edited: bool
    """A digest was made right by who did the damage: nobody can tell, so any answer without a traceback will do."""


def judge_resume(facts: ResumeFacts) -> tuple[list[str], bool]:
    """Return what did not hold before weights are compared, and True if the run must be as the undisturbed one is."""
    troubles = []
    if None in facts.codes:
        return [f"still running after {DEADLINE_S:g} s"], False
    if "Traceback" in facts.stderr:
        troubles.append(f"a traceback: {facts.stderr.strip().splitlines()[-1][:200]}")
    if "\x1b" in facts.stderr + facts.stdout:
        troubles.append("a raw ESC on the terminal")
    codes = set(facts.codes)
    if codes == {0}:
        return troubles, not facts.was_edited
    if codes != {2}:
        troubles.append(f"exit codes {facts.codes}")
    elif "error" not in facts.stderr:
        troubles.append("exit code 2 without a message")
    return troubles, False


def cut_back(whole: Path, cut: Path) -> None:
    """Copy a finished run as a kill at half of its steps would have left it, with the three newest checkpoints."""
    shutil.copytree(whole, cut)
    paths = _checkpoints(cut)
    middle = len(paths) // 2 + 1
    for path in [*paths[: max(middle - 3, 0)], *paths[middle:]]:
        shutil.rmtree(path)
    record = json.loads((cut / "run.json").read_text())
    (cut / "run.json").write_text(json.dumps({**record, "status": "running"}))


class Checkpoints:
    """See the module."""

    name = "checkpoints"
    counts = (10, 1000)
    mostly_waits = False

    def why_not(self) -> str | None:
        return None

    def prepare(self, folder: Path, nursery: Nursery) -> None:
        self._shared = folder
        self._expected: dict[tuple[str, int], RunFacts] = {}
        pack(folder / "packed.hdf")

    def run(self, trial: Trial) -> Outcome:
        rng = trial.random
        name, ranks = rng.choice(SOURCES)
        variant, out = VARIANTS[name], trial.folder / "run"
        keep = ("--keep-last", "99", "--keep-best", "0")
        whole = undisturbed(trial.nursery, variant, ranks, self._shared, *keep)
        # Back to its middle, as a kill would leave it: its checkpoints are damaged.
        shutil.copytree(made_once(self._shared / f"cut-{name}-{ranks}", lambda cut: cut_back(whole, cut)), out)
        damages = [rng.choice(DAMAGES) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        lines = []
        for damage in damages:
            try:
                lines.append(damage(out, rng))
            except (OSError, IndexError, ValueError) as error:  # an earlier damage has left nothing to do this to
                lines.append(f"{damage.__name__} not possible: {error}")
        (trial.folder / "damage.txt").write_text("\n".join([f"{name} on {ranks} ranks", *lines]))
        expected = self._expected.setdefault((name, ranks), read_run(whole))
        begun = time.monotonic()
        plan = Round(ranks, False, ())
        processes = start(trial.nursery, variant, plan, trial.folder, "resume", out, self._shared)
        trial.nursery.wait(processes, DEADLINE_S)
        seconds = time.monotonic() - begun
        facts = ResumeFacts(
            tuple(process.code for process in processes),
            "".join(process.err for process in processes),
            "".join(process.out for process in processes),
            consistent_edit in damages,
        )
        troubles, must_equal = judge_resume(facts)
        troubles += [f"left running: {line}" for line in trial.nursery.left(5.0)]
        if must_equal:
            troubles += self._compare(out, expected)
        if (trial.folder / "pwned").exists() or (out / "pwned").exists():
            troubles.append("code in a file was run")
        return trial.judged([f"{name} on {ranks}: {'; '.join(lines)}: {each}" for each in troubles], 1, seconds)

    @staticmethod
    def _compare(out: Path, expected: RunFacts) -> list[str]:
        try:
            return [*differences(read_run(out), expected, 0.0), *leftovers(out)]
        except (AssertionError, OSError, ValueError, KeyError) as error:
            return [f"the run cannot be read: {error!r}"]
