{{/* dict root role: vLLM's --kv-transfer-config. */}}
{{- define "pdrelay.pool.transfer" -}}
{{- $c := .root.Values.connector -}}
{{- $extra := merge (dict "kv_lease_duration" $c.leaseSeconds) $c.extraConfig -}}
{{- if ne $c.mode "pull" -}}
{{- $_ := set $extra "mode" $c.mode -}}
{{- end -}}
{{- $role := ternary "kv_producer" "kv_consumer" (eq .role "prefill") -}}
{{- $return := include "pdrelay.returnKv" .root -}}
{{- if $return -}}
{{- $_ := set $extra "return_kv" (ternary true "auto" (eq $return "true")) -}}
{{- end -}}
{{- if or $return $c.kvBoth .root.Values.onePool.enabled -}}
{{- $role = "kv_both" -}}
{{- end -}}
{{- $config := dict "kv_connector" "PDRelayConnector" "kv_connector_module_path" "pdrelay_connector" -}}
{{- $_ := set $config "kv_role" $role -}}
{{- $_ := set $config "kv_load_failure_policy" $c.loadFailurePolicy -}}
{{- $_ := set $config "kv_connector_extra_config" $extra -}}
{{- with $c.bufferDevice -}}
{{- $_ := set $config "kv_buffer_device" . -}}
{{- end -}}
{{- toJson $config -}}
{{- end -}}

