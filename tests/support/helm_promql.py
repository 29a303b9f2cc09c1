"""Alert rules, tried on made-up series, as ``promtool test rules`` tries them: for machines that have no promtool.

promql_parser, which is Prometheus' grammar and its type checks, reads the expressions; what follows from them is
computed here, for the part of PromQL that the chart's rules use. Whatever else an expression uses raises
:class:`Unknown`. A test compares the verdicts with those of promtool wherever there is one.
"""

import itertools
import math
import operator
import re
from dataclasses import dataclass

import pytest

LOOKBACK_S = 300.0
EVERY_S = 60.0  # between two looks, and between two samples
NAME = "__name__"


class Unknown(Exception):
    """The expression uses something that is not computed here."""


def parsed(expression):
    """Return the syntax tree; ValueError, in Prometheus' words, if it is none."""
    try:
        import promql_parser
    except ImportError:
        pytest.fail(
            "promql-parser is missing: it is in requirements/dev.in, so `make install` brings it", pytrace=False
        )
    return promql_parser.parse(expression)


def series(given):
    """Read promtool's notation: {'name{label="x"}': '0+1x30 _x5'} becomes [(labels, [(time, value)])]."""
    return [(_labels(name), _samples(values)) for name, values in given.items()]


def _labels(text):
    name, _, inner = text.partition("{")
    return {NAME: name} | dict(re.findall(r'(\w+)="([^"]*)"', inner))


def _samples(text):
    found = []
    for word in text.split():
        match = re.fullmatch(r"(_|-?[\d.]+)([+-][\d.]+)?(?:x(\d+))?", word)
        assert match, f"{word!r} is not a run of samples"
        first = match[1]
        step = float(match[2] or 0)
        times = int(match[3] or 0)
        if first == "_":
            found += [None] * (times or 1)
        else:
            found += [float(first) + step * n for n in range(times + 1)]
    return [(n * EVERY_S, value) for n, value in enumerate(found) if value is not None]


@dataclass(frozen=True)
class Rule:
    """An alert, as it stands in a PrometheusRule."""

    expr: object
    for_s: float
    labels: dict[str, str]

    @classmethod
    def read(cls, rule):
        number, unit = re.fullmatch(r"(\d+)([smh])", rule["for"]).groups()
        return cls(parsed(rule["expr"]), int(number) * {"s": 1, "m": 60, "h": 3600}[unit], rule["labels"])


