"""Inputs that are nearly right: documents drawn from their grammar, with wrong values at places that exist.

A generator is a hypothesis strategy of `Case`: the words behind `paceline`, the sound inputs they need, and the files
that replace some of them.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from tools.chaos.healthy import AUDIO, TRAIN_ASR

PAYLOAD = "echo > pwned"
"""A shell builtin: whoever runs it leaves a file `pwned`."""
FOLDER, MISSING = b"<folder>", b"<missing>"
"""In place of a file's content: a folder of that name; nothing."""


@dataclass(frozen=True)
class Case:
    """One bad input, whole: it can be replayed without the generator."""

    kind: str
    words: tuple[str, ...]
    healthy: tuple[str, ...]
    """Sound inputs that are there, too."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    codes: tuple[int, ...] = (0, 2)
    """Exit codes that are documented for this command."""
    reason: str = ""
    """For a regression case: what it showed."""

    def to_json(self) -> str:
        files = {name: _as_text(content) for name, content in self.files.items()}
        values = {"kind": self.kind, "reason": self.reason, "words": self.words, "healthy": self.healthy}
        return json.dumps({**values, "codes": self.codes, "files": files}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Case:
        values = json.loads(text)
        files = {name: _as_bytes(content) for name, content in values["files"].items()}
        tuples = {name: tuple(values[name]) for name in ("words", "healthy", "codes")}
        return cls(kind=values["kind"], files=files, reason=values["reason"], **tuples)


def _as_text(content: bytes) -> dict[str, str]:
    try:
        text = content.decode()
        return {"text": text} if text.isprintable() or "\n" in text else {"base64": base64.b64encode(content).decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def _as_bytes(value: Mapping[str, str]) -> bytes:
    return value["text"].encode() if "text" in value else base64.b64decode(value["base64"])


# -- values ------------------------------------------------------------------------------------------------------------

NASTY_TEXT = [
    *(
        "",
        " ",
        "\t",
        "-",
        "--",
        ".",
        "..",
        "/",
        "~",
        "*",
        "a\nb",
        "a\rb",
        "\x00",
        "\x7f",
        "\x1b[2J\x1b[31m",
        "\x1b]0;x\x07",
    ),
    *(
        "\x9b31m",
        "\u202e",
        "\ufeff",
        "é",
        "語",
        "😀",
        "nan",
        "inf",
        "-1",
        "1e999",
        "0x10",
        "1_000",
        "null",
        "true",
        "None",
    ),
    *(
        "../../../up",
        "/etc/passwd",
        "/dev/zero",
        "/dev/null",
        "/proc/self/mem",
        "file:///etc/passwd",
        "s3://x/y",
        "x" * 300,
    ),
    *(
        "%s%n",
        "{0.__class__}",
        "${HOME}",
        f"$({PAYLOAD})",
        f"`{PAYLOAD}`",
        f"x; {PAYLOAD}",
        f"x\n{PAYLOAD}\n",
        f"'; {PAYLOAD}; '",
    ),
    *("x" * 70_000, "a/" * 3000, "con", "a:b", "a,b", "a=b", "[1,", "{", "<script>alert(1)</script>", "\\", "'", '"'),
]
texts = st.one_of(st.sampled_from(NASTY_TEXT), st.text(max_size=12))
numbers = st.one_of(
    st.sampled_from([0, -1, 1, 2, 255, 2**31, 2**31 - 1, 2**32, 2**53 + 1, 2**63, -(2**63), 2**64, 10**30, 10**400]),
    st.sampled_from([0.0, -0.0, 1e-320, 1e308, -1e308, 0.1, 1.5, float("nan"), float("inf"), float("-inf")]),
    st.integers(),
    st.floats(),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
trees: SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
raw_json = st.sampled_from(
    [
        *(
            "[" * 5000,
            '{"a":' * 5000,
            "[" * 200_000,
            "NaN",
            "-Infinity",
            "1" * 5000,
            '"\\ud800"',
            '{"a": 1, "a": 2}',
            "{}",
            "[]",
        ),
        *(
            "null",
            "0",
            '""',
            "{",
            '{"audio_filepath"',
            "\x00" * 50,
            "\ufeff{}",
            "{'a': 1}",
            "// x",
            "1e99999",
            "\x1b[2J",
        ),
    ]
)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from places(value)


@st.composite
def edited_tree(draw: DrawFn, tree: Any) -> Any:
    """The tree with one to three places changed, dropped, renamed or added to."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 3))):
        choices = list(places(tree))
        if not choices:
            return draw(trees)
        holder, key = choices[draw(st.integers(0, len(choices) - 1))]
        action = draw(st.sampled_from(["change", "change", "drop", "rename", "add"]))
        if action == "drop":
            del holder[key]
        elif action == "rename" and isinstance(holder, dict):
            holder[draw(texts)] = holder.pop(key)
        elif action == "add" and isinstance(holder, dict):
            holder[draw(texts)] = draw(trees)
        else:
            holder[key] = draw(trees)
    return tree


