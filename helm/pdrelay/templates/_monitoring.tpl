{{/* dict root text: queries with the labels of this release in them. */}}
{{- define "pdrelay.queries" -}}
{{- $namespace := printf "namespace=%q" .root.Release.Namespace -}}
{{- $router := printf "%s,job=\"%s-router\"" $namespace (include "pdrelay.fullname" .root) -}}
{{- $engine := printf "%s,pdrelay_release=%q" $namespace .root.Release.Name -}}
{{- .text | replace "%ROUTER%" $router | replace "%ENGINE%" $engine -}}
{{- end -}}

{{/* Queries of a dashboard: with its variables for the labels of a release. Series without a label cluster fit every cluster. */}}
{{- define "pdrelay.boardQueries" -}}
{{- $place := "cluster=~\"$cluster\",namespace=\"$namespace\"" -}}
{{- $router := printf "%s,job=\"$release-router\"" $place -}}
{{- $engine := printf "%s,pdrelay_release=\"$release\"" $place -}}
{{- . | replace "%ROUTER%" $router | replace "%ENGINE%" $engine -}}
{{- end -}}

{{/* list key root: the variables of a dashboard. Routers have their release in the name of their job. */}}
{{- define "pdrelay.board.variables" -}}
{{- $root := last . -}}
{{- $of := dict "router" (list "pdrelay_requests_waiting" "job" "/^(.*)-router$/" (include "pdrelay.fullname" $root)) "engines" (list "vllm:num_requests_running" "pdrelay_release" "" $root.Release.Name) -}}
{{- $series := index $of (first .) -}}
{{- $source := dict "type" "prometheus" "uid" "${datasource}" -}}
{{- $query := dict "type" "query" "datasource" $source "refresh" 2 "sort" 1 -}}
{{- $all := dict "text" "All" "value" "$__all" -}}
{{- $variables := list (dict "name" "datasource" "type" "datasource" "query" "prometheus" "label" "Prometheus") -}}
{{- $variables = append $variables (merge (dict "name" "cluster" "label" "Cluster" "query" (printf "label_values(%s, cluster)" (index $series 0)) "includeAll" true "allValue" ".*" "current" $all) $query) -}}
{{- $namespace := dict "text" $root.Release.Namespace "value" $root.Release.Namespace -}}
{{- $variables = append $variables (merge (dict "name" "namespace" "label" "Namespace" "query" (printf "label_values(%s{cluster=~\"$cluster\"}, namespace)" (index $series 0)) "current" $namespace) $query) -}}
{{- $release := dict "text" (index $series 3) "value" (index $series 3) -}}
{{- $variables = append $variables (merge (dict "name" "release" "label" "Release" "query" (printf "label_values(%s{cluster=~\"$cluster\",namespace=\"$namespace\"}, %s)" (index $series 0) (index $series 1)) "regex" (index $series 2) "current" $release) $query) -}}
{{- toJson $variables -}}
{{- end -}}

{{/* The workers of a LeaderWorkerSet serve no metrics. */}}
{{- define "pdrelay.workerIndices" -}}
{{- $most := max .Values.prefill.nodes .Values.decode.nodes 2 | int -}}
{{- $indices := list -}}
{{- range $index := untilStep 1 $most 1 -}}
{{- $indices = append $indices (toString $index) -}}
{{- end -}}
{{- toJson $indices -}}
{{- end -}}

{{/* dict root key board: a Grafana dashboard, as JSON. */}}
{{- define "pdrelay.dashboard" -}}
{{- $full := include "pdrelay.fullname" .root -}}
{{- $source := dict "type" "prometheus" "uid" "${datasource}" -}}
{{- $panels := list -}}
{{- range $i, $panel := .board.panels -}}
{{- $targets := list -}}
{{- range $n, $query := $panel.queries -}}
{{- $targets = append $targets (dict "refId" (printf "Q%d" $n) "expr" (index $query 0) "legendFormat" (index $query 1) "datasource" $source) -}}
{{- end -}}
{{- $place := dict "x" (mul (mod $i 3) 8) "y" (mul (div $i 3) 8) "w" 8 "h" 8 -}}
{{- $field := dict "defaults" (dict "unit" $panel.unit "min" 0) "overrides" list -}}
{{- $panels = append $panels (dict "id" (add1 $i) "type" "timeseries" "title" $panel.title "datasource" $source "gridPos" $place "fieldConfig" $field "targets" $targets) -}}
{{- end -}}
{{- $uid := printf "%s/%s/%s" .root.Release.Namespace $full .key | sha256sum | trunc 16 -}}
{{- $board := dict "uid" $uid "title" (printf "pdrelay %s %s: %s" .root.Release.Namespace $full .board.title) "tags" (list "pdrelay") "schemaVersion" 39 "refresh" "30s" -}}
{{- $_ := set $board "time" (dict "from" "now-1h" "to" "now") -}}
{{- $_ := set $board "templating" (dict "list" (include "pdrelay.board.variables" (list .key .root) | fromJsonArray)) -}}
{{- $_ := set $board "panels" $panels -}}
{{- toPrettyJson $board -}}
{{- end -}}
