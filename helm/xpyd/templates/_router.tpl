{{/* Arguments of `xpyd`, as a YAML list. */}}
{{- define "xpyd.router.args" -}}
{{- $v := .Values.router -}}
- serve
- --host
- {{ .Values.listenAddress | quote }}
- --port
- {{ include "xpyd.argument" $v.port | quote }}
{{- if $v.adminPort }}
- --admin-port
- {{ include "xpyd.argument" $v.adminPort | quote }}
{{- end }}
{{- if gt (int $v.workers) 1 }}
- --workers
- {{ include "xpyd.argument" $v.workers | quote }}
{{- end }}
{{- if $v.discovery.enabled }}
{{- if $v.discovery.inferencePool }}
- --kubernetes-inference-pool
- {{ $v.discovery.inferencePool | quote }}
{{- else }}
- --kubernetes-selector
- xpyd.io/release={{ .Release.Name }}
{{- end }}
- --kubernetes-namespace
- {{ .Release.Namespace | quote }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- with index $v.discovery $role }}
- --{{ $role }}
{{- range . }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
- --store
{{- if eq $v.store.type "kubernetes" }}
- kubernetes:{{ include "xpyd.fullname" . }}-instances
{{- else if eq $v.store.type "redis" }}
- {{ printf "%s%sprefix=%s" $v.store.redisUrl (ternary "&" "?" (contains "?" $v.store.redisUrl)) ($v.store.prefix | default (printf "%s/%s" .Release.Namespace .Release.Name)) | quote }}
{{- else }}
- memory
{{- end }}
{{- if include "xpyd.router.peers" . }}
- --peers
- {{ include "xpyd.fullname" . }}-router-peers.{{ .Release.Namespace }}.svc:{{ int $v.peers.port }}
- --peer-port
- {{ include "xpyd.argument" $v.peers.port | quote }}
{{- end }}
- --drain-grace
- {{ include "xpyd.argument" $v.drain.graceSeconds | quote }}
- --shutdown-timeout
- {{ include "xpyd.argument" $v.drain.shutdownSeconds | quote }}
{{- if $v.apiKeys.secretName }}
- --api-keys-file
- /etc/xpyd/keys/keys
{{- end }}
{{- if $v.adminKey.secretName }}
- --admin-key-file
- /etc/xpyd/admin-key/key
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- if (index $.Values $role).apiKey.secretName }}
- --{{ $role }}-api-key-file
- /etc/xpyd/{{ $role }}-key/key
{{- end }}
{{- end }}
{{- with .Values.model.allowedMediaDomains }}
- --allowed-media-domains
{{- range . }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- if not (or $v.apiKeys.secretName $v.tls.clientCaSecretName) }}
- --allow-unauthenticated
- "true"
{{- end }}
{{- with include "xpyd.router.hosts" . | fromJsonArray }}
- --allowed-hosts
{{- range . }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- with $v.allowedInstances }}
- --allowed-instances
{{- range . }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- if $v.tls.secretName }}
- --tls-cert
- /etc/xpyd/tls/tls.crt
- --tls-key
- /etc/xpyd/tls/tls.key
{{- if $v.adminPort }}
- --admin-tls-cert
- /etc/xpyd/tls/tls.crt
- --admin-tls-key
- /etc/xpyd/tls/tls.key
{{- end }}
{{- end }}
{{- if $v.tls.clientCaSecretName }}
- --tls-client-ca
- /etc/xpyd/client-ca/ca.crt
{{- end }}
{{- if include "xpyd.engineTls.ca" . }}
- --engine-ca
- /etc/xpyd/engine-ca/ca.crt
{{- end }}
{{- with include "xpyd.engineTls.name" . }}
- --engine-server-name
- {{ . | quote }}
{{- end }}
{{- if .Values.engineTls.clientSecretName }}
- --engine-cert
- /etc/xpyd/engine-client/tls.crt
- --engine-key
- /etc/xpyd/engine-client/tls.key
{{- end }}
{{- with $v.classes }}
- --classes
{{- range $name, $class := . }}
- {{ include "xpyd.router.class" (list $name $class) | quote }}
{{- end }}
- --default-class
- {{ $v.defaultClass | quote }}
{{- end }}
{{- range $name, $value := include "xpyd.router.settings" . | fromYaml }}
- --{{ $name | trimSuffix "_s" | replace "_" "-" }}
{{- range kindIs "slice" $value | ternary $value (list $value) }}
- {{ include "xpyd.argument" . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A class of requests as an argument: NAME:KEY=VALUE,KEY=VALUE. */}}
{{- define "xpyd.router.class" -}}
{{- $said := list -}}
{{- range $key, $value := last . -}}
{{- $said = append $said (printf "%s=%s" $key (include "xpyd.argument" $value)) -}}
{{- end -}}
{{- first . -}}{{- if $said -}}:{{- join "," $said -}}{{- end -}}
{{- end -}}

