//! Throughput where a network is between the consumer and the database: each byte arrives half a
//! round trip later than it was sent, in order. There is no bound on what is under way.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sqlx::{Connection, PgConnection};

use crate::{
    load::Workload,
    report::Cell,
    run::Bench,
    servers::Database,
    throughput::{self, Pace},
    variants::Variant,
};

/// Round trips between consumer and database, milliseconds.
const ROUND_TRIPS_MS: [f64; 2] = [0.5, 2.0];
const PARTITIONS: i32 = 4;
/// Times that a round trip is measured.
const ASKED: usize = 51;

/// Throughput of the variants at one distance.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Distance {
    /// Round trip that was asked for, milliseconds.
    pub round_trip_ms: f64,
    /// Median round trip of an empty statement, milliseconds.
    pub measured_ms: f64,
    /// Runs of the variants.
    pub cells: Vec<Cell>,
}

/// Measures the variants that are at hand at each distance.
pub async fn measure(
    bench: &mut Bench,
    variants: &[Variant],
    rounds: usize,
    seconds: f64,
) -> Result<Vec<Distance>> {
    use Variant::{BatchComponent, ByHand, ByHandBatch, Component, ComponentAlone};
    let shown = [Component, ComponentAlone, ByHand, ByHandBatch, BatchComponent];
    let variants: Vec<_> = shown.into_iter().filter(|one| variants.contains(one)).collect();
    let mut distances = Vec::new();
    for round_trip_ms in ROUND_TRIPS_MS {
        bench.round_trip = Some(Duration::from_secs_f64(round_trip_ms / 1e3));
        let database = bench.servers.database(false).await?;
        let measured_ms = round_trip(bench, &database).await?;
        bench.servers.drop_database(database).await?;
        eprintln!("the database is {measured_ms:.2} ms away");
        let (mut pace, loads) = (Pace::of_seconds(seconds), [(Workload::Spread, PARTITIONS)]);
        let cells = throughput::measure(bench, &mut pace, &variants, &loads, rounds).await;
        bench.round_trip = None;
        distances.push(Distance { round_trip_ms, measured_ms, cells: cells? });
    }
    Ok(distances)
}

/// Returns the median time of a statement that does nothing, milliseconds.
async fn round_trip(bench: &Bench, database: &Database) -> Result<f64> {
    let mut connection = PgConnection::connect(&bench.away(database)?.url).await?;
    let mut times = Vec::new();
    for _ in 0..ASKED {
        let asked = Instant::now();
        connection.ping().await?;
        times.push(asked.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    connection.close().await?;
    Ok(times[ASKED / 2])
}

/// Listens on loopback for connections that lead to a server at this distance, until the process
/// ends. Returns the address.
pub fn listen(server: SocketAddr, round_trip: Duration) -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("failed to listen")?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let _ = lead(client, server, round_trip / 2); // a connection that ends at once
        }
    });
    Ok(address)
}

fn lead(client: TcpStream, server: SocketAddr, delay: Duration) -> std::io::Result<()> {
    let server = TcpStream::connect(server)?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
    }
    carry(client.try_clone()?, server.try_clone()?, delay);
    carry(server, client, delay);
    Ok(())
}

/// Carries bytes one way. Threads sleep more exactly than the timers of an executor, which count
/// milliseconds.
fn carry(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
    let (sender, receiver) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if sender.send((Instant::now() + delay, bytes[..count].to_vec())).is_err() {
                return;
            }
        }
    });
    thread::spawn(move || {
        for (due, bytes) in receiver {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both); // it may have ended by itself
    });
}
