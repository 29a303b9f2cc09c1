"""Alerts, dashboards and autoscalers: what they ask for exists, and alerts fire when they should and not otherwise."""

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from support.helm_chart import HELMS, ROOT, TOOLS, Chart, Refused, default
from support.helm_metrics import ENGINE_TARGET, TARGET, engine_metrics, loose, named, router_metrics
from support.helm_objects import kind, matches, pods
from support.helm_promql import Evaluation, Rule, firing, parsed, series
from support.helm_schemas import wrong

pytestmark = pytest.mark.processes


SERIES = yaml.safe_load((Path(__file__).parent / "alerts.yaml").read_text())
ROUTER = 'namespace="ns",job="r-pdrelay-router"'
ENGINE = 'namespace="ns",pdrelay_release="r"'
PLACE = 'cluster=~"$cluster",namespace="$namespace"'  # of a dashboard, by its variables
BOARD_ROUTER, BOARD_ENGINE = f'{PLACE},job="$release-router"', f'{PLACE},pdrelay_release="$release"'
SCRAPED = {"monitoring": {"podMonitor": {"enabled": True}}}


def rules():
    (rule,) = kind(default("2p4d"), "PrometheusRule")
    (group,) = rule["spec"]["groups"]
    return group["rules"]


def dashboards():
    return dashboards_of(default("2p4d"))


def dashboards_of(objects):
    found = [o for o in kind(objects, "ConfigMap") if o["metadata"]["labels"].get("grafana_dashboard") == "1"]
    return [json.loads(text) for o in found for text in o["data"].values()]


def queries():
    """Return every PromQL expression of the chart, by what it is for."""
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    for board in dashboards():
        for panel in board["panels"]:
            found |= {f"{board['title']}/{panel['title']}/{t['refId']}": t["expr"] for t in panel["targets"]}
    for case in ("2p4d", "tp8-multinode", "wanted-engines", "one-pool"):
        for scaled in kind(default(case), "ScaledObject"):
            for number, trigger in enumerate(scaled["spec"]["triggers"]):
                found[f"{case} {scaled['metadata']['name']}/{number}"] = trigger["metadata"]["query"]
    return found


@functools.cache
def real():
    """Return every metric that a router or an engine has, with its labels and those of its target."""
    up = {"up": ENGINE_TARGET}
    process = {"process_cpu_seconds_total": set(TARGET), "process_resident_memory_bytes": set(TARGET)}
    routers = {name: labels | TARGET for name, labels in router_metrics().items()}
    return up | process | routers | {name: labels | ENGINE_TARGET for name, labels in engine_metrics().items()}


def test_every_metric_and_label_of_a_query_exists():
    """A query for a metric that is not there is an alert that never fires."""
    metrics = real()
    for name, expression in queries().items():
        selected, grouped = named(expression)
        labels_of = [(metric, label) for metric, labels in selected for label in labels]

        assert selected, name
        assert [metric for metric, _ in selected if metric not in metrics] == [], name
        assert [(metric, label) for metric, label in labels_of if label not in metrics[metric]] == [], name
        known = set().union(*(metrics[metric] for metric, _ in selected))
        assert [label for label in grouped if label not in known] == [], name
        assert loose(expression) == set(), name
        assert any(labels in expression for labels in (ROUTER, ENGINE, BOARD_ROUTER, BOARD_ENGINE)), name


def test_autoscalers_look_at_metrics_that_engines_have():
    """And KEDA's by the name that vLLM gives the model: model_name."""
    for case in ("2p4d", "tp8-multinode", "wanted-engines", "one-pool"):
        for o in kind(default(case), "HorizontalPodAutoscaler"):
            assert all(m["pods"]["metric"]["name"] in real() for m in o["spec"]["metrics"] if m["type"] == "Pods")
    query = queries()["2p4d r-pdrelay-prefill/0"]
    assert 'model_name="qwen"' in query
    assert 'pdrelay_role="prefill"' in query


def test_the_ratio_of_the_pools_is_kept_by_counting_the_other():
    """Half a prefill engine for each decode engine that answers Prometheus; the autoscaler rounds up."""
    query = queries()["tp8-multinode r-pdrelay-prefill/2"]
    role = f'up{{{ENGINE},pdrelay_role="%s",pod="%s"}}'
    given = {role % ("decode", name): value for name, value in {"a": "1", "b": "1", "c": "1", "d": "0"}.items()}
    given |= {role % ("prefill", "p"): "1", 'up{namespace="ns",pdrelay_release="other",pdrelay_role="decode"}': "1"}

    assert Evaluation(series(given), 0.0).of(parsed(query)) == {frozenset(): 1.5}


