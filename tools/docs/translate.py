"""Compares the pages in Chinese (docs/zh/, README.zh.md) with the English pages that they are made from.

    python -m tools.docs.translate --stale             lists pages that are missing, stale or orphaned, and what to do
    python -m tools.docs.translate --check [PAGE ...]  fails unless each page, or PAGE, has a faithful, fresh twin
    python -m tools.docs.translate --stamp PAGE ...    writes the digest of the English page into its twin

A twin has the headings, code blocks, tables, links, inline code and numbers of the English page. Words are the
translator's: inside of a section (from one heading to the next) everything may come in another order. The first line
of a twin has the digest of the English text that it was made from, so a page that changed since is named. PAGE is the
path of either page. Everything here reads plain Markdown; no generator of sites is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import os.path
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
STAMP = re.compile(r"<!-- source: (\S+) sha256:([0-9a-f]{16}) -->")
_FENCE = re.compile(r"^[ ]*(`{3,}|~{3,})(.*)$")
_HEADING = re.compile(r"^(#{1,6}) +(.+?)(?: *\{ *#([\w-]+) *\})? *$")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"(?<!`)(`+)(?!`)((?:[^\n]|\n(?!\s*(?:\n|\|)))+?)(?<!`)\1(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|(https?://[^\s)>\]，。；：、（）]+[^\s)>\].,;:，。；：、（）])")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class Item:
    """Something that both pages must have: a heading, a block, a link, a number."""

    line: int
    value: str


@dataclass(frozen=True)
class Section:
    """A heading and what is below it, up to the next one."""

    line: int
    level: int
    """0: what is above the first heading."""
    anchor: str
    blocks: tuple[Item, ...]
    tables: tuple[Item, ...]
    links: tuple[Item, ...]
    codes: tuple[Item, ...]
    numbers: tuple[Item, ...]


@dataclass(frozen=True)
class Difference:
    """One way in which a page is not a faithful twin, and the remedy."""

    page: str
    line: int
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.what}\n    {self.remedy}"


# -- names of pages ----------------------------------------------------------------------------------------------------


def twin(page: str) -> str:
    """Return the path of the page in Chinese: `docs/zh/tune.md` for `docs/tune.md`."""
    path = PurePosixPath(page)
    return str(path.with_suffix(".zh.md") if path.parent == PurePosixPath(".") else path.parent / "zh" / path.name)


def original(page: str) -> str:
    """Return the path of the English page of either page."""
    path = PurePosixPath(page)
    if path.parent.name == "zh":
        return str(path.parent.parent / path.name)
    return str(path.with_name(path.name.replace(".zh.md", ".md")))


def pages(root: Path) -> list[str]:
    """Return the paths of all English pages that have a twin or need one."""
    return ["README.md", *sorted(path.relative_to(root).as_posix() for path in (root / "docs").glob("*.md"))]


def orphans(root: Path) -> list[str]:
    """Return the paths of pages in Chinese whose English page is gone."""
    found = [*(root / "docs" / "zh").glob("*.md"), *root.glob("*.zh.md")]
    names = sorted(path.relative_to(root).as_posix() for path in found)
    return [name for name in names if not (root / original(name)).exists()]


# -- reading a page ----------------------------------------------------------------------------------------------------


def digest(text: str) -> str:
    """Return the digest that the twin of an English page carries."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def slug(title: str) -> str:
    """Return the anchor that Python-Markdown gives to a heading."""
    text = re.sub(r"\]\([^)]*\)", "", title)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def read(text: str, page: str) -> list[Section]:
    """Return the sections of a page. Links are given as paths from the root, those to a twin as its English page."""
    lines = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text).split("\n")
    heads: list[tuple[int, int, str]] = [(1, 0, "")]
    blocks: list[list[Item]] = [[]]
    prose: list[list[Item]] = [[]]
    used: Counter[str] = Counter()
    fence, start = "", 0
    for number, line in enumerate(lines, 1):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not mark[2].strip():
                blocks[-1].append(Item(start, "\n".join(lines[start - 1 : number])))
                fence = ""
        elif mark:
            fence, start = mark[1], number
        elif title := _HEADING.match(line):
            name = slug(title[2])
            heads.append((number, len(title[1]), title[3] or (f"{name}_{used[name]}" if used[name] else name)))
            used[name] += 1
            blocks.append([])
            prose.append([Item(number, title[2])])
        else:
            prose[-1].append(Item(number, line))
    if fence:
        blocks[-1].append(Item(start, "\n".join(lines[start - 1 :])))
    return [
        Section(*head, tuple(fenced), *_contents(texts, page))
        for head, fenced, texts in zip(heads, blocks, prose, strict=True)
    ]


def has_anchor(line: str) -> bool:
    """Return True if a heading states its anchor: `## 安装 { #install }`."""
    title = _HEADING.match(line)
    return title is not None and title[3] is not None


