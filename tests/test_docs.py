"""The docs are true: blocks run, commands parse, links lead somewhere, names exist, the page of options is fresh."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import create_model

import paceline
from paceline.cli.completion import options_of
from paceline.cli.main import command_names, main
from paceline.config.aliases import aliases_of
from paceline.config.command_line import read_words
from paceline.config.load import load
from paceline.config.settings import Section, TrainConfig
from paceline.config.train_command import TrainCommand, take_task, train_options
from paceline.lab.tune import command as tune
from paceline.observe.journal import read
from paceline.recipes.speech.network.config import NetworkSettings
from paceline.train.find_task import find_task, recipe_names
from tests.commands import run_command
from tests.forked import Forked

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TIMEOUT_S = 300
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    number: int
    language: str
    title: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.stem}-{self.number}"


def _blocks(language: str) -> list[Block]:
    return [
        Block(page, number, *found)
        for page in PAGES
        for number, found in enumerate(_BLOCK.findall(page.read_text(encoding="utf-8")))
        if found[0] == language
    ]


PYTHON = _blocks("python")
RECIPE_SETTINGS = [find_task(name).Settings for name in recipe_names()]
RECIPE_USES = [find_task(name).Use for name in recipe_names() if find_task(name).Use is not Section]
EVERY_TRAIN_OPTION: Any = create_model(
    "EveryTrainOption",
    __base__=TrainCommand,
    **{name: (field.annotation, None) for settings in RECIPE_SETTINGS for name, field in settings.model_fields.items()},
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """How each Python block ended, all run by one process that imports torch once."""
    top = tmp_path_factory.mktemp("blocks")
    folders = {block.id: top / block.id for block in PYTHON}
    for block in PYTHON:
        folders[block.id].mkdir()
        (folders[block.id] / "block.py").write_text(block.text, encoding="utf-8")
    command = [sys.executable, str(ROOT / "tests" / "run_blocks.py"), *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {Path(outcome["folder"]).name: outcome for outcome in found}


@pytest.mark.parametrize("block", [pytest.param(block, id=block.id) for block in PYTHON])
def test_block_runs(block: Block, outcomes: dict[str, dict[str, object]]) -> None:
    outcome = outcomes[block.id]
    assert outcome["code"] == 0, outcome["stderr"]
    assert outcome["stdout"]


TWINS = {page: DOCS / "zh" / page.name if page.parent == DOCS else ROOT / "README.zh.md" for page in PAGES}


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_blocks_of_the_page_in_chinese_are_those_that_ran(page: Path) -> None:
    """Byte for byte: the run of a block is that of both pages, and each is run once."""
    english, chinese = (_BLOCK.findall(each.read_text(encoding="utf-8")) for each in (page, TWINS[page]))
    assert chinese == english
    assert [Block(page, number, *found) for number, found in enumerate(chinese) if found[0] == "python"] == [
        block for block in PYTHON if block.page == page
    ]


# -- commands ------------------------------------------------------------------------------------------------------


def _commands(block: Block) -> Iterator[list[str]]:
    """The words behind `paceline` in each line that has it, under whatever launcher."""
    for line in block.text.replace("\\\n", " ").splitlines():
        inside = re.search(r"<\((.*)\)", line)
        words = shlex.split(inside[1] if inside else line, comments=True)
        names = [place for place, word in enumerate(words) if word in ("paceline", ".venv/bin/paceline")]
        if names:
            rest = words[names[0] + 1 :]
            rest = rest[: rest.index(">")] if ">" in rest else rest
            yield [part for word in rest for part in (["--epochs", "1"] if word == "..." else [word])]


COMMAND_LINES = [
    pytest.param(block, words, id=f"{block.id}-{number}")
    for block in _blocks("bash")
    for number, words in enumerate(_commands(block))
]


@pytest.mark.parametrize(("block", "words"), COMMAND_LINES)
def test_command_line_is_understood(
    block: Block,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for language, title, text in _BLOCK.findall(block.page.read_text(encoding="utf-8")):
        if title:
            (tmp_path / title).write_text(text, encoding="utf-8")
        if language == "yaml":
            (tmp_path / "jasper.yaml").write_text(text, encoding="utf-8")
    _understand(words, tmp_path)
    capsys.readouterr()


def test_the_table_of_commands_has_all_of_them() -> None:
    table = re.findall(r"^\| \[`(\w+)`\]", (DOCS / "commands.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(command_names())


def _understand(words: list[str], folder: Path) -> None:
    """Read the words as the command would; whatever is wrong with them is raised."""
    command, rest = words[0], words[1:]
    if command in ("--help", "completion"):
        assert main(words) == 0
        return
    assert command in command_names()
    if command in ("launch", "submit"):
        dashes = rest.index("--")
        _understand(rest[dashes + 1 :], folder)
        rest = rest[:dashes]
    if command in ("train", "tune"):
        rest = tune.range_test_words(rest) if command == "tune" else rest
        model = tune.tune_options if command == "tune" else train_options
        name, _ = take_task(rest, model(TrainConfig))
        assert name is not None
        path = name.rpartition(":")[0]
        is_here = not path or (folder / path).exists()
        settings = find_task(name).Settings if is_here else TrainConfig
        for word in rest:
            if word.endswith(".yaml") and not (folder / word).exists():
                (folder / word).write_text("epochs: 12\n")  # what the line before it would have printed
        if command == "tune":
            rest, _ = tune.with_length(model(settings), rest)
        load(model(settings), rest, prog=f"paceline {command}", positional=("task",))
        return
    options, positional = options_of(command)
    if command in ("eval", "infer"):  # those of all recipes: which one it is only the run knows
        options = create_model("Options", __base__=(options, *dict.fromkeys(RECIPE_USES)))
    load(options, rest, prog=f"paceline {command}", positional=positional)


def test_yaml_blocks_are_settings() -> None:
    blocks = _blocks("yaml")
    assert blocks
    for block in blocks:
        content = yaml.safe_load(block.text)
        settings = {
            name: value for name, value in content.items() if name != "recipe"
        }  # of a network: read by the task
        is_network = bool({"blocks", "conformer"} & set(content))
        assert NetworkSettings(**settings) if is_network else TrainConfig(**content)


# -- first steps, for real -----------------------------------------------------------------------------------------


def _children(process: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    own = [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [*own, *(other for child in own for other in _children(child))]


def test_first_steps_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on two processes, SIGKILL them all, resume on one, look: with the page's own words."""
    page = DOCS / "first-steps.md"
    (file,) = [block for block in PYTHON if block.page == page and block.title == "waves.py"]
    (tmp_path / file.title).write_text(file.text, encoding="utf-8")
    lines = [words for block in _blocks("bash") if block.page == page for words in _commands(block)]
    first, second = [words for words in lines if words[0] == "train"]
    monkeypatch.chdir(tmp_path)
    with Forked("paceline.cli.main", first) as training:
        # The third epoch's line comes after the checkpoint of the first is whole.
        seen = next((line for line in training.stdout if line.startswith("train epoch 3,")), None)
        assert seen is not None, training.stderr.read()
        for process in [training.pid, *_children(training.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    run = tmp_path / "runs" / "waves"
    assert json.loads((run / "run.json").read_text())["status"] == "running"
    assert not list(run.glob("checkpoints/step-00004000"))

    def paceline_command(words: list[str]) -> str:
        done = run_command(words, TIMEOUT_S)
        assert done.code == 0, done.err
        return done.out

    paceline_command(second)
    steps = [line["step"] for line in read(run / "metrics.jsonl") if line["kind"] == "step"]
    assert steps == list(range(4000))
    looks = [words for words in lines if words[0] in ("runs", "eval")]
    assert [words[0] for words in looks] == ["runs", "eval"]
    for words in looks:
        assert "unseen" in paceline_command(words)


# -- links and names -----------------------------------------------------------------------------------------------

LINKS = [
    pytest.param(page, target, id=f"{page.stem}-{target}")
    for page in PAGES
    for target in sorted(
        set(re.findall(r"\]\(([^)\s]+)\)", _BLOCK.sub("", page.read_text(encoding="utf-8")))),
    )
    if "://" not in target
]


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_link_leads_somewhere(page: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    assert file.exists(), target
    if anchor:
        assert anchor in _anchors(file), sorted(_anchors(file))


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [name for name in listed if name != "index.md" and f"({name})" not in index] == []
    assert re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.zh.yml").read_text(encoding="utf-8")) == listed


OURS = [
    pytest.param(word, id=f"{page.stem}-{word}")
    for page in sorted(DOCS.glob("from-*.md"))
    for word in sorted(
        {
            word
            for row in page.read_text(encoding="utf-8").splitlines()
            if row.startswith("| ") and row.count(" | ") >= 2
            for word in re.findall(r"`([^`]+)`", row.split("|")[2])
        }
    )
]


@pytest.mark.parametrize("word", OURS)
def test_what_is_called_ours_exists(word: str) -> None:
    """The second column of the tables "coming from": an option, a command, or a name in Python."""
    if word.startswith("-"):
        typed = read_words(EVERY_TRAIN_OPTION, shlex.split(word))
        # A name without its value is only incomplete.
        assert [problem for problem in typed.problems if problem.is_unknown] == []
        assert typed.given or typed.files or typed.problems
    elif word.startswith("paceline "):
        words = shlex.split(word)[1:]
        if len(words) > 1 or words[0] != "export":  # a command by its name alone
            _understand(words if words[0] != "train" else [*words, "--epochs", "1", "--mode", "eval"], Path())
    else:
        owner, _, name = word.rpartition(".")
        home = getattr(paceline, owner) if owner != "paceline" else paceline
        assert name in (*dir(home), *_annotations(home))


def _annotations(kind: object) -> Iterable[str]:
    return getattr(kind, "__annotations__", {})


# -- the page of options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["architecture", "glossary"])
def test_files_that_a_page_names_exist(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    named = {
        path.rstrip("/").removeprefix("src/paceline")
        for path in re.findall(r"(?<![\w/])((?:[a-z_]+/)+(?:[a-z_]+\.py)?)(?![\w/])", text)
    }
    assert len(named) > 10
    assert sorted(path for path in named if not (ROOT / "src" / "paceline" / path).exists()) == []


@pytest.mark.parametrize("name", ["options", "api", "together"])
def test_written_page_is_fresh(name: str) -> None:
    generator = importlib.import_module(f"tools.docs.{name}")
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert text == generator.page(), f"`make docs` writes docs/{name}.md anew"
    chinese = (DOCS / "zh" / f"{name}.md").read_text(encoding="utf-8")
    assert chinese == generator.in_chinese(name, generator.page), f"`make docs` writes docs/zh/{name}.md anew"


@pytest.mark.parametrize("block", [pytest.param(block, id=block.id) for block in PYTHON])
def test_block_imports_public_names_only(block: Block) -> None:
    """From `paceline`, or from a module that the API page names."""
    public = {"paceline", *re.findall(r"^\| `(paceline\.\w+)` \|", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)}
    assert len(public) > 5
    private = []
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "paceline":
            names = importlib.import_module(node.module).__all__ if node.module in public else []
            private += [f"{node.module}.{each.name}" for each in node.names if each.name not in names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names if each.name.split(".")[0] == "paceline"]
            private += [name for name in names if name not in public]
    assert private == []


def test_page_of_options_has_every_setting() -> None:
    text = (DOCS / "options.md").read_text(encoding="utf-8")
    for name in {**TrainConfig.model_fields, **TrainCommand.model_fields}:
        assert re.search(rf"^\| `(?:{name}|{name.upper()})` \| [^|]+\S \| ", text, re.MULTILINE), name


def test_options_named_in_running_text_exist() -> None:
    """`--words` in backticks on pages about ours, outside of tables of others' options."""
    known = {name for command in command_names() for name in options_of(command)[0].model_fields}
    known |= {*EVERY_TRAIN_OPTION.model_fields, *aliases_of(TrainConfig)}
    known |= {name for recipe in recipe_names() for name in aliases_of(find_task(recipe).Settings)}
    known |= {"config", "help", "version", "hidden", "code_optimization", "plugins"}
    unknown = []
    for page in PAGES:
        if page.name.startswith("from-"):
            continue
        for text in re.findall(r"`([^`\n]+)`", _BLOCK.sub("", page.read_text(encoding="utf-8"))):
            if text.startswith("python "):  # a program of the repository, with options of its own
                continue
            for option in re.findall(r"(?<!\S)--([a-z][a-z0-9-]*)(?!_)\b", text):
                if option.replace("-", "_").removeprefix("no_") not in known:
                    unknown.append(f"{page.name}: --{option}")
    # Examples of mistakes.
    assert unknown == ["errors.md: --learning-rate", "errors.md: --batch-size", "errors.md: --gpus"]