def test_a_pool_may_be_as_large_as_the_routers_say():
    """Each of several routers says it; they look at the same engines, and one that has just started says less."""
    query = queries()["wanted-engines r-pdrelay-decode/0"]
    wanted = f'pdrelay_wanted_engines{{{ROUTER},pod="%s",role="%s"}}'
    given = {wanted % ("a", "decode"): "5", wanted % ("b", "decode"): "4", wanted % ("a", "prefill"): "9"}
    given |= {'pdrelay_wanted_engines{namespace="ns",job="other-router",role="decode"}': "7"}

    assert Evaluation(series(given), 0.0).of(parsed(query)) == {frozenset(): 5}


def test_one_pool_is_as_large_as_both_roles_need():
    """Of the same router: the largest number of one and the largest of the other may be of different moments."""
    query = queries()["one-pool r-pdrelay-decode/0"]
    wanted = f'pdrelay_wanted_engines{{{ROUTER},pod="%s",role="%s"}}'
    given = {wanted % ("a", "decode"): "5", wanted % ("a", "prefill"): "3"}
    given |= {wanted % ("b", "decode"): "2", wanted % ("b", "prefill"): "7"}

    assert Evaluation(series(given), 0.0).of(parsed(query)) == {frozenset(): 9}


@pytest.mark.parametrize(
    ("prefill", "decode", "sentence"),
    [
        ({"type": "hpa", "perOther": 1}, {}, "only KEDA can count"),
        ({"type": "keda", "perOther": 1}, {"type": "keda", "perOther": 1.5}, "each pool would make the other grow"),
    ],
)
def test_a_ratio_that_cannot_be_kept_is_refused(prefill, decode, sentence):
    """The second would end with all the accelerators there are."""
    with pytest.raises(Refused) as refusal:
        Chart().text({"prefill": {"autoscaling": prefill}, "decode": {"autoscaling": decode}} | SCRAPED)

    assert sentence in str(refusal.value)


@pytest.mark.parametrize("helm", HELMS)
def test_keda_takes_silence_for_an_error_and_not_for_zero(helm):
    """A Prometheus that has lost its targets would empty the pool at midday, and no fallback be asked."""
    scaled = {"autoscaling": {"type": "keda", "min": 2, "perOther": 0.5}, "replicas": 5}
    values = {"prefill": scaled, **SCRAPED}
    (o,) = kind(Chart().objects(values, helm=helm), "ScaledObject")

    assert [one["metadata"]["ignoreNullValues"] for one in o["spec"]["triggers"]] == ["false", "false"]
    assert o["spec"]["fallback"] == {"failureThreshold": 5, "replicas": 5, "behavior": "currentReplicasIfHigher"}
    assert {one["metricType"] for one in o["spec"]["triggers"]} == {"AverageValue"}  # a fallback needs it


@pytest.mark.parametrize("helm", HELMS)
def test_keda_may_ask_a_managed_prometheus(helm):
    """One wants a token, another a header that names the tenant, a third a region: every trigger has them."""
    reference = {"name": "amp", "kind": "ClusterTriggerAuthentication"}
    keda = {"authenticationRef": reference, "metadata": {"authModes": "bearer", "customHeaders": "X-Scope-OrgID=team"}}
    scaled = {"autoscaling": {"type": "keda", "perOther": 0.5, "more": [{"metric": "a", "target": "1"}]}}
    more = {"autoscaling": {"type": "keda", "more": [{"metric": "pdrelay_requests_running", "target": "9"}]}}
    watched = {"monitoring": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}}
    objects = Chart().objects({"keda": keda, "prefill": scaled, "router": more, **watched}, helm=helm)
    triggers = [t for o in kind(objects, "ScaledObject") for t in o["spec"]["triggers"] if t["type"] == "prometheus"]

    assert len(triggers) == 4
    for trigger in triggers:
        assert trigger["authenticationRef"] == reference
        assert trigger["metadata"] | keda["metadata"] == trigger["metadata"]
    assert [problem for o in kind(objects, "ScaledObject") for problem in wrong(o, "1.33.0")] == []


def test_an_older_keda_gets_no_fallback_that_it_does_not_know():
    """Before 2.17 the API prunes `behavior`, and what is left sets a number in place of the one that runs."""
    values = {"decode": {"autoscaling": {"type": "keda"}}, "keda": {"fallbackBehavior": ""}, **SCRAPED}
    (o,) = kind(Chart().objects(values), "ScaledObject")

    assert "fallback" not in o["spec"]


