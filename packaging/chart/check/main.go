// Command chart-check renders a chart with Helm's own engine and holds each manifest against the typed API of
// Kubernetes.
//
//	chart-check <chart> [values.yaml [release]]   print the manifests as a JSON array
//	chart-check --values <chart>                  print the chart's own values as JSON
//	chart-check --compose <compose.yaml>          print a compose file as Docker Compose reads it, as JSON
//
// Values that the chart's schema refuses, and a manifest that is not valid, are an error that names the file, the
// kind and the field.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"regexp"
	"sort"
	"strings"

	"github.com/compose-spec/compose-go/v2/cli"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	serializer "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

// ServiceMonitor has the fields of the Prometheus operator's type that the chart uses.
type ServiceMonitor struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Selector  metav1.LabelSelector `json:"selector"`
		Endpoints []struct {
			Port     string `json:"port"`
			Path     string `json:"path"`
			Interval string `json:"interval"`
		} `json:"endpoints"`
	} `json:"spec"`
}

// DeepCopyObject makes it an object of Kubernetes. It is never copied.
func (monitor *ServiceMonitor) DeepCopyObject() runtime.Object { return monitor }

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "chart-check: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 2 && args[0] == "--values" {
		loaded, err := loader.Load(args[1])
		if err != nil {
			return err
		}
		return print(loaded.Values)
	}
	if len(args) == 2 && args[0] == "--compose" {
		options, err := cli.NewProjectOptions(args[1:], cli.WithOsEnv)
		if err != nil {
			return err
		}
		project, err := options.LoadProject(context.Background())
		if err != nil {
			return fmt.Errorf("%s: %w", args[1], err)
		}
		return print(project)
	}
	if len(args) < 1 || len(args) > 3 {
		return errors.New("usage: chart-check <chart> [values.yaml [release]], --values <chart>, --compose <compose.yaml>")
	}
	loaded, err := loader.Load(args[0])
	if err != nil {
		return err
	}
	values, release := chartutil.Values{}, "oncebox"
	if len(args) == 3 {
		release = args[2]
	}
	if len(args) > 1 {
		if values, err = chartutil.ReadValuesFile(args[1]); err != nil {
			return fmt.Errorf("%s: %w", args[1], err)
		}
	}
	manifests, err := render(loaded, values, release)
	if err != nil {
		return err
	}
	return print(manifests)
}

func print(value any) error {
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", " ")
	return encoder.Encode(value)
}

