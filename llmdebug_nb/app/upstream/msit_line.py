"""A line of ``msit llm …`` in the words of ``llmdebug …``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llmdebug_nb.core.errors import OptionError, nearest
from llmdebug_nb.core.part_ids import MARK

_OPTION = re.compile(r"--?[A-Za-z]")
_PREFIX = ("msit", "ait", "llm")  # what a whole line begins with
_NO_COMMAND = {
    "transform": "it writes ATB's C++ code from a model",
    "bcanalyze": "it compares the answers of two evaluations; see llmdebug logits for tokens",
    "logitsdump": "record with llmdebug dump, then compare with llmdebug logits",
    "analyze": "it compares the answers of two evaluations; see llmdebug logits for tokens",
    "casefilter": "it filters cases of an evaluation",
}
_ALIASES = {"dd": "dump", "cc": "compare", "oo": "opcheck", "ee": "errcheck"}  # of msit 8.2
_LIMITS = {"-cs": "cosine_similarity", "-kl": "kl_divergence", "-l1": "l1_norm"}
Words = Sequence[str]


@dataclass(frozen=True)
class _Command:
    """A command of msit's.

    ``same``: options with our own meaning of the same words. ``renamed``: theirs to ours.
    ``no_effect`` and ``without``: options without effect or without an equivalent, and why.
    ``whole``: makes the words of the line from those of its options, by option.
    """

    ours: str
    same: frozenset[str]
    renamed: Mapping[str, str] = field(default_factory=dict)
    no_effect: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    whole: Callable[[dict[str, list[str]]], list[str]] | None = None


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _dump(options: dict[str, list[str]]) -> list[str]:
    """Return the words of ``llmdebug dump``: ids are those that msit counts."""
    for flag in options.keys() & {"-ids", "--save-operation-ids"}:
        ids = filter(None, re.split(r"[,\s]+", ",".join(options[flag])))
        options[flag] = [",".join(f"{MARK}{one}" for one in ids)]
    return [word for option, values in options.items() for word in (option, *values)]


def _logits(options: dict[str, list[str]]) -> list[str]:
    """Return the words of ``llmdebug logits`` for those of ``msit llm logitscmp``."""
    sides = [options.pop("-gp", []), options.pop("-mp", [])]
    for side, flag in zip(sides, ("-gp", "-mp"), strict=True):
        if len(side) != 1:
            raise OptionError(f"msit logitscmp: {flag} is missing, or has several values")
    folder = options.pop("-o", ["output"])
    table = os.path.join(folder[0] if folder else ".", "logits_cmp_res.csv")
    return [sides[0][0], sides[1][0], "--rule", _rule(options), "--csv", table]


def _rule(options: dict[str, list[str]]) -> str:
    """Return msit's rule, or its limits with those that the line has: none of ULP is left then."""
    given = {metric: options.pop(flag) for flag, metric in _LIMITS.items() if flag in options}
    if not given:
        return "msit"
    from llmdebug_nb.comparison.limits import RULES

    usual = {metric: str(limit) for metric, limit in RULES["msit_logits"][0].items()}
    limits = {**usual, **{metric: ",".join(values) for metric, values in given.items()}}
    return ",".join(f"{metric}={limit}" for metric, limit in limits.items())


_LEVEL = dict.fromkeys(("-l", "--log-level"), "its messages have one level")
_DEVICE = dict.fromkeys(("-device", "--device-id"), "the reference is computed on the CPU")
_COMMANDS = {
    "dump": _Command(
        "dump",
        _names(
            "--exec --type -sd --only-save-desc -ids --save-operation-ids -er --execute-range"
            " -child --save-operation-child -time --save-time -opname --operation-name -tiling"
            " --save-tiling -stp --save-tensor-part -o --output -device --device-id -l --log-level"
            " -symlink --enable-symlink -config --config-path -seed"
        ),
        whole=_dump,
    ),
    "compare": _Command(
        "compare",
        _names(
            "-gp --golden-path -mp --my-path -cl --cmp-level -o --output -mf --op-mapping-file"
            " -alg --custom-algorithms -l --log-level -w --weight -st --stats"
        ),
        without=dict.fromkeys(
            ("-r", "--rank"), "each rank is compared with the same rank, one alone with all"
        ),
    ),
    "opcheck": _Command(
        "opcheck",
        _names(
            "-i --input -o --output -ids --operation-ids -opname --operation-name -c --csv-path"
            " -rerun -alg --custom-algorithms -pmode --precision-mode -j --jobs -metric"
        ),
        renamed={"--precision-metric": "-metric", "--atb-rerun": "-rerun"},
        no_effect={**_LEVEL, **_DEVICE},
        without=dict.fromkeys(
            ("-opt", "--optimization-identify"), "it is of ATB's own attention kernels"
        ),
    ),
    "errcheck": _Command(
        "errcheck", _names("--exec --type -o --output --exit"), no_effect=_LEVEL
    ),
    "logitscmp": _Command(
        "logits", _names("-gp -mp -o -cs -kl -l1"),
        renamed={
            "--golden-path": "-gp", "--my-path": "-mp", "--output": "-o", "--output-dir": "-o",
            "--cosine-similarity": "-cs", "--kl-divergence": "-kl", "--l1-norm": "-l1",
        },
        no_effect={
            **_LEVEL, **dict.fromkeys(("-d", "--dtype"), "a ULP is that of the logits' own dtype")
        },
        whole=_logits,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Translated:
    """``words``: what follows ``llmdebug``. ``remarks``: what has no effect, and why."""

    words: list[str]
    remarks: list[str]


def translated(line: Words) -> Translated:
    """Translate a line of msit's, with or without ``msit llm`` before the command.

    Raises:
        OptionError: no such command, or an option without an equivalent; the message says which.
    """
    words = list(line)
    while words and words[0].lower() in _PREFIX:
        words.pop(0)
    name = words.pop(0) if words else ""
    name = _ALIASES.get(name.lower(), name)
    command = _COMMANDS.get(name.lower())
    if command is None:
        raise OptionError(_unknown(name))
    options: dict[str, list[str]] = {}
    remarks: list[str] = []
    for option, values in _options(name, words):
        if option in command.without:
            raise OptionError(f"msit {name}: {option} has no equivalent: {command.without[option]}")
        if option in command.no_effect:
            remarks.append(f"{option} has no effect: {command.no_effect[option]}")
            continue
        ours = command.renamed.get(option, option)
        if ours not in command.same:
            near = nearest(option, command.same)
            raise OptionError(f"msit {name}: {option} is unknown, or has no equivalent{near}")
        options.setdefault(ours, []).extend(values)
    if command.whole is not None:
        return Translated([command.ours, *command.whole(options)], remarks)
    rest = [word for option, values in options.items() for word in (option, *values)]
    return Translated([command.ours, *rest], remarks)


def _options(name: str, words: Words) -> Iterable[tuple[str, list[str]]]:
    """Return the options of a line, each with its values. Raises OptionError."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if found and not _OPTION.match(word):
            found[-1][1].append(word)
        elif not _OPTION.match(word):
            raise OptionError(f"msit {name}: {word!r} stands before the first option")
        else:
            option, equals, value = word.partition("=")
            found.append((option, [value] if equals else []))
    return found


def _unknown(name: str) -> str:
    known = ", ".join(_COMMANDS)
    if why := _NO_COMMAND.get(name.lower()):
        return f"msit {name} has no equivalent here: {why}; known: {known}"
    if not name:
        return f"msit: no command; say llmdebug msit llm dump --exec …; known: {known}"
    return f"msit {name} is no known command{nearest(name, _COMMANDS)}; known: {known}"
