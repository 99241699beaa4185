//! The compared variants and their start.

mod by_hand;
pub mod emitting;
pub mod host;
mod native;
mod node;
pub mod pgbench;

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    str::FromStr,
};

use anyhow::{Context, Result, anyhow};
use oncebox_devkit::local::process::Child;
use oncebox_model::policy::RowForm;
use serde::{Deserialize, Serialize};

use crate::{
    load::Load,
    servers::{Database, Servers},
};

/// One implementation of the business effect.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Variant {
    /// (a) SQL alone, a transaction per message: pgbench.
    Pgbench,
    /// (b) The inbox with a handler in Rust.
    Native,
    /// (c) The host with the component.
    Component,
    /// (d) Written by hand: rdkafka and sqlx, a transaction per message.
    ByHand,
    /// (d64) As (d), with up to 64 messages per transaction.
    ByHandBatch,
    /// (e) The host with the component that takes whole batches.
    BatchComponent,
    /// (f) Written by hand for Node.js: kafkajs and pg.
    Node,
    /// (b1) As (b), one message per transaction.
    NativeAlone,
    /// (c1) As (c), one message per transaction.
    ComponentAlone,
    /// (c2) As (c), with light rows.
    ComponentLight,
    /// (c3) As (c), with traces of one message in a hundred.
    ComponentTraced,
    /// (g) The host with the component as written in a language.
    Language(String),
    /// (c-emit) The host with a component that emits an outgoing message of each message.
    ComponentEmitting,
    /// (c-quiet) As (c-emit), with a component that emits nothing.
    ComponentQuiet,
    /// (d-outbox) As (d), with an outbox written by hand.
    ByHandOutbox,
}

use Variant::{
    BatchComponent, ByHand, ByHandBatch, ByHandOutbox, Component, ComponentAlone,
    ComponentEmitting, ComponentLight, ComponentQuiet, ComponentTraced, Language, Native,
    NativeAlone, Node, Pgbench,
};

const LETTERS: [(&str, Variant); 11] = [
    ("a", Pgbench),
    ("b", Native),
    ("c", Component),
    ("d", ByHand),
    ("d64", ByHandBatch),
    ("e", BatchComponent),
    ("f", Node),
    ("b1", NativeAlone),
    ("c1", ComponentAlone),
    ("c2", ComponentLight),
    ("c3", ComponentTraced),
];
/// The variants of the part `outgoing` alone. No option names them.
const OF_OUTGOING: [(&str, Variant); 3] =
    [("c-emit", ComponentEmitting), ("c-quiet", ComponentQuiet), ("d-outbox", ByHandOutbox)];

/// Share of the messages of (c3) that are traced.
const TRACED: &str = "0.01";

impl Variant {
    /// Returns all variants with a letter of their own.
    pub fn lettered() -> Vec<Self> {
        LETTERS.iter().map(|(_, variant)| variant.clone()).collect()
    }

    /// Returns the name on the command line.
    pub fn letter(&self) -> String {
        match self {
            Language(name) => format!("g:{name}"),
            _ => LETTERS
                .iter()
                .chain(&OF_OUTGOING)
                .find(|(_, variant)| variant == self)
                .map_or_else(String::new, |(letter, _)| (*letter).to_owned()),
        }
    }

    /// Returns a title of a few words.
    pub fn title(&self) -> String {
        match self {
            Pgbench => "pgbench: SQL alone, a transaction per message".to_owned(),
            Native => "inbox core, plain Rust handler, no Wasm".to_owned(),
            Component => "oncebox, component".to_owned(),
            ByHand => "by hand: rdkafka + sqlx, a transaction per message".to_owned(),
            ByHandBatch => "by hand: rdkafka + sqlx, 64 messages per transaction".to_owned(),
            BatchComponent => "oncebox, component that takes batches".to_owned(),
            Node => "by hand: kafkajs + pg, a transaction per message".to_owned(),
            NativeAlone => "inbox core, one message per transaction".to_owned(),
            ComponentAlone => "oncebox, component, one message per transaction".to_owned(),
            ComponentLight => "oncebox, component, light rows".to_owned(),
            ComponentTraced => "oncebox, component, 1 % of the messages traced".to_owned(),
            Language(name) => format!("oncebox, component written in {name}"),
            ComponentEmitting => "oncebox, one emit of each message".to_owned(),
            ComponentQuiet => "oncebox, the same component without the emit".to_owned(),
            ByHandOutbox => "by hand, with an outbox and a poller".to_owned(),
        }
    }