@st.composite
def edited_bytes(draw: DrawFn, content: bytes) -> bytes:
    """The content with a few bytes changed, cut, doubled or inserted; headers are hit more often."""
    raw = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        end = draw(st.sampled_from([len(raw), len(raw), 64, 1024]))
        at = draw(st.integers(0, max(0, min(end, len(raw)) - 1)))
        action = draw(st.sampled_from(["set", "set", "set", "word", "cut", "insert", "delete", "double", "zero"]))
        if action == "set":
            raw[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif action == "word":
            width = draw(st.sampled_from([2, 4, 8]))
            value = draw(st.sampled_from([0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), 2 ** (8 * width - 1) - 1]))
            raw[at : at + width] = value.to_bytes(width, draw(st.sampled_from(["little", "big"])))
        elif action == "cut":
            del raw[at:]
        elif action == "insert":
            raw[at:at] = draw(st.binary(max_size=20))
        elif action == "delete":
            del raw[at : at + draw(st.integers(1, 200))]
        elif action == "double":
            raw[at:at] = raw[: draw(st.integers(1, 500))]
        else:
            raw[at : at + 50] = bytes(min(50, len(raw) - at))
    return bytes(raw)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


def dumped(tree: Any) -> str:
    return json.dumps(tree, ensure_ascii=False)


instead_of_file = st.sampled_from(
    [b"", FOLDER, MISSING, b"\x00" * 100, b"\xff\xfe", b"[" * 100_000, b"{}", b"null", b"[]"]
)


# -- kinds -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Sound inputs as the generators need them: bytes by name."""

    folder: Path

    @cache  # noqa: B019  one object per process
    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def tree(self, name: str) -> Any:
        return json.loads(self.read(name))

    def names(self, folder: str) -> list[str]:
        return sorted(
            str(path.relative_to(self.folder)) for path in (self.folder / folder).rglob("*") if path.is_file()
        )


_SPEECH = ("train", "train.json", "dev", "dev.json", "network.yaml")


@st.composite
def manifests(draw: DrawFn, samples: Samples) -> Case:
    """Lines of a manifest: right ones with wrong values, and lines that are no JSON; any encoding, any line ending."""
    right = [json.loads(line) for line in samples.read("train.json").splitlines()]
    line = st.one_of(
        st.sampled_from(right).flatmap(lambda each: edited_tree(each)).map(dumped),
        st.sampled_from(right).map(dumped),
        raw_json,
        trees.map(dumped),
    )
    ending = draw(st.sampled_from(["\n", "\n", "\r\n", "\r", "\n\n"]))
    text = ending.join(draw(st.lists(line, max_size=6))) + draw(st.sampled_from(["", ending]))
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-16", "latin-1", "utf-8-sig"]))
    content = text.encode(encoding, errors="surrogatepass" if encoding.startswith("utf") else "replace")
    if draw(st.integers(0, 5)) == 0:
        content = draw(st.one_of(edited_bytes(content or b"x"), instead_of_file))
    commands: list[tuple[tuple[str, ...], tuple[int, ...]]] = [
        (("manifest", "stats", "train.json"), (0, 1, 2)),
        (("manifest", "stats", "train.json", "--json"), (0, 1, 2)),
        (("manifest", "stats", "train.json,dev.json", "--check"), (0, 1, 2)),
        (("manifest", "split", "train.json", "--out", "out"), (0, 2)),
        (("manifest", "split", "train.json", "--out", "out", "--by", draw(texts.filter(_is_word))), (0, 2)),
        (("manifest", "scan", "train.json", "--out", "out.json"), (0, 2)),
        (("pack", "train.json", "out.h5", "--processes", "1"), (0, 2)),
        (("pack", "train.json", "out.h5", "--processes", "1", "--bad-data", "skip"), (0, 2)),
        ((*TRAIN_ASR, "--out", "out", "--limit-batches", "1"), (0, 2, 3)),
        ((*TRAIN_ASR, "--out", "out", "--limit-batches", "1", "--bad-data", "skip"), (0, 2, 3)),
        (("eval", "asr", "--manifest", "train.json"), (0, 2)),
        (("infer", "asr", "--manifest", "train.json", "--json"), (0, 2)),
        (("infer", "asr", "train.json"), (0, 2)),
    ]
    words, codes = draw(st.sampled_from(commands))
    healthy = (*_SPEECH, "asr") if "asr" in words[1:2] and words[0] != "train" else _SPEECH
    return Case("manifest", words, healthy, {"train.json": content}, codes)


