//! `oncebox consumer seek`: shows what the seek means first, then seeks.

use anyhow::{Context, Result, anyhow, bail};
use chrono::{DateTime, Utc};
use clap::Args;
use oncebox_api::wire::{ConsumerBody, NewOffset, NewSeek, SeekEdge, SeekPartition, SeekPlan};
use oncebox_devkit::{api::Api, output};

use super::{
    Named,
    change::ask,
    wait::{For, Patience, wait},
};

#[derive(Args)]
pub(crate) struct SeekArgs {
    #[command(flatten)]
    of: Named,
    /// `beginning`, `end`, or a time as 2026-01-31T12:00:00Z
    #[arg(long, value_name = "WHERE", conflicts_with_all = ["offset", "cancel"])]
    to: Option<String>,
    /// An offset of a partition, as `orders:0=500`; `0=500` where there is one topic. May be
    /// repeated
    #[arg(long, value_name = "TOPIC:PARTITION=OFFSET", conflicts_with = "cancel")]
    offset: Vec<String>,
    /// Take a seek back that is not done yet
    #[arg(long)]
    cancel: bool,
    /// Carry it out
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    patience: Patience,
}

pub(super) async fn run(api: &Api, args: &SeekArgs, json: bool) -> Result<()> {
    let SeekArgs { of, patience, .. } = args;
    if args.cancel {
        let consumer: ConsumerBody = api.delete(&of.path(&["seek"])).await?;
        if json {
            return output::json(&consumer);
        }
        println!("consumer {} is not being sought", of.shown());
        return Ok(());
    }
    let plan: SeekPlan = api.post(&of.path(&["seek"]), &wanted(args)?).await?;
    if !json {
        show(&plan);
    }
    if !args.yes {
        if json {
            output::json(&plan)?;
        }
        ask(json, "carry it out?")?;
    }
    // The request names exactly the offsets that were shown, whatever the topics hold by now.
    let offset = |p: &SeekPartition| {
        Some(NewOffset { topic: Some(p.topic.clone()), partition: p.partition, offset: p.target? })
    };
    let offsets = plan.partitions.iter().filter_map(offset).collect();
    let agreed = NewSeek { offsets: Some(offsets), accept: true, ..NewSeek::default() };
    let done: SeekPlan = api.post(&of.path(&["seek"]), &agreed).await?;
    let consumer = wait(api, of, For::Sought, patience, json).await?.unwrap_or(done.consumer);
    if json {
        return output::json(&SeekPlan { is_accepted: true, consumer, ..plan });
    }
    match consumer.seek {
        Some(_) => println!("consumer {} is being sought", of.shown()),
        None => println!("consumer {} goes on from there", of.shown()),
    }
    Ok(())
}

fn wanted(args: &SeekArgs) -> Result<NewSeek> {
    let (to, time) = match args.to.as_deref() {
        Some("beginning") => (Some(SeekEdge::Beginning), None),
        Some("end") => (Some(SeekEdge::End), None),
        Some(text) => {
            let time = text.parse::<DateTime<Utc>>();
            (
                None,
                Some(time.map_err(|_| {
                    anyhow!(
                        "`--to {text}` is neither `beginning`, `end` nor \
                a time like 2026-01-31T12:00:00Z"
                    )
                })?),
            )
        }
        None => (None, None),
    };
    let offsets = args.offset.iter().map(|text| parse_offset(text)).collect::<Result<Vec<_>>>()?;
    if to.is_none() && time.is_none() && offsets.is_empty() {
        bail!("say where to: `--to beginning`, `--to end`, `--to` a time, or `--offset`");
    }
    Ok(NewSeek {
        to,
        time,
        offsets: Some(offsets).filter(|offsets| !offsets.is_empty()),
        accept: false,
    })
}

fn parse_offset(text: &str) -> Result<NewOffset> {
    let wrong = || format!("`--offset {text}` is not like `orders:0=500`");
    let (place, offset) = text.rsplit_once('=').with_context(wrong)?;
    let (topic, partition) = match place.rsplit_once(':') {
        Some((topic, partition)) => (Some(topic.to_owned()), partition),
        None => (None, place),
    };
    Ok(NewOffset {
        topic,
        partition: partition.parse().with_context(wrong)?,
        offset: offset.parse().with_context(wrong)?,
    })
}

fn show(plan: &SeekPlan) {
    let cells = |p: &SeekPartition| {
        vec![
            format!("{}:{}", p.topic, p.partition),
            p.committed.map_or_else(|| "none".to_owned(), |offset| offset.to_string()),
            p.target.map_or_else(|| "stays".to_owned(), |offset| offset.to_string()),
            format!("{} to {}", p.low, p.high),
            p.read_again.to_string(),
            p.run_again.to_string(),
            p.skipped.to_string(),
        ]
    };
    let rows: Vec<_> = plan.partitions.iter().map(cells).collect();
    output::table(
        &["PARTITION", "NOW", "THEN", "THERE ARE", "READ AGAIN", "RUN AGAIN", "SKIPPED"],
        &rows,
    );
    plan.consequences.iter().for_each(|consequence| println!("{consequence}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_read() {
        for (text, topic, partition, offset) in [
            ("orders:0=500", Some("orders"), 0, 500),
            ("3=7", None, 3, 7),
            ("a=b:c:1=2", Some("a=b:c"), 1, 2),
        ] {
            let parsed = parse_offset(text).expect(text);
            assert_eq!(
                (parsed.topic.as_deref(), parsed.partition, parsed.offset),
                (topic, partition, offset)
            );
        }
        for text in ["", "x", "orders=5", "orders:=5", "orders:0=", "0=-", "orders:x=1"] {
            assert!(parse_offset(text).is_err(), "{text}");
        }
    }
}
