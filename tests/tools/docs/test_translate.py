"""The checker of translated pages: a faithful twin passes, and each rule fails where it must."""

from __future__ import annotations

import subprocess
from pathlib import Path

import markdown
import pytest

from tools.docs import translate

ROOT = Path(__file__).parents[3]

ENGLISH = """\
# Tuning for speed

`paceline tune` measures 12 settings in 1,500 steps; see [levels](levels.md#level-2) and `--grains`.

## What is measured?

Four of them, and `--grains
4`. Results are in [a file](../benchmarks/RESULTS.md).

| knob | values |
|---|---|
| `workers` | 0, 2, 4 |

```bash
paceline tune digits --global-batch 64   # on this machine
```

## What is measured?

Nothing more: <https://example.org/a>.
"""
CHINESE = f"""\
<!-- source: docs/tune.md sha256:{translate.digest(ENGLISH)} -->
# 调优 {{ #tuning-for-speed }}

参见[级别](levels.md#level-2)和 `--grains`；`paceline tune` 用 1,500 步测量 12 个设置。

## 测量什么？ {{ #what-is-measured }}

四个，以及 `--grains 4`。结果在[文件](../../benchmarks/RESULTS.md)中。

| 旋钮 | 取值 |
|---|---|
| `workers` | 0、2、4 |

```bash
paceline tune digits --global-batch 64   # on this machine
```

## 测量什么？ {{ #what-is-measured_1 }}

没有更多：<https://example.org/a>。
"""


def _found(english: str, chinese: str) -> list[str]:
    return [str(each) for each in translate.differences("docs/tune.md", english, chinese)]


def test_a_faithful_twin_passes() -> None:
    assert _found(ENGLISH, CHINESE) == []


@pytest.mark.parametrize(
    ("before", "after", "line", "what"),
    [
        ("## 测量什么？ { #what-is-measured }", "### 测量什么？ { #what-is-measured }", 6, "a heading of level 3"),
        ("{ #what-is-measured }", "", 6, "another anchor\n    write `{ #what-is-measured }`"),
        ("{ #what-is-measured_1 }", "{ #what-is-measured }", 18, "{ #what-is-measured_1 }"),
        ("## 测量什么？ { #what-is-measured_1 }\n", "", 19, "no heading for that of docs/tune.md:18"),
        ("# on this machine", "# 在本机", 14, "code block in section #what-is-measured, not in docs/tune.md"),
        ("# on this machine", "# 在本机", 6, "code block missing here in section #what-is-measured: ```bash"),
        ("| `workers` | 0、2、4 |", "| `workers` | 0、2、4 | |", 10, "rows of 2 2 3 columns"),
        (
            "|---|---|\n",
            "",
            6,
            "table missing here in section #what-is-measured: 3 rows of 2 columns (docs/tune.md:10)",
        ),
        ("levels.md#level-2", "levels.md#level-3", 4, "link in section #tuning-for-speed, not in"),
        ("levels.md#level-2", "../levels.md#level-2", 4, "docs/levels.md#level-2 (in English)"),
        ("../../benchmarks", "../benchmarks", 8, "docs/benchmarks/RESULTS.md"),
        ("<https://example.org/a>", "", 18, "link missing here in section #what-is-measured_1: https://example.org/a"),
        ("`--grains`", "`--grain`", 2, "inline code missing here in section #tuning-for-speed: `--grains`"),
        ("`paceline tune`", "", 2, "inline code missing here in section #tuning-for-speed: `paceline tune`"),
        ("1,500", "1500", 4, "number in section #tuning-for-speed, not in docs/tune.md: 1500"),
        ("0、2、4", "0、2", 6, "number missing here in section #what-is-measured: 4 (docs/tune.md:12)"),
        ("12 个", "12 个（12）", 4, "number in section #tuning-for-speed, 1 more than in docs/tune.md: 12"),
        ("<!-- source: docs/tune.md", "<!-- source: docs/tuned.md", 1, "the first line does not name its source"),
    ],
)
def test_each_rule_fails_where_it_must(before: str, after: str, line: int, what: str) -> None:
    assert before in CHINESE
    found = _found(ENGLISH, CHINESE.replace(before, after, 1))
    assert [each for each in found if each.startswith(f"docs/zh/tune.md:{line}: ") and what in each], found


