//! Throughput as a function of one setting, for the plots.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::{
    load::{Load, Workload},
    report::Spread,
    run::Bench,
    throughput::{PAYLOAD_BYTES, Pace},
    variants::{Batch, Variant, host},
};

const PAYLOADS: [usize; 5] = [100, 1 << 10, 4 << 10, 16 << 10, 64 << 10];
const BATCHES: [usize; 5] = [1, 8, 64, 200, 500];
const PARTITIONS: i32 = 4;
/// Duration limit of a transaction, long enough that only the number of messages ends it.
const DURATION_MS: u64 = 2_000;

/// One variant at one setting.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Point {
    /// The variant.
    pub variant: Variant,
    /// Bytes of a payload, or messages of a transaction.
    pub at: usize,
    /// Messages a second.
    pub rate: f64,
    /// `rate` as a multiple of (d)'s.
    pub ratio: f64,
}

/// Returns the variants of the plots that are at hand; each is compared with (d).
fn compared(variants: &[Variant]) -> Vec<Variant> {
    let shown = [Variant::Component, Variant::BatchComponent];
    shown.into_iter().filter(|variant| variants.contains(variant)).collect()
}

/// Measures throughput by the size of the payload. Runs (d) at each size, as the reference.
pub async fn payloads(
    bench: &mut Bench,
    pace: &mut Pace,
    variants: &[Variant],
) -> Result<Vec<Point>> {
    let mut points = Vec::new();
    for payload_bytes in PAYLOADS {
        let load =
            Load { workload: Workload::Spread, partitions: PARTITIONS, messages: 0, payload_bytes };
        let by_hand = pace.run(bench, &Variant::ByHand, load, Batch::DEFAULT).await?.rate;
        for variant in compared(variants) {
            let rate = pace.run(bench, &variant, load, Batch::DEFAULT).await?.rate;
            points.push(point(variant, payload_bytes, rate, by_hand, "bytes"));
        }
    }
    Ok(points)
}

/// Measures throughput by the size of a transaction. (d) has one message per transaction at every
/// size. It runs between the others, so that a disturbance of the machine meets all of them. The
/// reference is the median of its runs.
pub async fn batches(
    bench: &mut Bench,
    pace: &mut Pace,
    variants: &[Variant],
) -> Result<Vec<Point>> {
    let load = Load {
        workload: Workload::Spread,
        partitions: PARTITIONS,
        messages: 0,
        payload_bytes: PAYLOAD_BYTES,
    };
    let (mut points, mut by_hand) = (Vec::new(), Vec::new());
    for messages_max in BATCHES {
        let batch = Batch { messages_max, duration_ms: DURATION_MS };
        if let Some(why) = host::refuses(batch) {
            eprintln!("transactions of {messages_max} messages are left out: {why}");
            continue;
        }
        let now = pace.run(bench, &Variant::ByHand, load, Batch::DEFAULT).await?.rate;
        by_hand.push(now);
        for variant in compared(variants) {
            let rate = pace.run(bench, &variant, load, batch).await?.rate;
            points.push(point(variant, messages_max, rate, now, "messages"));
        }
    }
    if let Some(by_hand) = Spread::of(by_hand) {
        points.iter_mut().for_each(|point| point.ratio = point.rate / by_hand.median);
    }
    Ok(points)
}

fn point(variant: Variant, at: usize, rate: f64, by_hand: f64, unit: &str) -> Point {
    let ratio = rate / by_hand;
    eprintln!("{at} {unit}: ({}) {rate:.0}/s, {ratio:.2} × (d)", variant.letter());
    Point { variant, at, rate, ratio }
}
