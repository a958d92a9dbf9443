"""A GE graph as a picture: layers from inputs to output, what is constant left out."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

from .decode import ge_dtype
from .graph import INPUTS, Graph, Node

BOX, GAP, ROW = 30, 18, 62  # height of a box; between boxes; from layer to layer
CHARACTER = 7.2
SWEEPS = 12  # of putting each node below its neighbours
STYLE = """
text { font: 12px ui-monospace, monospace; text-anchor: middle; fill: #222 }
text.small { font-size: 10px; fill: #666 }
rect { fill: #eef2f7; stroke: #8aa0b8; rx: 5px }
rect.input { fill: #fff } rect.heavy { fill: #cfe3ff; stroke: #2f6fb5 }
path { fill: none; stroke: #8aa0b8 }
"""
HEAVY = ("MatMul", "GroupedMatmul", "BatchMatMul")


class Place(NamedTuple):
    """A node in its layer, or the point where an edge passes through it."""

    layer: int
    node: Node
    target: Node | None = None


def svg(graph: Graph, inputs: tuple[str, ...] = ()) -> str:
    """An SVG file as text. inputs: names for the graph's inputs, by number."""
    shown = [node for node in graph.nodes if _varies(graph, node)]
    layer: dict[Node, int] = {}
    for node in shown:  # each after its sources
        layer[node] = 1 + max((layer[source] for source in _sources(node, layer)), default=-1)
    for node in reversed(shown):  # inputs near their readers
        readers = [layer[reader] for reader in shown if node in _sources(reader, layer)]
        if node.type in INPUTS and readers:
            layer[node] = min(readers) - 1
    edges = [_passing(layer, source, node) for node in shown for source in _sources(node, layer)]
    rows = _ordered(layer, edges)
    labels = {node: _label(node, inputs) for node in shown}
    width = {place: CHARACTER * max(map(len, labels[place.node])) + 16 if place.target is None else 0.0
             for row in rows for place in row}  # fmt: skip
    middle = _middles(rows, edges, width)
    return _file(rows, edges, width, middle, labels)


def _varies(graph: Graph, node: Node) -> bool:
    return node.type in INPUTS or any(source.type in INPUTS for source in graph.ancestors(node))


def _sources(node: Node, shown: dict[Node, int]) -> list[Node]:
    return [source for source in dict.fromkeys(node.inputs.values()) if source is not None and source in shown]


def _passing(layer: dict[Node, int], source: Node, target: Node) -> list[Place]:
    between = [Place(n, source, target) for n in range(layer[source] + 1, layer[target])]
    return [Place(layer[source], source), *between, Place(layer[target], target)]


def _ordered(layer: dict[Node, int], edges: list[list[Place]]) -> list[list[Place]]:
    """Rows of places, each near its neighbours in the rows beside it."""
    places = dict.fromkeys([Place(n, node) for node, n in layer.items()] + [p for edge in edges for p in edge])
    rows: list[list[Place]] = [[] for _ in range(1 + max(layer.values()))]
    for place in places:
        rows[place.layer].append(place)
    beside: dict[Place, list[Place]] = {place: [] for place in places}
    for edge in edges:
        for upper, lower in pairwise(edge):
            beside[upper].append(lower)
            beside[lower].append(upper)
    for sweep in range(SWEEPS):
        rank = {place: n / max(len(row) - 1, 1) for row in rows for n, place in enumerate(row)}
        step = 1 if sweep % 2 else -1
        for row in rows[::step]:
            row.sort(key=lambda place: _mean([rank[p] for p in beside[place]], rank[place]))
            rank.update({place: n / max(len(row) - 1, 1) for n, place in enumerate(row)})
    return rows


def _middles(rows: list[list[Place]], edges: list[list[Place]], width: dict[Place, float]) -> dict[Place, float]:
    """Where each place is, from left to right: side by side, then towards its neighbours as far as there is room."""
    middle: dict[Place, float] = {}
    for row in rows:
        x = 0.0
        for place in row:
            middle[place] = x + width[place] / 2
            x += width[place] + GAP
        for place in row:
            middle[place] -= x / 2
    near: dict[Place, list[Place]] = {place: [] for place in middle}
    for edge in edges:
        for upper, lower in pairwise(edge):
            near[upper].append(lower)
            near[lower].append(upper)
    for _ in range(4 * SWEEPS):
        for row in rows:
            for n, place in enumerate(row):
                left = middle[row[n - 1]] + (width[row[n - 1]] + width[place]) / 2 + GAP if n else float("-inf")
                right = float("inf")
                if n + 1 < len(row):
                    right = middle[row[n + 1]] - (width[row[n + 1]] + width[place]) / 2 - GAP
                middle[place] = min(max(_mean([middle[p] for p in near[place]], middle[place]), left), right)
    shift = GAP - min(middle[place] - width[place] / 2 for place in middle)
    return {place: x + shift for place, x in middle.items()}


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _label(node: Node, inputs: tuple[str, ...]) -> tuple[str, str]:
    name = "output" if node.type == "NetOutput" else node.type
    if node.type in INPUTS and node.attrs["index"] < len(inputs):
        name = inputs[node.attrs["index"]]
    shape: Sequence[Any] | None = node.size if node.type in INPUTS else next(iter(node.shapes), None)
    flags = [key for key in ("transpose_weight", "transpose_x2") if node.attrs.get(key)]
    if node.type == "Cast":
        name += f" {ge_dtype(node.attrs['dst_type'])}".replace("torch.", "")
    known = "" if shape is None else "[" + ", ".join("?" if size == -1 else str(size) for size in shape) + "]"
    return name, " ".join([known, *flags]).strip()


def _file(
    rows: list[list[Place]],
    edges: list[list[Place]],
    width: dict[Place, float],
    middle: dict[Place, float],
    labels: dict[Node, tuple[str, str]],
) -> str:
    right = max(middle[place] + width[place] / 2 for place in middle) + GAP
    parts = []
    for edge in edges:
        for upper, lower in pairwise(edge):
            top = GAP + upper.layer * ROW + (BOX if upper.target is None else BOX / 2)
            bottom = GAP + lower.layer * ROW + (0 if lower.target is None else BOX / 2)
            half = (top + bottom) / 2
            a, b = middle[upper], middle[lower]
            parts.append(f'<path d="M{a:.0f},{top:.0f} C{a:.0f},{half:.0f} {b:.0f},{half:.0f} {b:.0f},{bottom:.0f}"/>')
    for place in (place for row in rows for place in row if place.target is None):
        kind = "input" if place.node.type in INPUTS else "heavy" if place.node.type in HEAVY else "box"
        x, y = middle[place], GAP + place.layer * ROW
        parts.append(
            f'<rect class="{kind}" x="{x - width[place] / 2:.0f}" y="{y}" width="{width[place]:.0f}" height="{BOX}"/>'
        )
        name, detail = map(escape, labels[place.node])
        parts.append(f'<text x="{x:.0f}" y="{y + (13 if detail else 19)}">{name}</text>')
        if detail:
            parts.append(f'<text class="small" x="{x:.0f}" y="{y + 25}">{detail}</text>')
    height = 2 * GAP + (len(rows) - 1) * ROW + BOX
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:.0f} {height}" width="{right:.0f}">'
    paper = '<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", paper, *parts, "</svg>", ""])
