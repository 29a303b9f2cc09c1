"""The chart, rendered by real helms: what tests look at are the objects, as Kubernetes would get them."""

import base64
import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from support.helm_objects import kind, of_controller

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "pdrelay"
TOOLS = ROOT / ".pdrelay" / "tools"
CI = sorted((CHART / "ci").glob("*.yaml"))
HELMS = (pytest.param("helm3", marks=pytest.mark.slow), "helm4")  # what one renders, the other does: test_chart.py
LEAST = {  # what a rendering needs that no site is in
    "acceptDrawnSecrets": True,
    "router": {"image": {"repository": "registry.example.com/pdrelay/router"}},
    "engine": {"image": {"repository": "registry.example.com/pdrelay/engine"}},
}


class Refused(Exception):
    """Helm did not render or accept the chart; the message is what it said."""


@dataclass(frozen=True)
class Chart:
    """A chart in a folder; values are a mapping, on top of a file of ci/ if one is named, on top of the least."""

    folder: Path = CHART
    least: Mapping[str, object] = field(default_factory=lambda: LEAST, hash=False)

    def render(self, values=None, **more):
        """Return the objects; Refused if there are none."""
        return yaml.load_all(self.text(values, **more), LOADER)

    def objects(self, values=None, **more):
        """Return the objects; what was drawn at random reads DRAWN, so that two renderings can be compared."""
        render = _render_once if self.folder == CHART else _render
        found = yaml.load_all(render(*self._order(values, **more)), LOADER)
        return [_drawn(one) if one["kind"] == "Secret" else one for one in found if one]

    def text(self, values=None, **more):
        return _render(*self._order(values, **more))

    def _order(self, values=None, *, ci=None, helm="helm4", release="r", namespace="ns"):
        return self.folder, json.dumps(dict(self.least)), json.dumps(values or {}), ci, helm, release, namespace

    def lint(self, *, ci=None, helm="helm4"):
        return run(helm, "lint", "--strict", str(self.folder), *(["-f", str(ci)] if ci else []))


def _render(folder, least, values, ci, helm, release, namespace):
    with least_values(json.loads(least)) as base:
        files = [*base, *(["-f", str(CHART / "ci" / f"{ci}-values.yaml")] if ci else [])]
        argv = ["template", release, str(folder), "-n", namespace, *files]
        return run(helm, *argv, *(["-f", "-"] if json.loads(values) else []), stdin=values)


_render_once = functools.cache(_render)  # the chart itself does not change while tests run


@contextmanager
def least_values(least=LEAST):
    """Yield arguments of helm with these values; none: there are none."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(least, file)
        file.flush()
        yield ["-f", file.name] if least else []


def notes(*more):
    """Return what helm says after an installation with these arguments, which is only pretended."""
    with least_values() as base:
        text = run("helm4", "install", "r", str(CHART), "--dry-run=client", "-n", "ns", *base, *more)
    return text.partition("NOTES:")[2]


DRAWN = "drawn at random"


def _drawn(secret):
    """Replace 48 letters and digits; anything else stays, for a check to find."""
    plain = {key: base64.b64decode(value) for key, value in secret["data"].items()}
    return secret | {
        "data": {k: DRAWN if re.fullmatch(rb"[A-Za-z0-9]{48}", v) else secret["data"][k] for k, v in plain.items()}
    }


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


ENVIRONMENT = os.environ | {"GOGC": "off"}  # a fifth of the CPU time of a rendering, which takes 60 MB as it is


def run(helm, *argv, stdin=""):
    """Run one of the two helms; return what it printed."""
    done = subprocess.run(
        [binary(helm), *argv], input=stdin, capture_output=True, text=True, timeout=60, check=False, env=ENVIRONMENT
    )
    if done.returncode:
        raise Refused((done.stderr + done.stdout).strip())
    return done.stdout


@functools.cache
def binary(helm):
    path = TOOLS / helm
    if not path.exists():
        pytest.fail(
            f"{path} is missing: `python tests/helm/get_helm.py` (or `make test-helm`) fetches it", pytrace=False
        )
    return str(path)


@functools.cache
def default(ci=None, helm="helm4"):
    """Return the objects of an unchanged chart, with what a controller makes of them; nobody may change them."""
    objects = Chart().objects(ci=ci, helm=helm)
    return (*objects, *(made for whole in kind(objects, "DisaggregatedSet") for made in of_controller(whole)))


def names_of_ci():
    return [path.name.removesuffix("-values.yaml") for path in CI]


# Every combination that the checks go through: the chart as it is, and with each file of ci/.
CASES = (None, *names_of_ci())