def _is_word(text: str) -> bool:
    """An argument of a process has no NUL, and one that looks like an option is another mistake."""
    return "\x00" not in text and not text.startswith("-") and len(text) < 100_000


@st.composite
def audio(draw: DrawFn, samples: Samples) -> Case:
    name = draw(st.sampled_from(AUDIO))
    content = draw(st.one_of(edited_bytes(samples.read(name)), instead_of_file, st.binary(max_size=60)))
    commands: list[tuple[tuple[str, ...], tuple[int, ...]]] = [
        (("manifest", "stats", "train.json", "--check"), (0, 1, 2)),
        (("manifest", "scan", "train", "--out", "out.json"), (0, 2)),
        (("pack", "train.json", "out.h5", "--processes", "1"), (0, 2)),
        (("infer", "asr", name), (0, 2)),
        (("infer", "asr", "train"), (0, 2)),
        ((*TRAIN_ASR, "--out", "out"), (0, 2, 3)),
    ]
    words, codes = draw(st.sampled_from(commands))
    return Case("audio", words, (*_SPEECH, "asr"), {name: content}, codes)


@st.composite
def yaml_files(draw: DrawFn, samples: Samples) -> Case:
    """Settings: right keys with wrong values, YAML's own weapons (tags, anchors, merges, depth), broken text."""
    key = st.one_of(
        st.sampled_from(
            ["lr", "steps", "epochs", "betas", "groups", "freeze", "out", "resume", "seed", "level", "grains"]
        ),
        st.sampled_from(
            ["loggers", "milestones", "profile", "workers", "exp_name", "monitor", "sync_batchnorm", "larc"]
        ),
        texts,
    )
    pairs = st.dictionaries(key, trees, min_size=1, max_size=5).map(dumped)
    weapons = st.sampled_from(
        [
            f"lr: !!python/object/apply:os.system ['{PAYLOAD}']\n",
            f"!!python/object/new:subprocess.Popen [['sh', '-c', '{PAYLOAD}']]\n",
            "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nlr: *c\n",
            "".join(f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9) if n else 'x'}]\n" for n in range(12)),
            "a: &a [*a]\nlr: *a\n",
            "a: &a {b: *a}\n<<: *a\n",
            "<<: [{lr: 1}, {lr: 2}]\n",
            "lr: " + "[" * 3000,
            "lr: " + "[" * 100_000,
            "? [a, b]\n: 1\n",
            "? {a: 1}\n: 1\n",
            "lr: 1\nlr: 2\n",
            "- lr\n- steps\n",
            "lr: 2026-11-16\nseed: 12:30:45\n",
            "%YAML 9.9\n---\nlr: 1\n",
            "--- a\n--- b\n",
            "lr: |\n  " + "x" * 50_000 + "\n",
            "out: !!binary aGVsbG8=\n",
            "freeze: !!set {a, b}\ngroups: !!omap [a: 1]\n",
            "lr: 0o17\nseed: 0x" + "f" * 400 + "\n",
            "seed: " + "9" * 5000 + "\n",
            "1: 2\nnull: 3\ntrue: 4\n1.5: 2\n",
            "milestones: [" + ", ".join(["1"] * 200_000) + "]\n",
            "key with spaces: x\n\tlr: 1\n",
        ]
    )
    text = "".join(draw(st.lists(st.one_of(pairs.map(lambda each: each + "\n"), weapons), min_size=1, max_size=2)))
    content = _encoded(text)
    if draw(st.integers(0, 6)) == 0:
        content = draw(st.one_of(edited_bytes(samples.read("train.yaml")), instead_of_file))
    commands: list[tuple[tuple[str, ...], tuple[int, ...]]] = [
        (("train", "digits", "--config", "train.yaml", "--print-config"), (0, 2)),
        (("train", "asr", "--config", "train.yaml", "--print-config"), (0, 2)),
        (("train", "continual", "--config", "train.yaml", "--print-config"), (0, 2)),
        (("tune", "digits", "--config", "train.yaml", "--no-such-option"), (2,)),
    ]
    words, codes = draw(st.sampled_from(commands))
    return Case("yaml", words, (), {"train.yaml": content}, codes)


