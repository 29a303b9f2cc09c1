"""Kubernetes' own schemas, strict, and those of the CRDs that the chart can make use of."""

import functools
import importlib.util
import json
import re
from pathlib import Path

import pytest
from referencing import Registry, Resource

from support.helm_chart import ROOT
from support.helm_objects import WORKLOADS, templates
from support.json_schemas import Draft202012Validator

CRDS = ROOT / "tests" / "helm" / "crds"
VERSIONS = tuple(f"1.{minor}.0" for minor in range(29, 38))
# For parametrize: what the oldest and the newest take, those between them take.
EACH_VERSION = (VERSIONS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in VERSIONS[1:-1]), VERSIONS[-1])


@functools.cache
def _folder(version):
    found = importlib.util.find_spec("kubernetes_validate")  # its files are all that we need of it
    if found is None:
        missing = "kubernetes-validate is missing: it is in requirements/dev.in, so `make install` brings it"
        pytest.fail(missing, pytrace=False)
    return Path(found.submodule_search_locations[0]) / "kubernetes-json-schema" / f"v{version}-local-strict"


@functools.cache
def _definitions(version):
    return Resource.from_contents(json.loads((_folder(version) / "_definitions.json").read_text()))


@functools.cache
def _validator(version, kind, api):
    name = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api)
    schema = json.loads((_folder(version) / f"{kind.lower()}-{name}.json").read_text())
    return Draft202012Validator(schema, registry=_definitions(version) @ Registry())


@functools.cache
def _crd(kind):
    return Draft202012Validator(json.loads((CRDS / f"{kind.lower()}.json").read_text()))


def wrong(o, version):
    """Return what is wrong with an object, in the words of its schema."""
    if not _is_crd(o):
        return _errors(_validator(version, o["kind"], o["apiVersion"]), o)
    found = _errors(_crd(o["kind"]), o)
    if o["kind"] in WORKLOADS:
        for template in templates(o):
            pod = {"apiVersion": "v1", "kind": "Pod", **template}
            found += _errors(_validator(version, "Pod", "v1"), pod)
    return found


def _is_crd(o):
    return (CRDS / f"{o['kind'].lower()}.json").exists()


def _errors(validator, o):
    return [
        f"{o['kind']}: {'.'.join(map(str, error.path))}: {error.message[:200]}" for error in validator.iter_errors(o)
    ]