@pytest.mark.parametrize(
    ("more", "types"), [([], ["cpu"]), ([("pdrelay_requests_running", "600")], ["cpu", "prometheus"])]
)
def test_routers_are_scaled_by_keda_as_engines_are(more, types):
    """By CPU, as the HPA does, and by metrics of their own. Without one of these KEDA takes no fallback."""
    keda = {"type": "keda", "min": 3, "max": 9, "more": [{"metric": name, "target": target} for name, target in more]}
    values = {"router": {"replicas": 4, "autoscaling": keda}, "monitoring": {"serviceMonitor": {"enabled": True}}}
    (o,) = kind(Chart().objects(values), "ScaledObject")
    spec, triggers = o["spec"], o["spec"]["triggers"]

    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "r-pdrelay-router"}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (3, 9)
    assert [one["type"] for one in triggers] == types
    assert triggers[0] == {"type": "cpu", "metricType": "Utilization", "metadata": {"value": "70"}}
    assert spec.get("fallback", {}).get("replicas") == (4 if more else None)
    for one in triggers[1:]:
        assert one["metadata"]["query"] == f"sum(pdrelay_requests_running{{{ROUTER}}})"
        assert (one["metadata"]["threshold"], one["metadata"]["ignoreNullValues"]) == ("600", "false")
        assert loose(one["metadata"]["query"]) == set()
        assert "pdrelay_requests_running" in real()
    assert wrong(o, "1.33.0") == []


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(("target", "number"), [("500m", 0.5), ("1500m", 1.5), ("5m", 0.005), ("0.7", 0.7), ("12", 12)])
def test_a_target_in_thousandths_is_a_number_for_keda(target, number, helm):
    """An HPA takes 500m; KEDA reads thresholds as plain numbers, and would scale nothing."""
    other = [{"metric": "vllm:num_requests_running", "target": target}]
    scaled = {"type": "keda", "target": target, "more": other}
    more = [{"metric": "pdrelay_requests_running", "target": target}]
    values = SCRAPED | {"decode": {"autoscaling": scaled}, "router": {"autoscaling": {"type": "keda", "more": more}}}
    values |= {"monitoring": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}}
    objects = Chart().objects(values, helm=helm)
    triggers = [one["metadata"] for o in kind(objects, "ScaledObject") for one in o["spec"]["triggers"]]
    thresholds = [one["threshold"] for one in triggers if "threshold" in one]

    assert len(thresholds) == 3
    assert {float(one) for one in thresholds} == {number}


@pytest.mark.parametrize("helm", HELMS)
def test_a_target_in_thousandths_stays_one_for_an_hpa(helm):
    """Kubernetes takes both."""
    objects = Chart().objects({"decode": {"autoscaling": {"type": "hpa", "target": "500m"}}}, helm=helm)
    (o,) = kind(objects, "HorizontalPodAutoscaler")

    assert o["spec"]["metrics"][0]["pods"]["target"]["averageValue"] == "500m"


def test_while_routers_do_not_know_what_is_wanted_the_number_stays():
    """Each restart of the routers is a silence: `replicas` then would add engines that had been taken away for good."""
    wanted = {"type": "keda", "min": 2, "wanted": True}
    values = {
        "prefill": {"autoscaling": wanted, "replicas": 5},
        "router": {"settings": {"roles": "dry-run", "target_ttft_s": 2, "target_itl_s": 0.05}},
        "monitoring": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}},
    }
    (o,) = kind(Chart().objects(values), "ScaledObject")

    assert o["spec"]["fallback"] == {"failureThreshold": 5, "replicas": 2, "behavior": "currentReplicasIfHigher"}


def test_autoscalers_aim_at_what_the_guide_says():
    """docs/scaling.md says why; the numbers are those of values.yaml."""
    page = " ".join((ROOT / "docs/scaling.md").read_text().split())
    values = yaml.safe_load((ROOT / "helm/pdrelay/values.yaml").read_text())
    prefill, decode = (values[role]["autoscaling"] for role in ("prefill", "decode"))

    assert f"`{prefill['metric']}` per engine, target {prefill['target']}" in page
    assert f"`{decode['metric']}` per engine, target {decode['target']}" in page


