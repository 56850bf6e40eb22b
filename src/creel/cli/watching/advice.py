"""What to change in a script, in one sentence: the end of `creel explain`. Pure."""

from __future__ import annotations

from creel.cli.watching.forecasts import HARDLY, ms
from creel.cli.watching.view import Values, format_seconds
from creel.units import format_size

#: A change that makes steps less than this many times as fast is not advised.
_GAIN = 1.05


def advice(values: Values, where: str) -> dict[str, str | None]:
    """Return the keys `sentence`, `line` (what to write; None: nothing) and `where`.

    Args:
        values: the other keys of `creel explain --json`.
        where: file and line where the script makes the loader; "": unknown.
    """
    tried = [(_line(change), change) for change in values["changes"]]
    if values["reads"] is not None:
        tried.insert(0, (values["reads"]["line"], values["reads"]))
    line, best = min(tried, key=lambda pair: pair[1]["step_s"], default=("", values))
    if best["step_s"] * _GAIN >= values["step_s"]:
        return {"sentence": _nothing(values), "line": None, "where": None}
    place = f" (the loader is made in {where})" * bool(where)
    sentence = f"Write {line}{place}: {_gain(values, best['step_s'])}."
    return {"sentence": sentence, "line": line, "where": where or None}


def _line(change: Values) -> str:
    """Return what to write for a change of `what_if.Change`."""
    if change["what"] == "workers":
        return f"num_workers={change['workers']}"
    if change["what"] == "keep_decoded":
        return 'keep_decoded="auto"'
    return f"CREEL_MEMORY__BUDGET={format_size(change['nbytes']).replace(' ', '')}"


def _gain(values: Values, step_s: float) -> str:
    if values["steps"] is None:
        return f"a step takes {ms(step_s)} instead of {ms(values['step_s'])}"
    now, then = (format_seconds(values["steps"] * s) for s in (values["step_s"], step_s))
    return f"an epoch takes {then} instead of {now}"


def _nothing(values: Values) -> str:
    if values["wait_s"] <= HARDLY * values["step_s"]:
        return "Change nothing: training does not wait for data."
    stage = max(values["busy_s"], key=lambda name: values["busy_s"][name])
    return (
        f"Make a sample cheaper, mostly to {stage}: no number of workers or memory makes a step 5 %"
        " shorter (docs/waiting.md)."
    )
