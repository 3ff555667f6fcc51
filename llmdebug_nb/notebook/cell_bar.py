"""A bar in the output of a cell. It is no widget, and nothing of it is left in a saved notebook."""

from __future__ import annotations

from html import escape

from IPython.display import DisplayHandle, display
from tqdm.std import tqdm

_COUNTED = "{desc}: {percentage:.0f} % of {total:,} {unit}s, {elapsed}, {remaining} to go"
_UNCOUNTED = "{desc} … {elapsed}"


class CellBar(tqdm):  # type: ignore[type-arg]  # it has no parameters when it runs
    """Draws in an output that it empties at the end, also after an error or an interrupt."""

    disable: bool
    _output: DisplayHandle | None = None

    def __init__(self, *args: object, **how: object) -> None:
        how["gui"] = True  # draws nothing by itself
        super().__init__(*args, **how)  # type: ignore[call-overload]
        if not self.disable and self.delay <= 0:
            self.display()

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar."""
        data = self._drawn()
        if self._output is None:
            self._output = display(data, raw=True, display_id=True)
        else:
            self._output.update(data, raw=True)
        return True

    def close(self) -> None:
        """Take the bar away."""
        if self.disable:
            return
        self.disable = True
        self._decr_instances(self)
        if self._output is not None:
            self._output.update({}, raw=True)

    def clear(self, *_: object, **__: object) -> None:
        """Leave the bar: output of the cell stands below it."""

    def _drawn(self) -> dict[str, str]:
        pattern = _COUNTED if self.total else _UNCOUNTED
        text = self.format_meter(**{**self.format_dict, "bar_format": pattern})
        share = f' max="{self.total}" value="{self.n}"' if self.total else ""
        name = escape(str(self.desc or ""), quote=True)
        page = f'<progress aria-label="{name}"{share}></progress> <small>{escape(text)}</small>'
        return {"text/plain": text, "text/html": page}