def test_autoscalers_have_all_their_metrics_and_their_pace():
    """The one that wants most engines decides; engines come as fast as they may and go one at a time."""
    objects = default("tp8-multinode")
    (keda,), (hpa,) = kind(objects, "ScaledObject"), kind(objects, "HorizontalPodAutoscaler")
    down = {"stabilizationWindowSeconds": 600, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}
    up = {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}

    assert [t["metadata"]["threshold"] for t in keda["spec"]["triggers"]] == ["1", "64", "1"]
    assert [(m["pods"]["metric"]["name"], m["pods"]["target"]["averageValue"]) for m in hpa["spec"]["metrics"]] == [
        ("vllm:kv_cache_usage_perc", "0.7"),
        ("vllm:num_requests_running", "128"),
    ]
    assert hpa["spec"]["behavior"] == {"scaleUp": up, "scaleDown": down}
    assert keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == {"scaleDown": down}


def test_what_is_scraped_has_the_labels_that_queries_ask_for():
    """The router's own label instance (an engine) must not be renamed; engines get release and role from their pods."""
    (service,) = kind(default("2p4d"), "ServiceMonitor")
    (engines,) = kind(default("tp8-multinode"), "PodMonitor")
    selected = [
        meta["labels"]["pdrelay/role"]
        for _, meta, _ in pods(default("tp8-multinode"))
        if matches(engines["spec"]["selector"], meta["labels"])
    ]

    assert service["spec"]["endpoints"][0]["honorLabels"] is True
    assert {"pdrelay/release", "pdrelay/role"} <= set(engines["spec"]["podTargetLabels"])
    assert set(selected) == {"prefill", "decode"}
    assert not matches(
        engines["spec"]["selector"],
        {"pdrelay/release": "r", "pdrelay/role": "decode", "leaderworkerset.sigs.k8s.io/worker-index": "1"},
    )


def test_an_engine_that_nobody_probes_is_not_missed():
    """Without probes it is starting until its first request."""
    asked = {"monitoring": {"prometheusRule": {"enabled": True}}}
    unprobed = asked | {"router": {"settings": {"health_check_interval_s": 0}}}
    states = []
    for values in (asked, unprobed):
        (rule,) = kind(Chart().objects(values), "PrometheusRule")
        by_name = {one["alert"]: one["expr"] for one in rule["spec"]["groups"][0]["rules"]}
        states.append(
            [
                re.search('state=~"(.*?)"', by_name[f"PDRelay{name}"])[1]
                for name in ("NoDecodeEngine", "InstanceEjected")
            ]
        )

    assert states == [["healthy|half_open", "ejected|starting"], ["starting|healthy|half_open", "ejected"]]


def test_every_alert_says_how_bad_it_is_and_where_to_read_on():
    """Its section exists in the runbook, under its own name, and the runbook has no other sections."""
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    sections = re.findall(r"(?m)^## (.*)$", runbook)
    anchors = {section.lower() for section in sections}

    assert sorted(sections) == sorted(rule["alert"] for rule in rules())
    assert "<a id=" not in runbook

    for rule in rules():
        url, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert url == "https://runbooks.example.com/pdrelay.md"
        assert anchor in anchors
        assert rule["labels"]["severity"] in ("warning", "critical")
    values = {"monitoring": {"prometheusRule": {"enabled": True}}}
    (rule,) = kind(Chart().objects(values), "PrometheusRule")
    assert rule["spec"]["groups"][0]["rules"][0]["annotations"]["runbook"] == "docs/runbook.md#pdrelayrouterdown"


def test_dashboards_do_not_collide():
    """Grafana keeps one for each uid."""
    ours = dashboards()
    others = dashboards_of(Chart().objects(ci="2p4d", release="other"))

    assert len({board["uid"] for board in ours + others}) == 4
    for board in ours:
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        assert len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]}) == len(board["panels"])


def test_a_dashboard_asks_where_to_look_and_begins_with_its_release():
    """One board serves every cluster, namespace and release; a Prometheus without the label cluster is one cluster."""
    for board, release in zip(sorted(dashboards(), key=lambda one: one["title"]), ("r", "r-pdrelay"), strict=True):
        variables = {one["name"]: one for one in board["templating"]["list"]}

        assert list(variables) == ["datasource", "cluster", "namespace", "release"]
        assert variables["cluster"]["allValue"] == ".*"
        assert variables["cluster"]["current"]["value"] == "$__all"
        assert (variables["namespace"]["current"]["value"], variables["release"]["current"]["value"]) == ("ns", release)
        assert {one["datasource"]["uid"] for one in board["templating"]["list"][1:]} == {"${datasource}"}


