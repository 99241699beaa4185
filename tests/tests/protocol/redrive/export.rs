//! Messages for an archive, and as they come.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
};

use oncebox_tests::services::target_dir;
use oncebox_tests::wait::DEADLINE;
use serde_json::Value;

use super::{dead_letter_topic::mixed, *};

/// What could go wrong: an archive lacks messages, has some twice, or does not say what became of
/// them; what comes in is not shown, or more than once. S0-042.
#[tokio::test(flavor = "multi_thread")]
async fn messages_are_exported_and_followed() {
    let fixture = HostFixture::new().await.unwrap();
    let load = mixed(1_200);
    fixture.send(&load).await.unwrap();
    let host = fixture.start("a", &[]).unwrap();
    fixture.wait_settled().await.unwrap();
    let tenant = fixture.tenant.name.clone();
    let named = ["--tenant", &tenant, "--consumer", "payments"];
    fixture
        .ok(&[
            &["inbox", "discard", "--reason", "park", "--because", "they are of no use"],
            &named[..],
        ]
        .concat())
        .await
        .unwrap();

    let file = target_dir().join("test-hosts").join(format!("{tenant}.jsonl"));
    let export =
        [&["inbox", "export", "--payload", "--output", file.to_str().unwrap()], &named[..]]
            .concat();
    fixture.ok(&export).await.unwrap();
    let exported: Vec<Value> = std::fs::read_to_string(&file)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let ids: BTreeSet<_> =
        exported.iter().map(|line| line["message_id"].as_str().unwrap()).collect();
    assert_eq!((exported.len(), ids.len()), (1_200, 1_200));
    let discarded = exported.iter().find(|line| line["status"] == "discarded").unwrap();
    let events = |line: &Value| {
        line["history"]
            .as_array()
            .unwrap()
            .iter()
            .map(|e| e["event"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    // S0-042, S1-034.
    assert_eq!(events(discarded), ["failed", "discarded"]);
    assert_eq!(discarded["history"][1]["reason"], "they are of no use");
    let rejected = exported.iter().find(|line| line["status"] == "failed_terminal").unwrap();
    assert_eq!(
        rejected["payload"],
        load.messages()[rejected["message_id"].as_str().unwrap()].payload()
    );
    assert!(
        fixture.ok(&export).await.unwrap_err().to_string().contains(".jsonl"),
        "a file that is there is left alone"
    );
    let some = fixture
        .ok(&[&["inbox", "export", "--status", "failed_terminal"], &named[..]].concat())
        .await
        .unwrap();
    assert_eq!(some.lines().count(), 400);
    assert!(!some.contains("\"payload\":\""), "it was not asked for");

    let mut command: Command = fixture.program().unwrap();
    command
        .args([&["inbox", "tail", "--json"], &named[..]].concat())
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut tail = command.spawn().unwrap();
    let lines = BufReader::new(tail.stdout.take().unwrap()).lines();
    let (sender, shown) = mpsc::channel::<String>();
    let reading =
        thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let id = |line: String| {
        serde_json::from_str::<Value>(&line).unwrap()["message_id"].as_str().unwrap().to_owned()
    };
    // It has looked at what is there already when it shows the first that comes.
    let mut probes = 0;
    let first = loop {
        match shown.try_recv() {
            Ok(line) => break id(line),
            Err(_) => assert!(probes < 100, "it shows nothing"),
        }
        fixture.send(&Load::of([Work::Pay]).named(&format!("probe{probes}"))).await.unwrap();
        probes += 1;
        sleep(Duration::from_millis(500)).await;
    };
    assert!(first.starts_with("probe"), "{first}");
    let more = Load::of((0..30).map(|_| Work::Pay)).named("more");
    fixture.send(&more).await.unwrap();
    let mut seen = BTreeSet::from([first]);
    let deadline = Instant::now() + DEADLINE;
    while !more.messages().keys().all(|id| seen.contains(*id)) {
        assert!(Instant::now() < deadline, "{seen:?}");
        match shown.try_recv() {
            Ok(line) => assert!(seen.insert(id(line.clone())), "twice: {line}"),
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    }
    tail.kill().unwrap();
    tail.wait().unwrap();
    let rest: Vec<_> = shown.iter().collect();
    assert!(rest.iter().all(|line| seen.insert(id(line.clone()))), "{rest:?}");
    drop(reading.join());
    host.stop().await.unwrap();
}
