"""The figures of a report, as PNG and SVG whose bytes follow from the records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.aggregate import AVERAGE
from infer.bootstrap import Interval
from infer.measurements import Measurement
from infer.tables import ROUND_STAGES, Run, stage_milliseconds, tree_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

WIDTH, HEIGHT = 7.2, 4.0  # inches
SWEPT = {
    "node_budget": "node budget (root not counted)",
    "cap": "nodes at most",
    "candidate_width": "candidate width",
    "node_topk": "node top-k",
}
MARKERS = "osD^vPX*<>"


def draw_figures(run: Run, folder: Path) -> list[tuple[str, str]]:
    """Write every figure into `folder`; returns file names without endings, with captions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {
        "svg.hashsalt": "dominotree",
        "font.size": 9,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.axisbelow": True,
    }
    written = []
    with matplotlib.rc_context(style):
        for name, caption, figure in _figures(run):
            figure.savefig(folder / f"{name}.png", dpi=130, metadata={"Software": None})
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
            pyplot.close(figure)
            written.append((name, caption))
    return written


def _figures(run: Run) -> Iterator[tuple[str, str, Figure]]:
    for temperature in run.temperatures:
        at, name = f"at temperature {temperature:g}", f"t{temperature:g}"
        yield f"speedup_{name}", f"Speedup over plain decoding {at}, with 95 % intervals", _speedups(run, temperature)
        yield (
            f"positions_{name}",
            f"Acceptance by position {at}: share of rounds that accepted a draft of that depth",
            _positions(run, temperature),
        )
        yield f"lengths_{name}", f"Tokens committed a round {at}, bonus token included", _lengths(run, temperature)
        sizes = {method: tree_sizes(run.of(temperature, method)) for method in _drafting(run)}
        chosen = {method: found for method, found in sizes.items() if found}
        if chosen:
            figure = _histograms(run, chosen, first=0, label="nodes")
            yield f"sizes_{name}", f"Nodes verified a round {at} by the methods that choose them", figure
        yield f"stages_{name}", f"Milliseconds a round by stage {at}", _stages(run, temperature)
        for option, label in SWEPT.items():
            curves = _swept(run, option)
            if curves:
                figure = _sweep(label, [(one, _points(run, temperature, found)) for one, found in curves.items()])
                yield f"{option}_{name}", f"τ and speedup against {label} {at}, with 95 % intervals", figure
    if len(run.temperatures) > 2:
        curves_by_method = [(method, _by_temperature(run, method)) for method in _drafting(run)]
        caption = "τ and speedup against temperature, with 95 % intervals"
        yield "temperatures", caption, _sweep("temperature", curves_by_method)


def _speedups(run: Run, temperature: float) -> Figure:
    figure, (axes,) = _axes(1)
    methods, columns = _drafting(run), run.columns
    width = 0.8 / max(1, len(methods))
    for index, method in enumerate(methods):
        intervals = [run.resampled[temperature].speedup(column, method) for column in columns]
        places = [place + (index - (len(methods) - 1) / 2) * width for place in range(len(columns))]
        heights, errors = _with_errors(intervals)
        axes.bar(places, heights, width, yerr=errors, color=_color(run, method), label=method, error_kw={"lw": 0.8})
    axes.axhline(1, color="black", lw=0.8)
    axes.set(ylabel="speedup over plain decoding", xticks=range(len(columns)), xticklabels=columns)
    axes.tick_params(axis="x", rotation=20 if len(columns) > 5 else 0)
    _legend(figure, axes)
    return figure


def _positions(run: Run, temperature: float) -> Figure:
    figure, (axes,) = _axes(1)
    for method in _drafting(run):
        lengths = _accepted(run.of(temperature, method))
        deepest = max(lengths, default=1) - 1
        shares = [sum(length > depth for length in lengths) / len(lengths) for depth in range(1, deepest + 1)]
        _line(axes, run, method, range(1, deepest + 1), shares)
    axes.set(xlabel="depth of the draft", ylabel="share of rounds", ylim=(0, 1))
    axes.xaxis.set_major_locator(_whole_numbers())
    _legend(figure, axes)
    return figure


def _lengths(run: Run, temperature: float) -> Figure:
    accepted = {method: _accepted(run.of(temperature, method)) for method in _drafting(run)}
    return _histograms(run, accepted, first=1, label="tokens")


def _histograms(run: Run, values: dict[str, list[int]], *, first: int, label: str) -> Figure:
    """Shares of rounds by a whole number from `first` on, a panel for each method."""
    methods = list(values)
    figure, panels = _axes(max(1, len(methods)), columns=4)
    counts = {method: Counter(found) for method, found in values.items()}
    longest = max((length for count in counts.values() for length in count), default=first)
    highest = max((n / count.total() for count in counts.values() for n in count.values()), default=1.0)
    for axes, method in zip(panels, methods, strict=False):
        total = max(1, counts[method].total())
        shares = [counts[method][length] / total for length in range(first, longest + 1)]
        axes.bar(range(first, longest + 1), shares, color=_color(run, method))
        axes.set(title=method, xlabel=label, ylim=(0, 1.05 * highest))
        axes.xaxis.set_major_locator(_whole_numbers())
    for axes in panels[::4]:
        axes.set(ylabel="share of rounds")
    for axes in panels[len(methods) :]:
        axes.remove()
    return figure


