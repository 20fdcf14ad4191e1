"""``brim plan``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from brim.cli import verdict
from brim.cli.loading import MODELS, load
from brim.cli.options import (
    BUDGET,
    DESCRIBED_MODEL,
    GPU,
    JSON,
    SVG,
    Command,
    Finite,
    OutputFile,
    html_option,
    json_option,
    print_json,
)
from brim.cli.plan.page import tiers_of, write_page
from brim.errors import BudgetError, UsageError
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from brim.cli.console import Console
    from brim.planning.request import Answer, Proposal, Request
from brim.planning.strategy.effects import Effect

_COUNT = click.IntRange(min=1)


class _PlanFiles(OutputFile):
    """The file of the first plan, and those of the others beside it."""

    def further(self, path: Path, params: Mapping[str, Any]) -> Iterator[Path]:
        if params["regimes"] or params["gpus"] is not None or params["compare_gpus"] is not None:
            return  # one file
        name = re.compile(rf"{re.escape(path.stem)}\.([0-9]{{1,9}}){re.escape(path.suffix)}")
        named = [entry for entry in params.values() if isinstance(entry, Path)]
        there = [entry.name for entry in named if entry.parent.resolve() == path.parent.resolve()]
        for other in sorted({*(entry.name for entry in path.parent.iterdir()), *there}):
            match = name.fullmatch(other)
            if (
                match is not None
                and _file(path, int(match[1]) - 1).name == other
                and 2 <= int(match[1]) <= params["top"]
            ):
                yield path.with_name(other)


_OPTIONS = [
    click.option("--task", type=click.Choice(["generate", "train"]), default="generate", show_default=True),
    click.option("--gpu", type=GPU, help='A GPU of the catalog, as in "RTX 3060". [default: this machine]'),
    click.option(
        "--vram", type=BUDGET, help="Budget of the GPU: 8GiB, or 80% of it.  [default: all of it that is free]"
    ),
    click.option(
        "--ram",
        type=BUDGET,
        help="Host memory: 8GiB, or 80% of it; with --gpus, of a node.  [default: 90 % of what is free; beside a "
        "--gpu its share of the machine that it is sold in, else 64GiB]",
    ),
    click.option(
        "--ram-gb-per-s",
        type=Finite(min=0, min_open=True),
        help="GB/s that host memory moves beside a --gpu; with --gpus, of a node.  [default: as with --ram]",
    ),
    click.option("--disk", type=BUDGET, help="Room on disk for what memory cannot hold."),
    click.option("--batch", type=_COUNT, default=1, show_default=True, help="Sequences a step."),
    click.option("--seq", type=_COUNT, default=1024, show_default=True, help="Tokens a sequence, or a prompt."),
    click.option("--new-tokens", type=_COUNT, default=128, show_default=True, help="Tokens to generate."),
    click.option("--precision", help="Keep to it, as in bf16 or int8. [default: the planner's choice]"),
    click.option("--optimizer", default="adamw", show_default=True),
    click.option("--method", type=click.Choice(["full", "lora"]), default="full", show_default=True),
    click.option(
        "--prefer",
        type=click.Choice(["speed", "memory", "quality"]),
        default="speed",
        show_default=True,
        help="What comes first: the fastest, the smallest, or the fastest that rounds no weights.",
    ),
    click.option("--lossless", is_flag=True, help="Never round weights to 8 bits or fewer."),
    click.option(
        "--host-compute/--no-host-compute",
        default=True,
        help="Let the processor compute blocks of a generation where that is faster; its last bits differ from the "
        "GPU's.  [default: it may]",
    ),
    click.option("--top", type=_COUNT, default=5, show_default=True, help="At most so many plans."),
    click.option("--gpus", type=_COUNT, help="Split training over so many GPUs, and search the splits."),
    click.option("--gpus-per-node", type=_COUNT, help="GPUs of one machine, beside --gpus. [default: 8]"),
    click.option(
        "--engine",
        type=click.Choice(["torch", "megatron"]),
        help="Whose seconds and bytes, beside --gpus: torch, which brim train runs, or megatron (with Transformer "
        "Engine). [default: torch]",
    ),
    click.option("--global-batch", type=_COUNT, help="Sequences of a step on all --gpus. [default: 8 for each]"),
    click.option("--compare-gpus", metavar="1,2,4,8", help="Compare a training on so many GPUs."),
    click.option("--price", type=Finite(min=0), help="Of one GPU for an hour, beside --compare-gpus."),
    click.option("--precisions", is_flag=True, help="Show what each kind of block takes in int8 and in 16 bits."),
    click.option(
        "--router-statistics",
        metavar="auto|FILE",
        help="Plan a mixture of experts by what its routers do in a short run, kept in FILE once it was made.",
    ),
    click.option("--regimes", is_flag=True, help="Compare ways to run models of 1 to 4 times the VRAM here."),
    click.option(
        "--output",
        type=_PlanFiles(JSON, SVG),
        help="Write plan 1 here, for --plan, and others beside it (plan.2.json). Of --regimes, its plot (SVG).",
    ),
    html_option,
    json_option,
]  # everything but MODEL, in the order of the help


# What several GPUs' plans take into account; of a comparison one GPU's is one, which may have RAM and disk.
_SEVERAL = {
    "model",
    "task",
    "gpu",
    "ram",
    "ram_gb_per_s",
    "seq",
    "gpus_per_node",
    "engine",
    "global_batch",
    "output",
    "as_json",
}
_USED = {
    "compare_gpus": _SEVERAL | {"compare_gpus", "price", "disk", "lossless"},
    "gpus": _SEVERAL | {"gpus", "top"},
}


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(cls=Command)
@click.argument("model", type=DESCRIBED_MODEL)
@_options
def plan(
    model: str,
    regimes: bool,
    precisions: bool,
    router_statistics: str | None,
    output: Path | None,
    html: Path | None,
    as_json: bool,
    **options: Any,
) -> int | None:
    """Find the fastest ways to train or run a model that fit a machine.

    MODEL is a name of the catalog, a folder, or a .gguf file; no weights are read. For training it may also be
    file.py:build, a function that returns a model and its inputs as a pair. Exit code 3 says that nothing fits, and
    the answer then is what would have to change.
    """
    _refuse_unused(click.get_current_context())
    compared, price = options.pop("compare_gpus"), options.pop("price")
    if compared is not None:
        from brim.cli.plan import compare as plan_compare

        return plan_compare.show(model, plan_compare.numbers(compared), options, price, output, as_json=as_json)
    if options["gpus"] is not None:
        from brim.cli.plan import meshes as plan_meshes

        return plan_meshes.show(model, options, output, as_json)
    if price is not None:
        raise UsageError("--price was given without --compare-gpus.", todo="Give --compare-gpus 1,2,4.")
    _leave_out_several(options)
    load("brim.run.plan.search", MODELS)
    from brim.planning.request import Request

    request = Request(model=model, **options)
    asked = {"precisions": precisions, "router_statistics": router_statistics}
    if not regimes:
        return _show(_answer(request, output, **asked), output, html, as_json)
    if any(asked.values()):
        raise UsageError(
            "Cannot use --regimes with --precisions or --router-statistics.", "It makes its own comparison."
        )
    _show_regimes(request, output, html, as_json)
    return None


def _refuse_unused(context: click.Context) -> None:
    """Raise UsageError for options that have no effect with several GPUs."""
    asked = next((name for name in _USED if context.params[name] is not None), None)
    if asked is None:
        return
    flags = {option.name or "": option.opts[0] for option in context.command.params}
    unused = [flags[name] for name in flags if name not in _USED[asked] and _given(context, name)]
    if unused:
        unused_flags = ", ".join(unused)
        raise UsageError(
            f"{unused_flags} {'was' if len(unused) == 1 else 'were'} given beside {flags[asked]}.",
            "It would have no effect: splits are searched for AdamW, full training and bf16.",
            f"Leave out {unused_flags}, or {flags[asked]}.",
        )  # fmt: skip


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def _show_regimes(request: Request, output: Path | None, html: Path | None, as_json: bool) -> None:
    from brim.cli.plan import regimes as plan_regimes

    plan_regimes.show(request, output, html, as_json)


def _leave_out_several(options: dict[str, Any]) -> None:
    """Take out what is about several GPUs; raises UsageError where some of it was given."""
    for name in ("gpus", "gpus_per_node", "global_batch", "engine"):
        if options.pop(name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} was given without --gpus.", todo="Give --gpus.")


def _answer(request: Request, output: Path | None, **asked: Any) -> Answer:
    """What is found, its plans written to ``output``."""
    from brim.cli.console import Console
    from brim.planning.file import write
    from brim.run.plan.search import plan as answer_to

    with Console(stderr=True).status("Planning"):
        answer = _with_files(answer_to(request, **asked), output)
        for index in range(len(answer.proposals) if output is not None else 0):
            write(_file(output or Path(), index), answer, index)
    return answer


def _show(answer: Answer, output: Path | None, html: Path | None, as_json: bool) -> int | None:
    if html is not None:
        write_page(html, answer)
    if as_json:
        print_json(answer.to_json())
    else:
        _print(answer, output)
    return None if answer.proposals else BudgetError.exit_code


def _file(output: Path, index: int) -> Path:
    """``plan.json``, ``plan.2.json``, ..."""
    return output if index == 0 else output.with_name(f"{output.stem}.{index + 1}{output.suffix}")


def _with_files(answer: Answer, output: Path | None) -> Answer:
    """Commands with the names that their plans' files have; where none are written, with the command before them that
    writes them."""
    from brim.planning.request import PLAN_FILE

    def named(proposal: Proposal, index: int) -> Proposal:
        name = str(_file(output or Path(PLAN_FILE), index))
        if not proposal.command.startswith("brim "):  # a line of Python
            return replace(proposal, command=proposal.command.replace(PLAN_FILE, name))
        words = [name if word == PLAN_FILE else word for word in shlex.split(proposal.command)]
        writes = f"{answer.request.command()} --output {PLAN_FILE} && " if output is None and name in words else ""
        return replace(proposal, command=writes + shlex.join(words))

    return replace(answer, proposals=[named(proposal, index) for index, proposal in enumerate(answer.proposals)])


def _print(answer: Answer, output: Path | None) -> None:
    from brim.cli.console import Console

    console = Console(highlight=False, soft_wrap=True)
    request, machine = answer.request, answer.machine
    budget = ", ".join(f"{format_bytes(n)} of {tier.upper()}" for tier, n in machine.budget_bytes.items())
    console.print(verdict.of_plans(answer), markup=False, style="bold")
    console.print(f"{request.model}: {request.task} on {machine.hardware.name} with {budget}", markup=False)
    console.print(verdict.of_precision(*answer.precision), markup=False)
    for assumed in machine.assumed:
        console.print(f"assumed: {assumed}", markup=False)
    if answer.proposals:
        _print_plans(console, answer)
        if output is None:
            console.print("--output FILE writes plans to files, for --plan.")
    else:
        _print_nearest(console, answer)
    if answer.precisions:
        from brim.planning.precision_table import shown

        console.print(shown(answer.precisions))
    console.print(f"planned in {format_seconds(answer.took_s)}", markup=False)


def _print_plans(console: Console, answer: Answer) -> None:
    from brim.planning.factory import is_factory
    from brim.planning.training import DATA, TRAINED

    tiers = tiers_of(answer)
    step = "s per step" if answer.request.task == "train" else "s per token"
    plans = _table("", *(tier.upper() for tier in tiers), step, "tokens/s", "limited by", "gap", left=("limited by",))
    for number, proposal in enumerate(answer.proposals, 1):
        peak = proposal.plan.promise.peak_bytes
        plans.add_row(
            f"{number}",
            *(format_bytes(peak.get(tier, 0)) for tier in tiers),
            format_seconds(proposal.step_s),
            f"{answer.tokens_per_s(proposal):.3g}",
            proposal.limited_by,
            f"{proposal.gap:.1%}",
        )
    console.print(plans)
    for number, proposal in enumerate(answer.proposals, 1):
        console.print(f"{number}: {_in_words(proposal)}", markup=False)
    best = answer.proposals[0]
    for title, effects in (("plan 1 uses", best.techniques), ("more room, not needed here, by", best.frees)):
        if effects:
            console.print(_effects(title, effects))
    for number, proposal in enumerate(answer.proposals, 1):
        console.print(f"{number}: {proposal.command}", markup=False)
    if answer.request.task == "train" and not is_factory(answer.request.model):
        console.print(f"{DATA} stands for your data, {TRAINED} for the folder that the trained model goes to.")


def _effects(title: str, effects: Sequence[Effect]) -> Table:
    table = _table(title, "which", "saves", "costs", left=("which", "saves"))
    for effect in effects:
        table.add_row(effect.technique, effect.what, _saved(effect), _costs(effect.costs_s))
    return table


def _in_words(proposal: Proposal) -> str:
    return "; ".join(f"{effect.technique}: {effect.what}" for effect in proposal.techniques) or "everything resident"


def _costs(seconds: float) -> str:
    if seconds < 0:
        return f"{format_seconds(-seconds)} less"
    return format_seconds(seconds) if seconds else "nothing"


def _saved(effect: Effect) -> str:
    """``2 GiB of VRAM, takes 2 GiB of RAM``."""
    parts = [(tier.upper(), count) for tier, count in effect.saves_bytes.items() if count]
    saved = [f"{format_bytes(count)} of {tier}" for tier, count in parts if count > 0]
    costs = [f"takes {format_bytes(-count)} of {tier}" for tier, count in parts if count < 0]
    return ", ".join([*saved, *costs])


def _print_nearest(console: Console, answer: Answer) -> None:
    console.print(answer.refusal, markup=False)
    if not answer.nearest:
        console.print("No small change that would do was found.")
        return
    for change in answer.nearest:  # a line each: a table would break commands over several
        console.print(f"It fits with {change.change}: {change.command}", markup=False)


def _table(*columns: str, left: tuple[str, ...] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or not column or column in left else "right")
    return table