@st.composite
def networks(draw: DrawFn, samples: Samples) -> Case:
    """The YAML that describes a speech network."""
    import yaml

    tree = yaml.safe_load(samples.read("network.yaml"))
    edited = draw(edited_tree(tree))
    content = draw(st.one_of(st.just(_encoded(dumped(edited))), edited_bytes(samples.read("network.yaml"))))
    commands = [
        (*TRAIN_ASR, "--out", "out"),
        ("pack", "train.json", "out.h5", "--features", "--network", "network.yaml"),
    ]
    return Case("network", draw(st.sampled_from(commands)), _SPEECH, {"network.yaml": content}, (0, 2, 3))


@st.composite
def packed(draw: DrawFn, samples: Samples) -> Case:
    """HDF5: damaged bytes, or a sound file with other attributes, shapes, types, links."""
    name = draw(st.sampled_from(["speech.h5", "samples.h5"]))
    content = samples.read(name)
    if draw(st.booleans()):
        content = draw(st.one_of(edited_bytes(content), edited_bytes(content), instead_of_file))
    else:
        content = _edited_hdf(draw, content)
    commands: list[tuple[tuple[str, ...], tuple[int, ...]]] = [
        (("pack", "--info", name), (0, 1, 2)),
        (("pack", "--verify", name), (0, 1, 2)),
        (("pack", "--extract", name, "out"), (0, 2)),
        (("pack", name, "out.h5", "--processes", "1"), (0, 2)),
        (("pack", name, "out.h5", "--processes", "1", "--bad-data", "skip"), (0, 2)),
    ]
    if name == "speech.h5":
        asr = [name if word == "train.json" else word for word in TRAIN_ASR]
        commands += [
            (("manifest", "stats", name), (0, 1, 2)),
            ((*asr, "--out", "out"), (0, 2, 3)),
            (("eval", "asr", "--manifest", name), (0, 2)),
        ]
    words, codes = draw(st.sampled_from(commands))
    return Case("packed", words, (*_SPEECH, "asr"), {name: content}, codes)


def _edited_hdf(draw: DrawFn, content: bytes) -> bytes:
    import h5py
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.h5"
        path.write_bytes(content)
        with h5py.File(path, "r+") as file:
            for _ in range(draw(st.integers(1, 3))):
                items: list[Any] = [file]
                file.visititems(lambda _name, item, items=items: items.append(item))
                item = items[draw(st.integers(0, len(items) - 1))]
                action = draw(
                    st.sampled_from(["attribute", "attribute", "drop", "values", "shape", "type", "link", "huge"])
                )
                try:
                    _edit_item(draw, action, file, item, np, h5py)
                except (TypeError, ValueError, KeyError, OSError, RuntimeError, OverflowError, UnicodeError):
                    continue  # not every value fits into HDF5
        return path.read_bytes()