{{/* dict root role worker: ports of the container, as a YAML list; empty: none. A worker has none: the ranks are the leader's. */}}
{{- define "pdrelay.pool.ports" -}}
{{- $p := index .root.Values .role -}}
{{- if not .worker }}
- {name: http, containerPort: {{ int $p.port }}}
{{- if gt (int $p.nodes) 1 }}
- {name: group, containerPort: {{ int $p.groupPort }}}
{{- end }}
{{- range $rank := until (int $p.dataParallel) }}
- {name: side-{{ $rank }}, containerPort: {{ add $p.sidePort $rank }}}
{{- end }}
{{- if $p.kvEvents.enabled }}
{{- range $rank := until (int $p.dataParallel) }}
- {name: kv-events-{{ $rank }}, containerPort: {{ add $p.kvEvents.port $rank }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* dict root role worker: arguments of `vllm`, as a YAML list. */}}
{{- define "pdrelay.pool.args" -}}
{{- $v := .root.Values -}}
{{- $p := index $v .role -}}
- serve
- {{ $v.model.name | quote }}
- --served-model-name
- {{ $v.model.servedName | default $v.model.name | quote }}
{{- range $v.model.aliases }}
- {{ . | quote }}
{{- end }}
- --host
- {{ $v.listenAddress | quote }}
- --port
- {{ include "pdrelay.argument" $p.port | quote }}
- --tensor-parallel-size
- {{ include "pdrelay.argument" $p.tensorParallel | quote }}
{{- if gt (int $p.dataParallel) 1 }}
- --data-parallel-size
- {{ include "pdrelay.argument" $p.dataParallel | quote }}
{{- end }}
{{- if $p.expertParallel }}
- --enable-expert-parallel
{{- end }}
- --dtype
- {{ $v.model.dtype | quote }}
{{- with $v.model.maxLength }}
- --max-model-len
- {{ include "pdrelay.argument" . | quote }}
{{- end }}
{{- with $v.model.blockSize }}
- --block-size
- {{ include "pdrelay.argument" . | quote }}
{{- end }}
{{- with $p.gpuMemoryUtilization }}
- --gpu-memory-utilization
- {{ include "pdrelay.argument" . | quote }}
{{- end }}
- --enable-prompt-tokens-details
- --disable-access-log-for-endpoints
- /health,/metrics
- --shutdown-timeout
- {{ include "pdrelay.argument" $p.drain.shutdownSeconds | quote }}
{{- $events := include "pdrelay.kvEvents" .root }}
{{- if or (eq $events "true") (eq (include "pdrelay.returnKv" .root) "true") }}
- --enable-prefix-caching
{{- end }}
{{- if $events }}
- --kv-events-config
- {{ dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" "ipc:///run/pdrelay/kv-events/inproc.ipc" "replay_endpoint" "ipc:///run/pdrelay/kv-events/inproc-replay.ipc" | toJson | quote }}
{{- else if $p.kvEvents.enabled }}
- --kv-events-config
- {{ dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" (printf "tcp://*:%d" (int $p.kvEvents.port)) | toJson | quote }}
{{- end }}
- --kv-transfer-config
- {{ include "pdrelay.pool.transfer" . | quote }}
{{- if gt (int $p.nodes) 1 }}
- --nnodes
- {{ include "pdrelay.argument" $p.nodes | quote }}
- --node-rank
- $(LWS_WORKER_INDEX)
- --master-addr
- $(LWS_LEADER_ADDRESS)
- --master-port
- {{ include "pdrelay.argument" $p.groupPort | quote }}
{{- end }}
{{- $domains := without $v.model.allowedMediaDomains "*" }}
{{- if and $domains (not (has "*" $v.model.allowedMediaDomains)) }}
- --allowed-media-domains
{{- range $domains }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- if and $p.apiKey.secretName $p.apiKey.nextKey }}
- --api-key
- $(VLLM_API_KEY)
- $(PDRELAY_NEXT_API_KEY)
{{- end }}
{{- if .worker }}
- --headless
{{- else if not (kindIs "invalid" $p.apiServers) }}
- --api-server-count
- {{ include "pdrelay.argument" $p.apiServers | quote }}
{{- end }}
{{- with $v.engineTls }}
{{- if and .secretName (not $.worker) }}
- --ssl-certfile
- /etc/pdrelay/engine-tls/tls.crt
- --ssl-keyfile
- /etc/pdrelay/engine-tls/tls.key
- --enable-ssl-refresh
{{- if .requireClientCertificates }}
- --ssl-ca-certs
- /etc/pdrelay/engine-tls/ca.crt
- --ssl-cert-reqs
- "2"
{{- end }}
{{- end }}
{{- end }}
{{- range $p.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* dict root role patient: how the kubelet asks an engine. It can show no certificate itself. Patient: a certificate that is no good is
left to the readiness probe, for a restart brings no better one. */}}
{{- define "pdrelay.pool.probe" -}}
{{- $t := .root.Values.engineTls -}}
{{- $p := index .root.Values .role -}}
{{- if $t.requireClientCertificates -}}
exec:
  command:
    - python3
    - /opt/pdrelay/health.py
    - --port={{ int $p.port }}
    - --seconds={{ int $p.probes.timeoutSeconds }}
    {{- include "pdrelay.engineTls.args" .root | nindent 4 }}
    {{- if .patient }}
    - --patient
    {{- end }}
{{- else if $t.secretName -}}
httpGet: {path: /health, port: http, scheme: HTTPS}
{{- else -}}
httpGet: {path: /health, port: http}
{{- end }}
{{- end -}}

{{/* dict root role: where what is written goes that would else be in a home, which not every user has. */}}
{{- define "pdrelay.pool.folders" -}}
{{- $cache := ternary "/tmp/cache" "/cache" (eq .root.Values.cache.type "none") -}}
XDG_CACHE_HOME: {{ $cache }}
XDG_CONFIG_HOME: /tmp/.config
VLLM_CACHE_ROOT: {{ $cache }}/vllm
VLLM_CONFIG_ROOT: /tmp/.config/vllm
HF_HOME: {{ $cache }}/huggingface
TRITON_CACHE_DIR: {{ $cache }}/triton
FLASHINFER_WORKSPACE_BASE: {{ $cache }}
CUDA_CACHE_PATH: {{ $cache }}/nv
{{- end -}}

{{- define "pdrelay.pool.env" -}}
{{- include "pdrelay.env" (dict "own" (include "pdrelay.pool.ownEnv" .) "extra" (index .root.Values .role).extraEnv) -}}
{{- end -}}

{{- define "pdrelay.pool.ownEnv" -}}
{{- $v := .root.Values -}}
{{- $p := index $v .role -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: VLLM_HOST_IP
  value: $(POD_IP)
- name: VLLM_NIXL_SIDE_CHANNEL_HOST
{{- if .worker }}
  value: $(LWS_LEADER_ADDRESS) # where the engine's own workers find its side channel
{{- else }}
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
- name: VLLM_NIXL_SIDE_CHANNEL_PORT
  value: {{ include "pdrelay.argument" $p.sidePort | quote }}
- name: VLLM_NO_USAGE_STATS
  value: "1"
{{- $defaults := include "pdrelay.pool.folders" . | fromYaml }}
{{- if gt (int $p.dataParallel) 1 }}
{{- /* How long API servers wait for the ranks: vLLM's 600 s are shorter than a first download. */}}
{{- $_ := set $defaults "VLLM_ENGINE_READY_TIMEOUT_S" (include "pdrelay.argument" $p.probes.startupSeconds) }}
{{- end }}
{{- if and $v.model.allowedMediaDomains (not (has "*" $v.model.allowedMediaDomains)) }}
{{- /* An allowed host could send an engine anywhere else. */}}
{{- $_ := set $defaults "VLLM_MEDIA_URL_ALLOW_REDIRECTS" "0" }}
{{- end }}
{{- range $variable, $value := $defaults }}
- name: {{ $variable }}
  value: {{ $value | quote }}
{{- end }}
{{- if ne $v.model.volume.type "none" }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- with $v.model.hubToken }}
{{- if .secretName }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .secretName | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- if include "pdrelay.connector.secret" .root }}
- name: PDRELAY_CONNECTOR_SECRET_FILE # a file is read again when it changes, and no other process of the node sees it
  value: /etc/pdrelay/connector/secret
{{- end }}
{{- with $p.apiKey }}
{{- if .secretName }}
- name: VLLM_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .secretName | quote }}, key: {{ .key | quote }}}}
{{- if .nextKey }}
- name: PDRELAY_NEXT_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .secretName | quote }}, key: {{ .nextKey | quote }}}}
{{- end }}
{{- end }}
{{- end }}
{{- if and $v.engineTls.secretName (not .worker) }}
- name: WATCHFILES_FORCE_POLLING # --enable-ssl-refresh: a watch on a file ends when the kubelet replaces it the first time
  value: "true"
