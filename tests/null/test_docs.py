"""Pages name what is there: files, links, commands with the options and values that they take, Python names.

Every command of a page is parsed by the parser of the program that it calls.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import re
import runpy
import shlex
import sys
import typing
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from torch.distributed.run import get_args_parser

import brim
from brim import catalog
from brim.cli import COMMANDS
from brim.cli import brim as commands_of_brim
from brim.errors import BrimError
from brim.run.fit import Fitted

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
# Paths are written from the root, or from src/brim.
_FROM = (ROOT, ROOT / "src/brim", ROOT / "docs")
_PATH = re.compile(
    r"(?:[\w.-]+/)+[\w.-]+\.(?:py|md|jsonl?(?:\.gz)?|cpp|c|txt|png|svg)|(?:bench|tests|docs|src|measurements)/[\w/.]+"
)
_ELSEWHERE = re.compile(r"^(path/to|c10|aten|cuda|torch)/")  # of users, and of PyTorch
_PLACEHOLDER = re.compile(r"[A-Z]+(?:\.\.\.)?|\.\.\.")
_OPTION = re.compile(r"--[a-z][a-z-]*")
_OF_MEGATRON = {"--expert-tensor-parallel-size"}  # not modelled, as docs/ranks.md says

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def spans(text: str) -> list[str]:
    """Text in backticks outside of fences, which may go over the end of a line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def lines(text: str) -> list[str]:
    """Lines of shell in fences, in indented text and in backticks, with continued lines joined."""
    blocks = [block for language, block in FENCE.findall(text) if language != "python"]
    blocks += _INDENTED.findall(FENCE.sub("", text))
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()] + spans(text)


def commands(text: str, program: str) -> list[list[str]]:
    """Arguments that pages give to a program, which is a regular expression."""
    found = []
    for line in lines(text):
        line = line.partition("  #")[0].replace("[-", "-").replace("]", "").replace(" 2>&1", "")
        for part in re.split(r" \| | && ", line):
            if match := re.search(rf"(?:^|[$ ]|\.venv/bin/){program}(?=\s|$)(.*)", part):
                found.append(shlex.split(match[match.lastindex or 1]))
    return found


# -- brim -----------------------------------------------------------------------------------------------------------


def refusals(words: list[str]) -> list[str]:
    """Errors of click about the options and values of a command line of brim."""
    found = []
    for name in words[0].split("|"):
        command = commands_of_brim.get_command(click.Context(commands_of_brim), name)
        assert command is not None
        # click keeps the help option of a command's first context: it comes from the parent, as in a call.
        parent = commands_of_brim.make_context("brim", [], resilient_parsing=True)
        context = click.Context(command, parent=parent, resilient_parsing=True)
        try:
            given, _, _ = command.make_parser(context).parse_args(words[1:])
            for parameter in command.params:
                _check(parameter, given.get(parameter.name), context)
        except click.BadOptionUsage:
            pass  # an option without its value, in a sentence
        except (click.UsageError, BrimError) as error:
            found.append(f"brim {shlex.join(words)}: {error}")
    return found


def _check(parameter: click.Parameter, value: Any, context: click.Context) -> None:
    """Convert a value, or each alternative of one, as click does. Files of users are not there."""
    if not isinstance(value, str) or isinstance(parameter.type, click.Path):
        return
    for one in value.split("|"):
        if _PLACEHOLDER.fullmatch(one) or _ELSEWHERE.match(one):
            continue
        parameter.type.convert(one, parameter, context)
        if parameter.name == "gpu":
            catalog.gpu(one)
        choices = getattr(parameter, "help", None) or ""
        if parameter.name in ("task", "precision", "optimizer", "checkpointing", "engine", "method") and choices:
            assert one in re.findall(r"[\w-]+", choices) or isinstance(parameter.type, click.Choice), (one, choices)


@functools.cache
def options_of_brim() -> frozenset[str]:
    every = [commands_of_brim.get_command(click.Context(commands_of_brim), name) for name in COMMANDS]
    named = (parameter for command in every if command for parameter in command.params)
    return frozenset(name for one in named for name in (*one.opts, *one.secondary_opts)) | {"--help"}


