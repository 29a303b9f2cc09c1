{{/* What auto comes to where engines offer the KV that they have. Pools have the values of engine by then. */}}

{{/* "true" unless router.settings.reuse_kv is false. */}}
{{- define "pdrelay.reuses" -}}
{{- if ne (toString (get .Values.router.settings "reuse_kv")) "false" -}}true{{- end -}}
{{- end -}}

{{/* "true", "auto" or nothing: whether prefill engines read the KV of answers. auto leaves it out where it is of no use, too: routers name
no rank of a decode engine. */}}
{{- define "pdrelay.returnKv" -}}
{{- $v := .Values -}}
{{- $enabled := toString $v.returnKv.enabled -}}
{{- if eq $enabled "true" -}}
true
{{- else if and (eq $enabled "auto") (include "pdrelay.reuses" .) $v.prefill.enabled $v.decode.enabled (eq (int $v.decode.dataParallel) 1) -}}
{{- if not (or (hasKey $v.connector.extraConfig "return_kv") (include "pdrelay.returnKv.hindrance" .)) -}}auto{{- end -}}
{{- end -}}
{{- end -}}

{{/* Why prefill engines cannot read the KV of answers, as the rest of the sentence "returnKv.enabled is true"; nothing: they can. */}}
{{- define "pdrelay.returnKv.hindrance" -}}
{{- $c := .Values.connector -}}
{{- $settings := .Values.router.settings -}}
{{- $policy := get $settings "decode_policy" | default "prefix" -}}
{{- $uncached := "" -}}
{{- range $role := list "prefill" "decode" -}}
{{- if has "--no-enable-prefix-caching" (get $.Values $role).extraArgs -}}{{- $uncached = $uncached | default $role -}}{{- end -}}
{{- end -}}
{{- if not (has $policy (list "prefix" "expected_ttft")) -}}
{{- printf ", but router.settings.decode_policy is %s, which forgets where conversations are: write prefix or expected_ttft, or leave it out" $policy -}}
{{- else if ne $c.loadFailurePolicy "recompute" -}}
{{- printf ", but connector.loadFailurePolicy is %s: prefill engines would ask no decode engine, for a read that fails would cost the request; write recompute" $c.loadFailurePolicy -}}
{{- else if and (or $c.bufferDevice (get $c.extraConfig "host_staging")) (ne $c.mode "pull") -}}
{{- printf ", connector.mode is %s and KV goes through host memory (connector.bufferDevice is %q): what is read does not go through host memory, and engines would refuse to start; write pull, or leave bufferDevice and extraConfig.host_staging out" $c.mode $c.bufferDevice -}}
{{- else if $uncached -}}
{{- printf ", and %s.extraArgs has --no-enable-prefix-caching: what is read comes from the prefix cache, so leave it out" $uncached -}}
{{- else if and (hasKey $settings "return_kv") (not $settings.return_kv) -}}
, and router.settings.return_kv is false: leave one of them out
{{- end -}}
{{- end -}}
