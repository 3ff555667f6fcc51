"""Switching fusion off, in the form of a ``fusion_switch_file``: which of Inductor's passes and fusions that means.

    {"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"vertical": "off", "aten.rsqrt": "off"}}}

``GraphFusion`` are the passes over the graph, ``UBFusion`` what is computed in one kernel. An operator named under ``UBFusion`` is
computed in a kernel of its own. Both ``ALL: off`` (or ``ALL`` of the whole) leaves a kernel of PyTorch for every operator.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmdebug_nb.core.errors import OptionError, nearest

_OFF: dict[str, dict[str, dict[str, Any]]] = {
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
_ALONE = {
    "fallback_by_default": True,
    "selective_decompose": True,
}  # of Inductor: a kernel of PyTorch for every operator
_EXAMPLE = '{"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"vertical": "off"}}}'


@dataclass(frozen=True, slots=True)
class FusionSwitch:
    """``config``: what it sets of Inductor's configuration. ``vertical``/``horizontal``: kernels may be fused with what they are
    made of, and with what reads the same. ``apart``: operators that are not fused with anything, as ``aten.rsqrt``.
    """

    config: dict[str, Any] = field(default_factory=dict)
    vertical: bool = True
    horizontal: bool = True
    apart: frozenset[str] = frozenset()

    @property
    def says_nothing(self) -> bool:
        """Fusion is as ever."""
        return self.vertical and self.horizontal and not self.apart

    @classmethod
    def read(cls, given: Any) -> FusionSwitch:
        """Read a JSON file, or the mapping in it; None changes nothing.

        Raises:
            OptionError: it is no such file or mapping, or names a rule that there is not.
        """
        if given is None:
            return cls()
        switch = _loaded(given)
        config: dict[str, Any] = {}
        off: dict[str, set[str]] = {}
        for section, rules in switch.items():
            off[section] = _off(section, rules)
            for rule in off[section] & _OFF[section].keys():
                config |= _OFF[section][rule]
        kernels = off.get("UBFusion", set())
        if all("ALL" in off.get(section, ()) for section in _OFF):
            config |= _ALONE
        known = _OFF["UBFusion"].keys() | {"ALL"}
        return cls(
            config,
            "vertical" not in kernels,
            "horizontal" not in kernels,
            frozenset(kernels - known),
        )


def _loaded(given: Any) -> dict[str, Mapping[str, Any]]:
    """Return section -> rule -> on or off."""
    where = "fusion_switch"
    if isinstance(given, (str, os.PathLike)):
        where = f"fusion_switch {os.fspath(given)!r}"
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise OptionError(
                f"{where}: {str(error).partition(chr(10))[0]}; expected a JSON file such as {_EXAMPLE}"
            ) from None
    switch = given.get("Switch") if isinstance(given, Mapping) else None
    if not isinstance(switch, Mapping):
        raise OptionError(f"{where}: expected a mapping with the key Switch, such as {_EXAMPLE}")
    everything = switch.get("ALL")
    sections: dict[str, Mapping[str, Any]] = {}
    if everything is not None:
        sections = {section: {"ALL": everything} for section in _OFF}
    for name, rules in switch.items():
        if name == "ALL":
            continue
        if name not in _OFF:
            raise OptionError(
                f"{where}: there is no {name!r}{nearest(str(name), list(_OFF))}; there are {', '.join(_OFF)}"
            )
        if not isinstance(rules, Mapping):
            raise OptionError(
                f"{where}: {name} {rules!r}: expected a mapping such as {{'ALL': 'off'}}"
            )
        sections[name] = dict(rules)
    return sections


def _off(section: str, rules: Mapping[str, Any]) -> set[str]:
    """Return the rules of a section that are off; all of them where ``ALL`` is, but for those said to be on."""
    known = _OFF[section]
    said = {}
    for rule, value in rules.items():
        operators = section == "UBFusion" and _is_operator(rule)
        if rule not in known and rule != "ALL" and not operators:
            near = nearest(str(rule), [*known, "ALL"])
            also = " or an operator such as aten.rsqrt" if section == "UBFusion" else ""
            raise OptionError(
                f"fusion_switch: {section} has no rule {rule!r}{near}; known: ALL, {', '.join(known)}{also}"
            )
        if value not in ("on", "off"):
            raise OptionError(f"fusion_switch: {section}.{rule} {value!r}: expected 'on' or 'off'")
        said[rule] = value == "off"
    everything = said.get("ALL", False)
    off = {rule for rule in (*known, "ALL") if said.get(rule, everything)}
    return off | {rule for rule, is_off in said.items() if is_off}


def _is_operator(rule: str) -> bool:
    """Tell whether a rule is the name of an operator that there is: ``aten.rsqrt``, also with its overload."""
    import torch

    namespace, dot, name = rule.partition(".")
    if not dot or namespace not in ("aten", "prims"):
        return False
    return hasattr(getattr(torch.ops, namespace), name.partition(".")[0])