@each_page
def test_commands_take_the_options_and_values_that_are_named(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "reference.md":
        return
    given = commands(text, rf"brim(?=\s+(?:{'|'.join(COMMANDS)})\b)")
    assert [error for words in given for error in refusals(words)] == []


@each_page
def test_options_that_are_named_alone_belong_to_a_program_of_the_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    alone = {option for span in spans(text) if span.startswith("--") for option in _OPTION.findall(span)}
    known = set(options_of_brim())
    for script in {words[0] for words in scripts(text)}:
        known |= set(_OPTION.findall((ROOT / script).read_text(encoding="utf-8")))
        if (program := parser_of(ROOT / script)) is not None:
            known |= set(_OPTION.findall(program.format_help()))
    known |= set(_OPTION.findall(get_args_parser().format_help()))
    assert sorted(alone - known - _OF_MEGATRON) == []


# -- scripts, modules, torchrun, pytest, make -----------------------------------------------------------------------


class Parsing(BaseException):
    """A script has come to the parsing of its options."""


@functools.cache
def parser_of(script: Path) -> argparse.ArgumentParser | None:
    """The parser of a script, which is run up to there; none where it reads ``sys.argv`` by itself."""
    if "ArgumentParser" not in script.read_text(encoding="utf-8"):
        return None

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        raise Parsing(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        patch.setattr(sys, "argv", [str(script)])
        patch.setattr(sys, "path", [str(script.parent), *sys.path])
        with pytest.raises(Parsing) as stopped:
            runpy.run_path(str(script), run_name="__main__")
    parser: argparse.ArgumentParser = stopped.value.args[0]
    return parser


def scripts(text: str) -> list[list[str]]:
    """Scripts of this repository in a page, each with its arguments."""
    named = [words for words in commands(text, r"python3?") if words and words[0].endswith(".py")]
    return [words for words in named if words[0].startswith(("bench/", "examples/", "tests/", "docs/"))]


def _arguments(words: list[str]) -> list[str]:
    """With 1 for each placeholder, which is a number and a name."""
    return [_PLACEHOLDER.sub("1", word) if _PLACEHOLDER.fullmatch(word) else word for word in words]


@each_page
def test_scripts_take_the_arguments_that_are_named(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = []
    for script, *words in scripts(page.read_text(encoding="utf-8")):
        parser = parser_of(ROOT / script)
        if parser is None:
            continue
        own, _, others = " ".join(shlex.quote(word) for word in words).partition(" -m ")
        try:
            (parser.parse_known_args if others or words[:1] == ["-m"] else parser.parse_args)(_arguments(words))
        except SystemExit as ended:
            if ended.code:
                refused.append(f"{script} {own}: {capsys.readouterr().err}")
    assert refused == []


@each_page
def test_modules_that_are_run_are_there(page: Path) -> None:
    for words in commands(page.read_text(encoding="utf-8"), r"python3? -m"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [str(ROOT / "tests"), *sys.path])
            spec = importlib.util.find_spec(words[0])
        assert spec is not None and spec.origin is not None
        assert "__main__" in Path(spec.origin).read_text(encoding="utf-8") or spec.submodule_search_locations


@each_page
def test_torchrun_takes_the_options_that_are_named(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(page.read_text(encoding="utf-8"), "torchrun"):
        if len(words) > 1:  # else an option in a sentence
            try:
                get_args_parser().parse_args(_arguments(words))
            except SystemExit:
                pytest.fail(f"torchrun {shlex.join(words)}: {capsys.readouterr().err}")


@each_page
def test_targets_of_make_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {words[0] for words in commands(page.read_text(encoding="utf-8"), "make") if words}
    assert named <= targets


# -- Python ---------------------------------------------------------------------------------------------------------


def snippets(text: str) -> list[str]:
    """Python of a page: its fences, and calls of brim in backticks."""
    calls = [span for span in spans(text) if re.match(r"(?:import )?(?:brim|handle)\.\w(?!.*\.json$)", span)]
    return [block for language, block in FENCE.findall(text) if language == "python"] + calls


@each_page
def test_python_names_and_keywords_are_there(page: Path) -> None:
    if page.name == "reference.md":
        return
    for snippet in snippets(page.read_text(encoding="utf-8")):
        _Resolver().visit(ast.parse(snippet))


class _Resolver(ast.NodeVisitor):
    """Resolve what a snippet takes from brim, and check the keywords of its calls."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {"brim": brim, "handle": Fitted}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            assert importlib.util.find_spec(alias.name) is not None or alias.name == "subprocess"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = importlib.import_module(node.module or "")
        self.known |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        made = self._type(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name) and made is not None:
                self.known[target.id] = made

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        self._value(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = self._value(node.func)
        if callable(called):
            method = inspect.isfunction(called) and "." in called.__qualname__
            given = {word.arg: None for word in node.keywords if word.arg}
            inspect.signature(called).bind_partial(*[None] * (len(node.args) + method), **given)

    def _type(self, node: ast.expr) -> Any:
        """The class of what a call returns."""
        called = self._value(node.func) if isinstance(node, ast.Call) else None
        if called is None or inspect.isclass(called):
            return called
        return typing.get_type_hints(called).get("return")

    def _value(self, node: ast.expr) -> Any:
        """The object that a name or an attribute is, where that is known."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if not isinstance(node, ast.Attribute) or (owner := self._value(node.value)) is None:
            return None
        first, *_ = [_attribute(one, node.attr) for one in typing.get_args(owner) or [owner]]
        return first


def _attribute(owner: Any, name: str) -> Any:
    """An attribute of a module or a class; nothing for one that only instances have."""
    if inspect.ismodule(owner) and not hasattr(owner, name):
        return importlib.import_module(f"{owner.__name__}.{name}")
    if not inspect.isclass(owner) or hasattr(owner, name):
        return getattr(owner, name)
    assert name in _attributes(owner), f"{owner.__name__}.{name}"
    return None


def _attributes(owner: type) -> set[str]:
    """Fields of a class, and attributes that its methods set."""
    fields = {name for base in owner.__mro__ for name in vars(base).get("__annotations__", ())}
    nodes = ast.walk(ast.parse(inspect.getsource(owner)))
    return fields | {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


@each_page
def test_variables_of_the_environment_are_read(page: Path) -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/brim").rglob("*.py"))
    named = set(re.findall(r"\bBRIM_[A-Z_]+\b", page.read_text(encoding="utf-8")))
    assert sorted(name for name in named if name not in source) == []


@each_page
def test_tests_that_are_named_are_there(page: Path) -> None:
    missing = []
    for span in spans(page.read_text(encoding="utf-8")):
        file, _, test = span.partition("::")
        if test and file:
            texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(Path(file).name)]
            missing += [span] * (not any(f"def {test}(" in text for text in texts))
    assert missing == []


# -- links and files ------------------------------------------------------------------------------------------------


@each_page
def test_links_lead_somewhere(page: Path) -> None:
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
def test_files_that_are_named_are_there(page: Path) -> None:
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


def test_every_mode_of_the_dispatcher_is_in_the_table() -> None:
    text, base = (ROOT / "docs/design.md").read_text(encoding="utf-8"), re.compile(r"class (\w+)\(Torch\w+Mode\)")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src/brim").rglob("*.py")]
    modes = {name for source in sources for name in base.findall(source)}
    assert sorted(name for name in modes if not re.search(rf"\b{name}`", text)) == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/design.md"])
def test_names_of_code_that_are_named_are_there(name: str) -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    named = {span.partition("(")[0] for span in spans((ROOT / name).read_text(encoding="utf-8"))}
    code = {part for span in named if re.fullmatch(r"[\w.]*[A-Z_]\w*", span) for part in span.split(".")}
    assert sorted(code - words) == []
