"""The programs around PyTorch, JAX and TensorFlow: their signs in a log, and their settings that take memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from brim.report import read_table
from brim.report.phase import NAMED, Advice

_NEAREST_VERB = 120  # characters between "decrease" and the setting that is meant


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a program. ``less`` and ``more`` are the advice in either direction, None: that does not help.

    ``name`` matches it in the program's own messages.
    """

    name: re.Pattern[str]
    less: Advice | None = None
    more: Advice | None = None


def _setting(name: str, directions: Mapping[str, Sequence[str]]) -> Setting:
    advices = {
        direction: Advice(_TEXTS[text[1:]] if text.startswith("$") else text, "".join(paste))
        for direction, (text, *paste) in directions.items()
    }
    return Setting(name=re.compile(name, re.IGNORECASE), **advices)


_TABLE = read_table("oom/programs.toml")
_TEXTS, _PROGRAMS = _TABLE["texts"], _TABLE["program"]
SETTINGS: dict[str, tuple[Setting, ...]] = {
    name: tuple(_setting(*item) for item in program["settings"].items())
    for name, program in _PROGRAMS.items()
    if "settings" in program
}
_SIGNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(program["signs"])) for name, program in _PROGRAMS.items() if "signs" in program
)
_FAMILY = _TABLE["family"]
IN_RAM, OF_FAMILY, _OVER_FAMILY = _FAMILY["in_ram"], _FAMILY["own"], _FAMILY["over"]


def program_of(family: str, frames: Sequence[str], text: str, before: str) -> str:
    """Return the program that ran out, "" for an unknown one.

    ``frames`` are lines of the message's traceback, the innermost first: the nearest decides. Without them the
    message's ``text`` does, then the program that the log named ``before``.
    """
    own = OF_FAMILY.get(family, "")
    above = _OVER_FAMILY.get(family, ()) if own or family in _OVER_FAMILY else None
    for frame in frames:
        for name, pattern in _SIGNS:
            if pattern.search(frame) and (above is None or name in above):
                return name
    if frames and family.startswith("torch-") and not own:
        return ""
    named = next((name for name, pattern in _SIGNS if pattern.search(text) and (above is None or name in above)), "")
    if named:
        return named
    return before if before and (above is None or before in above) else own


def server_in(text: str) -> str:
    """Return the server or application named in a piece of a log, "" for none."""
    return next((name for name, pattern in _SIGNS if "server" in _PROGRAMS[name] and pattern.search(text)), "")


_DIRECTION = re.compile(
    r"(?P<less>\b(?:decreas|lower|reduc|small|less\b|fewer|shorten|shorter|disabl|limit)\w*)"
    r"|(?P<more>\b(?:increas|rais|larger|higher|more\b|enabl)\w*)",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"(?<=[.;!])\s+|\s(?=\d\. )")
_ASKS = re.compile(r"\b(?:try|please|need to|should|consider|set|use|decreas|increas|reduc|lower)", re.IGNORECASE)


def remedies(program: str, text: str, numbers: Mapping[str, int]) -> list[Advice]:
    """Return the message's own advice in its order: the program's settings beside a direction."""
    advices: list[Advice] = []
    for clause in _CLAUSE.split(text):
        if not _ASKS.search(clause):
            continue
        verbs = list(_DIRECTION.finditer(clause))
        for match, setting in _named(program, clause):
            verb = next((verb for verb in reversed(verbs) if verb.end() <= match.start()), None)
            verb = verb or next((verb for verb in verbs if verb.start() >= match.end()), None)
            if verb is None or not -_NEAREST_VERB < match.start() - verb.end() < _NEAREST_VERB:
                continue
            advice = setting.less if verb["less"] else setting.more
            if advice is not None:
                advices.append(_measured(advice, text, numbers, less=bool(verb["less"])))
    return advices


def _named(program: str, clause: str) -> list[tuple[re.Match[str], Setting]]:
    """Return the settings in a clause, by position."""
    named = [(match, setting) for setting in SETTINGS.get(program, ()) if (match := setting.name.search(clause))]
    return sorted(named, key=lambda pair: pair[0].start())


