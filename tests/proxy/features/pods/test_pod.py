"""What a pod says of its engine."""

import msgspec
import pytest

from pdrelay_proxy.core.model import EngineRole, Role
from pdrelay_proxy.errors import AddressError
from pdrelay_proxy.features.pods.pod import Pod, engine_of
from support.kube_api import pod


def engine(**said):
    return engine_of(msgspec.convert({**pod(**said), "apiVersion": "v1"}, Pod))


def test_a_ready_pod_is_an_engine():
    """Its address is the pod's own: what a service says would be any of them."""
    found = engine(role="decode", ip="10.1.2.3")

    assert (found.role, found.target.text, found.leaves) == (Role.DECODE, "http://10.1.2.3:8000", False)


@pytest.mark.parametrize("role", EngineRole)
def test_a_pod_may_serve_both_roles(role):
    """Until a router gives it one; it is a pod of the decode pool by its key and its name."""
    found = engine(role=role)

    assert found.serves is role
    assert found.role is (Role.PREFILL if role is EngineRole.PREFILL else Role.DECODE)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"revision": "v7"}, "http://10.0.0.1:8000#revision=v7"),
        ({"ranks": "2", "mode": "push"}, "http://10.0.0.1:8000#dp=2&mode=push"),
        ({"annotations": {"pdrelay/port": "9000"}}, "http://10.0.0.1:9000"),
        ({"port": None, "annotations": {"pdrelay/port": "9000"}}, "http://10.0.0.1:9000"),
        ({"revision": "label", "annotations": {"pdrelay/revision": "note"}}, "http://10.0.0.1:8000#revision=note"),
        ({"slice": "rack-1"}, "http://10.0.0.1:8000#slice=rack-1"),
        ({"revision": "v7", "slice": "rack-1"}, "http://10.0.0.1:8000#revision=v7&slice=rack-1"),
        ({"scheme": "https"}, "https://10.0.0.1:8000"),
        ({"ip": "fd00::7"}, "http://[fd00::7]:8000"),
        ({"worker": 0}, "http://10.0.0.1:8000"),
    ],
)
def test_labels_and_annotations_say_the_rest(said, text):
    """An annotation counts before a label, and a number before the named port."""
    assert engine(**said).target.text == text


@pytest.mark.parametrize(
    "said", [{"ip": None}, {"phase": "Failed"}, {"phase": "Succeeded"}, {"role": None}, {"worker": 1}]
)
def test_what_is_no_engine_is_none(said):
    """No address yet, over, of another kind, or a worker of a LeaderWorkerSet, whose leader speaks for it."""
    assert engine(**said) is None


@pytest.mark.parametrize("said", [{"deleted": True}, {"ready": False}])
def test_a_pod_that_is_deleted_or_not_ready_leaves(said):
    """It gets nothing new, from the moment it is marked and not from the moment it is gone."""
    assert engine(**said).leaves


@pytest.mark.parametrize(
    ("move", "expected"), [("true", (True, False)), ("false", (False, False)), (None, (False, False))]
)
def test_streams_move_from_a_pod_that_is_deleted_if_it_says_so(move, expected):
    """One that is not ready for a moment keeps them: it may come back."""
    annotations = {} if move is None else {"pdrelay/move": move}
    deleted, unready = engine(deleted=True, annotations=annotations), engine(ready=False, annotations=annotations)

    assert (deleted.moves, unready.moves) == expected


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"annotations": {"pdrelay/move": "yes"}}, "pdrelay/move is 'yes': write true or false"),
        ({"role": "all"}, "pdrelay/role is 'all': write prefill, decode or both"),
        ({"role": "both", "ranks": "2"}, "pdrelay/role is 'both': write prefill or decode: pdrelay/ranks is set"),
        ({"scheme": "ftp"}, "pdrelay/scheme"),
        ({"revision": "a&b"}, "pdrelay/revision"),
        ({"slice": "a&b"}, "pdrelay/slice"),
        ({"ranks": "many"}, "dp=N"),
        ({"port": None}, "no container port named http"),
        ({"annotations": {"pdrelay/port": "70000"}}, "between 1 and 65535"),
    ],
)
def test_what_cannot_be_is_said(said, named):
    """In one sentence, with the pod's name."""
    with pytest.raises(AddressError, match=named) as info:
        engine(**said)
    assert "pod " in str(info.value)


def test_another_label_may_name_the_slice():
    """Kubernetes copies the zone of the node; a DisaggregatedSet numbers its slices."""
    body = pod()
    body["metadata"]["labels"]["topology.kubernetes.io/zone"] = "eu-1a"
    found = engine_of(msgspec.convert(body, Pod), slice_label="topology.kubernetes.io/zone")

    assert found.target.slice == "eu-1a"
