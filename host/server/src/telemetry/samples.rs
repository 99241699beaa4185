//! The host's metrics for a collector: the samples of `/metrics`, as OTLP has them. They keep their
//! names, so that one rule or panel serves for both ways.

use std::collections::BTreeMap;

use opentelemetry_proto::{
    tonic::{
        collector::metrics::v1::ExportMetricsServiceRequest,
        common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value},
        metrics::v1::{
            AggregationTemporality, DataPointFlags, Gauge, Histogram, HistogramDataPoint, Metric,
            NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum, metric::Data,
            number_data_point::Value,
        },
        resource::v1::Resource as ResourceMessage,
    },
    transform::common::tonic::ResourceAttributesWithSchema,
};
use opentelemetry_sdk::Resource;

/// The label of the upper bound of a bucket.
const BOUND: &str = "le";

/// Times of the samples of a process, in nanoseconds of the Unix epoch.
#[derive(Debug, Clone, Copy)]
pub(super) struct SampleTimes {
    /// Time since which it counts.
    pub(super) start: u64,
    /// Time of the samples.
    pub(super) now: u64,
}

type Labels = Vec<(String, String)>;

/// A histogram of one set of labels, as the lines of its buckets, sum and count add to it.
#[derive(Default)]
struct Buckets {
    /// Upper bound and cumulative count of each bucket but the last.
    bounded: Vec<(f64, u64)>,
    sum: f64,
    count: u64,
}

/// Returns the request with these samples, which are rendered for Prometheus.
pub(super) fn request(
    rendered: &str,
    resource: &Resource,
    times: SampleTimes,
) -> ExportMetricsServiceRequest {
    let mut metrics = Vec::new();
    let mut lines = rendered.lines().peekable();
    while let Some(line) = lines.next() {
        let Some((name, kind)) = kind_of(line) else { continue };
        let mut samples = Vec::new();
        while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
            samples.extend(sample(line));
        }
        if !samples.is_empty() {
            metrics.extend(data(kind, samples, times).map(|data| Metric {
                name: name.to_owned(),
                data: Some(data),
                ..Default::default()
            }));
        }
    }
    let attributes = ResourceAttributesWithSchema::from(resource).attributes.0;
    let scope = InstrumentationScope { name: "oncebox".to_owned(), ..Default::default() };
    ExportMetricsServiceRequest {
        resource_metrics: vec![ResourceMetrics {
            resource: Some(ResourceMessage { attributes, ..Default::default() }),
            scope_metrics: vec![ScopeMetrics { scope: Some(scope), metrics, ..Default::default() }],
            ..Default::default()
        }],
    }
}

/// Returns name and kind of the metric that a line declares.
fn kind_of(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("# TYPE ")?.split_once(' ')
}

/// Returns name, labels and value of the sample of a line. None for an empty line.
fn sample(line: &str) -> Option<(String, Labels, f64)> {
    let (before, value) = line.rsplit_once(' ')?;
    let value = value.parse().ok()?;
    match before.split_once('{') {
        None => Some((before.to_owned(), Vec::new(), value)),
        Some((name, labels)) => Some((name.to_owned(), labels_of(labels), value)),
    }
}

/// Returns the labels of a sample, from behind the brace.
fn labels_of(text: &str) -> Labels {
    let mut labels = Vec::new();
    let mut rest = text;
    while let Some((name, behind)) = rest.split_once("=\"") {
        let mut value = String::new();
        let mut characters = behind.char_indices();
        let mut end = behind.len();
        while let Some((at, character)) = characters.next() {
            match character {
                '"' => {
                    end = at + 1;
                    break;
                }
                '\\' => match characters.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, escaped)) => value.push(escaped),
                    None => {}
                },
                _ => value.push(character),
            }
        }
        labels.push((name.to_owned(), value));
        rest = behind[end..].trim_start_matches(',');
    }
    labels
}

/// Returns the points of a metric of this kind. None for a kind that the host does not have.
fn data(kind: &str, samples: Vec<(String, Labels, f64)>, times: SampleTimes) -> Option<Data> {
    let aggregation_temporality = AggregationTemporality::Cumulative.into();
    Some(match kind {
        "counter" => Data::Sum(Sum {
            data_points: numbers(samples, times.start, times),
            aggregation_temporality,
            is_monotonic: true,
        }),
        "histogram" => {
            let data_points = histograms(samples, times);
            Data::Histogram(Histogram { data_points, aggregation_temporality })
        }
        // A gauge says nothing of the time before.
        "gauge" => Data::Gauge(Gauge { data_points: numbers(samples, 0, times) }),
        _ => return None,
    })
}

fn numbers(
    samples: Vec<(String, Labels, f64)>,
    start: u64,
    times: SampleTimes,
) -> Vec<NumberDataPoint> {
    let point = |(_, labels, value): (String, Labels, f64)| NumberDataPoint {
        attributes: attributes(labels),
        start_time_unix_nano: start,
        time_unix_nano: times.now,
        // What has ended is no number, and its series ends.
        value: (!value.is_nan()).then_some(Value::AsDouble(value)),
        flags: if value.is_nan() { DataPointFlags::NoRecordedValueMask as u32 } else { 0 },
        ..Default::default()
    };
    samples.into_iter().map(point).collect()
}