def _edit_item(draw: DrawFn, action: str, file: Any, item: Any, np: Any, h5py: Any) -> None:
    """Change one group or data set."""
    is_data = isinstance(item, h5py.Dataset)
    if action == "attribute" or (item.name == "/" and action != "link"):
        names = list(item.attrs)
        name = draw(st.sampled_from([*names, "extra"]))
        if draw(st.integers(0, 3)) == 0 and name in item.attrs:
            del item.attrs[name]
        else:
            item.attrs[name] = draw(st.one_of(scalars.filter(lambda value: value is not None), st.just([1, 2])))
        return
    name = item.name
    if action == "drop":
        del file[name]
    elif action == "link":
        target = draw(st.sampled_from(["self", "external", "dangling"]))
        del file[name]
        file[name] = {
            "self": h5py.SoftLink(name),
            "external": h5py.ExternalLink("/etc/passwd", "/"),
            "dangling": h5py.SoftLink("/nowhere"),
        }[target]
    elif is_data:
        values = item[()]
        attributes = dict(item.attrs)
        del file[name]
        if action == "huge":
            length = draw(st.sampled_from([2**31, 2**40, 2**62]))
            file.create_dataset(name, shape=(length, *values.shape[1:]), dtype=values.dtype, chunks=True)
        elif action == "shape":
            file[name] = values[: draw(st.integers(0, 3))] if values.ndim else np.zeros((2, 2))
        elif action == "type":
            kind = draw(st.sampled_from(["f8", "i1", "u8", "S3", "c8", "f2"]))
            file[name] = np.zeros(values.shape, kind)
        else:
            extreme = draw(st.sampled_from([0, -1, 1, 2**31 - 1, 2**62]))
            file[name] = np.full(values.shape, extreme).astype(values.dtype) if values.dtype.kind in "iuf" else values
        for key, value in attributes.items():
            file[name].attrs[key] = value


@st.composite
def archives(draw: DrawFn, samples: Samples) -> Case:
    """`.nemo`: members with other names, kinds and sizes; damaged configuration; weights that are another pickle."""
    import yaml

    tree = yaml.safe_load(samples.read("model_config.yaml"))
    config = draw(
        st.one_of(
            st.just(samples.read("model_config.yaml")),
            edited_tree(tree).map(dumped).map(_encoded),
            edited_bytes(samples.read("model_config.yaml")),
            instead_of_file.filter(lambda content: content not in (FOLDER, MISSING)),
        )
    )
    evil = b"cposix\nsystem\n(S'" + PAYLOAD.encode() + b"'\ntR."
    weights = draw(
        st.one_of(
            st.just(samples.read("weights.ckpt")),
            edited_bytes(samples.read("weights.ckpt")),
            st.sampled_from([evil, b"", b"\x80\x02" + evil, b"PK\x05\x06" + bytes(18)]),
        )
    )
    members: list[tuple[str, bytes]] = [("model_config.yaml", config), ("model_weights.ckpt", weights)]
    for _ in range(draw(st.integers(0, 2))):
        name = draw(
            st.sampled_from(
                ["../pwned", "/tmp/pwned-by-chaos", "model_config.yaml", "x", "a" * 300, "model_weights.ckpt"]
            )
        )
        members.insert(draw(st.integers(0, len(members))), (name, b"pwned"))
    kind = draw(
        st.sampled_from([tarfile.REGTYPE] * 5 + [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
    )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=draw(st.sampled_from(["w", "w:gz", "w:xz"]))) as tar:
        special = draw(st.integers(0, len(members) - 1))
        for number, (name, content) in enumerate(members):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if number == special and kind != tarfile.REGTYPE:
                info.type, info.linkname, info.size = kind, "/etc/passwd", 0
            tar.addfile(info, io.BytesIO(content))
    raw = buffer.getvalue()
    if draw(st.integers(0, 3)) == 0:
        raw = draw(st.one_of(edited_bytes(raw), instead_of_file))
    words = (*TRAIN_ASR[:2], *TRAIN_ASR[2:], "--out", "out", "--init-from", "model.nemo")
    return Case("archive", words, (*_SPEECH,), {"model.nemo": raw}, (0, 2, 3))


@st.composite
def run_folders(draw: DrawFn, samples: Samples) -> Case:
    """Run folders of others: record, journal, lock, checkpoints; a file may be a folder or missing."""
    run = draw(st.sampled_from(["plain", "asr", "ema"]))
    files: dict[str, bytes] = {}
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from([f"{run}/run.json", f"{run}/run.json", f"{run}/metrics.jsonl", "any"]))
        if name == "any":
            name = draw(st.sampled_from(samples.names(run)))
        files[name] = draw(_damaged_file(samples, name))
    commands: list[tuple[tuple[str, ...], tuple[int, ...]]] = [
        (("runs", "."), (0, 2)),
        (("runs", ".", "--json"), (0, 2)),
        (("diff", run, "other"), (0, 1, 2)),
        (("diff", "other", run), (0, 1, 2)),
        (("report", run, "--out", "out.html"), (0, 2)),
        (("report", run, "other", "--out", "out.html"), (0, 2)),
        (("eval", run), (0, 2)),
        (("eval", run, "--checkpoint", "last", "--json"), (0, 2)),
        (("infer", run, "--out", "out.txt"), (0, 2)),
        (("export", run, "out"), (0, 2)),
    ]
    if run == "asr":
        commands.append(((*TRAIN_ASR, "--out", "asr", "--resume", "auto", "--val-manifest", "dev.json"), (0, 2, 3)))
    words, codes = draw(st.sampled_from(commands))
    return Case("run", words, (*_SPEECH, run, "other"), files, codes)