def firing(rule, given, *, at_s):
    """Return the labels of the alerts that fire at a time, having looked at the series once every interval."""
    since = {}
    firing = []
    for step in range(int(at_s // EVERY_S) + 1):
        now = step * EVERY_S
        found = [_without_name(labels) for labels in Evaluation(given, now).of(rule.expr)]
        since = {labels: since.get(labels, now) for labels in found}
        firing = [labels for labels, start in since.items() if now - start >= rule.for_s]
    return [dict(labels) | rule.labels for labels in firing]


def _without_name(labels):
    return frozenset(pair for pair in labels if pair[0] != NAME)


COMPARISONS = {
    "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le,
}  # fmt: skip
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}
AGGREGATES = {"sum": math.fsum, "min": min, "max": max, "count": len}


class Evaluation:
    """Expressions at one time. A vector is {labels as a frozenset of pairs: value}, a scalar a float."""

    def __init__(self, given, now):
        self.given = given
        self.now = now

    def of(self, node):
        kind = type(node).__name__
        method = getattr(self, f"_{kind.removesuffix('Expr').lower()}", None)
        if method is None:
            raise Unknown(kind)
        return method(node)

    def _numberliteral(self, node):
        return node.val

    def _paren(self, node):
        return self.of(node.expr)

    def _vectorselector(self, node):
        end = self.now - _seconds(node.offset)
        found = {}
        for labels, samples in self._selected(node):
            recent = [value for time, value in samples if end - LOOKBACK_S < time <= end]
            if recent:
                found[frozenset(labels.items())] = recent[-1]
        return found

    def _selected(self, node):
        if node.at is not None or node.matchers.or_matchers:
            raise Unknown("@, or alternatives among matchers")
        wanted = [(m.name, str(m.op).removeprefix("MatchOp."), m.value) for m in node.matchers.matchers]
        wanted += [(NAME, "Equal", node.name)] if node.name else []
        return [one for one in self.given if all(_fits(one[0].get(name, ""), op, value) for name, op, value in wanted)]

    def _range(self, node):
        """Return (labels, samples within the range, its beginning, its end) of every series that has any."""
        selector = node.vector_selector
        end = self.now - _seconds(selector.offset)
        begin = end - _seconds(node.range)
        for labels, samples in self._selected(selector):
            within = [(time, value) for time, value in samples if begin < time <= end]
            if within:
                yield _without_name(labels.items()), within, begin, end

    def _call(self, node):
        name, args = node.func.name, node.args
        if name == "absent":
            return {} if self.of(args[0]) else {frozenset(_pinned(args[0]).items()): 1.0}
        if name in ("max_over_time", "min_over_time"):
            most = max if name == "max_over_time" else min
            return {labels: most(value for _, value in within) for labels, within, _, _ in self._range(args[0])}
        if name in ("rate", "increase"):
            risen = {labels: _increase(*rest) for labels, *rest in self._range(args[0])}
            per = _seconds(args[0].range) if name == "rate" else 1.0
            return {labels: value / per for labels, value in risen.items() if value is not None}
        if name == "histogram_quantile":
            return _quantiles(self.of(args[0]), self.of(args[1]))
        raise Unknown(name)

    def _aggregate(self, node):
        if str(node.op) not in AGGREGATES or node.param is not None:
            raise Unknown(str(node.op))
        by = node.modifier
        if by is not None and str(by.type) != "AggModifierType.By":
            raise Unknown(str(by.type))
        groups = {}
        for labels, value in self.of(node.expr).items():
            kept = frozenset(pair for pair in labels if by is not None and pair[0] in by.labels)
            groups.setdefault(kept, []).append(value)
        return {labels: float(AGGREGATES[str(node.op)](values)) for labels, values in groups.items()}

    def _binary(self, node):
        left = self.of(node.lhs)
        right = self.of(node.rhs)
        op = str(node.op)
        modifier = node.modifier
        if modifier is not None and (modifier.return_bool or modifier.group_labels):
            raise Unknown("bool, or group_left")
        if op in ("and", "or", "unless"):
            return _joined(op, left, right, modifier)
        if isinstance(left, float) and isinstance(right, float):
            return _apply(op, left, right)
        if isinstance(right, float):
            return _kept(op, {labels: (value, right) for labels, value in left.items()})
        if isinstance(left, float):
            if op in COMPARISONS:
                raise Unknown("a number compared with a vector")
            return _kept(op, {labels: (left, value) for labels, value in right.items()})
        others = {_key(labels, modifier): value for labels, value in right.items()}
        if len(others) < len(right) or len({_key(labels, modifier) for labels in left}) < len(left):
            raise Unknown("many-to-many matching")
        keyed = {labels: _key(labels, modifier) for labels in left}
        return _kept(op, {labels: (left[labels], others[key]) for labels, key in keyed.items() if key in others})


def _seconds(delta):
    return 0.0 if delta is None else delta.total_seconds()


def _fits(label, op, value):
    found = label == value if op.endswith("Equal") else bool(re.fullmatch(value, label))
    return found is (not op.startswith("Not"))


def _pinned(node):
    """Return the labels that an absent vector has: those of its selector that have one value."""
    while not hasattr(node, "matchers"):
        if type(node).__name__ == "BinaryExpr":
            return {}
        node = node.expr
    return {m.name: m.value for m in node.matchers.matchers if str(m.op) == "MatchOp.Equal"}


def _key(labels, modifier):
    matching = modifier.matching if modifier is not None else None
    if matching is None:
        return _without_name(labels)
    include = str(matching.type) == "LabelModifierType.Include"
    return frozenset(p for p in labels if p[0] != NAME and (p[0] in matching.labels) is include)


def _joined(op, left, right, modifier):
    others = {_key(labels, modifier) for labels in right}
    if op == "or":
        mine = {_key(labels, modifier) for labels in left}
        return left | {labels: value for labels, value in right.items() if _key(labels, modifier) not in mine}
    return {labels: value for labels, value in left.items() if (_key(labels, modifier) in others) is (op == "and")}


def _apply(op, left, right):
    if op == "/":
        return left / right if right else math.copysign(math.inf, left) if left else math.nan
    if op not in ARITHMETIC:
        raise Unknown(op)
    return ARITHMETIC[op](left, right)


def _kept(op, pairs):
    """A comparison keeps what it is true of, as it is; arithmetic drops the name."""
    if op in COMPARISONS:
        return {labels: left for labels, (left, right) in pairs.items() if COMPARISONS[op](left, right)}
    return {_without_name(labels): _apply(op, *pair) for labels, pair in pairs.items()}


def _increase(samples, begin, end):
    """As Prometheus: resets are made good, and what is seen is carried on to the range's ends if they are near."""
    if len(samples) < 2:
        return None
    values = [value for _, value in samples]
    (first_s, first), (last_s, last) = samples[0], samples[-1]
    risen = last - first + sum(a for a, b in itertools.pairwise(values) if b < a)
    sampled = last_s - first_s
    mean = sampled / (len(samples) - 1)
    to_start, to_end = first_s - begin, end - last_s
    to_start = mean / 2 if to_start >= mean * 1.1 else to_start
    if risen > 0 and first >= 0:
        to_start = min(to_start, sampled * first / risen)
    to_end = mean / 2 if to_end >= mean * 1.1 else to_end
    return risen * (sampled + to_start + to_end) / sampled


def _quantiles(share, buckets):
    groups = {}
    for labels, value in buckets.items():
        bound = float(dict(labels)["le"])
        groups.setdefault(frozenset(p for p in labels if p[0] not in ("le", NAME)), []).append((bound, value))
    found = {labels: _quantile(share, sorted(ones)) for labels, ones in groups.items()}
    return {labels: value for labels, value in found.items() if value is not None}


def _quantile(share, buckets):
    if len(buckets) < 2 or buckets[-1][0] != math.inf:
        return None
    rank = share * buckets[-1][1]
    if not rank:
        return math.nan
    index = next(i for i, (_, count) in enumerate(buckets) if count >= rank)
    if index == len(buckets) - 1:
        return buckets[-2][0]
    start, below = buckets[index - 1] if index else (0.0, 0.0)
    bound, count = buckets[index]
    return start + (bound - start) * (rank - below) / (count - below)
