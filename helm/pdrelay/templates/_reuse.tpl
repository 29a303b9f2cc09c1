{{/* What auto comes to where engines offer the KV that they have. Pools have the values of engine by then. */}}

{{/* "true" unless router.settings.reuse_kv is false. */}}
{{- define "pdrelay.reuses" -}}
{{- if ne (toString (get .Values.router.settings "reuse_kv")) "false" -}}true{{- end -}}
{{- end -}}

{{/* The policies of both legs, as a JSON array: prefix where router.settings leaves it open. expected_ttft chooses both engines. */}}
{{- define "pdrelay.policies" -}}
{{- $settings := .Values.router.settings -}}
{{- $given := list (get $settings "prefill_policy") (get $settings "decode_policy") -}}
{{- $usual := ternary "expected_ttft" "prefix" (has "expected_ttft" $given) -}}
{{- list (first $given | default $usual) (last $given | default $usual) | toJson -}}
{{- end -}}

{{/* "true", "auto" or nothing: whether engines publish KV events, and routers follow them. auto leaves them out where routers would
not ask, and where an engine cannot or may not serve them. */}}
{{- define "pdrelay.kvEvents" -}}
{{- $v := .Values -}}
{{- $enabled := toString $v.kvEvents.enabled -}}
{{- if eq $enabled "true" -}}
true
{{- else if and (eq $enabled "auto") (include "pdrelay.kvEvents.wanted" .) (not (include "pdrelay.kvEvents.keyless" .)) -}}
auto
{{- end -}}
{{- end -}}

{{/* "true" if auto leaves it to the keys of engines whether they publish events. */}}
{{- define "pdrelay.kvEvents.wanted" -}}
{{- $v := .Values -}}
{{- $pools := list -}}
{{- $hindered := false -}}
{{- range $role := list "prefill" "decode" -}}
{{- $p := index $v $role -}}
{{- if $p.enabled -}}
{{- $pools = append $pools $role -}}
{{- $hindered = or $hindered $p.kvEvents.enabled (has "--no-enable-prefix-caching" $p.extraArgs) -}}
{{- range $p.extraEnv -}}
{{- if eq .name "VLLM_PLUGINS" -}}
{{- $hindered = or $hindered (not (has "pdrelay_kv_events" (splitList "," (.value | default "")))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $remembers := include "pdrelay.remembers" (include "pdrelay.policies" . | fromJsonArray) -}}
{{- $asks := ne (get $v.router.settings "kv_events" | default "auto") "off" -}}
{{- if and $pools (not $hindered) $remembers $asks (include "pdrelay.reuses" .) -}}true{{- end -}}
{{- end -}}

{{/* The pools whose engines have no API key: events contain prompts, and are served with a key alone. */}}
{{- define "pdrelay.kvEvents.keyless" -}}
{{- $v := .Values -}}
{{- $keyless := list -}}
{{- range $role := list "prefill" "decode" -}}
{{- $p := index $v $role -}}
{{- if and $p.enabled (not $p.apiKey.secretName) -}}{{- $keyless = append $keyless $role -}}{{- end -}}
{{- end -}}
{{- join " and " $keyless -}}
{{- end -}}

{{/* A list of policies: "true" if one of them remembers what engines have cached. */}}
{{- define "pdrelay.remembers" -}}
{{- if or (has "prefix" .) (has "expected_ttft" .) -}}true{{- end -}}
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
{{- $policy := include "pdrelay.policies" . | fromJsonArray | last -}}
{{- $uncached := "" -}}
{{- range $role := list "prefill" "decode" -}}
{{- if has "--no-enable-prefix-caching" (get $.Values $role).extraArgs -}}{{- $uncached = $uncached | default $role -}}{{- end -}}
{{- end -}}
{{- if not (include "pdrelay.remembers" (list $policy)) -}}
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