def test_a_page_that_changed_is_stale_until_it_is_stamped(tmp_path: Path) -> None:
    for name in ("README.md", "docs/tune.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(ENGLISH if name != "README.md" else "# Paceline\n", encoding="utf-8")
    (tmp_path / "docs" / "zh").mkdir()
    (tmp_path / "docs" / "zh" / "tune.md").write_text(CHINESE, encoding="utf-8")
    (tmp_path / "docs" / "zh" / "gone.md").write_text(CHINESE, encoding="utf-8")
    assert translate.to_do(tmp_path) == [
        "missing   README.zh.md: translate README.md",
        "orphaned  docs/zh/gone.md: remove it",
    ]
    assert [each.page for each in translate.check(tmp_path)] == ["README.zh.md", "docs/zh/gone.md"]
    (tmp_path / "README.zh.md").write_text("# Paceline\n", encoding="utf-8")
    translate.stamp(tmp_path, "README.md")
    (tmp_path / "docs" / "zh" / "gone.md").unlink()
    assert translate.check(tmp_path) == []

    (tmp_path / "docs" / "tune.md").write_text(ENGLISH + "\nNot a number and no code: only words.\n", encoding="utf-8")
    (found,) = translate.check(tmp_path)
    assert str(found).startswith("docs/zh/tune.md:1: stale: docs/tune.md has changed")
    assert translate.to_do(tmp_path) == ["stale     docs/zh/tune.md: compare it with docs/tune.md; then --stamp it"]
    translate.stamp(tmp_path, "docs/tune.md")
    assert translate.check(tmp_path) == []


def test_a_stale_page_is_shown_with_the_commit_that_it_was_made_from(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        person = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *person, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "docs" / "zh").mkdir(parents=True)
    (tmp_path / "docs" / "tune.md").write_text(ENGLISH, encoding="utf-8")
    (tmp_path / "docs" / "zh" / "tune.md").write_text(CHINESE, encoding="utf-8")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    made_from = git("log", "--format=%h")
    (tmp_path / "docs" / "tune.md").write_text(ENGLISH + "\nMore.\n", encoding="utf-8")
    git("commit", "-q", "-a", "-m", "two")
    assert f"stale     docs/zh/tune.md: git diff {made_from} -- docs/tune.md; then --stamp it" in translate.to_do(
        tmp_path
    )


def test_the_link_between_a_page_and_its_twin_is_left_out() -> None:
    english, chinese = "[中文](README.zh.md) [a](docs/a.md)\n", "[English](README.md) [a](docs/zh/a.md)\n"
    head = f"<!-- source: README.md sha256:{translate.digest(english)} -->\n"
    assert list(translate.differences("README.md", english, head + chinese)) == []
    wrong = chinese.replace("docs/zh/a.md", "docs/a.md")
    assert len(list(translate.differences("README.md", english, head + wrong))) == 2


def test_anchors_are_those_of_python_markdown() -> None:
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        page = markdown.Markdown(extensions=["tables", "toc", "pymdownx.superfences"])
        page.convert(text)

        def anchors(tokens: list[dict[str, object]]) -> list[str]:
            return [name for each in tokens for name in [str(each["id"]), *anchors(each["children"])]]  # type: ignore[arg-type]

        ours = [section.anchor for section in translate.read(text, f"docs/{path.name}")][1:]
        assert ours == anchors(page.toc_tokens), path.name  # type: ignore[attr-defined]


def test_the_command_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert translate.main(["--stale"]) == 0
    assert capsys.readouterr().out
    with pytest.raises(SystemExit, match="no such page: docs/nothing.md"):
        translate.main(["--check", str(ROOT / "docs" / "nothing.md")])


def test_pages_in_chinese_are_faithful_and_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    """As `make check` asks it."""
    found = translate.main(["--check"])
    assert found == 0, capsys.readouterr().out