def _contents(lines: Sequence[Item], page: str) -> tuple[tuple[Item, ...], ...]:
    """Return tables, links, inline code and numbers of a section's text."""
    tables, codes, links, numbers = [], [], [], []
    rows: list[Item] = []
    for line in [*lines, Item(0, "")]:
        if line.value.lstrip().startswith("|"):
            rows.append(line)
        elif rows:
            tables.append(Item(rows[0].line, " ".join(str(_columns(row.value)) for row in rows)))
            rows = []

    text = "\n".join(line.value for line in lines)
    starts = [line.line for line in lines]

    def at(place: int) -> int:
        return starts[text.count("\n", 0, place)]

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    for found in _CODE.finditer(text):
        codes.append(Item(at(found.start()), " ".join(found[2].split())))
    text = _CODE.sub(blank, text)
    for found in _LINK.finditer(text):
        target = found[1] or found[2]
        if (path := _target(target, page)) is not None:
            links.append(Item(at(found.start()), path))
    text = _LINK.sub(blank, text)
    for found in _NUMBER.finditer(text):
        numbers.append(Item(at(found.start()), found[0]))
    return tuple(tables), tuple(links), tuple(codes), tuple(numbers)


def _columns(row: str) -> int:
    """Return the number of cells of a table's row."""
    inside = re.sub(r"\\\|", "", _CODE.sub("", row)).strip()
    return inside.removeprefix("|").removesuffix("|").count("|") + 1


def _target(link: str, page: str) -> str | None:
    """Return where a link leads, equal for a page and its twin; None for the link between a page and its twin."""
    path, mark, anchor = link.partition("#")
    if "://" in link or link.startswith("mailto:"):
        return link
    if not path:
        return link
    place = PurePosixPath(os.path.normpath(PurePosixPath(page).parent / path)).as_posix()
    is_twin = page != original(page)
    if place != page and original(place) == original(page):
        return None
    if is_twin and place.endswith(".md") and place != original(place):
        return original(place) + mark + anchor
    if is_twin and (place == "README.md" or re.fullmatch(r"docs/[^/]+\.md", place)):
        return f"{place}{mark}{anchor} (in English)"
    return place + mark + anchor


# -- comparing two pages -----------------------------------------------------------------------------------------------


def differences(page: str, english: str, chinese: str) -> Iterator[Difference]:
    """Yield every way in which the twin of `page` is not one, in the order of the page."""
    name = twin(page)
    stamp = STAMP.match(chinese)
    if stamp is None or stamp[1] != page:
        first = f"<!-- source: {page} sha256:{digest(english)} -->"
        yield Difference(name, 1, "the first line does not name its source", f"make it `{first}`")
    elif stamp[2] != digest(english):
        remedy = f"bring the text up to date, then run `python -m tools.docs.translate --stamp {name}`"
        yield Difference(name, 1, f"stale: {page} has changed since this was made from it", remedy)
    ours, theirs = read(english, page), read(chinese, name)
    yield from _headings(page, ours, theirs, chinese)
    if [section.level for section in ours] == [section.level for section in theirs]:
        for one, other in zip(ours, theirs, strict=True):
            yield from _section(page, one, other)


def _headings(page: str, ours: Sequence[Section], theirs: Sequence[Section], chinese: str) -> Iterator[Difference]:
    name, lines = twin(page), chinese.split("\n")
    states_anchors = PurePosixPath(name).parent.name == "zh"  # GitHub shows a README, and would show them as text
    for one, other in zip(ours[1:], theirs[1:], strict=False):
        if one.level != other.level:
            what = f"a heading of level {other.level}, where {page}:{one.line} has one of level {one.level}"
            yield Difference(name, other.line, what, "give it the same level, in the same order")
            return
        if states_anchors and (other.anchor != one.anchor or not has_anchor(lines[other.line - 1])):
            what = f"the heading of {page}:{one.line} has another anchor"
            yield Difference(name, other.line, what, f"write `{{ #{one.anchor} }}` behind it")
    for one in ours[len(theirs) :]:
        what = f"no heading for that of {page}:{one.line} (`{'#' * one.level}`, #{one.anchor})"
        yield Difference(name, len(chinese.splitlines()), what, "translate the section")
    for other in theirs[len(ours) :]:
        yield Difference(name, other.line, f"a heading that {page} does not have", "remove it")


