{{/* Arguments of `pdrelay`, as a YAML list. */}}
{{- define "pdrelay.router.args" -}}
{{- $v := .Values.router -}}
- serve
- --host
- {{ .Values.listenAddress | quote }}
- --port
- {{ include "pdrelay.argument" $v.port | quote }}
- --admin-port
- {{ include "pdrelay.argument" $v.adminPort | quote }}
{{- if $v.discovery.enabled }}
{{- if $v.discovery.inferencePool }}
- --kubernetes-inference-pool
- {{ $v.discovery.inferencePool | quote }}
{{- else }}
- --kubernetes-selector
- pdrelay/release={{ .Release.Name }}
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
- kubernetes:{{ include "pdrelay.fullname" . }}-instances
{{- else if eq $v.store.type "redis" }}
- {{ printf "%s%sprefix=%s" $v.store.redisUrl (ternary "&" "?" (contains "?" $v.store.redisUrl)) ($v.store.prefix | default (printf "%s/%s" .Release.Namespace .Release.Name)) | quote }}
{{- else }}
- memory
{{- end }}
{{- if include "pdrelay.router.peers" . }}
- --peers
- {{ include "pdrelay.fullname" . }}-router-peers.{{ .Release.Namespace }}.svc:{{ int $v.peers.port }}
- --peer-port
- {{ include "pdrelay.argument" $v.peers.port | quote }}
{{- end }}
- --drain-grace
- {{ include "pdrelay.argument" $v.drain.graceSeconds | quote }}
- --shutdown-timeout
- {{ include "pdrelay.argument" $v.drain.shutdownSeconds | quote }}
{{- if $v.apiKeys.secretName }}
- --api-keys-file
- /etc/pdrelay/keys/keys
{{- end }}
{{- if $v.adminKey.secretName }}
- --admin-key-file
- /etc/pdrelay/admin-key/key
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- if (index $.Values $role).apiKey.secretName }}
- --{{ $role }}-api-key-file
- /etc/pdrelay/{{ $role }}-key/key
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
{{- with include "pdrelay.router.hosts" . | fromJsonArray }}
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
- /etc/pdrelay/tls/tls.crt
- --tls-key
- /etc/pdrelay/tls/tls.key
{{- end }}
{{- if $v.tls.clientCaSecretName }}
- --tls-client-ca
- /etc/pdrelay/client-ca/ca.crt
{{- end }}
{{- if include "pdrelay.engineTls.ca" . }}
- --engine-ca
- /etc/pdrelay/engine-ca/ca.crt
{{- end }}
{{- with include "pdrelay.engineTls.name" . }}
- --engine-server-name
- {{ . | quote }}
{{- end }}
{{- if .Values.engineTls.clientSecretName }}
- --engine-cert
- /etc/pdrelay/engine-client/tls.crt
- --engine-key
- /etc/pdrelay/engine-client/tls.key
{{- end }}
{{- range $name, $value := include "pdrelay.router.settings" . | fromYaml }}
- --{{ $name | trimSuffix "_s" | replace "_" "-" }}
{{- range kindIs "slice" $value | ternary $value (list $value) }}
- {{ include "pdrelay.argument" . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Settings of the router, by name, unless router.settings has others: those that make use of what engines have cached, of kvEvents.enabled, returnKv.enabled and several slices; and, without reuse_kv, of several routers. With reuse_kv routers name decode engines that have KV of answers by themselves. Where engines publish no events, routers do not ask for them. One leg with expected_ttft wants the other with it, too. */}}
{{- define "pdrelay.router.settings" -}}
{{- $policies := include "pdrelay.policies" . | fromJsonArray -}}
{{- $caches := dict "prefill_policy" (first $policies) "decode_policy" (last $policies) -}}
{{- $weighs := ternary $caches dict (has "expected_ttft" $policies) -}}
{{- $events := merge (dict "kv_events" "auto") $caches -}}
{{- $return := merge (dict "return_kv" true) $caches -}}
{{- $reuse := merge (dict "reuse_kv" true "kv_events" "off") $caches -}}
{{- $peers := dict "prefill_policy" "least_loaded" "decode_policy" "least_loaded" -}}
{{- $slices := dict "slice_pairing" "prefer" "slice_label" "disaggregatedset.x-k8s.io/slice" -}}
{{- merge (dict) .Values.router.settings $weighs (ternary $slices dict (gt (int .Values.disaggregatedSet.slices) 1)) (ternary $events dict (ne (include "pdrelay.kvEvents" .) "")) (ternary $return dict (eq (include "pdrelay.returnKv" .) "true")) (ternary $reuse dict (eq (include "pdrelay.reuses" .) "true")) (ternary $peers dict (eq (include "pdrelay.router.peers" .) "true")) | toYaml -}}
{{- end -}}

{{/* Names that clients may call routers by: needed where neither keys nor TLS keep web pages of other names away. */}}
{{- define "pdrelay.router.hosts" -}}
{{- $v := .Values.router -}}
{{- $hosts := $v.allowedHosts -}}
{{- if not (or $v.apiKeys.secretName $v.tls.secretName) -}}
{{- range $name := list "router" "router-admin" -}}
{{- $hosts = append $hosts (printf "%s-%s.%s" (include "pdrelay.fullname" $) $name $.Release.Namespace) -}}
{{- end -}}
{{- if .Values.ingress.enabled -}}{{- $hosts = concat $hosts .Values.ingress.hosts -}}{{- end -}}
{{- if .Values.httpRoute.enabled -}}{{- $hosts = concat $hosts (.Values.httpRoute.hostnames | default (list "*")) -}}{{- end -}}
{{- end -}}
{{- $plain := list -}}
{{- range $hosts -}}{{- $plain = append $plain (ternary "*" . (contains "*" .)) -}}{{- end -}}
{{- uniq $plain | toJson -}}
{{- end -}}

{{- define "pdrelay.router.env" -}}
{{- include "pdrelay.env" (dict "own" (include "pdrelay.router.ownEnv" .) "extra" .Values.router.extraEnv) -}}
{{- end -}}

{{- define "pdrelay.router.ownEnv" -}}
- name: PDRELAY_ROUTER # for `pdrelay instances` inside the pod
  value: {{ lower (include "pdrelay.scheme" .) }}://localhost:{{ int .Values.router.adminPort }}
{{- if .Values.router.tls.secretName }}
- name: PDRELAY_ROUTER_PIN
  value: /etc/pdrelay/tls/tls.crt
{{- end }}
{{- with .Values.router.adminKey }}
{{- if .secretName }}
- name: ADMIN_API_KEY # for `pdrelay instances` inside the pod; the router reads its file, which may change
  valueFrom: {secretKeyRef: {name: {{ .secretName | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- if include "pdrelay.router.peers" . }}
- name: PDRELAY_PEER_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "pdrelay.router.peers.secret" . | quote }}, key: {{ .Values.router.peers.secret.key | quote }}}}
{{- end }}
{{- with .Values.router.cacheSalt }}
{{- if .secretName }}
- name: PDRELAY_CACHE_SALT_SECRET
  valueFrom: {secretKeyRef: {name: {{ .secretName | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- end -}}

{{/* A router fills a core at most, so that is what is asked for, or what it may have; an HPA compares with it. */}}
{{- define "pdrelay.router.resources" -}}
{{- $given := .Values.router.resources -}}
{{- $core := hasKey ($given.limits | default dict) "cpu" | ternary dict (dict "cpu" "1") -}}
{{- $requests := merge (dict) ($given.requests | default dict) $core -}}
{{- merge (dict "requests" $requests) $given | toYaml -}}
{{- end -}}
