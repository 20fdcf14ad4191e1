"""What pages name is there: files, links, commands and benches with their options, Python names."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

from brim.cli import COMMANDS
from brim.cli import brim as commands_of_brim

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Paths are written from the root, or from src/brim.
_FROM = (ROOT, ROOT / "src/brim", ROOT / "docs")
_PATH = re.compile(
    r"(?:[\w.-]+/)+[\w.-]+\.(?:py|md|jsonl?|cpp|c|txt|png|svg)|(?:bench|tests|docs|src|measurements)/[\w/.]+"
)
_ELSEWHERE = re.compile(r"^(path/to|c10|aten|cuda|torch)/")  # of users, and of PyTorch

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def spans(text: str) -> list[str]:
    """What stands in backticks outside of fences, which may go over the end of a line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def commands(text: str) -> list[list[str]]:
    """Command lines of brim in a text, without the word brim."""
    lines = [line for language, block in FENCE.findall(text) if language != "python" for line in block.splitlines()]
    found = []
    for line in [*lines, *spans(text)]:
        line = line.partition("  #")[0].replace("[-", "-").replace("]", "")
        for part in line.split(" | "):
            match = re.search(rf"(?:^|[$ ])brim ((?:{'|'.join(COMMANDS)})\b.*)", part)
            if match:
                found.append(shlex.split(match[1].partition(" 2>&1")[0]))
    return found


def refusals(words: list[str]) -> str:
    """What click says of the options of a command line; nothing where all are known."""
    name, _, other = words[0].partition("|")
    command = commands_of_brim.get_command(click.Context(commands_of_brim), name)
    parser = command.make_parser(click.Context(command, resilient_parsing=True))
    try:
        parser.parse_args(words[1:])
    except click.NoSuchOption as error:
        return f"brim {shlex.join(words)}: {error}"
    except click.BadOptionUsage:
        pass  # an option alone, in a sentence
    return refusals([other, *words[1:]]) if other else ""


@each_page
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        file = page if not path else page.parent / path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert not dead


def anchors(file: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_files_that_are_named_are_there(page):
    text = page.read_text(encoding="utf-8")
    named = {
        path for span in [*spans(text), *(block for _, block in FENCE.findall(text))] for path in _PATH.findall(span)
    }
    missing = [
        path
        for path in sorted(named)
        if not _ELSEWHERE.search(path) and not any((root / path).exists() for root in _FROM)
    ]
    assert not missing


@each_page
def test_commands_have_the_options_that_are_named(page):
    said = [refusals(words) for words in commands(page.read_text(encoding="utf-8"))]
    assert not [text for text in said if text]


@each_page
def test_scripts_have_the_options_that_are_named(page):
    text, missing = page.read_text(encoding="utf-8"), []
    lines = [line for _, block in FENCE.findall(text) for line in block.splitlines()] + spans(text)
    for line in lines:
        for script, rest in re.findall(r"python ((?:bench|examples|tests)/\S+\.py)([^|&]*)", line):
            known = options(ROOT / script) | {"--help"}
            own = re.findall(r"--[a-z][a-z-]*", rest.partition(" -m ")[0])
            missing += [f"{script} {option}" for option in own if option not in known]
    assert not missing


def options(script: Path) -> set[str]:
    """Texts in a script, and in what it imports from beside it, that look like options."""
    source = script.read_text(encoding="utf-8")
    near = [
        script.parent / name.replace(".", "/")
        for name in re.findall(r"^(?:from|import) (\w[\w.]*)", source, re.MULTILINE)
    ]
    files = [script, *(path.with_suffix(".py") for path in near), *(path / "__init__.py" for path in near)]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    found = {option for text in texts for option in re.findall(r"""["'](--[a-z][a-z-]*)["']""", text)}
    for text in texts:
        if 'f"--{' in text:  # an option for each of some names
            found |= {f"--{name}" for name in re.findall(r'"([a-z]+)"', text)}
    return found


@each_page
def test_python_in_pages_names_what_is_there(page):
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language != "python" or page.name == "reference.md":
            continue
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("brim"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "brim":
                assert node.attr in importlib.import_module("brim").__all__