- name: WATCHFILES_POLL_DELAY_MS
  value: "5000"
{{- end }}
{{- if $p.rdma.enabled }}
{{- with $p.rdma.devices }}
- name: UCX_NET_DEVICES
  value: {{ . | quote }}
{{- end }}
{{- with $p.rdma.transports }}
- name: UCX_TLS # without tcp, which would take the place of RDMA's keys
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- if or (ne (include "pdrelay.pool.root" .) "true") (get $p.securityContext "readOnlyRootFilesystem") }}
- name: HOME # the image's is root's
  value: {{ ternary "/tmp" "/cache" (eq $v.cache.type "none") }}
- name: USER # Python asks for a name of the user, who has none in the image
  value: pdrelay
{{- end }}
{{- end -}}

{{- define "pdrelay.pool.resources" -}}
{{- $p := index .root.Values .role -}}
{{- $limits := dict -}}
{{- $count := $p.accelerator.count -}}
{{- if kindIs "invalid" $count -}}
{{- $count = div (mul $p.tensorParallel $p.dataParallel) $p.nodes -}}
{{- end -}}
{{- if and $p.accelerator.resource (gt (int $count) 0) -}}
{{- $_ := set $limits $p.accelerator.resource (int $count | toString) -}}
{{- end -}}
{{- if $p.rdma.enabled -}}
{{- $_ := set $limits $p.rdma.resource (int $p.rdma.count | toString) -}}
{{- end -}}
{{- with $p.hugepages -}}
{{- if .size -}}
{{- $_ := set $limits (printf "hugepages-%s" .size) .amount -}}
{{- end -}}
{{- end -}}
{{- $given := $p.resources -}}
{{- $all := dict "limits" (merge $limits ($given.limits | default dict)) "requests" (merge (dict) $limits ($given.requests | default dict)) -}}
{{- $claims := $given.claims | default list -}}
{{- range $p.resourceClaims -}}
{{- $claims = append $claims (pick . "name" "request") -}}
{{- end -}}
{{- if $claims -}}
{{- $_ := set $all "claims" $claims -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* dict root role: whether the engine is root. */}}
{{- define "pdrelay.pool.root" -}}
{{- $p := index .root.Values .role -}}
{{- ternary $p.rdma.enabled $p.runAsRoot (kindIs "invalid" $p.runAsRoot) -}}
{{- end -}}

{{/* dict root role: the pod's security; root is root's group too, and what it writes is its own. */}}
{{- define "pdrelay.pool.podSecurity" -}}
{{- $security := deepCopy (index .root.Values .role).podSecurityContext -}}
{{- if eq (include "pdrelay.pool.root" .) "true" -}}
{{- $security = merge (dict "runAsNonRoot" false "runAsUser" 0) (omit $security "runAsNonRoot" "runAsUser" "runAsGroup" "fsGroup" "fsGroupChangePolicy") -}}
{{- end -}}
{{- toYaml $security -}}
{{- end -}}

