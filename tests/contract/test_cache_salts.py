"""Which of vLLM's requests take the ``cache_salt`` by which the router keeps clients apart.

The router sends one with each prompt of several clients. A class without the field ignores it, so what that leaves open
is told in SECURITY.md. The classes are found in vLLM's sources: importing all of them takes a minute.
"""

import ast
import warnings
from pathlib import Path

import pytest

from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS, UNCACHED, EndpointKind

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine

FORMS = {path for path, kind in ENDPOINTS.items() if kind is EndpointKind.FORM}
WITHOUT = {"/v2/embed", *FORMS}  # as SECURITY.md says under "What one client can see of another"
BEFORE_0_32 = {"/generative_scoring"}  # whose class has a salt in the versions that have the path below
SINCE_0_32 = "/v1/systemone"
BODIES = ("request", "body")  # the parameters of handlers


class Sources:
    """The handlers, classes and names of classes in vLLM's entrypoints."""

    def __init__(self, folder):
        self.bodies = {}  # by path: the annotation of a handler's body
        self.classes = {}
        self.aliases = {}
        for file in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                self.read(node)

    def read(self, node):
        if isinstance(node, ast.ClassDef):
            self.classes[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id.endswith("Request"):
                self.aliases[target.id] = node.value
        elif isinstance(node, ast.AsyncFunctionDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
                    self.bodies[call.args[0].value] = [one.annotation for one in node.args.args if one.arg in BODIES]

    def names_in(self, hint):
        """Return the classes of requests that an annotation may mean."""
        names = {one.id for one in ast.walk(hint) if isinstance(one, ast.Name) and one.id.endswith("Request")}
        found = names & self.classes.keys()
        for name in names & self.aliases.keys():
            found |= self.names_in(self.aliases[name])
        return found

    def takes_salt(self, name):
        node = self.classes.get(name)
        if node is None:
            return False
        fields = {
            one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        bases = {one.id for base in node.bases for one in ast.walk(base) if isinstance(one, ast.Name)}
        return "cache_salt" in fields or any(self.takes_salt(base) for base in bases - {name})


@pytest.fixture(scope="module")
def requests():
    """Return by path which classes of requests an endpoint takes, and whether each takes a salt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm
    sources = Sources(Path(vllm.__file__).parent / "entrypoints")
    return {
        path: {name: sources.takes_salt(name) for hint in hints for name in sources.names_in(hint)}
        for path, hints in sources.bodies.items()
    }


def test_every_prompt_takes_a_salt_but_for_those_that_are_told(requests):
    """Another one would have two clients share a prefix cache, and nobody would know."""
    served = {path: requests[path] for path in ENDPOINTS.keys() & requests.keys() - UNCACHED}

    without = {path for path, takes in served.items() if not takes or not all(takes.values())}

    assert len(served) > 15  # the sources were read as they are meant
    assert all(takes for path, takes in served.items() if path not in BEFORE_0_32)
    assert without == (WITHOUT if SINCE_0_32 in requests else WITHOUT | BEFORE_0_32)


def test_what_is_left_open_is_told():
    """Operators choose by it what they let which tenants do."""
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    told = page.partition("What remains:")[2].partition("\n## ")[0]

    assert "`/v1/audio/...`" in told
    assert {path for path in BEFORE_0_32 | WITHOUT - FORMS if f"`{path}`" not in told} == set()