    /// Returns whether the variant needs the host's schema.
    pub fn is_host(&self) -> bool {
        !matches!(self, Pgbench | ByHand | ByHandBatch | ByHandOutbox | Node)
    }

    /// Returns whether the variant sends a record to the broker for each message.
    pub fn sends(&self) -> bool {
        matches!(self, ComponentEmitting | ByHandOutbox)
    }

    /// Returns whether one load is enough for the variant: it differs from another one in a single
    /// setting.
    pub fn has_one_load(&self) -> bool {
        matches!(self, NativeAlone | ComponentAlone | ComponentLight | ComponentTraced)
    }

    /// Returns the messages a second to expect before anything is measured. It sizes the first run.
    pub fn guess(&self) -> f64 {
        match self {
            BatchComponent => 15_000.0,
            Native => 6_000.0,
            Component | ComponentLight | ComponentQuiet | ComponentTraced => 4_500.0,
            ComponentEmitting | ByHandBatch => 3_000.0,
            Pgbench | ByHand | ByHandOutbox => 1_500.0,
            Node | NativeAlone | ComponentAlone | Language(_) => 800.0,
        }
    }
}

impl From<Variant> for String {
    fn from(variant: Variant) -> Self {
        variant.letter()
    }
}

impl TryFrom<String> for Variant {
    type Error = anyhow::Error;

    fn try_from(letter: String) -> Result<Self> {
        let of_outgoing = OF_OUTGOING
            .iter()
            .find(|(known, _)| *known == letter)
            .map(|(_, variant)| variant.clone());
        of_outgoing.map_or_else(|| letter.parse(), Ok)
    }
}

impl FromStr for Variant {
    type Err = anyhow::Error;

    fn from_str(letter: &str) -> Result<Self> {
        if let Some(language) = letter.strip_prefix("g:") {
            return Ok(Language(language.to_owned()));
        }
        let found =
            LETTERS.iter().find(|(known, _)| *known == letter).map(|(_, variant)| variant.clone());
        found.ok_or_else(|| {
            anyhow!(
                "there is no variant `{letter}`; there are a, b, b1, c, c1, c2, \
            c3, d, d64, e, f and g:<language>"
            )
        })
    }
}

/// Limits of a transaction, for variants that have any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Batch {
    /// Largest number of messages.
    pub messages_max: usize,
    /// Time after which no further message begins, milliseconds.
    pub duration_ms: u64,
}

impl Batch {
    /// The defaults of a policy.
    pub const DEFAULT: Self = Self { messages_max: 64, duration_ms: 50 };
}

/// Places of the programs and components.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The repository.
    pub root: PathBuf,
    /// The folder of `oncebox` and `bench-consumer`.
    pub bin: PathBuf,
}

impl Programs {
    /// Returns the path of the component that a host variant runs.
    pub fn component(&self, variant: &Variant) -> PathBuf {
        match variant {
            Language(name) => self.root.join(format!("target/languages/{name}.wasm")),
            BatchComponent => self.root.join("guest-examples/components/order-batch.wasm"),
            _ => self.root.join("guest-examples/components/order.wasm"),
        }
    }

    /// Returns a variant for each language whose component was built.
    pub fn languages(&self) -> Vec<Variant> {
        let found =
            std::fs::read_dir(self.root.join("target/languages")).into_iter().flatten().flatten();
        let names = found.filter_map(|entry| {
            entry.file_name().to_str()?.strip_suffix(".wasm").map(str::to_owned)
        });
        // Beside each is a component with a planted bug, for the tests.
        let mut languages: Vec<_> =
            names.filter(|name| !name.ends_with("-crash")).map(Language).collect();
        languages.sort();
        languages
    }

