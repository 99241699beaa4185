//! A load at a fixed rate, for the parts that last: minutes, in which the benchmark does other work
//! too.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};
use tokio::time::sleep;

use crate::{
    load::{Load, Sender, Workload},
    report::Spread,
    run::Bench,
    throughput::{PAYLOAD_BYTES, Pace},
    variants::{Batch, Variant},
};

/// Partitions of the topics of the parts that last.
pub const PARTITIONS: i32 = 4;
/// Runs at full speed from which the maximum is taken.
const CALIBRATIONS: usize = 3;
const POLL: Duration = Duration::from_millis(50);

/// A thread that sends messages at a fixed rate. It ends when all are sent, and also when this is
/// dropped, so that an interrupted benchmark does not wait for it.
pub struct SteadyLoad {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl SteadyLoad {
    /// Starts to send, `rate` messages a second. `send` sends the message of a number, which is
    /// less than `messages`.
    pub fn start(
        sender: Sender,
        messages: usize,
        rate: f64,
        mut send: impl FnMut(&Sender, usize) -> Result<()> + Send + 'static,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let begun = Instant::now();
            for number in 0..messages {
                let due = Duration::from_secs_f64(number as f64 / rate);
                std::thread::sleep(due.saturating_sub(begun.elapsed()));
                if stopped.load(Ordering::Relaxed) {
                    return Ok(());
                }
                send(&sender, number)?;
            }
            sender.flush()
        });
        Self { stop, thread: Some(thread) }
    }

    /// Waits until all messages are sent.
    pub async fn finish(mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        while !thread.is_finished() {
            sleep(POLL).await;
        }
        thread.join().map_err(|_| anyhow!("the thread that sends messages panicked"))?
    }
}

impl Drop for SteadyLoad {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Returns the load of a topic of `PARTITIONS` partitions with this number of messages.
pub fn load(messages: usize) -> Load {
    Load {
        workload: Workload::Spread,
        partitions: PARTITIONS,
        messages,
        payload_bytes: PAYLOAD_BYTES,
    }
}

/// Measures the messages a second that the host processes at most: the median of a few short runs.
pub async fn maximum(bench: &mut Bench, pace: &mut Pace) -> Result<f64> {
    let mut rates = Vec::new();
    for _ in 0..CALIBRATIONS {
        let figures = pace.run(bench, &Variant::Component, load(0), Batch::DEFAULT).await?;
        rates.push(figures.rate);
    }
    let rate = Spread::of(rates).map_or(f64::NAN, |spread| spread.median);
    eprintln!("at most {rate:.0} messages/s");
    Ok(rate)
}