@st.composite
def _damaged_file(draw: DrawFn, samples: Samples, name: str) -> bytes:
    content = samples.read(name)
    if draw(st.integers(0, 5)) == 0:
        return draw(st.one_of(instead_of_file, edited_bytes(content)))
    if name.endswith(".json"):
        return _encoded(dumped(draw(edited_tree(json.loads(content)))))
    if name.endswith(".jsonl"):
        lines = [json.loads(line) for line in content.splitlines()]
        changed = st.sampled_from(lines).flatmap(lambda line: edited_tree(line)).map(dumped)
        row = [dumped(line) for line in lines]
        for new in draw(st.lists(st.one_of(changed, changed, raw_json, trees.map(dumped)), min_size=1, max_size=4)):
            row.insert(draw(st.integers(0, len(row))), new)
        return _encoded("\n".join(row) + draw(st.sampled_from(["\n", ""])))
    return draw(edited_bytes(content))


@st.composite
def options(draw: DrawFn, samples: Samples) -> Case:
    """Words on the command line: options that exist with values that do not fit, and others."""
    command = draw(
        st.sampled_from(["train", "submit", "runs", "pack", "manifest", "report", "launch", "eval", "diff", "infer"])
    )
    fields = _option_names(command)
    words: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.one_of(st.sampled_from(fields), texts.filter(_is_word).map(lambda text: text.replace("=", ""))))
        words.append(f"--{name.replace('_', '-')}")
        if draw(st.integers(0, 4)):
            words.append(draw(st.one_of(texts, scalars.map(str)).filter(_is_word)))
    fixed: dict[str, list[list[str]]] = {
        "train": [["digits", "--steps", "1", "--print-config"], ["nowhere.py:Task", "--print-config"]],
        "submit": [["slurm", "--dry-run"], ["sge", "--dry-run"]],
        "manifest": [["stats", "train.json"], ["split", "train.json", "--out", "out"]],
        "pack": [["train.json", "out.h5", "--processes", "1"], ["--info", "speech.h5"]],
        "report": [["plain", "--out", "out.html"]],
        "eval": [["plain"]],
        "infer": [["plain"]],
        "runs": [["."]],
        "diff": [["plain", "asr"]],
        "launch": [["--nnodes", "0"]],
    }
    first = draw(st.sampled_from(fixed[command]))
    behind = ["--", "train", "digits", "--steps", "1"] if command in ("submit", "launch") else []
    if command == "submit":
        words = [word for word in words if word not in ("--setup", "--env")]
        behind += ["--out", draw(texts.filter(_is_word))]
    if any(word in ("--procs", "--threads", "--processes") for word in words):
        words = []  # so many processes are what was asked for
    if any(word.startswith(("--watch", "--port")) for word in words):
        words = []  # serves until it is told to stop
    codes = {"manifest": (0, 1, 2), "diff": (0, 1, 2), "pack": (0, 1, 2)}.get(command, (0, 2))
    return Case(
        "options", (command, *first, *words, *behind), ("train", "train.json", "speech.h5", "plain", "asr"), {}, codes
    )


@cache
def _option_names(command: str) -> list[str]:
    from paceline.cli.main import import_command

    return sorted(import_command(command).OPTIONS.model_fields)


KINDS: Sequence[Callable[[Samples], SearchStrategy[Case]]] = (
    manifests,
    audio,
    yaml_files,
    networks,
    packed,
    archives,
    run_folders,
    run_folders,
    options,
)
