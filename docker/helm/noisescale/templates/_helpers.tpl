{{- define "noisescale.name" -}}
{{- .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "noisescale.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "noisescale.selectorLabels" -}}
app.kubernetes.io/name: {{ include "noisescale.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "noisescale.labels" -}}
{{ include "noisescale.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "noisescale.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "noisescale.serviceAccountName" -}}
{{ .Values.serviceAccount.existing | default (include "noisescale.fullname" .) }}
{{- end -}}

{{/* What cannot work is refused when rendered, with what to write instead. */}}
{{- define "noisescale.check" -}}
{{- if and (gt (int .Values.replicaCount) 1) (not .Values.database.existingSecret) -}}
{{- fail (printf "replicaCount is %d but there is no PostgreSQL: set database.existingSecret to a Secret with its URL, or replicaCount to 1" (int .Values.replicaCount)) -}}
{{- end -}}
{{- if not (or .Values.auth.existingSecret .Values.auth.insecure) -}}
{{- fail "set auth.existingSecret to a Secret with the tokens, or auth.insecure=true to serve without any" -}}
{{- end -}}
{{- end -}}

{{/* Where the database is, for the server and for the migration. */}}
{{- define "noisescale.databaseEnv" -}}
{{- if .Values.database.existingSecret }}
- name: NOISESCALE_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.database.existingSecret }}
      key: {{ .Values.database.existingSecretKey }}
{{- end }}
{{- end -}}

{{- define "noisescale.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "noisescale.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}