def _section(page: str, one: Section, other: Section) -> Iterator[Difference]:
    kinds: list[tuple[str, str, Sequence[Item], Sequence[Item], Callable[[str], str]]] = [
        ("code block", "copy it byte for byte", one.blocks, other.blocks, _first_line),
        ("table", "give it the same rows and columns", one.tables, other.tables, _shape),
        ("link", "lead to the same place", one.links, other.links, str),
        ("inline code", "write it as it is there", one.codes, other.codes, lambda code: f"`{code}`"),
        ("number", "write it as it is there", one.numbers, other.numbers, str),
    ]
    name = twin(page)
    for kind, remedy, ours, theirs, shown in kinds:
        wanted, found = Counter(each.value for each in ours), Counter(each.value for each in theirs)
        for value, times in (wanted - found).items():
            lines = ", ".join(str(each.line) for each in ours if each.value == value)
            how = f"{times} of the {wanted[value]} times" if wanted[value] > 1 else "here"
            what = f"{kind} missing {how} in section #{one.anchor}: {shown(value)} ({page}:{lines})"
            yield Difference(name, other.line, what, remedy)
        for value, times in (found - wanted).items():
            line = next(each.line for each in theirs if each.value == value)
            more = f", {times} more than" if wanted[value] else ", not"
            what = f"{kind} in section #{one.anchor}{more} in {page}: {shown(value)}"
            yield Difference(name, line, what, f"remove it, or {remedy}")


def _first_line(block: str) -> str:
    lines = block.split("\n")
    return " / ".join(line.strip() for line in lines[:2]) + (" / ..." if len(lines) > 3 else "")


def _shape(table: str) -> str:
    columns = table.split()
    return f"{len(columns)} rows of {columns[0]} columns" if len(set(columns)) == 1 else f"rows of {table} columns"


# -- the command -------------------------------------------------------------------------------------------------------


def check(root: Path, chosen: Sequence[str] | None = None) -> list[Difference]:
    """Return every difference of all pages, or of those that are chosen."""
    found: list[Difference] = []
    for page in chosen if chosen is not None else pages(root):
        path = root / twin(page)
        if path.exists():
            english = (root / page).read_text(encoding="utf-8")
            found += differences(page, english, path.read_text(encoding="utf-8"))
        else:
            found.append(Difference(twin(page), 1, f"missing: {page} has no twin", f"translate {page}"))
    for page in orphans(root) if chosen is None else []:
        found.append(Difference(page, 1, f"orphaned: there is no {original(page)}", "remove it"))
    return found


def to_do(root: Path) -> list[str]:
    """Return what is missing, stale or orphaned, a line for each."""
    lines = []
    for page in pages(root):
        path = root / twin(page)
        if not path.exists():
            lines.append(f"missing   {twin(page)}: translate {page}")
            continue
        stamp = STAMP.match(path.read_text(encoding="utf-8"))
        if stamp is None or stamp[2] != digest((root / page).read_text(encoding="utf-8")):
            commit = stamp and _commit_of(root, page, stamp[2])
            how = f"git diff {commit} -- {page}" if commit else f"compare it with {page}"
            lines.append(f"stale     {twin(page)}: {how}; then --stamp it")
    return [*lines, *(f"orphaned  {page}: remove it" for page in orphans(root))]


def _commit_of(root: Path, page: str, wanted: str) -> str | None:
    """Return the last commit whose text of a page has this digest, if there is one."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, encoding="utf-8")
        return done.stdout if done.returncode == 0 else ""

    commits = git("log", "--format=%h", "-n", "200", "--", page).split()
    return next((commit for commit in commits if digest(git("show", f"{commit}:{page}")) == wanted), None)


def stamp(root: Path, page: str) -> None:
    """Write the digest of the English page into the first line of its twin."""
    path = root / twin(page)
    text = path.read_text(encoding="utf-8")
    head = f"<!-- source: {page} sha256:{digest((root / page).read_text(encoding='utf-8'))} -->"
    found = STAMP.match(text)
    path.write_text(head + text[found.end() :] if found else f"{head}\n{text}", encoding="utf-8")


def _named(root: Path, paths: Sequence[str]) -> list[str]:
    """Return the English pages of paths that were typed."""
    names = [original(Path(path).resolve().relative_to(root).as_posix()) for path in paths]
    wrong = [name for name in names if name not in pages(root)]
    if wrong:
        sys.exit(f"translate.py: no such page: {', '.join(wrong)}; there are: {', '.join(pages(root))}")
    return names


def main(words: Sequence[str]) -> int:
    shape = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="translate.py", description=__doc__, formatter_class=shape)
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--stale", action="store_true")
    job.add_argument("--check", action="store_true")
    job.add_argument("--stamp", action="store_true")
    parser.add_argument("pages", nargs="*", metavar="PAGE")
    chosen = parser.parse_args(words)
    names = _named(ROOT, chosen.pages)
    if chosen.stamp:
        if not names:
            parser.error("--stamp needs the pages")
        for name in names:
            stamp(ROOT, name)
        return 0
    if chosen.stale:
        lines = to_do(ROOT)
        print("\n".join(lines) if lines else "every page has a twin, and none is stale")
        return 0
    found = check(ROOT, names or None)
    for difference in found:
        print(difference)
    if found:
        print(f"{len(found)} differences; `python -m tools.docs.translate --stale` lists the pages to work on")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