{{- define "pdrelay.pool.security" -}}
{{- $p := index .root.Values .role -}}
{{- $security := deepCopy $p.securityContext -}}
{{- if $p.rdma.enabled -}}
{{- $capabilities := get $security "capabilities" | default dict -}}
{{- $_ := set $capabilities "add" (append (get $capabilities "add" | default list) "IPC_LOCK" | uniq) -}}
{{- $_ := set $security "capabilities" $capabilities -}}
{{- end -}}
{{- toYaml $security -}}
{{- end -}}

{{/* What containers, hooks and probes run in the pods, as YAML of a ConfigMap. */}}
{{- define "pdrelay.pool.scripts" -}}
drain.py: |
  {{- .Files.Get "files/drain.py" | nindent 2 }}
{{- if include "pdrelay.plugins" . }}
start.py: |
  {{- .Files.Get "files/start.py" | nindent 2 }}
{{- end }}
{{- if .Values.engineTls.requireClientCertificates }}
health.py: |
  {{- .Files.Get "files/health.py" | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "pdrelay.pool.labels" -}}
{{- $more := merge (dict "pdrelay/role" (ternary "both" .role .root.Values.onePool.enabled) "pdrelay/release" .root.Release.Name "pdrelay/revision" (include "pdrelay.revision" .root)) (index .root.Values .role).podLabels -}}
{{- include "pdrelay.podLabels" (dict "root" .root "component" .role "more" $more) -}}
{{- end -}}

{{- define "pdrelay.pool.annotations" -}}
{{- $p := index .root.Values .role -}}
pdrelay/port: {{ include "pdrelay.argument" $p.port | quote }}
{{- if .root.Values.engineTls.secretName }}
pdrelay/scheme: https
{{- end }}
{{- if gt (int $p.dataParallel) 1 }}
pdrelay/ranks: {{ include "pdrelay.argument" $p.dataParallel | quote }}
{{- end }}
{{- if ne .root.Values.connector.mode "pull" }}
pdrelay/mode: {{ .root.Values.connector.mode }}
{{- end }}
checksum/scripts: {{ include "pdrelay.pool.scripts" .root | sha256sum | trunc 16 }}
{{- with merge (dict) $p.podAnnotations .root.Values.commonAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* dict root role worker: the template of a pod. A worker is a pod of an engine that answers no requests. */}}
{{- define "pdrelay.pool.template" -}}
{{- $v := .root.Values -}}
{{- $p := index $v .role -}}
{{- $name := include "pdrelay.fullname" .root -}}
{{- $events := include "pdrelay.kvEvents" .root -}}
metadata:
  labels:
    {{- include "pdrelay.pool.labels" . | nindent 4 }}
  annotations:
    {{- include "pdrelay.pool.annotations" . | nindent 4 }}
