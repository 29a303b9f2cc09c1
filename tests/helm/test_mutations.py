"""Charts that somebody broke: for each mistake the check that is there for it complains."""

import shutil

import pytest

from support.helm_care import ALL, all_complaints
from support.helm_chart import CHART, Chart

# The chart is rendered for each fault that is put into it.
pytestmark = [pytest.mark.processes, pytest.mark.slow]


MUTATIONS = {  # what: (file, text, what somebody wrote instead, the check that must notice)
    "a service selects nothing": (
        "router.yaml",
        "  selector:\n    {{- $selector | nindent 4 }}",
        "  selector: {app: router}",
        "selectors",
    ),
    "a budget protects other pods": (
        "pools.yaml",
        "matchLabels:\n"
        '      {{- include "pdrelay.selector" (dict "root" $ "component" $role) | nindent 6 }}\n{{- end }}',
        "matchLabels:\n      app.kubernetes.io/instance: {{ $.Release.Name }}\n{{- end }}",
        "selectors",
    ),
    "a selector changes with the version": (
        "_helpers.tpl",
        "app.kubernetes.io/component: {{ .component }}",
        "app.kubernetes.io/component: {{ .component }}\napp.kubernetes.io/version: {{ .root.Chart.AppVersion }}",
        "selectors",
    ),
    "a verb is missing": ("router-rbac.yaml", "verbs: [list, watch]", "verbs: [list]", "rbac"),
    "the store cannot be written": ("router-rbac.yaml", "verbs: [list, watch, patch]", "verbs: [list, watch]", "rbac"),
    "the router may do too much": ("router-rbac.yaml", "verbs: [list, watch]", "verbs: [list, watch, delete]", "rbac"),
    "every ConfigMap is open": ("router-rbac.yaml", "    resourceNames: [{{ $store }}]\n", "", "rbac"),
    "a role of the whole cluster": ("router-rbac.yaml", "kind: Role\n", "kind: ClusterRole\n", "rbac"),
    "the role is bound to nobody": (
        "router-rbac.yaml",
        "kind: ServiceAccount, name: {{",
        "kind: ServiceAccount, name: x{{",
        "references",
    ),
    "a flag that the router does not know": ("_router.tpl", "- --drain-grace\n", "- --drain-grace-s\n", "router_args"),
    "a value that the router refuses": (
        "_router.tpl",
        '- {{ include "pdrelay.argument" $v.drain.shutdownSeconds | quote }}',
        '- "0"',
        "router_args",
    ),
    "the router listens on localhost": (
        "_router.tpl",
        "- --host\n- {{ .Values.listenAddress | quote }}\n",
        "",
        "router_args",
    ),
    "a client's service has the admin port": (
        "router.yaml",
        "port: {{ int $v.service.port }}, targetPort: http,",
        "port: {{ int $v.service.port }}, targetPort: admin,",
        "admin_port",
    ),
    "a load balancer shows the admin port": (
        "router.yaml",
        "  type: ClusterIP\n",
        "  type: LoadBalancer\n",
        "admin_port",
    ),
    "the admin port is open to everybody": (
        "networkpolicy.yaml",
        "        - {port: admin}\n      from:\n        {{- toYaml . | nindent 8 }}\n",
        "        - {port: admin}\n",
        "admin_port",
    ),
    "probes ask at the clients' port": ("router.yaml", '(ternary "admin" "http"', '(ternary "http" "http"', "probes"),
    "the admin port is another one": (
        "_router.tpl",
        '- {{ include "pdrelay.argument" $v.adminPort | quote }}',
        '- "8082"',
        "router_args",
    ),
    "the router looks for another name": (
        "_router.tpl",
        "- --engine-server-name\n- {{ . | quote }}",
        "- --engine-server-name\n- other.svc",
        "engine_tls",
    ),
    "the router trusts everybody's authorities": (
        "_router.tpl",
        "- --engine-ca\n- /etc/pdrelay/engine-ca/ca.crt\n",
        "",
        "engine_tls",
    ),
    "pods do not say that they serve https": ("_pool.tpl", "pdrelay/scheme: https\n", "", "engine_tls"),
    "the kubelet has no certificate": (
        "_pool.tpl",
        "{{- if $t.requireClientCertificates -}}\nexec:",
        "{{- if false -}}\nexec:",
        "engine_tls",
    ),
    "the hook asks by http": ("_helpers.tpl", "- --ca=/etc/pdrelay/engine-tls/ca.crt\n", "", "engine_tls"),
    "no readiness probe": ("router.yaml", "readinessProbe:", "x-readinessProbe:", "probes"),
    "an engine without a startup probe": ("_pool.tpl", "startupProbe:", "x-startupProbe:", "probes"),
    "a router is restarted for lack of engines": (
        "router.yaml",
        "livenessProbe:\n            {{- toYaml $alive",
        "livenessProbe:\n            {{- toYaml $ready",
        "probes",
    ),
    "a router is killed while it drains": (
        "_helpers.tpl",
        "add $d.preStopSeconds $d.graceSeconds $d.shutdownSeconds $d.marginSeconds",
        "add $d.preStopSeconds $d.marginSeconds",
        "drains",
    ),
    "grace is shorter than the lease": ("_pool.tpl", '{{ include "pdrelay.pool.grace" . }}', "30", "drains"),
    "a prefill engine does not wait for its leases": (
        "_helpers.tpl",
        "$v.prefill.drain.requestSeconds $lease",
        "$v.prefill.drain.requestSeconds",
        "drains",
    ),
    "no preStop hook": ("_pool.tpl", "lifecycle:", "x-lifecycle:", "drains"),
    "the hook asks the other role's question": ("_pool.tpl", "--role={{ .role }}", "--role=decode", "drains"),
    "the side channel is on localhost": (
        "_pool.tpl",
        "{{- else }}\n  valueFrom: {fieldRef: {fieldPath: status.podIP}}",
        "{{- else }}\n  value: localhost",
        "side_channel",
    ),
    "the ports of the ranks are not declared": (
        "_pool.tpl",
        "range $rank := $ranks }}\n- {name: side-",
        "range $rank := until 1 }}\n- {name: side-",
        "side_channel",
    ),
    "workers with ranks of their own look for them at the leader": (
        "_pool.tpl",
        'and .worker (not (include "pdrelay.pool.wide" $p))',
        "and .worker true",
        "side_channel",
    ),
    "both roles produce": ("_pool.tpl", '"kv_producer" "kv_consumer"', '"kv_producer" "kv_producer"', "engine_args"),
    "a setting that the connector does not know": (
        "_pool.tpl",
        '"kv_lease_duration"',
        '"lease_duration"',
        "engine_args",
    ),
    "the router writes to its root": (
        "values.yaml",
        "readOnlyRootFilesystem: true",
        "readOnlyRootFilesystem: false",
        "security",
    ),
    "the router is root": ("values.yaml", "runAsNonRoot: true\n    runAsUser: 65532", "runAsUser: 0", "security"),
    "an engine is root": (
        "values.yaml",
        "runAsNonRoot: true\n    runAsUser: 65532\n    runAsGroup: 65532\n    fsGroup: 65532\n    fsGroupChange",
        "fsGroupChange",
        "security",
    ),
    "the engines' secret is no file": (
        "_pool.tpl",
        "        - {name: connector, mountPath: /etc/pdrelay/connector, readOnly: true}\n",
        "",
        "connector_secret",
    ),
    "the secret that is made is not the one that is read": (
        "_pool.tpl",
        "secretName: {{ . | quote }}, items",
        "secretName: other, items",
        "connector_secret",
    ),
    "the engines' secret is written down": ("pools.yaml", "(randAlphaNum 48 | b64enc)", '"aHVudGVyMg=="', "secrets"),
    "engines share the node's memory": (
        "_pool.tpl",
        "hostNetwork: true",
        "hostNetwork: true\n  hostIPC: true",
        "security",
    ),
    "engines keep capabilities": ("_pool.tpl", "deepCopy $p.securityContext", "dict", "security"),
    "the admin key is written down": (
        "_router.tpl",
        "valueFrom: {secretKeyRef: {name: {{ .secretName | quote }}, key: {{ .key | quote }}}}",
        "value: {{ .secretName }}",
        "secrets",
    ),
    "a pod of no revision": ("_pool.tpl", '"pdrelay/revision" (include "pdrelay.revision" .root)', "", "discovery"),
    "each role has a revision of its own": ("_pool.tpl", '(include "pdrelay.revision" .root)', ".role", "discovery"),
    "routers look for another label": ("_router.tpl", "pdrelay/release={{", "pdrelay/app={{", "discovery"),
    "side channels are open to everybody": (
        "networkpolicy.yaml",
        '    - from:\n        {{- include "pdrelay.engines" $ | nindent 8 }}\n    - ports:',
        "    - ports: [{port: side-0}]\n    - ports:",
        "isolation",
    ),
    "a volume that nobody made": (
        "_pool.tpl",
        "    - {name: tmp, emptyDir: {sizeLimit: {{ $p.tmpSize }}}}\n",
        "",
        "references",
    ),
    "a temporary folder without a limit": ("_pool.tpl", "{sizeLimit: {{ $p.tmpSize }}}", "{}", "disk"),
    "nobody knows what goes to the disk": ("values.yaml", ", ephemeral-storage: 24Gi}", "}", "disk"),
    "a router is evicted for its own volume": ("router.yaml", "sizeLimit: 64Mi", "sizeLimit: 4Gi", "disk"),
    "a worker ends before its engine has": ("_pool.tpl", "              - --of-leader\n", "", "workers"),
    "the test does not get to the engines": ("networkpolicy.yaml", '(eq $role "decode")', "false", "tested"),
    "the test has no certificate to compare with": (
        "tests/both-legs.yaml",
        "        - {name: tls, mountPath: /etc/pdrelay/tls, readOnly: true}\n",
        "",
        "tested",
    ),
    "a name that is too long": ("_helpers.tpl", "gt (len $full) 40 -}}", "gt (len $full) 400 -}}", "names"),
}


