{{- define "oncebox.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "oncebox" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-oncebox" (.Release.Name | trunc 42 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "oncebox.selector" -}}
app.kubernetes.io/name: oncebox
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: host
{{- end -}}

{{- define "oncebox.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | trunc 63 | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "oncebox.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "oncebox.name" .) -}}
{{- end -}}

{{- define "oncebox.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- /* The pod's own settings, the same of the host and of the Job. */ -}}
{{- define "oncebox.pod" -}}
automountServiceAccountToken: false
# A Service of the name `oncebox` would make variables ONCEBOX_…, which the host reads.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.userId }}
  runAsGroup: {{ .Values.userId }}
  fsGroup: {{ .Values.userId }}
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "oncebox.container" -}}
image: {{ include "oncebox.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- /* A variable of the environment from a Secret: variable, name, key. */ -}}
{{- define "oncebox.secretVariable" -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef:
      name: {{ index . 1 }}
      key: {{ index . 2 | quote }}
{{- end -}}

{{- define "oncebox.masterKey" -}}
{{- with .Values.masterKey -}}
{{ include "oncebox.secretVariable" (list "ONCEBOX_MASTER_KEY" .secret.name .secret.key) }}
{{- with .previousSecret }}
{{- if .name }}
{{ include "oncebox.secretVariable" (list "ONCEBOX_PREVIOUS_MASTER_KEY" .name .key) }}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "oncebox.secretFileMounts" -}}
{{- range $index, $name := .Values.secretFiles }}
- name: secret-{{ $index }}
  mountPath: /etc/oncebox/secrets/{{ $name }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "oncebox.secretFileVolumes" -}}
{{- range $index, $name := .Values.secretFiles }}
- name: secret-{{ $index }}
  secret:
    secretName: {{ $name }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- /* The host's file. A string, a number, a boolean and a list are written in TOML as in JSON. */ -}}
{{- define "oncebox.toml" -}}
{{- $config := deepCopy .Values.config -}}
{{- $kafka := $config.kafka | default dict -}}
{{- $properties := $kafka.properties | default dict -}}
{{- $_ := set $config "kafka" (merge (dict "brokers" .Values.kafka.brokers) (omit $kafka "properties")) -}}
{{- $_ := set $config "shutdown" (dict "drain_ms" (mul .Values.drainSeconds 1000)) -}}
{{- range $section := keys $config | sortAlpha -}}
{{- $value := get $config $section -}}
{{- $tables := kindIs "slice" $value | ternary $value (list $value) -}}
{{- range $table := $tables -}}
{{ kindIs "slice" $value | ternary (printf "[[%s]]" $section) (printf "[%s]" $section) }}
{{ include "oncebox.tomlTable" (dict "path" $section "table" $table) }}
{{ end -}}
{{ end -}}
{{- /* The last table: lines from a Secret may follow. */ -}}
[kafka.properties]
{{ range $key := keys $properties | sortAlpha -}}
{{ $key | toRawJson }} = {{ get $properties $key | toRawJson }}
{{ end -}}
{{- end -}}

{{- /* Settings of a table, then the tables in the tables below it, such as `[references.stores."documents"]`. */ -}}
{{- define "oncebox.tomlTable" -}}
{{- $path := .path -}}
{{- $table := .table -}}
{{- range $key := keys $table | sortAlpha -}}
{{- if not (kindIs "map" (get $table $key)) -}}
{{ $key }} = {{ get $table $key | toRawJson }}
{{ end -}}
{{- end -}}
{{- range $key := keys $table | sortAlpha -}}
{{- if kindIs "map" (get $table $key) -}}
{{- range $name := keys (get $table $key) | sortAlpha -}}
{{- $below := printf "%s.%s.%s" $path $key ($name | toRawJson) -}}
[{{ $below }}]
{{ include "oncebox.tomlTable" (dict "path" $below "table" (get (get $table $key) $name)) }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