    /// Returns the reason why a variant cannot run here; `None` where it can.
    pub fn missing(&self, variant: &Variant) -> Option<String> {
        let needs = |path: PathBuf, remedy: &str| {
            (!path.exists()).then(|| format!("`{}` is missing; {remedy}", path.display()))
        };
        match variant {
            Pgbench => pgbench::program()
                .is_none()
                .then(|| "there is no `pgbench`; install PostgreSQL's client programs".to_owned()),
            Native | NativeAlone | ByHand | ByHandBatch => None,
            ByHandOutbox | ComponentEmitting | ComponentQuiet => None,
            Node => needs(
                node::dir(self).join("node_modules"),
                "install Node.js and npm, then run bench.sh again",
            ),
            Language(_) => {
                needs(self.component(variant), "build it with guest-examples/languages/build.sh")
            }
            _ => needs(self.component(variant), "build it with guest-examples/build.sh"),
        }
    }
}

/// Everything that a variant needs to start.
pub struct Setting<'a> {
    /// The servers.
    pub servers: &'a Servers,
    /// The database of the run.
    pub database: &'a Database,
    /// The messages of the run.
    pub load: &'a Load,
    /// The topic that holds them.
    pub topic: &'a str,
    /// Kafka group of this run alone.
    pub group: &'a str,
    /// Limits of a transaction.
    pub batch: Batch,
    /// Places of the programs.
    pub programs: &'a Programs,
    /// File that takes the output of the process.
    pub log: &'a Path,
}

impl Variant {
    /// Starts the variant's process.
    pub async fn start(&self, setting: &Setting<'_>) -> Result<Child> {
        let command = match self {
            Pgbench => pgbench::command(setting)?,
            ByHand => by_hand::command(setting, 1, false),
            ByHandBatch => by_hand::command(setting, Batch::DEFAULT.messages_max, false),
            ByHandOutbox => by_hand::command(setting, 1, true),
            ComponentEmitting => emitting::command(setting, true).await?,
            ComponentQuiet => emitting::command(setting, false).await?,
            Node => node::command(setting),
            Native | NativeAlone => native::command(setting, self.batch(setting.batch)).await?,
            Component | BatchComponent | ComponentAlone | ComponentLight | ComponentTraced
            | Language(_) => {
                let component = setting.programs.component(self);
                let bytes = std::fs::read(&component)
                    .with_context(|| format!("failed to read `{}`", component.display()))?;
                let mut command =
                    host::command(setting, self.batch(setting.batch), self.rows(), &bytes).await?;
                if *self == ComponentTraced {
                    command
                        .env("ONCEBOX_TELEMETRY_ENDPOINT", setting.servers.collector.url())
                        .env("ONCEBOX_TELEMETRY_SAMPLE", TRACED);
                }
                command
            }
        };
        spawn(command, setting.log)
    }

    fn rows(&self) -> RowForm {
        if *self == ComponentLight { RowForm::Light } else { RowForm::Full }
    }

    fn batch(&self, batch: Batch) -> Batch {
        match self {
            NativeAlone | ComponentAlone => Batch { messages_max: 1, ..batch },
            // A tuned setting: a statement for 256 messages costs little more than one for 64.
            BatchComponent if batch == Batch::DEFAULT => Batch { messages_max: 256, ..batch },
            _ => batch,
        }
    }
}

/// Starts a process whose output goes to a log.
pub fn spawn(mut command: Command, log: &Path) -> Result<Child> {
    let file =
        File::create(log).with_context(|| format!("failed to create `{}`", log.display()))?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let program = command.get_program().to_owned();
    Child::spawn(command, libc::SIGKILL)
        .with_context(|| format!("failed to start `{}`", program.display()))
}

/// Returns the last lines of a log, for an error.
pub fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

fn ours(setting: &Setting<'_>, mode: &str) -> Command {
    let mut command = Command::new(setting.programs.bin.join("bench-consumer"));
    command.args([
        mode,
        "--database",
        &setting.database.url,
        "--brokers",
        setting.servers.kafka.bootstrap(),
    ]);
    command
}