spec:
  serviceAccountName: {{ include "pdrelay.engine.serviceAccount" .root | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "pdrelay.pool.grace" . }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "pdrelay.pool.podSecurity" . | nindent 4 }}
  {{- if $p.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- if $p.hostNamespaces }}
  hostPID: true
  hostIPC: true
  {{- end }}
  {{- range $key := list "runtimeClassName" "priorityClassName" "schedulerName" }}
  {{- with index $p $key }}
  {{ $key }}: {{ . | quote }}
  {{- end }}
  {{- end }}
  {{- with $p.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $p.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $p.affinity }}
  affinity:
    {{- toYaml $p.affinity | nindent 4 }}
  {{- else if $p.colocate.enabled }}
  affinity:
    podAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 50
          podAffinityTerm:
            topologyKey: {{ $p.colocate.topologyKey | quote }}
            labelSelector:
              matchLabels:
                {{- include "pdrelay.selector" (dict "root" .root "component" (ternary "decode" "prefill" (eq .role "prefill"))) | nindent 16 }}
  {{- end }}
  {{- if $p.topologySpread }}
  topologySpreadConstraints:
    {{- include "pdrelay.spread" (dict "constraints" $p.topologySpread "selector" (include "pdrelay.selector" (dict "root" .root "component" .role) | fromYaml)) | nindent 4 }}
  {{- end }}
  {{- with $p.resourceClaims }}
  resourceClaims:
    {{- range . }}
    - {{- omit . "request" | toYaml | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- if or $events $p.initContainers }}
  initContainers:
    {{- if $events }}
    - name: kv-events # an emptyDir is open to all users; the engine refuses sockets that others may reach
      image: {{ include "pdrelay.image" (dict "root" .root "image" $p.image) }}
      imagePullPolicy: {{ $p.image.pullPolicy }}
      command: [mkdir, -p, -m, "0700", /run/pdrelay/kv-events]
      resources:
        requests: {cpu: 10m, memory: 16Mi, ephemeral-storage: 1Mi}
        limits: {cpu: 100m, memory: 64Mi, ephemeral-storage: 16Mi}
      securityContext:
        {{- toYaml $p.securityContext | nindent 8 }}
      volumeMounts:
        - {name: run, mountPath: /run/pdrelay}
    {{- end }}
    {{- range $p.initContainers }}
    {{- $own := hasKey . "securityContext" | ternary (dict) (dict "securityContext" $p.securityContext) }}
    - {{- merge (dict) . $own | toYaml | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: engine
      image: {{ include "pdrelay.image" (dict "root" .root "image" $p.image) }}
      imagePullPolicy: {{ $p.image.pullPolicy }}
      {{- with include "pdrelay.plugins" .root }}
      command: [python3, /opt/pdrelay/start.py, {{ . | quote }}]
      {{- else }}
      command: [vllm]
      {{- end }}
      args:
        {{- include "pdrelay.pool.args" . | nindent 8 }}
      env:
        {{- include "pdrelay.pool.env" . | nindent 8 }}
      {{- with include "pdrelay.pool.ports" . | trim }}
      ports:
        {{- . | nindent 8 }}
      {{- end }}
      {{- if not .worker }}
      {{- /* Of an engine that does not answer its probes: nothing can be drained, and its hook would wait as long as for a stream. */}}
      {{- $hung := add $p.drain.settleSeconds $p.drain.shutdownSeconds $p.drain.marginSeconds | max 1 }}
      startupProbe:
        {{- include "pdrelay.pool.probe" (merge (dict "patient" true) .) | nindent 8 }}
        periodSeconds: {{ int $p.probes.periodSeconds }}
        timeoutSeconds: {{ int $p.probes.timeoutSeconds }}
        failureThreshold: {{ divf $p.probes.startupSeconds $p.probes.periodSeconds | ceil | int }}
        terminationGracePeriodSeconds: {{ $hung }}
      readinessProbe:
        {{- include "pdrelay.pool.probe" (merge (dict "patient" false) .) | nindent 8 }}
        periodSeconds: {{ int $p.probes.periodSeconds }}
        timeoutSeconds: {{ int $p.probes.timeoutSeconds }}
        failureThreshold: {{ int $p.probes.readinessFailures }}
      livenessProbe:
        {{- include "pdrelay.pool.probe" (merge (dict "patient" true) .) | nindent 8 }}
        periodSeconds: {{ int $p.probes.periodSeconds }}
        timeoutSeconds: {{ int $p.probes.timeoutSeconds }}
        failureThreshold: {{ int $p.probes.livenessFailures }}
        terminationGracePeriodSeconds: {{ $hung }}
      {{- end }}
      lifecycle:
        preStop:
          exec:
            command:
              - python3
              - /opt/pdrelay/drain.py
              - --port={{ int $p.port }}
              - --role={{ .role }}
              - --settle={{ int $p.drain.settleSeconds }}
              - --lease={{ include "pdrelay.argument" $v.connector.leaseSeconds }}
              - --seconds={{ include "pdrelay.pool.drain" . }}
              {{- with include "pdrelay.engineTls.args" .root | trim }}
              {{- . | nindent 14 }}
              {{- end }}
              {{- if .worker }}
              - --of-leader
              {{- end }}
      resources:
        {{- include "pdrelay.pool.resources" . | nindent 8 }}
      securityContext:
        {{- include "pdrelay.pool.security" . | nindent 8 }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        - {name: scripts, mountPath: /opt/pdrelay, readOnly: true}
        {{- if $events }}
        - {name: run, mountPath: /run/pdrelay}
        {{- end }}
        {{- if $v.engineTls.secretName }}
        - {name: engine-tls, mountPath: /etc/pdrelay/engine-tls, readOnly: true}
        {{- end }}
        {{- if include "pdrelay.connector.secret" .root }}
        - {name: connector, mountPath: /etc/pdrelay/connector, readOnly: true}
        {{- end }}
        {{- if ne $v.cache.type "none" }}
        - {name: cache, mountPath: /cache}
        {{- end }}
        {{- if ne $v.model.volume.type "none" }}
        - {name: model, mountPath: {{ $v.model.volume.mountPath | quote }}, readOnly: true}
        {{- end }}
        {{- if $p.hugepages.size }}
        - {name: hugepages, mountPath: /dev/hugepages}
        {{- end }}
        {{- with $p.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $p.shmSize }}}}
    - {name: tmp, emptyDir: {sizeLimit: {{ $p.tmpSize }}}}
    - {name: scripts, configMap: {name: {{ $name }}-scripts}}
    {{- if $events }}
    - {name: run, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
    {{- end }}
    {{- if $v.engineTls.secretName }}
    - name: engine-tls
      projected:
        sources:
          - secret: {name: {{ $v.engineTls.secretName | quote }}, items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]}
          - secret: {name: {{ include "pdrelay.engineTls.ca" .root | quote }}, items: [{key: ca.crt, path: ca.crt}]}
    {{- end }}
    {{- with include "pdrelay.connector.secret" .root }}
    - {name: connector, secret: {secretName: {{ . | quote }}, items: [{key: {{ $v.connector.secret.key | quote }}, path: secret}]}}
    {{- end }}
    {{- with $v.cache }}
    {{- if eq .type "emptyDir" }}
    - {name: cache, emptyDir: {sizeLimit: {{ .size }}}}
    {{- else if eq .type "pvc" }}
    - {name: cache, persistentVolumeClaim: {claimName: {{ .claimName | quote }}}}
    {{- else if eq .type "hostPath" }}
    - {name: cache, hostPath: {path: {{ .hostPath | quote }}, type: DirectoryOrCreate}}
    {{- end }}
    {{- end }}
    {{- with $v.model.volume }}
    {{- if eq .type "pvc" }}
    - {name: model, persistentVolumeClaim: {claimName: {{ .claimName | quote }}, readOnly: true}}
    {{- else if eq .type "image" }}
    - {name: model, image: {reference: {{ .image | quote }}, pullPolicy: IfNotPresent}}
    {{- else if eq .type "hostPath" }}
    - {name: model, hostPath: {path: {{ .hostPath | quote }}, type: Directory}}
    {{- end }}
    {{- end }}
    {{- with $p.hugepages }}
    {{- if .size }}
    - {name: hugepages, emptyDir: {medium: HugePages-{{ .size }}}}
    {{- end }}
    {{- end }}
    {{- with $p.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* dict root role: what a LeaderWorkerSet has beside its replicas. */}}
{{- define "pdrelay.pool.groups" -}}
{{- $p := index .root.Values .role -}}
startupPolicy: LeaderCreated
rolloutStrategy:
  {{- toYaml ($p.strategy | default (dict "type" "RollingUpdate" "rollingUpdateConfiguration" (dict "maxUnavailable" 0 "maxSurge" 1))) | nindent 2 }}
leaderWorkerTemplate:
  size: {{ int $p.nodes }}
  restartPolicy: RecreateGroupOnPodRestart
  leaderTemplate:
    {{- include "pdrelay.pool.template" (merge (dict "worker" false) .) | nindent 4 }}
  workerTemplate:
    {{- include "pdrelay.pool.template" (merge (dict "worker" true) .) | nindent 4 }}
{{- end -}}

{{/* dict root role: annotations of a LeaderWorkerSet, as a dict. */}}
{{- define "pdrelay.pool.topology" -}}
{{- $p := index .root.Values .role -}}
{{- ternary (dict "leaderworkerset.sigs.k8s.io/exclusive-topology" $p.exclusiveTopology) dict (and (eq $p.kind "LeaderWorkerSet") (not (empty $p.exclusiveTopology))) | toYaml -}}
{{- end -}}

{{/* Both pools as the roles of one object, whose controller replaces them in step. */}}
{{- define "pdrelay.pools.set" -}}
apiVersion: disaggregatedset.x-k8s.io/v1
kind: DisaggregatedSet
metadata:
  {{- include "pdrelay.metadata" (dict "root" . "component" "engines" "name" (include "pdrelay.fullname" .)) | nindent 2 }}
spec:
  {{- with .Values.disaggregatedSet }}
  {{- /* LeaderWorkerSet 0.9 has neither field. */}}
  {{- if gt (int .slices) 1 }}
  slices: {{ int .slices }}
  {{- end }}
  {{- if ne .placementPolicy.type "None" }}
  placementPolicy: {type: {{ .placementPolicy.type }}, topology: {{ .placementPolicy.topology | quote }}}
  {{- end }}
  {{- end }}
  roles:
    {{- range $role := list "prefill" "decode" }}
    {{- $one := dict "root" $ "role" $role }}
    - name: {{ $role }}
      metadata:
        labels:
          {{- include "pdrelay.labels" (dict "root" $ "component" $role) | nindent 10 }}
        {{- with include "pdrelay.pool.topology" $one | fromYaml }}
        annotations:
          {{- toYaml . | nindent 10 }}
        {{- end }}
      {{- $scaled := ne (index $.Values $role).autoscaling.type "none" }}
      {{- if $scaled }}
      scaling: {mode: External} # the controller makes a scaler for the role, which begins with the engines that run
      {{- end }}
      spec:
        {{- if not $scaled }}
        replicas: {{ int (index $.Values $role).replicas }}
        {{- end }}
        {{- include "pdrelay.pool.groups" $one | nindent 8 }}
    {{- end }}
{{- end -}}

{{/* dict root role: the workload. */}}
{{- define "pdrelay.pool.workload" -}}
{{- $p := index .root.Values .role -}}
{{- $name := printf "%s-%s" (include "pdrelay.fullname" .root) .role -}}
{{- $leader := merge (dict "worker" false) . -}}
{{- $annotations := merge (include "pdrelay.replicas.noted" $p | fromYaml) (include "pdrelay.pool.topology" . | fromYaml) -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq $p.kind "LeaderWorkerSet") }}
kind: {{ $p.kind }}
metadata:
  {{- include "pdrelay.metadata" (dict "root" .root "component" .role "name" $name "annotations" $annotations) | nindent 2 }}