def rendered(chart):
    """Render all there is, so that whatever is broken shows."""
    yield chart.objects(ci="2p4d", release="r" * 50)
    yield chart.objects({"prefill": {"drain": {"requestSeconds": 5}}}, ci="hostnetwork-rdma")
    yield chart.objects(ci="tp8-multinode")
    yield chart.objects(ci="wide-ep")
    yield chart.objects(ci="https-engines")
    yield chart.objects()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_chart_is_noticed(mutation, tmp_path):
    """The chart as it is has no complaint: below."""
    file, text, instead, check = MUTATIONS[mutation]
    folder = shutil.copytree(CHART, tmp_path / "pdrelay")
    path = folder / (file if file == "values.yaml" else f"templates/{file}")
    before = path.read_text()
    assert text in before, f"{file} has changed: the mutation means nothing any more"
    path.write_text(before.replace(text, instead))

    assert any(said.startswith(f"{check}:") for objects in rendered(Chart(folder)) for said in all_complaints(objects))


def test_every_check_is_shown_to_notice_something():
    """A check that never fails is none."""
    assert {check for _, _, _, check in MUTATIONS.values()} == set(ALL)


def test_nothing_is_said_of_the_chart_as_it_is():
    """With the same releases and values."""
    assert [all_complaints(objects) for objects in rendered(Chart())] == [[]] * 6
