"""Options as fields of dataclasses: the parser, its help, checks and printed commands are made from them."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from brim.errors import UsageError
from brim.units import exact_bytes

T = TypeVar("T")

LARGEST = 1 << 40  # a count above that is a slip of the hand
Method = Literal["full", "lora"]
Device = Literal["auto", "cuda", "xpu", "npu", "cpu", "emulated"]  # or a GPU by its number: "cuda:1"
Place = Literal["keep", "ram", "disk"]  # of states: with their weights, or not
VRAM_HELP = "Budget of the compute device: 8GiB, or 80% of its memory.  [default: 90 % of the free memory]"
RAM_HELP = "Budget of host memory: 8GiB, or 80% of all RAM.  [default: 90 % of the free memory]"
STORED = "stored"  # frozen weights as the checkpoint has them
PRECISIONS = (  # to train
    "fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16", "bf16-stochastic", "bf16-master", STORED, "fp8",
)  # fmt: skip
_METADATA = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """The statement of an option, beside the field's name, type and default.

    Attributes:
        help: The help text.
        flags: As on the command line. Empty: the field's name.
        min: The smallest number; ``above``: numbers must be larger than that.
        max: The largest number.
        names: Allowed values that the parser accepts as any text, for ``check``.
        words: Words of the command line for values that are written otherwise in Python.
        kind: A type of the command line for texts that are more than texts: ``"gpu"``, ``"device"``.
        metavar: The placeholder in the help.
        argument: The value is given without a flag.
        after: The field that comes before it in the help, of a dataclass that this one inherits from.
        group: A dataclass whose options stand here; with ``only_given`` each is None where it is not given.
    """

    help: str = ""
    flags: tuple[str, ...] = ()
    min: float | None = None
    above: bool = False
    max: float | None = None
    names: Collection[str] = ()
    words: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kind: Any = ""
    metavar: str | None = None
    argument: bool = False
    group: type | None = None
    only_given: bool = False
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class OptionField:
    """A field of a dataclass that is an option. ``type`` is without None."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def flags(self) -> tuple[str, ...]:
        if self.option.flags:
            return self.option.flags
        flag = f"--{self.name.replace('_', '-')}"
        return (f"{flag}/--no-{flag[2:]}" if self.type is bool and self.default is True else flag,)

    @property
    def flag(self) -> str:
        return self.flags[-1].partition("/")[0]

    @property
    def choices(self) -> tuple[Any, ...]:
        return typing.get_args(self.entry) if typing.get_origin(self.entry) is Literal else ()

    @property
    def several(self) -> bool:
        return typing.get_origin(self.type) in (tuple, Sequence)

    @property
    def entry(self) -> Any:
        """The type, of a sequence that of an entry."""
        return typing.get_args(self.type)[0] if self.several else self.type

    @property
    def numeric(self) -> bool:
        return self.type in (int, float)


def option(default: Any = dataclasses.MISSING, help: str = "", **settings: Any) -> Any:
    """Return a dataclass field that is an option."""
    return dataclasses.field(default=default, metadata={_METADATA: Option(help=help, **settings)})


def device_option() -> Any:
    """Return the field of ``--device``."""
    help = "The device to compute on; auto takes CUDA if torch sees it, cuda:1 is one of several GPUs."
    return option("auto", help, kind="device")


def option_group(kind: type, default: Any = dataclasses.MISSING, *, only_given: bool = False) -> Any:
    """Return a field for the options of the dataclass ``kind``: an object of it, or a mapping of their values."""
    return option(default, group=kind, only_given=only_given)


def option_fields(kind: type) -> tuple[OptionField, ...]:
    """The options of a dataclass, in the order of its fields."""
    hints = typing.get_type_hints(kind)
    options: dict[str, OptionField] = {}
    for field in dataclasses.fields(kind):
        if (option := field.metadata.get(_METADATA)) is None:
            continue
        entry = OptionField(
            name=field.name, type=_without_none(hints[field.name]), default=field.default, option=option
        )
        names = [*options]
        names.insert(names.index(option.after) + 1 if option.after else len(names), field.name)
        options = {name: options.get(name, entry) for name in names}
    return tuple(options.values())


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
    return typing.Union[tuple(parts)]  # noqa: UP007  # of parts known at run time only


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make a ``kind`` of those of ``values`` that are its fields."""
    return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values})  # type: ignore[arg-type]


def check(request: Any) -> None:
    """Raise UsageError for values outside the names and bounds of their options."""
    for field in option_fields(type(request)):
        value, allowed = getattr(request, field.name), field.choices or tuple(field.option.names)
        if value is None or (
            (field.option.kind or field.option.words) and not field.option.names and not field.numeric
        ):
            continue
        for entry in value if isinstance(value, (tuple, list)) else (value,):
            if allowed and entry not in allowed:
                raise UsageError(f"{field.flag} {entry} was given.", f"Allowed are {', '.join(allowed)}.")
        if field.numeric:
            _check_number(field, value)


def _check_number(field: OptionField, value: float) -> None:
    least, most = field.option.min, field.option.max
    if least is None and most is None:
        return
    if field.type is int:
        low, high = int(least or 0), int(LARGEST if most is None else most)
        if not low <= value <= high:
            raise UsageError(f"{field.flag} {value} was given.", f"It must be a whole number, {low:,} to {high:,}.")
    elif not math.isfinite(value) or value < (least or 0) or (field.option.above and value == least):
        rule = f"{'above' if field.option.above else 'from'} {least:g}{'' if field.option.above else ' on'}"
        raise UsageError(f"{field.flag} {value} was given.", f"It must be a finite number {rule}.")


def words(request: Any, *, always: Sequence[str] = (), without: Sequence[str] = ()) -> list[str]:
    """Words of the command line that ask for ``request``; defaults only of the fields ``always``."""
    given: list[str] = []
    for field in option_fields(type(request)):
        value = getattr(request, field.name)
        if field.name not in without and (value != field.default or field.name in always):
            given += _words(field, value)
    return given


def _words(field: OptionField, value: Any) -> list[str]:
    option = field.option
    if option.group is not None:
        return words(value)
    if option.argument:
        return [str(value)]
    if isinstance(value, bool) and not option.words:
        return [field.flag if value else field.flags[-1].rpartition("/")[2]]
    if option.words:
        value = next((word for word, meaning in option.words.items() if meaning == value), value)
    elif field.type == str | int:
        value = exact_bytes(value)
    entries = value if isinstance(value, (tuple, list)) else (value,)
    if option.kind and entries is value:
        entries = (",".join(map(str, value)),)
    return [word for entry in entries for word in (field.flag, str(entry))]
