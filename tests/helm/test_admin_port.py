"""The routers' admin port in the chart: who gets there, who scrapes it, and what probes find there."""

import ssl

import httpx
import pytest

from support.certificates import Authority
from support.helm_chart import HELMS, Chart, Refused, default, notes
from support.helm_checks import complaints
from support.helm_objects import PROBES, container, flag, kind, one, router, templates
from support.router_process import RouterProcess
from support.sim import until

pytestmark = pytest.mark.processes


PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "operators"}}}
MTLS = {"tls": {"secretName": "t", "clientCaSecretName": "c"}}
PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def rules(objects):
    """Return the peers that may reach each port of the routers; None: everybody."""
    policy = one(objects, "NetworkPolicy", "r-pdrelay-router")
    found = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["spec"]["ingress"]}
    return {port: peers for port, peers in found.items() if port != "peers"}  # that is where routers hear each other


@pytest.mark.parametrize("helm", HELMS)
def test_clients_reach_one_port_and_prometheus_the_other(helm):
    """A policy knows ports and no paths: with one port, who may send prompts could ask for /instances, too."""
    named = {"routerFrom": [PEER], "adminFrom": [PEER]}
    plain, chosen, nobody = (
        rules(Chart().objects({"networkPolicy": values, "tests": {"enabled": False}}, helm=helm))
        for values in ({}, named, {"metricsFrom": []})
    )

    assert plain == {"http": None, "admin": [PROMETHEUS]}
    assert chosen == {"http": [PEER], "admin": [PROMETHEUS, PEER]}
    assert nobody == {"http": None}


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("kind_", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_a_load_balancer_has_the_clients_port_alone(helm, kind_):
    """Whatever type the routers' service has, the other one is inside the cluster."""
    objects = Chart().objects({"router": {"allowUnauthenticated": True, "service": {"type": kind_}}}, helm=helm)
    main, admin = (one(objects, "Service", name)["spec"] for name in ("r-pdrelay-router", "r-pdrelay-router-admin"))

    assert (main["type"], [port["targetPort"] for port in main["ports"]]) == (kind_, ["http"])
    assert (admin["type"], [port["targetPort"] for port in admin["ports"]]) == ("ClusterIP", ["admin"])
    assert main["selector"] == admin["selector"]


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(
    "values", [{}, {"tls": {"secretName": "t"}}, MTLS], ids=["http", "https", "client certificates"]
)
def test_routers_are_asked_whether_they_are_ready_whatever_clients_must_show(helm, values):
    """With client certificates readiness was an open TCP port: a router got traffic before it knew an engine."""
    c = container(templates(router(Chart().objects({"router": values}, helm=helm)))[0])
    asked = {probe: c[probe]["httpGet"] for probe in PROBES}

    assert {probe["port"] for probe in asked.values()} == {"admin"}
    assert {probe["scheme"] for probe in asked.values()} == {"HTTPS" if values else "HTTP"}
    assert [asked[probe]["path"] for probe in PROBES] == ["/live", "/ready", "/live"]


@pytest.mark.parametrize("helm", HELMS)
def test_prometheus_scrapes_the_admin_port_under_the_same_job(helm):
    """Alerts and dashboards go by the job, which is the name of a service unless a label says otherwise."""
    values = {"router": MTLS, "monitoring": {"serviceMonitor": {"enabled": True}}}
    objects = Chart().objects(values, helm=helm)
    (monitor,) = kind(objects, "ServiceMonitor")
    service = one(objects, "Service", "r-pdrelay-router-admin")
    (end,) = monitor["spec"]["endpoints"]

    assert (end["port"], end["scheme"], end["tlsConfig"]) == ("admin", "https", {"insecureSkipVerify": True})
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "r-pdrelay-router"
    assert complaints(objects) == []


def test_two_ports_that_are_one_are_refused():
    """In a sentence, before anything is installed."""
    with pytest.raises(Refused, match=r"router.port and router.adminPort are both 8081"):
        Chart().objects({"router": {"port": 8081}})


def probe(port, asked, values):
    """Ask as the kubelet does: it looks at no certificate and shows none, and takes 200 to 399 for success."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    url = f"{asked['scheme'].lower()}://127.0.0.1:{port}{asked['path']}"
    try:
        return 200 <= httpx.get(url, verify=context, timeout=values).status_code < 400
    except httpx.HTTPError:
        return False


@pytest.mark.slow  # starts a router, and asks it as long as it takes to find its engines' source
@pytest.mark.parametrize("values", [{}, MTLS], ids=["http", "client certificates"])
def test_what_the_chart_probes_is_what_a_router_answers(tmp_path, values):
    """By its own arguments, but for the cluster: ready when it knows its engines, alive before and after that."""
    alone = {"peers": {"enabled": False}}  # their port may be taken here
    c = container(templates(router(Chart().objects({"router": values | alone})))[0])
    authority = Authority(tmp_path, "ca")
    pair = authority.sign("router")
    files = {"/etc/pdrelay/tls/tls.crt": pair.cert, "/etc/pdrelay/tls/tls.key": pair.key}
    files["/etc/pdrelay/client-ca/ca.crt"] = authority.own.cert
    away = (
        "--host",
        "--port",
        "--admin-port",
        "--kubernetes-selector",
        "--kubernetes-namespace",
        "--store",
        "--drain-grace",
    )
    args = list(c["args"][1:])
    for name in away:
        at = args.index(name)
        del args[at : at + 2]
    args = [files.get(arg, arg) for arg in args]
    process = RouterProcess(tmp_path / "router.log", *args, "--admin-port", "0", "--drain-grace", "60")
    try:
        process.started()
        until(lambda: "the admin port is" in process.said)
        port = int(process.said.partition("the admin port is ")[2].split()[0].rpartition(":")[2])
        timeout = c["readinessProbe"]["timeoutSeconds"] * 5  # this machine may be busy
        found = [probe(port, c[name]["httpGet"], timeout) for name in PROBES]
        process.terminate()
        until(lambda: not probe(port, c["readinessProbe"]["httpGet"], timeout))
        leaving = probe(port, c["livenessProbe"]["httpGet"], timeout)
    finally:
        process.kill()

    assert found == [True, True, True]
    assert leaving


def test_notes_say_where_the_status_page_is():
    """The service of clients has it no more."""
    assert "port-forward service/r-pdrelay-router-admin 8081:8081" in notes()


def test_operators_always_have_a_port_of_their_own():
    """One port for clients and operators was never needed, and no policy could tell them apart there."""
    assert flag(container(templates(router(default()))[0])["args"], "--admin-port") == "8081"
    with pytest.raises(Refused, match="adminPort"):
        Chart().objects({"router": {"adminPort": 0}})
