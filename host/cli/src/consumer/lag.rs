//! `oncebox consumer lag`: the records that a consumer's group has not acked.

use anyhow::Result;
use oncebox_api::wire::{LagBody, PartitionLagBody};
use oncebox_devkit::{api::Api, output};

use super::Named;

/// Prints the lag of each partition, the largest first, and their sum.
pub(super) async fn run(api: &Api, of: &Named, json: bool) -> Result<()> {
    let lag: LagBody = api.get(&of.path(&["lag"])).await?;
    if json {
        return output::json(&lag);
    }
    let row = |partition: &PartitionLagBody| {
        vec![
            partition.topic.clone(),
            partition.partition.to_string(),
            partition.committed.map_or_else(|| "none".to_owned(), output::number),
            output::number(partition.high),
            output::number(partition.records),
        ]
    };
    let rows: Vec<_> = lag.partitions.iter().map(row).collect();
    output::table(&["TOPIC", "PARTITION", "COMMITTED", "END", "LAG"], &rows);
    let records = output::number(lag.records);
    println!("\n{records} records are not acked, at {} UTC", output::time(lag.measured_at));
    Ok(())
}