@pytest.mark.parametrize("alert", [rule for rule in SERIES if rule != "PDRelayRouterDown"])
def test_an_alert_is_of_one_cluster_and_names_it(alert):
    """Otherwise a ruler over several adds up their numbers, and healthy engines of one hide that another has none."""
    (rule,) = [one for one in rules() if one["alert"] == alert]
    _, grouped = named(rule["expr"])
    groups = re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"])

    assert "cluster" in grouped
    assert [group for group in groups if not group.startswith("cluster, namespace")] == []


def test_every_alert_has_series_that_make_it_fire():
    """Below they are given to what evaluates rules."""
    assert [rule["alert"] for rule in rules()] == list(SERIES)


@pytest.mark.parametrize("fires", [True, False], ids=["fires", "quiet"])
@pytest.mark.parametrize("alert", SERIES)
def test_an_alert_fires_when_it_should_and_is_quiet_otherwise(alert, fires):
    """With the expression of the chart, as often as Prometheus would look at it."""
    (rule,) = [one for one in rules() if one["alert"] == alert]
    case = _case(rule, SERIES[alert], fires=fires)
    given = series({one["series"]: one["values"] for one in case["input_series"]})
    (wanted,) = case["alert_rule_test"]

    found = firing(Rule.read(rule), given, at_s=60 * int(wanted["eval_time"].removesuffix("m")))
    assert sorted(map(sorted, map(dict.items, found))) == sorted(
        sorted(o["exp_labels"].items()) for o in wanted["exp_alerts"]
    )
    for labels in found:  # what its text names is there; $value is a number
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels.keys()


def test_prometheus_own_grammar_reads_every_query():
    """Types included: a rate of what is no range is refused. Grafana puts in how long a range is."""
    for name, expression in queries().items():
        assert parsed(expression.replace("$__rate_interval", "5m")), name


PROMTOOL = shutil.which("promtool") or (str(TOOLS / "promtool") if (TOOLS / "promtool").exists() else "")


@pytest.mark.parametrize("tool", [PROMTOOL or "none here"])
def test_promtool_comes_to_the_same(tool, tmp_path):
    """Where there is one (Debian: apt-get install prometheus): the rules of the chart, and the same series."""
    bare = [{key: value for key, value in rule.items() if key != "annotations"} for rule in rules()]
    for name, group in (("rules.yaml", bare), ("whole.yaml", rules())):
        (tmp_path / name).write_text(yaml.safe_dump({"groups": [{"name": "pdrelay", "rules": group}]}))
    cases = [_case(rule, SERIES[rule["alert"]], fires=fires) for rule in rules() for fires in (True, False)]
    whole = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(whole))

    for asked in (["check", "rules", "whole.yaml"], ["test", "rules", "tests.yaml"]) if PROMTOOL else ():
        done = subprocess.run([tool, *asked], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def _case(rule, made, *, fires):
    def full(text):
        return re.sub(r"\b([RE])(?=[,}])", lambda m: {"R": ROUTER, "E": ENGINE}[m[1]], text)

    given = [{"series": full(one), "values": values} for one, values in made["fire" if fires else "quiet"].items()]
    expected = []
    if fires:
        found = made.get("labels", {})
        expected = [{"exp_labels": rule["labels"] | one} for one in (found if isinstance(found, list) else [found])]
    return {
        "interval": "1m",
        "name": f"{rule['alert']} {'fires' if fires else 'is quiet'}",
        "input_series": given,
        "alert_rule_test": [{"eval_time": made.get("at", "29m"), "alertname": rule["alert"], "exp_alerts": expected}],
    }


def test_a_router_that_wants_keys_is_scraped_with_one_or_opened():
    """Where clients need a key /metrics does, too, and Prometheus would get 401 for ever."""
    values = {
        "router": {"apiKeys": {"secretName": "clients"}},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    }
    with pytest.raises(Refused, match="/metrics wants a key"):
        Chart().objects(values)

    opened = values | {"router": values["router"] | {"settings": {"public_metrics": True}}}
    (monitor,) = kind(Chart().objects(opened), "ServiceMonitor")
    assert "authorization" not in monitor["spec"]["endpoints"][0]

    values["monitoring"]["serviceMonitor"]["bearerToken"] = {"secretName": "scraper", "key": "k"}
    (monitor,) = kind(Chart().objects(values), "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["authorization"] == {"credentials": {"name": "scraper", "key": "k"}}
