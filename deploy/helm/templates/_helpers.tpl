{{/* Labels that select the pods of a component: (list . "broker"). */}}
{{- define "postdate.pods" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: postdate
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of an object of a component. */}}
{{- define "postdate.labels" -}}
{{- $root := index . 0 -}}
{{ include "postdate.pods" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{- define "postdate.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "postdate.jobsImage" -}}
{{ .Values.jobsImage.repository }}:{{ .Values.jobsImage.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Settings of the broker as environment variables. Helm reads whole numbers as floats, and would write 1e+09. */}}
{{- define "postdate.settings" -}}
{{- range $name, $value := .Values.settings }}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ $value = int64 $value }}{{ end }}
POSTDATE_{{ upper $name }}: {{ $value | toString | quote }}
{{- end }}
{{- if .Values.spans.endpoint }}
OTEL_EXPORTER_OTLP_ENDPOINT: {{ .Values.spans.endpoint | quote }}
{{- range $name, $value := .Values.spans.variables }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end }}
{{- if .Values.cluster.store }}
POSTDATE_CLUSTER_STORE: {{ .Values.cluster.store | quote }}
{{- $nodes := list }}
{{- range $number := until (int .Values.cluster.nodes) }}
{{- $node := printf "%s-%d" $.Release.Name $number }}
{{- $nodes = append $nodes (printf "%s=%s.%s-headless:7650" $node $node $.Release.Name) }}
{{- end }}
POSTDATE_CLUSTER_NODES: {{ join "," $nodes | quote }}
{{- else if .Values.jobs.enabled }}
POSTDATE_AUDIT_REPORT_DIR: /reports
{{- end }}
{{- end }}

{{/* Credentials of the store, by the names that its provider's own tools use; none where the account has a role. */}}
{{- define "postdate.environment" -}}
- configMapRef: {name: {{ .Release.Name }}}
{{- if .Values.cluster.store }}
- secretRef: {name: {{ .Release.Name }}-store, optional: true}
{{- end }}
{{- end }}

{{- define "postdate.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "postdate.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
{{- end }}

{{/* Where a pod may run, and how it gets its images. */}}
{{- define "postdate.placement" }}
{{- with .Values.imagePullSecrets -}}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A ReadWriteOnce volume is mounted on one machine: jobs that read the broker's run beside it. */}}
{{- define "postdate.besideBroker" -}}
podAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - labelSelector:
        matchLabels:
          {{- include "postdate.pods" (list . "broker") | nindent 10 }}
      topologyKey: kubernetes.io/hostname
{{- end }}

{{- define "postdate.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.storage.storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .Values.storage.size }}
{{- end }}