def _stages(run: Run, temperature: float) -> Figure:
    from matplotlib import colormaps

    figure, (axes,) = _axes(1, height=1.2 + 0.35 * len(run.methods))
    stages = {method: stage_milliseconds(run.of(temperature, method)) for method in run.methods}
    left = [0.0] * len(run.methods)
    for index, stage in enumerate(ROUND_STAGES):
        widths = [stages[method][stage] for method in run.methods]
        axes.barh(run.methods, widths, left=left, label=stage, color=colormaps["Set2"](index))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds a round")
    _legend(figure, axes)
    return figure


def _sweep(label: str, curves: Sequence[tuple[str, dict[float, tuple[Interval, Interval]]]]) -> Figure:
    """τ and speedup side by side, a line for each of `curves`; values are set at equal distances."""
    figure, panels = _axes(2)
    is_width = label == SWEPT["candidate_width"]
    values = sorted({value for _, points in curves for value in points}, key=lambda v: (is_width and v == 0, v))
    names = ["all" if is_width and value == 0 else f"{value:g}" for value in values]  # 0: the whole vocabulary
    for axes, place, what in zip(panels, (0, 1), ("τ", "speedup over plain decoding"), strict=True):
        for index, (name, points) in enumerate(curves):
            there = [x for x, value in enumerate(values) if value in points]
            heights, errors = _with_errors([points[values[x]][place] for x in there])
            marker = MARKERS[index % len(MARKERS)]
            axes.errorbar(there, heights, yerr=errors, label=name, color=f"C{index}", marker=marker, capsize=2)
        axes.set(xlabel=label, ylabel=what, xticks=range(len(values)), xticklabels=names)
    _legend(figure, panels[0])
    return figure


def _swept(run: Run, option: str) -> dict[str, dict[float, str]]:
    """Rows that differ in this option alone: by what they have in common, a row's label by the option's value."""
    groups: dict[str, dict[float, str]] = {}
    for label, method in run.info["identity"]["methods"].items():
        if option in method:
            rest = {key: value for key, value in method.items() if key not in (option, "name")}
            groups.setdefault(f"{method['name']} {sorted(rest.items())}", {})[method[option]] = label
    swept = [group for group in groups.values() if len(group) > 1]
    return {_common(list(group.values()), run): group for group in swept}


def _common(labels: list[str], run: Run) -> str:
    names = {run.info["identity"]["methods"][label]["name"] for label in labels}
    return " ".join(sorted(names))


def _points(run: Run, temperature: float, labels: dict[float, str]) -> dict[float, tuple[Interval, Interval]]:
    return _known({value: _pair(run, temperature, label) for value, label in labels.items()})


def _by_temperature(run: Run, method: str) -> dict[float, tuple[Interval, Interval]]:
    return _known({temperature: _pair(run, temperature, method) for temperature in run.temperatures})


def _pair(run: Run, temperature: float, method: str) -> tuple[Interval | None, Interval | None]:
    resampled, column = run.resampled[temperature], AVERAGE
    return resampled.tau(column, method), resampled.speedup(column, method)


def _known(
    points: dict[float, tuple[Interval | None, Interval | None]],
) -> dict[float, tuple[Interval, Interval]]:
    return {x: (tau, speed) for x, (tau, speed) in points.items() if tau is not None and speed is not None}


def _axes(count: int, *, columns: int = 2, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    """At least `count` panels in rows of `columns`; `height` of a single row, in inches."""
    from matplotlib import pyplot

    across = min(count, columns)
    rows = -(-count // across)
    size = (WIDTH if across < 3 else 2.4 * across, height if rows == 1 else 2.4 * rows)
    made: Any = pyplot.subplots(rows, across, figsize=size, layout="constrained", squeeze=False)
    figure, panels = made
    return figure, list(panels.flat)


def _whole_numbers() -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def _legend(figure: Figure, axes: Axes) -> None:
    """Beside the axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)


def _line(axes: Axes, run: Run, method: str, xs: Sequence[int], ys: Sequence[float]) -> None:
    marker = MARKERS[run.methods.index(method) % len(MARKERS)]
    axes.plot(xs, ys, marker=marker, ms=4, label=method, color=_color(run, method))


def _color(run: Run, method: str) -> str:
    """The same for a method in every figure."""
    return f"C{(run.methods.index(method) - 1) % 10}"


def _drafting(run: Run) -> list[str]:
    return run.methods[1:]


def _accepted(group: list[Measurement]) -> list[int]:
    return [length for one in group for length in one.accepted_lengths]


def _with_errors(intervals: Sequence[Interval | None]) -> tuple[list[float], list[list[float]]]:
    """Heights, and how far the interval's bounds lie below and above them; missing ones are not drawn."""
    nan = float("nan")
    known = [one or Interval(nan, nan, nan) for one in intervals]
    below = [max(0.0, one.value - one.low) for one in known]
    above = [max(0.0, one.high - one.value) for one in known]
    return [one.value for one in known], [below, above]
