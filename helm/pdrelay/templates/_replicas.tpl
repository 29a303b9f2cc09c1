{{/* dict root values kind name: spec.replicas of a workload; empty: it has none. The API makes 1 of a number that is left out, so one that
is left to an autoscaler is the one that runs. So is one that somebody scaled by hand, until `replicas` changes: the annotation tells what
it was. A tool that renders without a cluster knows no number, and would undo the autoscaler's with each rendering: it gets none. (Every
namespace has kube-root-ca.crt.) */}}
{{- define "pdrelay.replicas" -}}
{{- $v := .values -}}
{{- $ns := .root.Release.Namespace -}}
{{- $scaled := ne $v.autoscaling.type "none" -}}
{{- $api := ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq .kind "LeaderWorkerSet") -}}
{{- $live := lookup $api .kind $ns .name | default dict -}}
{{- $unchanged := eq (dig "metadata" "annotations" "pdrelay/replicas" "" $live) (int $v.replicas | toString) -}}
{{- if and (hasKey (get $live "spec" | default dict) "replicas") (or $scaled $unchanged) -}}
{{- int $live.spec.replicas -}}
{{- else if not $scaled -}}
{{- int $v.replicas -}}
{{- else if or .root.Release.IsUpgrade (lookup "v1" "ConfigMap" $ns "kube-root-ca.crt") -}}
{{- max $v.autoscaling.min $v.replicas | int -}}
{{- end -}}
{{- end -}}

{{/* values: the annotation of a workload that tells what `replicas` was, as a dict. */}}
{{- define "pdrelay.replicas.noted" -}}
pdrelay/replicas: {{ int .replicas | quote }}
{{- end -}}