spec:
  {{- with include "pdrelay.replicas" (dict "root" .root "values" $p "kind" $p.kind "name" $name) }}
  replicas: {{ . }}
  {{- end }}
  {{- if eq $p.kind "LeaderWorkerSet" }}
  {{- include "pdrelay.pool.groups" . | nindent 2 }}
  {{- else }}
  {{- with int $p.minReadySeconds }}
  minReadySeconds: {{ . }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "pdrelay.selector" (dict "root" .root "component" .role) | nindent 6 }}
  strategy:
    {{- toYaml ($p.strategy | default (dict "type" "RollingUpdate" "rollingUpdate" (dict "maxSurge" 1 "maxUnavailable" 0))) | nindent 4 }}
  progressDeadlineSeconds: {{ add $p.probes.startupSeconds 600 $p.minReadySeconds }}
  template:
    {{- include "pdrelay.pool.template" $leader | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* dict root role: what the autoscaler scales. */}}
{{- define "pdrelay.pool.target" -}}
{{- $kind := (index .root.Values .role).kind -}}
{{- if .root.Values.disaggregatedSet.enabled -}}
apiVersion: disaggregatedset.x-k8s.io/v1
kind: DisaggregatedSetRoleScaler
{{- else -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq $kind "LeaderWorkerSet") }}
kind: {{ $kind }}
{{- end }}
name: {{ include "pdrelay.fullname" .root }}-{{ .role }}
{{- end -}}

{{/* An autoscaler's values: how fast. One engine less a minute, for each drains first. */}}
{{- define "pdrelay.pool.behavior" -}}
{{- if .scaleUpPods -}}
scaleUp:
  policies:
    - {type: Pods, value: {{ int .scaleUpPods }}, periodSeconds: 60}
{{ end -}}
scaleDown:
  stabilizationWindowSeconds: {{ int .scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}

{{- /* The plugins of vLLM that must be named beside the others, if there are any but the connector's own. */ -}}
{{- define "pdrelay.plugins" -}}
{{- $plugins := list -}}
{{- if include "pdrelay.kvEvents" . -}}{{- $plugins = append $plugins "pdrelay_kv_events" -}}{{- end -}}
{{- if .Values.timelines.enabled -}}{{- $plugins = append $plugins "pdrelay_timelines" -}}{{- end -}}
{{- if $plugins -}}{{- join "," (prepend $plugins "pdrelay") -}}{{- end -}}
{{- end -}}
