{{/* What the schema cannot say: values that contradict each other. */}}
{{- define "pdrelay.checks" -}}
{{- $v := .Values -}}
{{- include "pdrelay.check.images" . -}}
{{- include "pdrelay.check.drawn" . -}}
{{- include "pdrelay.check.policies" . -}}
{{- include "pdrelay.check.texts" . -}}
{{- include "pdrelay.check.strategy" (dict "name" "router" "kind" "Deployment" "strategy" $v.router.strategy) -}}
{{- if and (eq $v.router.store.type "memory") (or (gt (int $v.router.replicas) 1) (ne $v.router.autoscaling.type "none")) -}}
{{- fail "router.store.type is memory, which is one router's own: write kubernetes or redis, or router.replicas: 1 without autoscaling" -}}
{{- end -}}
{{- range $where, $account := dict "router.serviceAccount" $v.router.serviceAccount "engineServiceAccount" $v.engineServiceAccount -}}
{{- if not (or $account.create $account.name) -}}
{{- fail (printf "%s.create is false and %s.name is empty: pods are made with an account that exists, so name it, such as default" $where $where) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "[?&](username|password)=" $v.router.store.redisUrl -}}
{{- fail "router.store.redisUrl has a password, which everybody can read who reads the release: write PDRELAY_REDIS_PASSWORD with a secretKeyRef into router.extraEnv" -}}
{{- end -}}
{{- if and (eq $v.router.store.type "redis") (not $v.router.store.redisUrl) -}}
{{- fail "router.store.type is redis, but router.store.redisUrl is empty: write redis://HOST:PORT" -}}
{{- end -}}
{{- if and (include "pdrelay.router.peers" .) (not (include "pdrelay.router.peers.secret" .)) -}}
{{- fail "router.peers.secret.name is empty and router.peers.secret.create is false: routers prove to each other that they belong together, so write one of the two, or router.peers.enabled: false" -}}
{{- end -}}
{{- if and $v.router.adminKey.secretName (eq $v.router.adminKey.secretName $v.router.apiKeys.secretName) (eq $v.router.adminKey.key $v.router.apiKeys.key) -}}
{{- fail "router.adminKey and router.apiKeys are the same key of the same secret: clients would be operators, so give each a key of its own" -}}
{{- end -}}
{{- if eq (int $v.router.port) (int $v.router.adminPort) -}}
{{- fail (printf "router.port and router.adminPort are both %d: write two" (int $v.router.port)) -}}
{{- end -}}
{{- if and $v.router.tls.clientCaSecretName (not $v.router.tls.secretName) -}}
{{- fail "router.tls.clientCaSecretName needs router.tls.secretName: certificates are shown over https only" -}}
{{- end -}}
{{- if and $v.router.apiKeys.secretName $v.monitoring.serviceMonitor.enabled (not $v.monitoring.serviceMonitor.bearerToken.secretName) (not (get $v.router.settings "public_metrics")) -}}
{{- fail "router.apiKeys.secretName is set, and /metrics wants a key: name one for Prometheus in monitoring.serviceMonitor.bearerToken, or write router.settings.public_metrics: true" -}}
{{- end -}}
{{- $tls := $v.engineTls -}}
{{- if and $tls.requireClientCertificates (not (and $tls.secretName $tls.clientSecretName)) -}}
{{- fail "engineTls.requireClientCertificates is true: engines would refuse every router, so name the engines' certificate in engineTls.secretName and the routers' in engineTls.clientSecretName" -}}
{{- end -}}
{{- if and $tls.requireClientCertificates $v.monitoring.podMonitor.enabled (not $v.monitoring.podMonitor.tlsConfig) -}}
{{- fail "engineTls.requireClientCertificates is true: Prometheus needs a certificate to show to engines, so write monitoring.podMonitor.tlsConfig" -}}
{{- end -}}
{{- /* NAME-SLICE-REVISION-prefill is a LeaderWorkerSet; its controllers add to that, and a label has 63 characters. */ -}}
{{- $name := include "pdrelay.fullname" . -}}
{{- $set := $v.disaggregatedSet -}}
{{- $most := ternary 29 30 (gt (int $set.slices) 10) -}}
{{- if and $set.enabled (gt (len $name) $most) -}}
{{- fail (printf "disaggregatedSet.enabled is true, and the name %s has more than %d characters: pods would be called by too long names, so write a shorter fullnameOverride" $name $most) -}}
{{- end -}}
{{- if and (gt (int $set.slices) 1) (not $set.enabled) -}}
{{- fail (printf "disaggregatedSet.slices is %d: write disaggregatedSet.enabled: true, or replicas of the pools" (int $set.slices)) -}}
{{- end -}}
{{- if and (ne $set.placementPolicy.type "None") (not $set.placementPolicy.topology) -}}
{{- fail (printf "disaggregatedSet.placementPolicy.type is %s: name the label of nodes that says what a place is in disaggregatedSet.placementPolicy.topology" $set.placementPolicy.type) -}}
{{- end -}}
{{- if or (hasPrefix "127." $v.listenAddress) (eq $v.listenAddress "::1") -}}
{{- fail (printf "listenAddress is %s, a pod's own: no probe and no other pod reaches it there, so write 0.0.0.0, or \"::\"" $v.listenAddress) -}}
{{- end -}}
{{- $service := $v.router.service -}}
{{- if and (eq $service.ipFamilyPolicy "SingleStack") (gt (len $service.ipFamilies) 1) -}}
{{- fail "router.service.ipFamilyPolicy is SingleStack, and ipFamilies names two families: write PreferDualStack, or one family" -}}
{{- end -}}
{{- if and (or (has "IPv6" $service.ipFamilies) (hasSuffix "DualStack" $service.ipFamilyPolicy)) (not (contains ":" $v.listenAddress)) -}}
{{- fail (printf "router.service wants IPv6, and listenAddress is %s: routers would listen on IPv4 alone, so write listenAddress: \"::\", which takes both" $v.listenAddress) -}}
{{- end -}}
{{- if and (eq $v.router.autoscaling.type "keda") $v.router.autoscaling.more (not $v.monitoring.serviceMonitor.enabled) -}}
{{- fail "router.autoscaling.more asks Prometheus: write monitoring.serviceMonitor.enabled: true" -}}
{{- end -}}
{{- $egress := $v.networkPolicy.egress -}}
{{- if and $v.networkPolicy.enabled $egress.enabled (not $egress.routerTo) -}}
{{- if eq $v.router.store.type "redis" -}}
{{- fail "networkPolicy.egress.enabled keeps routers from Redis: name it in networkPolicy.egress.routerTo" -}}
{{- end -}}
{{- if or $v.prefill.hostNetwork $v.decode.hostNetwork $v.router.discovery.prefill $v.router.discovery.decode -}}
{{- fail "networkPolicy.egress.enabled keeps routers from engines on their nodes' network or outside of the release: name their addresses in networkPolicy.egress.routerTo" -}}
{{- end -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled $egress.enabled (not $egress.engineTo) (or $v.prefill.hostNetwork $v.decode.hostNetwork) (not (and $v.prefill.hostNetwork $v.decode.hostNetwork)) -}}
{{- fail "networkPolicy.egress.enabled keeps engines from those on their nodes' network: name the nodes in networkPolicy.egress.engineTo" -}}
{{- end -}}
{{- $hub := and (eq $v.model.volume.type "none") (not (hasPrefix "/" $v.model.name)) -}}
{{- range $role := list "prefill" "decode" -}}
{{- $p := index $v $role -}}
{{- $offline := false -}}
{{- range $p.extraEnv -}}{{- $offline = or $offline (eq .name "HF_HUB_OFFLINE") -}}{{- end -}}
{{- if and $v.networkPolicy.enabled $egress.enabled (not $egress.engineTo) $hub $p.enabled (not $offline) (not $p.hostNetwork) -}}
{{- fail (printf "networkPolicy.egress.enabled keeps engines from the model hub, and %s is not on a volume: name the hub (or a proxy) in networkPolicy.egress.engineTo, use model.volume, or set HF_HUB_OFFLINE in %s.extraEnv if the cache has the model" $v.model.name $role) -}}
{{- end -}}
{{- end -}}
{{- $handoff := add (ceil (divf (mulf $v.connector.leaseSeconds 2) 3)) (ceil (get $v.router.settings "connect_timeout_s" | default 5)) -}}
{{- if gt (float64 $handoff) (float64 $v.connector.leaseSeconds) -}}
{{- fail (printf "connector.leaseSeconds is %v: the router may hand over %d s after a prefill (two thirds of the lease, and connect_timeout_s of router.settings), when the KV is gone; write a longer lease or a shorter timeout" $v.connector.leaseSeconds $handoff) -}}
{{- end -}}
{{- if and $v.router.discovery.inferencePool (not $v.router.discovery.enabled) -}}
{{- fail "router.discovery.inferencePool needs router.discovery.enabled: the router watches the pool" -}}
{{- end -}}
{{- if and (not $v.router.discovery.enabled) (not $v.router.discovery.prefill) (not $v.router.discovery.decode) -}}
{{- fail "router.discovery.enabled is false, and router.discovery.prefill and decode are empty: the router would know no engine" -}}
{{- end -}}
{{- $tells := eq (include "pdrelay.kvEvents" .) "true" -}}
{{- if and $tells (not (include "pdrelay.remembers" (include "pdrelay.policies" . | fromJsonArray))) -}}
{{- fail "kvEvents.enabled is true, but no policy of router.settings remembers what engines have cached: leave out prefill_policy or decode_policy, or write expected_ttft for both" -}}
{{- end -}}
{{- $c := $v.connector -}}
{{- if eq (include "pdrelay.returnKv" .) "true" -}}
{{- with include "pdrelay.returnKv.hindrance" . -}}
{{- fail (printf "returnKv.enabled is true%s" .) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $c.mode "auto") (or $c.bufferDevice (get $c.extraConfig "host_staging")) -}}
{{- fail (printf "connector.mode is auto, and KV goes through host memory (connector.bufferDevice is %q): engines would refuse to start; write pull or push" $c.bufferDevice) -}}
{{- end -}}
{{- if not (or (include "pdrelay.connector.secret" .) (get $c.extraConfig "allow_open_side_channel")) -}}
{{- fail "connector.secret.name is empty and connector.secret.create is false: engines refuse a side channel without a secret, so write one of the two, or connector.extraConfig.allow_open_side_channel: true" -}}
{{- end -}}
{{- if not (or $v.networkPolicy.enabled $c.acceptOpenDataPlane) -}}
{{- fail "networkPolicy.enabled is false: over TCP a host that reaches an engine's UCX port reads and writes its memory, so enable it, or write connector.acceptOpenDataPlane: true if the engines' network is closed otherwise" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $p := index $v $role -}}
{{- if and $p.enabled $p.hostNetwork (not $c.acceptOpenDataPlane) -}}
{{- fail (printf "%s.hostNetwork is true: no NetworkPolicy applies there, and over TCP a host that reaches an engine's UCX port reads and writes its memory; close the nodes' network and write connector.acceptOpenDataPlane: true" $role) -}}
{{- end -}}
{{- if and $p.enabled $p.kvEvents.enabled (or $p.hostNetwork (not $v.networkPolicy.enabled)) -}}
{{- fail (printf "%s.kvEvents.enabled is true: vLLM publishes without a key, so it wants networkPolicy.enabled: true and %s.hostNetwork: false" $role $role) -}}
{{- end -}}
{{- if and $tells $p.enabled -}}
{{- if not $p.apiKey.secretName -}}
{{- fail (printf "kvEvents.enabled is true: KV events contain prompts, and an engine shows them only to clients with its key, so name a secret in %s.apiKey.secretName" $role) -}}
{{- end -}}
{{- if $p.kvEvents.enabled -}}
{{- fail (printf "kvEvents.enabled and %s.kvEvents.enabled are both true: an engine publishes over a socket of its own or over a port, so write one of the two" $role) -}}
{{- end -}}
{{- end -}}
{{- if $p.enabled -}}
{{- $needed := include "pdrelay.plugins" $ -}}
{{- range $p.extraEnv -}}
{{- if and $needed (eq .name "VLLM_PLUGINS") -}}
{{- $plugins := splitList "," (.value | default "") -}}
{{- range splitList "," $needed -}}
{{- if not (has . $plugins) -}}
{{- fail (printf "%s.extraEnv sets VLLM_PLUGINS: vLLM loads only plugins that are named there, so with kvEvents.enabled or timelines.enabled name %s, too" $role $needed) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $v.disaggregatedSet.enabled -}}
{{- if or (not $p.enabled) (ne $p.kind "LeaderWorkerSet") -}}
{{- fail (printf "disaggregatedSet.enabled is true: its roles are LeaderWorkerSets, so write %s.enabled: true and %s.kind: LeaderWorkerSet" $role $role) -}}
{{- end -}}
{{- /* Only a real cluster tells what it has: helm template without one lists none of its kinds. */ -}}
{{- if and (ne $p.autoscaling.type "none") ($.Capabilities.APIVersions.Has "disaggregatedset.x-k8s.io/v1/DisaggregatedSet") (not ($.Capabilities.APIVersions.Has "disaggregatedset.x-k8s.io/v1/DisaggregatedSetRoleScaler")) -}}
{{- fail (printf "%s.autoscaling.type is %s, but the cluster has no DisaggregatedSetRoleScaler: a role is scaled by a LeaderWorkerSet newer than 0.9; write none, or disaggregatedSet.enabled: false" $role $p.autoscaling.type) -}}
{{- end -}}
{{- if and (ne $p.autoscaling.type "none") (gt (int $v.disaggregatedSet.slices) 1) -}}
{{- fail (printf "%s.autoscaling.type is %s: the controller scales no set of several slices, and there are %d; write none, or disaggregatedSet.slices: 1" $role $p.autoscaling.type (int $v.disaggregatedSet.slices)) -}}
{{- end -}}
{{- if or (ne (get $p.strategy "type" | default "RollingUpdate") "RollingUpdate") (hasKey (get $p.strategy "rollingUpdateConfiguration" | default dict) "partition") -}}
{{- fail (printf "%s.strategy: a DisaggregatedSet takes RollingUpdate without a partition" $role) -}}
{{- end -}}
{{- end -}}
{{- if $p.enabled -}}
{{- include "pdrelay.check.strategy" (dict "name" $role "kind" $p.kind "strategy" $p.strategy) -}}
{{- if and (ne $p.kind "LeaderWorkerSet") (gt (int $p.nodes) 1) -}}
{{- fail (printf "%s.nodes is %d, but %s.kind is %s: only a LeaderWorkerSet has several pods for one engine" $role (int $p.nodes) $role $p.kind) -}}
{{- end -}}
{{- if and (eq $p.kind "LeaderWorkerSet") (gt (int $p.minReadySeconds) 0) -}}
{{- fail (printf "%s.minReadySeconds is %d, but %s.kind is LeaderWorkerSet: a LeaderWorkerSet has no such field" $role (int $p.minReadySeconds) $role) -}}
{{- end -}}
{{- if and (gt (int $p.nodes) 1) (gt (int $p.dataParallel) 1) -}}
{{- fail (printf "%s.dataParallel is %d, and %s.nodes is %d: ranks over several pods have not been tried, so write dataParallel: 1, to spread tensorParallel over the nodes, or nodes: 1" $role (int $p.dataParallel) $role (int $p.nodes)) -}}
{{- end -}}
{{- if ne (mod $p.tensorParallel $p.nodes) 0 -}}
{{- fail (printf "%s.tensorParallel is %d: it cannot be divided over %d nodes" $role (int $p.tensorParallel) (int $p.nodes)) -}}
{{- end -}}
{{- if gt (int $p.autoscaling.min) (int $p.autoscaling.max) -}}
{{- fail (printf "%s.autoscaling.min is %d, above max, which is %d" $role (int $p.autoscaling.min) (int $p.autoscaling.max)) -}}
{{- end -}}
{{- $fromNone := and (eq $p.autoscaling.type "keda") (or $p.autoscaling.wanted $p.autoscaling.perOther) -}}
{{- if and (ne $p.autoscaling.type "none") (eq (int $p.autoscaling.min) 0) (not $fromNone) -}}
{{- fail (printf "%s.autoscaling.min is 0: no metric of a pool without engines says when to begin again, so write 1 or more, or with keda wanted: true or perOther" $role) -}}
{{- end -}}
{{- if and (eq $p.autoscaling.type "keda") (not $v.monitoring.podMonitor.enabled) -}}
{{- fail (printf "%s.autoscaling.type is keda, which asks Prometheus by labels that the PodMonitor adds: write monitoring.podMonitor.enabled: true" $role) -}}
{{- end -}}
{{- if $p.autoscaling.wanted -}}
{{- if or (ne $p.autoscaling.type "keda") (not $v.monitoring.serviceMonitor.enabled) -}}
{{- fail (printf "%s.autoscaling.wanted is true: KEDA asks Prometheus for it, so write %s.autoscaling.type: keda and monitoring.serviceMonitor.enabled: true" $role $role) -}}
{{- end -}}
{{- if eq ($v.router.settings.roles | default "off") "off" -}}
{{- fail (printf "%s.autoscaling.wanted is true, and no router counts engines: write router.settings.roles: dry-run with target_ttft_s and target_itl_s" $role) -}}
{{- end -}}
{{- end -}}
{{- if eq ($v.router.settings.roles | default "off") "auto" -}}
{{- if and (ne $p.autoscaling.type "none") (not $v.onePool.enabled) -}}
{{- fail (printf "router.settings.roles is auto, and %s.autoscaling.type is %s: pods that have turned count for the pool that they were made in, so write %s.autoscaling.type: none, or roles: dry-run" $role $p.autoscaling.type $role) -}}
{{- end -}}
{{- if not (or $v.connector.kvBoth (include "pdrelay.returnKv" $) $v.onePool.enabled) -}}
{{- fail (printf "router.settings.roles is auto, and %s engines are started for one role (kv_role), so no engine can turn: write connector.kvBoth: true, or roles: dry-run" $role) -}}
{{- end -}}
{{- end -}}
{{- if and $p.autoscaling.perOther (eq $p.autoscaling.type "hpa") -}}
{{- fail (printf "%s.autoscaling.perOther is set, but %s.autoscaling.type is hpa: only KEDA can count the engines of the other pool" $role $role) -}}
{{- end -}}
{{- range $p.extraArgs -}}
{{- $flag := splitList "=" . | first | replace "_" "-" -}}
{{- if has $flag (list "-pp" "--pipeline-parallel-size") -}}
{{- fail (printf "%s.extraArgs has %s: no real engine has been tried with pipeline stages, so leave it out, and write tensorParallel, which nodes of a LeaderWorkerSet can share" $role $flag) -}}
{{- end -}}
{{- if and (or (hasPrefix "--ssl-" $flag) (eq "--enable-ssl-refresh" $flag)) (ne "--ssl-ciphers" $flag) -}}
{{- fail (printf "%s.extraArgs has %s: routers, probes, the drain hook and helm test would know nothing of it, so the pod would never be ready; write engineTls.secretName" $role $flag) -}}
{{- end -}}
{{- if eq "--uds" $flag -}}
{{- fail (printf "%s.extraArgs has --uds: routers, probes, the drain hook and helm test reach engines over TCP, so the pod would never be ready; leave it out" $role) -}}
{{- end -}}
{{- end -}}
{{- range $p.extraArgs -}}
{{- if and (eq "--api-server-count" (splitList "=" . | first | replace "_" "-")) (gt (int $p.nodes) 1) -}}
{{- fail (printf "%s.extraArgs has --api-server-count, which the workers of an engine refuse: write %s.apiServers" $role $role) -}}
{{- end -}}
{{- end -}}
{{- include "pdrelay.check.ports" (dict "role" $role "pool" $p) -}}
{{- end -}}
{{- end -}}
{{- if $v.onePool.enabled -}}
{{- if or $v.prefill.enabled (not $v.decode.enabled) -}}
{{- fail "onePool.enabled is true: its engines are those of decode, so write prefill.enabled: false and decode.enabled: true" -}}
{{- end -}}
{{- if ne ($v.router.settings.roles | default "off") "auto" -}}
{{- fail "onePool.enabled is true, and no router gives its engines their roles: write router.settings.roles: auto with target_ttft_s and target_itl_s" -}}
{{- end -}}
{{- if gt (int $v.decode.dataParallel) 1 -}}
{{- fail (printf "onePool.enabled is true, and decode.dataParallel is %d: ranks of one engine share an address, and cannot turn, so write 1" (int $v.decode.dataParallel)) -}}
{{- end -}}
{{- if has $v.decode.autoscaling.type (list "hpa") -}}
{{- fail "onePool.enabled is true, and decode.autoscaling.type is hpa: no metric of one engine says how many both roles need, so write keda with wanted: true, or none" -}}
{{- end -}}
{{- if and (eq $v.decode.autoscaling.type "keda") (not $v.decode.autoscaling.wanted) -}}
{{- fail "onePool.enabled is true, and decode.autoscaling.type is keda: no metric of one engine says how many both roles need, so write decode.autoscaling.wanted: true" -}}
{{- end -}}
{{- end -}}
{{- if and $v.prefill.enabled $v.decode.enabled $v.prefill.hostNetwork $v.decode.hostNetwork -}}
{{- range $one := include "pdrelay.ports" $v.prefill | fromJsonArray -}}
{{- if has $one (include "pdrelay.ports" $v.decode | fromJsonArray) -}}
{{- fail (printf "port %d is of prefill and of decode, and both have hostNetwork: they may run on one node, so give them ports of their own" (int $one)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $loop := mulf ($v.prefill.autoscaling.perOther | default 0) ($v.decode.autoscaling.perOther | default 0) -}}
{{- if gt $loop 1.0 -}}
{{- fail (printf "prefill.autoscaling.perOther times decode.autoscaling.perOther is %v: above 1 each pool would make the other grow, up to the most there may be" $loop) -}}
{{- end -}}
{{- if gt (int $v.router.autoscaling.min) (int $v.router.autoscaling.max) -}}
{{- fail (printf "router.autoscaling.min is %d, above max, which is %d" (int $v.router.autoscaling.min) (int $v.router.autoscaling.max)) -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled is true, but httpRoute.parentRefs is empty: name the gateway" -}}
{{- end -}}
{{- $volume := $v.model.volume -}}
{{- $needs := get (dict "pvc" "claimName" "image" "image" "hostPath" "hostPath") $volume.type -}}
{{- if and $needs (not (get $volume $needs)) -}}
{{- fail (printf "model.volume.type is %s, but model.volume.%s is empty" $volume.type $needs) -}}
{{- end -}}
{{- $below := printf "%s/" (trimSuffix "/" $volume.mountPath) -}}
{{- if and (ne $volume.type "none") (not (hasPrefix $below (printf "%s/" (trimSuffix "/" $v.model.name)))) -}}
{{- fail (printf "model.volume.type is %s, but model.name is %s: it is looked for on the volume alone, so write a path in %s" $volume.type $v.model.name $volume.mountPath) -}}
{{- end -}}
{{- $needs = get (dict "pvc" "claimName" "hostPath" "hostPath") $v.cache.type -}}
{{- if and $needs (not (get $v.cache $needs)) -}}
{{- fail (printf "cache.type is %s, but cache.%s is empty" $v.cache.type $needs) -}}
{{- end -}}
{{- include "pdrelay.check.open" . -}}
{{- end -}}

{{/* All ports of an engine, as a JSON array. */}}
{{- define "pdrelay.ports" -}}
{{- $ports := list (int .port) -}}
{{- if gt (int .nodes) 1 -}}{{- $ports = append $ports (int .groupPort) -}}{{- end -}}
{{- range $rank := until (int .dataParallel) -}}
{{- $ports = append $ports (add $.sidePort $rank | int) -}}
{{- if $.kvEvents.enabled -}}
{{- $ports = append $ports (add $.kvEvents.port $rank | int) -}}
{{- end -}}
{{- end -}}
{{- toJson $ports -}}
{{- end -}}

{{- define "pdrelay.check.ports" -}}
{{- $ports := include "pdrelay.ports" .pool | fromJsonArray -}}
{{- if ne (len $ports) (len (uniq $ports)) -}}
{{- $group := ternary (printf ", groupPort %d" (int .pool.groupPort)) "" (gt (int .pool.nodes) 1) -}}
{{- fail (printf "%s: port %d%s, the side channel from %d on and KV events from %d on share a port over %d ranks: move them apart" .role (int .pool.port) $group (int .pool.sidePort) (int .pool.kvEvents.port) (int .pool.dataParallel)) -}}
{{- end -}}
{{- range $ports -}}
{{- if gt (int .) 65535 -}}
{{- fail (printf "%s: its ports reach %d, above 65535" $.role (int .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* dict name kind strategy: a workload's; both kinds have another. */}}
{{- define "pdrelay.check.strategy" -}}
{{- $rolling := get (dict "Deployment" "rollingUpdate" "LeaderWorkerSet" "rollingUpdateConfiguration") .kind -}}
{{- range without (keys .strategy) "type" $rolling -}}
{{- fail (printf "%s.strategy has %s, which a %s does not: it has type and %s" $.name . $.kind $rolling) -}}
{{- end -}}
{{- $type := get .strategy "type" | default "RollingUpdate" -}}
{{- if not (or (eq $type "RollingUpdate") (and (eq $type "Recreate") (eq .kind "Deployment"))) -}}
{{- fail (printf "%s.strategy.type is %s, which a %s does not have: write RollingUpdate" .name $type .kind) -}}
{{- end -}}
{{- $least := get .strategy $rolling | default dict -}}
{{- if and (eq $type "RollingUpdate") (has (get $least "maxSurge" | toString) (list "0" "0%")) (has (get $least "maxUnavailable" | toString) (list "0" "0%")) -}}
{{- fail (printf "%s.strategy: maxSurge and maxUnavailable are both 0, so no pod could be replaced: write one of them above" .name) -}}
{{- end -}}
{{- end -}}

{{/* The project publishes no images, and a name that begins with localhost/ is that of an image on the machine which built it. */}}
{{- define "pdrelay.check.images" -}}
{{- $v := .Values -}}
{{- $all := dict "router" $v.router -}}
{{- range $role := list "prefill" "decode" -}}
{{- if (index $v $role).enabled -}}{{- $_ := set $all $role (index $v $role) -}}{{- end -}}
{{- end -}}
{{- range $name, $pod := $all -}}
{{- $where := ternary "router.image" (printf "engine.image (or %s.image)" $name) (eq $name "router") -}}
{{- if not $pod.image.repository -}}
{{- fail (printf "%s.image.repository is empty: the project publishes no images, so build them (helm/images/README.md), push them to your registry, and name it in %s.repository" $name $where) -}}
{{- end -}}
{{- if and (hasPrefix "localhost/" $pod.image.repository) (ne $pod.image.pullPolicy "Never") -}}
{{- fail (printf "%s.image.repository is %s, which no node can pull: push the image to a registry and name that in %s.repository, or write pullPolicy: Never there if every node has the image" $name $pod.image.repository $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" if lookup sees a cluster: each namespace has kube-root-ca.crt, but a new one has not yet. */}}
{{- define "pdrelay.cluster" -}}
{{- if lookup "v1" "ConfigMap" .Release.Namespace "kube-root-ca.crt" -}}true{{- else if lookup "v1" "Namespace" "" "kube-system" -}}true{{- end -}}
{{- end -}}

{{/* A secret that is drawn at each rendering parts engines, or routers, of two renderings. */}}
{{- define "pdrelay.check.drawn" -}}
{{- $v := .Values -}}
{{- $drawn := dict -}}
{{- if and $v.connector.secret.create (not $v.connector.secret.name) -}}
{{- $_ := set $drawn "connector.secret" (include "pdrelay.connector.secret" .) -}}
{{- end -}}
{{- if and (include "pdrelay.router.peers" .) $v.router.peers.secret.create (not $v.router.peers.secret.name) -}}
{{- $_ := set $drawn "router.peers.secret" (include "pdrelay.router.peers.secret" .) -}}
{{- end -}}
{{- if and $drawn (not $v.acceptDrawnSecrets) -}}
{{- range $value, $name := $drawn -}}
{{- if not (or (lookup "v1" "Secret" $.Release.Namespace $name) (include "pdrelay.cluster" $)) -}}
{{- fail (printf "%s.name is empty, and helm does not see the cluster (helm template, Argo CD, a dry run): each rendering would draw another secret, and pods of two renderings would refuse each other; make a secret yourself and name it in %s.name, or write acceptDrawnSecrets: true for a look at the objects" $value $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pdrelay.check.open" -}}
{{- $v := .Values -}}
{{- if not (or $v.router.apiKeys.secretName $v.router.tls.clientCaSecretName $v.router.allowUnauthenticated) -}}
{{- $way := "" -}}
{{- if ne $v.router.service.type "ClusterIP" -}}{{- $way = printf "router.service.type is %s" $v.router.service.type -}}{{- end -}}
{{- if $v.ingress.enabled -}}{{- $way = "ingress.enabled is true" -}}{{- end -}}
{{- if $v.httpRoute.enabled -}}{{- $way = "httpRoute.enabled is true" -}}{{- end -}}
{{- if $way -}}
{{- fail (printf "%s, and clients need no key: whoever reaches that address could use the engines, so name a secret with keys in router.apiKeys.secretName, or write router.allowUnauthenticated: true if something in front knows who clients are" $way) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pdrelay.check.policies" -}}
{{- $own := list "round_robin" "least_loaded" "power_of_two" "session" "prefix" "expected_ttft" -}}
{{- $known := concat $own .Values.router.policies -}}
{{- range $key := list "prefill_policy" "decode_policy" -}}
{{- $name := get $.Values.router.settings $key -}}
{{- if and $name (not (has $name $known)) -}}
{{- fail (printf "router.settings.%s is %s, which is no policy: write one of %s, or name one that a package in your image adds in router.policies" $key $name (join ", " $own)) -}}
{{- end -}}
{{- end -}}
{{- $policies := include "pdrelay.policies" . | fromJsonArray -}}
{{- if and (has "expected_ttft" $policies) (ne (first $policies) (last $policies)) -}}
{{- fail (printf "router.settings.prefill_policy is %s and router.settings.decode_policy is %s, but expected_ttft chooses both engines: write it for both, or for neither" (first $policies) (last $policies)) -}}
{{- end -}}
{{- end -}}

{{/* What a schema could only refuse with "not". */}}
{{- define "pdrelay.check.texts" -}}
{{- $v := .Values -}}
{{- range $role := list "prefill" "decode" -}}
{{- $p := index $v $role -}}
{{- range $argument := $p.extraArgs -}}
{{- $flag := $argument | splitList "=" | first | splitList "." | first | replace "_" "-" -}}
{{- $value := get (include "pdrelay.flags" $role | fromYaml) $flag -}}
{{- if $value -}}
{{- fail (printf "%s.extraArgs has %s, which the chart sets itself: write %s" $role $flag $value) -}}
{{- end -}}
{{- if and (regexMatch "^-[a-z]" $flag) (ne $flag "-pp") -}}
{{- fail (printf "%s.extraArgs has the short flag %s: write the long one, which the chart can compare with those that it sets itself" $role $flag) -}}
{{- end -}}
{{- end -}}
{{- range $p.initContainers -}}
{{- if has .name (list "engine" "kv-events") -}}
{{- fail (printf "%s.initContainers has the name %s, which is that of a container of the chart: write another" $role .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $who := list "router" "prefill" "decode" -}}
{{- $names := list -}}
{{- range (index $v $who).extraEnv -}}
{{- if has .name $names -}}
{{- fail (printf "%s.extraEnv has %s twice: write it once" $who .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- if and (hasKey . "value") (regexMatch "(KEY|TOKEN|SECRET|PASSWORD)$" .name) -}}
{{- fail (printf "%s.extraEnv has %s with a value, which everybody can read who reads the release: write valueFrom with a secretKeyRef" $who .name) -}}
{{- end -}}
{{- end -}}
{{- range (index $v $who).topologySpread -}}
{{- if hasKey . "labelSelector" -}}
{{- fail (printf "%s.topologySpread has a labelSelector: the chart adds that of the pods, so leave it out" $who) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $v.extraObjects -}}
{{- if eq .kind "Secret" -}}
{{- fail (printf "extraObjects has the Secret %s: values are stored in plain text, so make it outside of the chart and give its name" .metadata.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A role: flags of vLLM that are values here, and which. */}}
{{- define "pdrelay.flags" -}}
--host: listenAddress
--port: {{ . }}.port
--model: model.name
--served-model-name: model.servedName and model.aliases
--dtype: model.dtype
--max-model-len: model.maxLength
--block-size: model.blockSize
--tensor-parallel-size: {{ . }}.tensorParallel
-tp: {{ . }}.tensorParallel
--tp: {{ . }}.tensorParallel
--data-parallel-size: {{ . }}.dataParallel
-dp: {{ . }}.dataParallel
--dp: {{ . }}.dataParallel
{{- range $end := list "size-local" "rank" "start-rank" "address" "rpc-port" "external-lb" "hybrid-lb" "multi-port-external-lb" }}
--data-parallel-{{ $end }}: {{ $ }}.dataParallel
{{- end }}
--enable-expert-parallel: {{ . }}.expertParallel
--no-enable-expert-parallel: {{ . }}.expertParallel
--nnodes: {{ . }}.nodes
--node-rank: {{ . }}.nodes
--master-addr: {{ . }}.nodes
--master-port: {{ . }}.groupPort
--headless: {{ . }}.nodes
--allowed-media-domains: model.allowedMediaDomains
--gpu-memory-utilization: {{ . }}.gpuMemoryUtilization
--shutdown-timeout: {{ . }}.drain.shutdownSeconds
--api-key: {{ . }}.apiKey.secretName
--kv-transfer-config: values below connector
--kv-events-config: kvEvents.enabled or {{ . }}.kvEvents
--decode-context-parallel-size: nothing, because no engine has been tried so
--enable-prompt-tokens-details: nothing, because clients are told what was cached
--no-enable-prompt-tokens-details: nothing, because clients are told what was cached
{{- end -}}