// render returns the manifests in the order of their files.
func render(loaded *chart.Chart, values chartutil.Values, name string) ([]any, error) {
	release := chartutil.ReleaseOptions{Name: name, Namespace: "messages", Revision: 1, IsInstall: true}
	all, err := chartutil.ToRenderValues(loaded, values, release, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	rendered, err := engine.Render(loaded, all)
	if err != nil {
		return nil, err
	}
	files := []string{}
	for file := range rendered {
		if path.Ext(file) == ".yaml" {
			files = append(files, file)
		}
	}
	sort.Strings(files)
	manifests := []any{}
	for _, file := range files {
		for _, document := range regexp.MustCompile(`(?m)^---\s*$`).Split(rendered[file], -1) {
			if strings.TrimSpace(document) == "" {
				continue
			}
			if err := check([]byte(document)); err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			var manifest any
			if err := yaml.Unmarshal([]byte(document), &manifest); err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			manifests = append(manifests, manifest)
		}
	}
	return manifests, nil
}

// check decodes a manifest without unknown, doubled or mistyped fields, and holds what a type does not show.
func check(document []byte) error {
	known := runtime.NewScheme()
	if err := scheme.AddToScheme(known); err != nil {
		return err
	}
	known.AddKnownTypeWithName(
		schema.GroupVersionKind{Group: "monitoring.coreos.com", Version: "v1", Kind: "ServiceMonitor"},
		&ServiceMonitor{})
	strict := serializer.NewSerializerWithOptions(serializer.DefaultMetaFactory, known, known,
		serializer.SerializerOptions{Yaml: true, Strict: true})
	object, kind, err := strict.Decode(document, nil, nil)
	if err != nil {
		if kind != nil {
			return fmt.Errorf("%s: %w", kind.Kind, err)
		}
		return err
	}
	meta := object.(metav1.Object)
	faults := field.ErrorList{}
	for _, fault := range validation.IsDNS1123Subdomain(meta.GetName()) {
		faults = append(faults, field.Invalid(field.NewPath("metadata", "name"), meta.GetName(), fault))
	}
	faults = append(faults, metavalidation.ValidateLabels(meta.GetLabels(), field.NewPath("metadata", "labels"))...)
	switch typed := object.(type) {
	case *appsv1.Deployment:
		faults = append(faults, checkPod(&typed.Spec.Template)...)
		selector, err := metav1.LabelSelectorAsSelector(typed.Spec.Selector)
		if err != nil || !selector.Matches(labels.Set(typed.Spec.Template.Labels)) {
			faults = append(faults, field.Invalid(field.NewPath("spec", "selector"), typed.Spec.Selector,
				"does not select the pods of the template"))
		}
	case *batchv1.Job:
		faults = append(faults, checkPod(&typed.Spec.Template)...)
	}
	if len(faults) > 0 {
		return fmt.Errorf("%s: %w", kind.Kind, faults.ToAggregate())
	}
	return nil
}

// checkPod holds what the API server refuses of a pod and what the names in it refer to.
func checkPod(template *corev1.PodTemplateSpec) field.ErrorList {
	at := field.NewPath("spec", "template")
	faults := metavalidation.ValidateLabels(template.Labels, at.Child("metadata", "labels"))
	volumes := map[string]bool{}
	for index, volume := range template.Spec.Volumes {
		if volumes[volume.Name] || len(validation.IsDNS1123Label(volume.Name)) > 0 {
			faults = append(faults, field.Invalid(at.Child("spec", "volumes").Index(index), volume.Name, "bad name"))
		}
		volumes[volume.Name] = true
	}
	for _, container := range append(template.Spec.InitContainers, template.Spec.Containers...) {
		inside := at.Child("spec", "containers").Key(container.Name)
		if len(validation.IsDNS1123Label(container.Name)) > 0 || container.Image == "" {
			faults = append(faults, field.Required(inside.Child("image"), "a container has a name and an image"))
		}
		mounted := map[string]bool{}
		for _, mount := range container.VolumeMounts {
			if !volumes[mount.Name] || mounted[mount.MountPath] || !path.IsAbs(mount.MountPath) {
				faults = append(faults, field.Invalid(inside.Child("volumeMounts"), mount, "no volume of this name"))
			}
			mounted[mount.MountPath] = true
		}
		variables := map[string]bool{}
		for _, variable := range container.Env {
			if variables[variable.Name] || len(validation.IsEnvVarName(variable.Name)) > 0 {
				faults = append(faults, field.Duplicate(inside.Child("env"), variable.Name))
			}
			variables[variable.Name] = true
		}
		faults = append(faults, checkProbes(container, inside)...)
	}
	return faults
}

// checkProbes holds that each probe asks a port that the container declares.
func checkProbes(container corev1.Container, at *field.Path) field.ErrorList {
	faults := field.ErrorList{}
	for name, probe := range map[string]*corev1.Probe{
		"startupProbe": container.StartupProbe, "livenessProbe": container.LivenessProbe,
		"readinessProbe": container.ReadinessProbe,
	} {
		if probe == nil {
			continue
		}
		is := probe.HTTPGet != nil && probe.HTTPGet.Port.Type == intstr.String
		found := false
		for _, port := range container.Ports {
			found = found || is && port.Name == probe.HTTPGet.Port.StrVal
		}
		if !found {
			faults = append(faults, field.Invalid(at.Child(name), probe.HTTPGet, "asks no port of the container"))
		}
	}
	return faults
}
