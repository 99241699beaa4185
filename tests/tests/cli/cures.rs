//! The page that shows how stuck messages are found and cured is run, command by command.

use super::*;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cures.md");
/// How long a message may take to be where a command shows it: a gap that lasted too long is looked for every ten seconds.
const PATIENCE: Duration = Duration::from_secs(40);

/// A command of the page with what it prints.
struct Shown {
    command: String,
    output: Vec<String>,
}

/// The parts of the page: text as it stands, and commands.
enum Part {
    Text(String),
    Shown(Shown),
}

fn parts(page: &str) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let mut is_console = false;
    for line in page.lines() {
        if line.starts_with("```") {
            is_console = line == "```console";
            parts.push(Part::Text(line.to_owned()));
        } else if let Some(command) = line.strip_prefix("$ ").filter(|_| is_console) {
            parts.push(Part::Shown(Shown { command: command.to_owned(), output: Vec::new() }));
        } else if let (true, Some(Part::Shown(shown))) = (is_console, parts.last_mut()) {
            shown.output.push(line.to_owned());
        } else {
            parts.push(Part::Text(line.to_owned()));
        }
    }
    parts
}

/// What differs from run to run, and the width of columns, is the same.
fn normal(line: &str) -> String {
    let is_time = |word: &str| {
        let digits = word.bytes().filter(u8::is_ascii_digit).count();
        digits >= 6 && word.bytes().all(|byte| byte.is_ascii_digit() || b"-:.".contains(&byte))
    };
    let is_digest = |word: &str| word.len() >= 8 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_host = |word: &str| word.split_once('/').is_some_and(|(_, process)| process.bytes().all(|byte| byte.is_ascii_digit()));
    let word = |word: &str| match word.trim_end_matches([',', ';', '.']) {
        bare if is_time(bare) => word.replace(bare, "TIME"),
        bare if is_host(bare) => word.replace(bare, "HOST"),
        bare if is_digest(bare) => word.replace(bare, "DIGEST"),
        _ => word.to_owned(),
    };
    line.split_whitespace().map(word).collect::<Vec<_>>().join(" ")
}

/// Whether a command changes nothing, so that it can be said again.
fn only_looks(command: &str) -> bool {
    ["oncebox why", "oncebox inbox list"].iter().any(|look| command.starts_with(look))
}

fn all_normal(lines: &[String]) -> Vec<String> {
    lines.iter().map(|line| normal(line)).collect()
}

/// The desk at which the page is run: its names stand for others of the same length, which nobody else uses.
struct Bench {
    desk: Desk,
    tenant: String,
    topic: String,
}

impl Bench {
    fn theirs(&self, text: &str) -> String {
        text.replace("acme", &self.tenant).replace("orders", &self.topic)
    }

    fn ours(&self, text: &str) -> String {
        text.replace(&self.tenant, "acme").replace(&self.topic, "orders")
    }

    /// A file of the page.
    fn file(&self, name: &str, text: &str) -> String {
        self.desk.file(name, self.theirs(text))
    }

    /// What a command prints.
    async fn run(&self, command: &str) -> Vec<String> {
        let path = format!("{}:{}", program().parent().unwrap().display(), std::env::var("PATH").unwrap());
        let mut bash = Command::new("bash");
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEBOX_")) {
            bash.env_remove(name);
        }
        bash.arg("-c").arg(self.theirs(command)).envs(&self.desk.environment).env("PATH", path);
        let output = run(bash.current_dir(&self.desk.dir).stdin(Stdio::null()).kill_on_drop(true)).await;
        let said = text(&output.stdout) + &text(&output.stderr);
        self.ours(&said).lines().map(str::to_owned).collect()
    }

    /// What a command prints once it prints what is expected; what it prints in the end, where it does not.
    async fn shows(&self, shown: &Shown) -> Vec<String> {
        let expected = all_normal(&shown.output);
        let until = Instant::now() + PATIENCE;
        loop {
            let said = self.run(&shown.command).await;
            if all_normal(&said) == expected || !only_looks(&shown.command) || Instant::now() > until {
                return said;
            }
            sleep(Duration::from_millis(200)).await;
        }
    }
}

fn message(id: &str, event_type: &str, order: &str, version: u32, quantity: u32) -> String {
    format!(
        "{{\"id\": \"{id}\", \"event_type\": \"{event_type}\", \"key\": \"{order}\", \"headers\": {{\"version\": \"{version}\"}},\n \
         \"payload\": {{\"reservation_id\": \"{id}\", \"order_id\": \"{order}\", \"sku\": \"apple\", \"quantity\": {quantity}}}}}\n"
    )
}

