"""Reads a ``fusion_switch_file``: which of Inductor's passes and fusions are switched off.

    {"Switch": {"GraphFusion": {"ALL": "off"},
                "UBFusion": {"vertical": "off", "aten.rsqrt": "off"}}}

``GraphFusion`` are passes over the graph; ``UBFusion`` decides what one kernel computes. An
operator named under ``UBFusion`` gets a kernel of its own. With ``ALL: off`` in both sections (or
for the whole) every operator is computed by PyTorch's own kernel.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmdebug_nb.core.errors import OptionError, nearest

# section -> rule -> the settings of Inductor's configuration that switch it off
RULES: dict[str, dict[str, dict[str, object]]] = {
    "GraphFusion": {
        "pattern_matcher": {"pattern_matcher": False},
        "pre_grad_passes": {"use_pre_grad_passes": False, "pre_grad_fusion_options": {}},
        "joint_graph_passes": {"use_joint_graph_passes": False},
        "post_grad_fusion": {"post_grad_fusion_options": {}},
        "batch_fusion": {"batch_fusion": False},
        "group_fusion": {"group_fusion": False},
        "split_cat": {"split_cat_fx_passes": False},
        "constant_folding": {"joint_graph_constant_folding": False},
    },
    "UBFusion": {
        "vertical": {},
        "horizontal": {},
        "epilogue": {"epilogue_fusion": False},
        "prologue": {"prologue_fusion": False},
        "inplace": {"inplace_buffers": False},
    },
}
_NOTHING_FUSED = {"fallback_by_default": True, "selective_decompose": True}  # PyTorch's own kernels
_EXAMPLE = '{"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"vertical": "off"}}}'


@dataclass(frozen=True, slots=True)
class FusionSwitch:
    """What may be fused.

    ``config``: settings of Inductor's configuration. ``vertical``: a kernel may be fused with the
    kernels that compute its inputs. ``horizontal``: kernels may be fused that share inputs.
    ``apart``: operators that are not fused with anything, such as ``aten.rsqrt``.
    """

    config: dict[str, object] = field(default_factory=dict)
    vertical: bool = True
    horizontal: bool = True
    apart: frozenset[str] = frozenset()

    @property
    def allows_all(self) -> bool:
        """All fusions of kernels are allowed."""
        return self.vertical and self.horizontal and not self.apart

    @classmethod
    def read(cls, switch: object) -> FusionSwitch:
        """Read a JSON file, or the mapping in it; None changes nothing.

        Raises:
            OptionError: this is not such a file or mapping, or it names an unknown rule.
        """
        if switch is None:
            return cls()
        off = {section: _off(section, rules) for section, rules in _sections(switch).items()}
        config: dict[str, object] = {}
        for section, names in off.items():
            for name in names & RULES[section].keys():
                config |= RULES[section][name]
        if all("ALL" in off.get(section, ()) for section in RULES):
            config |= _NOTHING_FUSED
        kernels = off.get("UBFusion", set())
        apart = frozenset(kernels - RULES["UBFusion"].keys() - {"ALL"})
        return cls(config, "vertical" not in kernels, "horizontal" not in kernels, apart)


def _sections(switch: object) -> dict[str, Mapping[str, object]]:
    """Return section -> rule -> "on" or "off"."""
    where = "fusion_switch"
    if isinstance(switch, (str, os.PathLike)):
        where = f"fusion_switch {os.fspath(switch)!r}"
        switch = _parsed(Path(switch), where)
    switches = switch.get("Switch") if isinstance(switch, Mapping) else None
    if not isinstance(switches, Mapping):
        raise OptionError(f"{where}: expected a mapping with the key Switch, such as {_EXAMPLE}")
    everything = switches.get("ALL")
    sections: dict[str, Mapping[str, object]] = {}
    if everything is not None:
        sections = {section: {"ALL": everything} for section in RULES}
    for name, rules in switches.items():
        if name == "ALL":
            continue
        if name not in RULES:
            hint = f"{nearest(str(name), list(RULES))}; there are {', '.join(RULES)}"
            raise OptionError(f"{where}: there is no {name!r}{hint}")
        if not isinstance(rules, Mapping):
            example = "expected a mapping such as {'ALL': 'off'}"
            raise OptionError(f"{where}: {name} {rules!r}: {example}")
        sections[name] = dict(rules)
    return sections


def _parsed(file: Path, where: str) -> object:
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        message = f"{where}: {why}; expected a JSON file such as {_EXAMPLE}"
        raise OptionError(message) from None
    return content


def _off(section: str, rules: Mapping[str, object]) -> set[str]:
    """Return the rules of a section that are off; with ``ALL`` off, all that are not on."""
    known = RULES[section]
    is_off = {}
    for rule, value in rules.items():
        is_operator = section == "UBFusion" and _is_operator(rule)
        if rule not in known and rule != "ALL" and not is_operator:
            near = nearest(str(rule), [*known, "ALL"])
            names = ", ".join(["ALL", *known])
            also = " or an operator such as aten.rsqrt" if section == "UBFusion" else ""
            unknown = f"{section} has no rule {rule!r}{near}; known: {names}{also}"
            raise OptionError(f"fusion_switch: {unknown}")
        if value not in ("on", "off"):
            raise OptionError(f"fusion_switch: {section}.{rule} {value!r}: expected 'on' or 'off'")
        is_off[rule] = value == "off"
    everything = is_off.get("ALL", False)
    names_off = {rule for rule in (*known, "ALL") if is_off.get(rule, everything)}
    return names_off | {rule for rule, off in is_off.items() if off}


def _is_operator(rule: str) -> bool:
    """Tell whether a rule names an existing operator, with or without its overload."""
    import torch

    namespace, dot, name = rule.partition(".")
    if not dot or namespace not in ("aten", "prims"):
        return False
    return hasattr(getattr(torch.ops, namespace), name.partition(".")[0])