fn histograms(samples: Vec<(String, Labels, f64)>, times: SampleTimes) -> Vec<HistogramDataPoint> {
    let mut by_labels = BTreeMap::<Labels, Buckets>::new();
    for (name, mut labels, value) in samples {
        let bound = labels.iter().position(|(name, _)| name == BOUND);
        let bound = bound.map(|at| labels.remove(at).1);
        let buckets = by_labels.entry(labels).or_default();
        match bound.map(|bound| bound.parse::<f64>()) {
            Some(Ok(bound)) if bound.is_finite() => buckets.bounded.push((bound, value as u64)),
            // The last bucket has as many as all.
            Some(_) => {}
            None if name.ends_with("_sum") => buckets.sum = value,
            None => buckets.count = value as u64,
        }
    }
    by_labels.into_iter().map(|(labels, buckets)| buckets.point(labels, times)).collect()
}

impl Buckets {
    /// Returns the data point, whose buckets count what is in them alone.
    fn point(self, labels: Labels, times: SampleTimes) -> HistogramDataPoint {
        let mut below = 0;
        let mut counts: Vec<u64> = Vec::with_capacity(self.bounded.len() + 1);
        for count in self.bounded.iter().map(|(_, count)| *count).chain([self.count]) {
            counts.push(count.saturating_sub(below));
            below = count;
        }
        HistogramDataPoint {
            attributes: attributes(labels),
            start_time_unix_nano: times.start,
            time_unix_nano: times.now,
            count: self.count,
            sum: Some(self.sum),
            bucket_counts: counts,
            explicit_bounds: self.bounded.into_iter().map(|(bound, _)| bound).collect(),
            ..Default::default()
        }
    }
}

fn attributes(labels: Labels) -> Vec<KeyValue> {
    let attribute = |(key, value)| KeyValue {
        key,
        value: Some(AnyValue { value: Some(any_value::Value::StringValue(value)) }),
        ..Default::default()
    };
    labels.into_iter().map(attribute).collect()
}

#[cfg(test)]
mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    const TIMES: SampleTimes = SampleTimes { start: 1, now: 2 };

    // What could go wrong: a label with a quote or a brace ends its sample, buckets count what is
    // below them too, or a metric that the exporter renders is none for the collector.
    #[test]
    fn what_is_rendered_for_prometheus_is_told_whole() {
        let builder = PrometheusBuilder::new().set_buckets(&[0.1, 1.0]).expect("buckets");
        let recorder = builder.build_recorder();
        metrics::with_local_recorder(&recorder, || {
            metrics::describe_counter!("a_total", "text # TYPE x gauge");
            metrics::counter!("a_total", "t" => "q\"u}o, e=\"\\ \n", "u" => "é").increment(3);
            metrics::counter!("a_total").increment(4);
            metrics::gauge!("b", "t" => "").set(-0.5);
            metrics::gauge!("ended").set(f64::NAN);
            for seconds in [0.05, 0.5, 0.6, 7.0] {
                metrics::histogram!("c_seconds", "t" => "x").record(seconds);
            }
        });
        let rendered = recorder.handle().render();
        let request = request(&rendered, &Resource::builder_empty().build(), TIMES);
        let metrics = &request.resource_metrics[0].scope_metrics[0].metrics;
        let named = |name: &str| {
            let found = metrics.iter().find(|metric| metric.name == name);
            found.and_then(|metric| metric.data.clone()).unwrap_or_else(|| panic!("{name}"))
        };
        let texts = |attributes: &[KeyValue]| -> Vec<(String, String)> {
            let text = |it: &KeyValue| match it.value.clone().and_then(|value| value.value) {
                Some(any_value::Value::StringValue(text)) => (it.key.clone(), text),
                other => panic!("{other:?}"),
            };
            attributes.iter().map(text).collect()
        };
        assert_eq!(metrics.len(), 4, "{rendered}");

        let Data::Sum(sum) = named("a_total") else { panic!("{rendered}") };
        assert!(sum.is_monotonic);
        let mut points: Vec<_> = sum
            .data_points
            .iter()
            .map(|point| (texts(&point.attributes), point.value, point.start_time_unix_nano))
            .collect();
        points.sort_by_key(|(labels, ..)| labels.len());
        let of = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let labelled = vec![of("t", "q\"u}o, e=\"\\ \n"), of("u", "é")];
        let expected = [
            (Vec::new(), Some(Value::AsDouble(4.0)), 1),
            (labelled, Some(Value::AsDouble(3.0)), 1),
        ];
        assert_eq!(points, expected, "{rendered}");

        let Data::Gauge(gauge) = named("b") else { panic!("{rendered}") };
        assert_eq!(gauge.data_points[0].value, Some(Value::AsDouble(-0.5)));
        assert_eq!(texts(&gauge.data_points[0].attributes), [of("t", "")]);

        let Data::Gauge(ended) = named("ended") else { panic!("{rendered}") };
        assert_eq!((ended.data_points[0].value, ended.data_points[0].flags), (None, 1));

        let Data::Histogram(histogram) = named("c_seconds") else { panic!("{rendered}") };
        let [point] = &histogram.data_points[..] else { panic!("{rendered}") };
        assert_eq!((point.count, &point.bucket_counts[..]), (4, &[1, 2, 1][..]), "{rendered}");
        assert_eq!(point.explicit_bounds, [0.1, 1.0]);
        assert!((point.sum.unwrap_or(0.0) - 8.15).abs() < 1e-9, "{rendered}");
        assert_eq!(texts(&point.attributes), [of("t", "x")]);
    }
}