const STOCK: &str = r#"topics = ["orders"]
ack = "after_commit"
order = "key"
identity = { id = [{ header = "message-id" }], event_type = [{ header = "event-type" }] }
sequence = { version = { header = "version" }, first = 1, gap_wait_ms = 1000 }
retry = { attempts_max = 2, backoff_min_ms = 100, backoff_max_ms = 100 }

[schemas."stock.*"]
json_schema = { properties.order_id.pattern = "^o-[0-9]+$" }
"#;

/// What could go wrong: a person finds a stuck message and no way out, or one that the page says and that is none; a
/// command prints something else than what the page shows. S1-030, S1-070, S0-030.
///
/// `ONCEBOX_WRITE_CURES=1` writes what is printed into the page, to be looked at.
#[tokio::test(flavor = "multi_thread")]
async fn stuck_messages_are_found_and_cured_as_the_page_shows() {
    let mut desk = Desk::empty().await;
    let kafka = tokio::task::spawn_blocking(KafkaServer::shared).await.unwrap().unwrap();
    let unique = format!("{:08x}", rand::random::<u32>());
    let (tenant, topic) = (format!("t{}", &unique[..3]), format!("q{}", &unique[3..]));
    kafka.create_topic(&topic, 1, &[]).await.unwrap();
    desk.environment.insert("ONCEBOX_KAFKA_BROKERS".to_owned(), kafka.bootstrap().to_owned());
    let bench = Bench { desk, tenant, topic };
    let desk = &bench.desk;

    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-examples");
    let tables = std::fs::read_to_string(example.join("inventory-reservation/schema.sql")).unwrap();
    let tables = desk.file("stock.sql", tables + "INSERT INTO stock VALUES ('apple', 100);");
    let policy = bench.file("stock.toml", STOCK);
    bench.file("mended.toml", &STOCK.replace("^o-[0-9]+$", "^o-([a-z]+-)?[0-9]+$"));
    std::fs::copy(example.join("components/inventory-reservation.wasm"), desk.dir.join("reservations.wasm")).unwrap();
    let broken = desk.file("broken.wasm", guests::component(&[guests::trap()], &End::Ok));
    bench.file("poison.jsonl", &message("r-1", "stock.reserve", "o-1", 1, 3));
    bench.file("unrouted.jsonl", &message("r-2", "stock.preorder", "o-2", 1, 2));
    bench.file("early.jsonl", &message("r-4", "stock.reserve", "o-3", 2, 1));
    bench.file("later.jsonl", &message("r-5", "stock.reserve", "o-3", 3, 1));
    bench.file("late.jsonl", &message("r-3", "stock.reserve", "o-3", 1, 1));
    bench.file("abroad.jsonl", &message("r-6", "stock.reserve", "o-fr-4", 1, 5));

    desk.ok(&["migrate"]).await;
    desk.ok(&["tenant", "create", &bench.tenant, "--schema", &tables]).await;
    desk.ok(&["consumer", "create", "stock", "--tenant", &bench.tenant, "--policy", &policy]).await;
    desk.ok(&["deploy", &broken, "--tenant", &bench.tenant, "--consumer", "stock", "--event-type", "stock.reserve"]).await;
    let host = host(desk);

    let page = std::fs::read_to_string(PAGE).unwrap();
    let is_written = std::env::var_os("ONCEBOX_WRITE_CURES").is_some();
    let mut written = String::new();
    for part in parts(&page) {
        match part {
            Part::Text(line) => written.extend([line.as_str(), "\n"]),
            Part::Shown(shown) => {
                if is_written && only_looks(&shown.command) {
                    sleep(Duration::from_secs(14)).await;
                }
                let said = if is_written { bench.run(&shown.command).await } else { bench.shows(&shown).await };
                if !is_written {
                    assert_eq!(all_normal(&said), all_normal(&shown.output), "$ {}", shown.command);
                }
                written.extend(["$ ", &shown.command, "\n"]);
                said.iter().for_each(|line| written.extend([line.as_str(), "\n"]));
            }
        }
    }
    if is_written {
        std::fs::write(PAGE, written).unwrap();
    }
    let rows = desk.json(&["inbox", "list", "--tenant", &bench.tenant]).await;
    let rows: Vec<_> = rows.as_array().unwrap().iter().map(|row| row["status"].as_str().unwrap()).collect();
    assert_eq!(rows, ["completed"; 6]);
    host.signal(libc::SIGTERM);
    assert!(host.wait(DEADLINE).expect("the host ends").success());
}
