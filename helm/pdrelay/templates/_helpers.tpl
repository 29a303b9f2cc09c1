{{/* Gives both pools the values of engine that they do not have themselves. Every file of templates begins with it, for their order is
helm's; they share the values, so it is done once: a null, which takes a value away, would be forgotten the second time. */}}
{{- define "pdrelay.pools.values" -}}
{{- if not (hasKey .Values "poolsHaveValues") -}}
{{- include "pdrelay.fill" (dict "values" .Values "empty" (.Files.Get "files/empty.json" | fromJson)) -}}
{{- range $role := list "prefill" "decode" -}}
{{- $values := dict -}}
{{- range list $.Values.engine (index $.Values $role) -}}
{{- include "pdrelay.overlay" (dict "over" . "under" $values) -}}
{{- end -}}
{{- $_ := set $.Values $role $values -}}
{{- end -}}
{{- $_ := set .Values "poolsHaveValues" true -}}
{{- end -}}
{{- end -}}

{{/* dict values empty: writes what is empty into values that lack it, for helm takes a default away for which null is written. */}}
{{- define "pdrelay.fill" -}}
{{- range $key, $empty := .empty -}}
{{- $value := get $.values $key -}}
{{- if and $empty $value -}}
{{- include "pdrelay.fill" (dict "values" $value "empty" $empty) -}}
{{- else if not (or $empty $value) -}}
{{- $_ := set $.values $key $empty -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* dict over under: writes over's values into under, key by key. A null takes a key away. (mergeOverwrite would keep what 0, false and ""
replace.) */}}
{{- define "pdrelay.overlay" -}}
{{- range $key, $value := .over -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $.under $key -}}
{{- else if kindIs "map" $value -}}
{{- if not (kindIs "map" (get $.under $key)) -}}{{- $_ := set $.under $key dict -}}{{- end -}}
{{- include "pdrelay.overlay" (dict "over" $value "under" (get $.under $key)) -}}
{{- else -}}
{{- $_ := set $.under $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Names: <release>-<chart>, so that no two releases meet. Objects add at most 23 characters. A Service's name has no dot and begins with a
letter, which a release's need not: such names, and long ones, end with a hash. */}}
{{- define "pdrelay.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride | default (ternary $name (printf "%s-%s" .Release.Name $name) (eq .Release.Name $name)) -}}
{{- $plain := regexReplaceAll "^([0-9])" $full "r${1}" | replace "." "-" -}}
{{- if or (gt (len $plain) 40) (ne $plain $full) -}}
{{- $plain = printf "%s-%s" ($plain | trunc 31 | trimSuffix "-") (sha256sum $full | trunc 8) -}}
{{- end -}}
{{- $plain -}}
{{- end -}}

{{/* dict root component: what selectors look at. No version, no revision: those change. A release may be called y, or 123. */}}
{{- define "pdrelay.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* dict root component [more]: labels of an object; nobody's own labels replace those of the chart. */}}
{{- define "pdrelay.labels" -}}
{{- $own := include "pdrelay.selector" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "pdrelay" -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- merge $own (.more | default dict) .root.Values.commonLabels | toYaml -}}
{{- end -}}

{{/* dict root component [more]: labels of a pod. Nothing that a new chart would change: pods would start anew for it. */}}
{{- define "pdrelay.podLabels" -}}
{{- merge (include "pdrelay.selector" . | fromYaml) (.more | default dict) .root.Values.commonLabels | toYaml -}}
{{- end -}}

{{/* dict root component name [labels annotations]: the metadata of an object. */}}
{{- define "pdrelay.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "pdrelay.labels" (dict "root" .root "component" .component "more" .labels) | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* dict root image: its reference; the digest wins. */}}
{{- define "pdrelay.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* dict own extra: variables of a container, the chart's and those of the values, which take the place of the chart's: helm 4 refuses two of
one name. */}}
{{- define "pdrelay.env" -}}
{{- $names := list -}}
{{- range .extra -}}{{- $names = append $names .name -}}{{- end -}}
{{- $all := list -}}
{{- range fromYamlArray .own -}}
{{- if not (has .name $names) -}}{{- $all = append $all . -}}{{- end -}}
{{- end -}}
{{- concat $all (.extra | default list) | toYaml -}}
{{- end -}}

{{/* A number or a switch as an argument: YAML's numbers are floats here, and 1e+06 is no whole number to anybody. */}}
{{- define "pdrelay.argument" -}}
{{- if and (or (kindIs "float64" .) (kindIs "int64" .) (kindIs "int" .)) (eq (floor .) (float64 .)) -}}
{{- printf "%d" (int64 .) -}}
{{- else -}}
{{- printf "%v" . -}}
{{- end -}}
{{- end -}}

{{/* A target for KEDA, whose triggers take plain numbers: a quantity such as 500m is Kubernetes' own. */}}
{{- define "pdrelay.threshold" -}}
{{- if hasSuffix "m" . -}}
{{- divf (trimSuffix "m" . | float64) 1000 -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* dict root query threshold: a trigger of KEDA that asks Prometheus. No series is an error, and fallback's; it is not 0. */}}
{{- define "pdrelay.keda.trigger" -}}
{{- $keda := .root.Values.keda -}}
- type: prometheus
  metricType: AverageValue
  {{- with $keda.authenticationRef }}
  authenticationRef:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  metadata:
    serverAddress: {{ $keda.serverAddress | quote }}
    query: {{ .query | quote }}
    threshold: {{ .threshold | quote }}
    ignoreNullValues: "false"
    {{- with $keda.metadata }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* dict root replicas: what KEDA does while Prometheus does not answer; nothing: the autoscaler leaves the number as it is. */}}
{{- define "pdrelay.keda.fallback" -}}
{{- with .root.Values.keda.fallbackBehavior -}}
fallback:
  failureThreshold: 5
  replicas: {{ int $.replicas }}
  behavior: {{ . }}
{{- end -}}
{{- end -}}

{{/* What must fit on both sides, so that only engines of one revision meet. */}}
{{- define "pdrelay.revision" -}}
{{- if .Values.revision -}}
{{- .Values.revision -}}
{{- else -}}
{{- $p := include "pdrelay.image" (dict "root" . "image" .Values.prefill.image) -}}
{{- $d := include "pdrelay.image" (dict "root" . "image" .Values.decode.image) -}}
{{- $m := .Values.model -}}
{{- $c := .Values.connector -}}
{{- /* Not the maps as they are: one helm keeps keys that are null, the other drops them. */ -}}
{{- $own := list $p $d $m.name $m.servedName ($m.maxLength | default "") $m.dtype ($m.blockSize | default "") (toJson $m.volume) -}}
{{- $own = concat $own (list $c.mode $c.leaseSeconds $c.loadFailurePolicy $c.bufferDevice (toJson $c.extraConfig)) -}}
{{- /* The secret that both sides prove to each other. */ -}}
{{- $own = concat $own (list $c.secret.name $c.secret.key) -}}
{{- $own = concat $own $m.aliases -}}
{{- /* All of them, for which of vLLM's flags shape the cache is vLLM's to say. */ -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := index $.Values $role -}}
{{- $own = concat $own (list (toJson $pool.extraArgs) (toJson $pool.extraEnv)) -}}
{{- with $pool.initContainers -}}{{- $own = append $own (toJson .) -}}{{- end -}}
{{- end -}}
{{- join "\n" $own | sha256sum | trunc 12 -}}
{{- end -}}
{{- end -}}

{{- define "pdrelay.router.serviceAccount" -}}
{{- .Values.router.serviceAccount.name | default (printf "%s-router" (include "pdrelay.fullname" .)) -}}
{{- end -}}

{{- define "pdrelay.engine.serviceAccount" -}}
{{- .Values.engineServiceAccount.name | default (printf "%s-engine" (include "pdrelay.fullname" .)) -}}
{{- end -}}

{{/* The secret that engines prove to each other: the values', or the chart's own. Empty: there is none. */}}
{{- define "pdrelay.connector.secret" -}}
{{- $s := .Values.connector.secret -}}
{{- $s.name | default (ternary (printf "%s-connector" (include "pdrelay.fullname" .)) "" $s.create) -}}
{{- end -}}

{{/* "true" if routers tell each other how busy engines are. */}}
{{- define "pdrelay.router.peers" -}}
{{- $r := .Values.router -}}
{{- $several := or (gt (int $r.replicas) 1) (ne $r.autoscaling.type "none") -}}
{{- if and $r.peers.enabled $several -}}true{{- end -}}
{{- end -}}

{{/* The secret that routers prove to each other: the values', or the chart's own. Empty: there is none. */}}
{{- define "pdrelay.router.peers.secret" -}}
{{- $s := .Values.router.peers.secret -}}
{{- $s.name | default (ternary (printf "%s-router-peers" (include "pdrelay.fullname" .)) "" $s.create) -}}
{{- end -}}

{{/* The name in the certificates of https engines; empty: that of each one's address. */}}
{{- define "pdrelay.engineTls.name" -}}
{{- $t := .Values.engineTls -}}
{{- $t.serverName | default (ternary (printf "%s-engines.%s.svc" (include "pdrelay.fullname" .) .Release.Namespace) "" (not (empty $t.secretName))) -}}
{{- end -}}

{{/* The secret with the authorities of https engines; empty: the system's. */}}
{{- define "pdrelay.engineTls.ca" -}}
{{- .Values.engineTls.caSecretName | default .Values.engineTls.secretName -}}
{{- end -}}

{{/* What scripts in an engine's pod need to reach an engine of the release, as a YAML list; empty: it serves http. */}}
{{- define "pdrelay.engineTls.args" -}}
{{- with .Values.engineTls }}
{{- if .secretName }}
- --ca=/etc/pdrelay/engine-tls/ca.crt
- --server-name={{ include "pdrelay.engineTls.name" $ }}
{{- if .requireClientCertificates }}
- --cert=/etc/pdrelay/engine-tls/tls.crt
- --cert-key=/etc/pdrelay/engine-tls/tls.key
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "pdrelay.scheme" -}}
{{- ternary "HTTPS" "HTTP" (not (empty .Values.router.tls.secretName)) -}}
{{- end -}}

{{/* Seconds. Router: endpoints forget it, it serves late comers, it finishes, and some more. */}}
{{- define "pdrelay.router.grace" -}}
{{- $d := .Values.router.drain -}}
{{- $least := add $d.preStopSeconds $d.graceSeconds $d.shutdownSeconds $d.marginSeconds -}}
{{- include "pdrelay.grace" (dict "name" "router" "least" $least "given" .Values.router.terminationGracePeriodSeconds) -}}
{{- end -}}

{{/* dict root role: seconds that an engine's preStop may take. A prefill engine waits for its leases, too. Where engines turn, each may
have either role's work to end. */}}
{{- define "pdrelay.pool.drain" -}}
{{- $v := .root.Values -}}
{{- $lease := ceil $v.connector.leaseSeconds | int64 -}}
{{- $prefill := add $v.prefill.drain.settleSeconds $v.prefill.drain.requestSeconds $lease -}}
{{- $decode := add $v.decode.drain.settleSeconds $v.decode.drain.requestSeconds -}}
{{- if eq ($v.router.settings.roles | default "off") "auto" -}}
{{- max $prefill (add $decode $lease) -}}
{{- else -}}
{{- ternary $prefill $decode (eq .role "prefill") -}}
{{- end -}}
{{- end -}}

{{- define "pdrelay.pool.grace" -}}
{{- $pool := index .root.Values .role -}}
{{- $least := add (include "pdrelay.pool.drain" .) $pool.drain.shutdownSeconds $pool.drain.marginSeconds -}}
{{- include "pdrelay.grace" (dict "name" .role "least" $least "given" $pool.terminationGracePeriodSeconds) -}}
{{- end -}}

{{- define "pdrelay.grace" -}}
{{- if kindIs "invalid" .given -}}
{{- .least -}}
{{- else if lt (int64 .given) (int64 .least) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d: its drain takes up to %d s, so write that, more, or null" .name (int64 .given) (int64 .least)) -}}
{{- else -}}
{{- int64 .given -}}
{{- end -}}
{{- end -}}

{{/* dict selector constraints: topology spread constraints with the selector of the pods they are about. */}}
{{- define "pdrelay.spread" -}}
{{- $spread := list -}}
{{- range .constraints -}}
{{- $spread = append $spread (merge (dict "labelSelector" (dict "matchLabels" $.selector)) .) -}}
{{- end -}}
{{- toYaml $spread -}}
{{- end -}}

{{/* dict root component: how many there are, of a pool or of the routers, for NOTES.txt. */}}
{{- define "pdrelay.notes.count" -}}
{{- $v := index .root.Values .component -}}
{{- if eq (toString $v.enabled) "false" -}}
no
{{- else if ne $v.autoscaling.type "none" -}}
{{- printf "%d to %d" (int $v.autoscaling.min) (int $v.autoscaling.max) -}}
{{- else if and .root.Values.disaggregatedSet.enabled (ne .component "router") -}}
{{- mul $v.replicas .root.Values.disaggregatedSet.slices -}}
{{- else -}}
{{- include "pdrelay.replicas" (dict "root" .root "values" $v "kind" ($v.kind | default "Deployment") "name" (printf "%s-%s" (include "pdrelay.fullname" .root) .component)) -}}
{{- end -}}
{{- end -}}

{{/* Address families of a Service that clients or operators reach, as lines of its spec. */}}
{{- define "pdrelay.families" -}}
{{- with .Values.router.service }}
{{- with .ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .ipFamilies }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end }}
{{- end -}}