_ESTIMATED_LENGTH = re.compile(r"estimated maximum model length is ([0-9]{1,9})")


def _measured(advice: Advice, text: str, numbers: Mapping[str, int], *, less: bool) -> Advice:
    """Return the advice with a value derived from the message's numbers, or from the value in force."""
    free, total = numbers.get("free"), numbers.get("total")
    if advice.paste.startswith("--gpu-memory-utilization") and less and free and total and "wanted" in numbers:
        return replace(advice, paste=f"--gpu-memory-utilization {int(100 * free / total) / 100:.2f}")
    if advice.paste.startswith("--max-model-len") and (match := _ESTIMATED_LENGTH.search(text)):
        return replace(advice, paste=f"--max-model-len {match[1]}")
    if (share := _SHARE_AT_END.search(advice.paste)) and (in_force := _share_in_force(share[1], text)) is not None:
        value = max(in_force - 0.1, in_force / 2) if less else min(in_force + 0.05, (1 + in_force) / 2)
        return replace(advice, paste=f"{advice.paste[: share.start(2)]}{value:.2f}")
    return advice


_SHARE_AT_END = re.compile(r"([\w-]+):?[ =](0\.[0-9]+)$")
SHARES = re.compile(
    r"(gpu[-_ ]memory[-_ ]utili[sz]ation|mem[-_]fraction[-_]static|XLA_PYTHON_CLIENT_MEM_FRACTION"
    r"|cuda[-_]memory[-_]fraction"
    r"|free_gpu_memory_fraction|cache[-_]max[-_]entry[-_]count)['\"]?[ =:]{1,3}\(?(0?\.[0-9]{1,4}|1\.0)\b",
    re.IGNORECASE,
)


def _share_in_force(name: str, text: str) -> float | None:
    """Return the last value of a share in a log; None without one."""
    plain = name.lower().lstrip("-").replace("-", "_")
    stated = [match for match in SHARES.finditer(text) if re.sub(r"[- ]", "_", match[1].lower()) == plain]
    return float(stated[-1][2]) if stated else None


def settings_of(program: str, order: Sequence[str], text: str, numbers: Mapping[str, int]) -> list[Advice]:
    """Return advice by setting, "-name" for less and "+name" for more, in this order."""
    advices = []
    for item in order:
        setting = next(setting for setting in SETTINGS[program] if setting.name.search(item[1:]))
        advice = setting.less if item[0] == "-" else setting.more
        assert advice is not None, f"{program} has no {item}"
        advices.append(_measured(advice, text, numbers, less=item[0] == "-"))
    return advices


_TO_RAM = ("-ngl", "+cpu-moe", "-num_gpu", "-gpulayers", "-gpu_offload")


def program_advice(
    program: str, frames: Sequence[str], text: str, numbers: Mapping[str, int], *, on_host: bool
) -> list[Advice]:
    """Return the program's helpful settings: those of its own message, then those of the place where it ran out."""
    if program not in SETTINGS:
        return []
    entry = _PROGRAMS[program]
    by_text = [settings for pattern, settings in entry.get("by_text", ()) if re.search(pattern, text)]
    by_frame = (
        settings
        for frame in frames
        for pattern, settings in entry.get("places", ())
        if re.search(pattern, frame, re.IGNORECASE)
    )
    order = by_text[0] if by_text else next(by_frame, entry["order"])
    # On the host, layers that leave the GPU would need RAM.
    items = [item for item in order.split() if not (on_host and item in _TO_RAM)]
    advices = remedies(program, text, numbers)
    for advice in settings_of(program, items, text, numbers):
        if all(_key(advice) != _key(other) for other in advices):
            advices.append(advice)
    return advices


def _key(advice: Advice) -> str:
    """Return the setting of an advice, whatever its direction."""
    return re.split(r"[ =]", advice.paste.removeprefix("export "))[0] if advice.paste else advice.text


def spelled(program: str, advices: Sequence[Advice]) -> list[Advice]:
    """Return advice with the running trainer's names of settings."""
    names = {NAMED[name]: paste for name, paste in _PROGRAMS.get(program, {}).get("spelled", {}).items()}
    return [replace(advice, paste=names[advice]) if advice in names else advice for advice in advices]