{{/* Settings of the router, by name: with kvEvents.enabled, returnKv.enabled, several routers or several slices those that make use of it, unless router.settings has others. */}}
{{- define "xpyd.router.settings" -}}
{{- $events := dict "kv_events" "auto" "prefill_policy" "prefix" "decode_policy" "prefix" -}}
{{- $return := dict "return_kv" true "prefill_policy" "prefix" "decode_policy" "prefix" -}}
{{- $peers := dict "prefill_policy" "least_loaded" "decode_policy" "least_loaded" -}}
{{- $slices := dict "slice_pairing" "prefer" "slice_label" "disaggregatedset.x-k8s.io/slice" -}}
{{- merge (dict) .Values.router.settings (ternary $slices dict (gt (int .Values.disaggregatedSet.slices) 1)) (ternary $events dict .Values.kvEvents.enabled) (ternary $return dict .Values.returnKv.enabled) (ternary $peers dict (eq (include "xpyd.router.peers" .) "true")) | toYaml -}}
{{- end -}}

{{/* Names that clients may call routers by: needed where neither keys nor TLS keep web pages of other names away. */}}
{{- define "xpyd.router.hosts" -}}
{{- $v := .Values.router -}}
{{- $hosts := $v.allowedHosts -}}
{{- if not (or $v.apiKeys.secretName $v.tls.secretName) -}}
{{- $hosts = append $hosts (printf "%s-router.%s" (include "xpyd.fullname" .) .Release.Namespace) -}}
{{- if $v.adminPort -}}{{- $hosts = append $hosts (printf "%s-router-admin.%s" (include "xpyd.fullname" .) .Release.Namespace) -}}{{- end -}}
{{- if .Values.ingress.enabled -}}{{- $hosts = concat $hosts .Values.ingress.hosts -}}{{- end -}}
{{- if .Values.httpRoute.enabled -}}{{- $hosts = concat $hosts (.Values.httpRoute.hostnames | default (list "*")) -}}{{- end -}}
{{- end -}}
{{- $plain := list -}}
{{- range $hosts -}}{{- $plain = append $plain (ternary "*" . (contains "*" .)) -}}{{- end -}}
{{- uniq $plain | toJson -}}
{{- end -}}

{{- define "xpyd.router.env" -}}
- name: XPYD_ROUTER # for `xpyd instances` inside the pod
  value: {{ lower (include "xpyd.scheme" .) }}://localhost:{{ int (.Values.router.adminPort | default .Values.router.port) }}
{{- if .Values.router.tls.secretName }}
- name: XPYD_ROUTER_PIN
  value: /etc/xpyd/tls/tls.crt
{{- end }}
{{- with .Values.router.adminKey }}
{{- if .secretName }}
- name: ADMIN_API_KEY # for `xpyd instances` inside the pod; the router reads its file, which may change
  valueFrom: {secretKeyRef: {name: {{ .secretName | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- if include "xpyd.router.peers" . }}
- name: XPYD_PEER_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "xpyd.router.peers.secret" . | quote }}, key: {{ .Values.router.peers.secret.key | quote }}}}
{{- end }}
{{- with .Values.router.cacheSalt }}
{{- if .secretName }}
- name: XPYD_CACHE_SALT_SECRET
  valueFrom: {secretKeyRef: {name: {{ .secretName | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- with .Values.router.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Without an admin port. Fails unless the router answers, with any status: one that hangs must be restarted, one without engines must not. One that closes the
connection, for it has as many as it may or the probe shows no certificate, is alive, too. */}}
{{- define "xpyd.router.alive" -}}
import http.client as h, ssl
{{- $where := printf "'localhost', %d, timeout=%d" (int .Values.router.port) (int .Values.router.probes.timeoutSeconds) }}
{{- if .Values.router.tls.secretName }}
c = h.HTTPSConnection({{ $where }}, context=ssl._create_unverified_context())
{{- else }}
c = h.HTTPConnection({{ $where }})
{{- end }}
try:
    c.request('GET', '/health')
    c.getresponse()
except (ConnectionResetError, BrokenPipeError, ssl.SSLError):
    pass
{{- end -}}

{{/* Each worker fills a core at most, so that is what is asked for; an HPA compares with it. */}}
{{- define "xpyd.router.resources" -}}
{{- $given := .Values.router.resources -}}
{{- $requests := merge (dict) ($given.requests | default dict) (dict "cpu" (int .Values.router.workers | toString)) -}}
{{- merge (dict "requests" $requests) $given | toYaml -}}
{{- end -}}
