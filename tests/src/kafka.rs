//! A real Kafka for the tests: one broker that is its own controller, from the jars that
//! `tests/kafka/pom.xml` names. Maven fetches them into `target/kafka-libs` on first use.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libc::{SIGKILL, SIGTERM};
use oncebox_devkit::local::free_port;
use oncebox_devkit::local::process::Child;
use rdkafka::ClientConfig;
use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier,
    TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer};

use crate::maven;
use crate::services::{self, Service};
use crate::temp_dir::{own_path, own_path_on_disk};
use crate::wait::{self, DEADLINE};

/// Set to `host:port` to use brokers that run already.
pub const BROKERS: &str = "ONCEBOX_TEST_BROKERS";

/// Any value will do; the broker's folder is tied to it.
const CLUSTER_ID: &str = "b25jZWJveC10ZXN0cy0wMQ";
/// Files beside the jars: the storage that a broker begins with, and the classes that it loads.
const FORMATTED: &str = "formatted";
const CLASSES: &str = "classes.jsa";
const POLL: Duration = Duration::from_millis(50);
const LOGGING: &str = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn";

/// Fast groups and small internal topics; the rest are Kafka's defaults.
const SETTINGS: &str = "\
process.roles=broker,controller
node.id=1
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
auto.create.topics.enable=false
num.partitions=4
default.replication.factor=1
offsets.topic.num.partitions=4
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
group.consumer.min.session.timeout.ms=1000
group.consumer.min.heartbeat.interval.ms=100
";

/// For brokers that get killed: the controller keeps a killed broker's place for this long and
/// refuses its successor until then. Too short for a busy broker that all tests share.
const QUICK_RETURN: &str = "\
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=300
";

/// The members of a group that start together are assigned their partitions in one step.
const LASTING: &str = "group.initial.rebalance.delay.ms=500\n";

/// The last setting of a name is the one that counts.
const AUTOMATIC_TOPICS: &str = "auto.create.topics.enable=true\n";

/// A broker: the one that all tests share, or one of the test's own. One's own ends with the
/// value, and with the process however that ends.
#[derive(Debug)]
pub struct KafkaServer {
    bootstrap: String,
    own: Option<Broker>,
}

impl KafkaServer {
    /// The broker that all tests share, started if need be; blocks for the first caller.
    /// Topics and groups need names of their own.
    pub fn shared() -> Result<Self> {
        let bootstrap = match std::env::var(BROKERS) {
            Ok(brokers) => brokers,
            Err(_) => services::shared::<Self>()?,
        };
        Ok(Self { bootstrap, own: None })
    }

    /// Brokers that run already.
    pub fn at(bootstrap: &str) -> Self {
        Self { bootstrap: bootstrap.to_owned(), own: None }
    }

    /// A broker of one's own, to kill and restart; takes some seconds and 300 MB. Blocks.
    pub fn start_private() -> Result<Self> {
        Self::start_in(&own_path("broker"), QUICK_RETURN, &[])
    }

    /// A broker of one's own that makes a topic when a client names it, as Kafka does by default.
    /// Blocks.
    pub fn start_with_automatic_topics() -> Result<Self> {
        Self::start_in(&own_path("broker"), AUTOMATIC_TOPICS, &[])
    }

    /// A broker of one's own that is also reached by these ports: a client that comes by one of
    /// them is told to come by it. On each the caller passes clients on to the port of
    /// [`Self::own_ports`] at the same place. Blocks.
    pub fn start_behind(advertised: &[u16]) -> Result<Self> {
        Self::start_in(&own_path("broker"), "", advertised)
    }

    /// A broker of one's own that takes a user's password on the first of its [`Self::own_ports`].
    /// Blocks.
    pub fn start_with_password(user: &str, password: &str) -> Result<Self> {
        let settings = format!(
            "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,BEHIND0:SASL_PLAINTEXT\n\
             sasl.enabled.mechanisms=PLAIN\n\
             listener.name.behind0.plain.sasl.jaas.config=\
             org.apache.kafka.common.security.plain.PlainLoginModule required \
             user_{user}=\"{password}\";\n"
        );
        Self::start_in(&own_path("broker"), &settings, &[free_port()?])
    }

    /// The ports that a broker of one's own listens on beside its usual one.
    pub fn own_ports(&self) -> &[u16] {
        self.own.as_ref().map_or(&[], |broker| &broker.behind)
    }

    /// A broker of one's own that is as patient as the shared one, for a benchmark. Blocks.
    pub fn start_lasting() -> Result<Self> {
        Self::start_in(&own_path_on_disk("broker"), LASTING, &[])
    }

    fn start_in(dir: &Path, settings: &str, advertised: &[u16]) -> Result<Self> {
        let broker = Broker::create(dir, settings, advertised)?;
        let mut server =
            Self { bootstrap: format!("127.0.0.1:{}", broker.port), own: Some(broker) };
        server.start_again()?;
        Ok(server)
    }

    /// `host:port` for `bootstrap.servers`.
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// The broker's process, if it is one's own and runs.
    pub fn pid(&self) -> Option<libc::pid_t> {
        self.own.as_ref()?.child.as_ref().filter(|child| child.is_running()).map(Child::pid)
    }

    /// Kills the broker without a chance to write anything down.
    pub fn kill(&mut self) -> Result<()> {
        self.own()?.end(&[(SIGKILL, Duration::from_secs(10))])
    }

    /// Shuts the broker down in order.
    pub fn stop(&mut self) -> Result<()> {
        self.own()?.end(&[(SIGTERM, DEADLINE), (SIGKILL, Duration::from_secs(10))])
    }

    /// Starts a broker that was killed or stopped, with the same port and data. Blocks until
    /// it answers.
    pub fn start_again(&mut self) -> Result<()> {
        self.own()?.launch()
    }

    /// Stops in order and starts again.
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.start_again()
    }

    /// Creates a topic and waits until every partition has a leader.
    pub async fn create_topic(
        &self,
        name: &str,
        partitions: i32,
        config: &[(&str, &str)],
    ) -> Result<()> {
        let topic = NewTopic {
            name,
            num_partitions: partitions,
            replication: TopicReplication::Fixed(1),
            config: config.to_vec(),
        };
        let results = self.admin()?.create_topics([&topic], &AdminOptions::new()).await;
        for result in results.context("failed to create a topic")? {
            result.map_err(|(topic, code)| {
                anyhow::anyhow!("failed to create the topic `{topic}`: {code}")
            })?;
        }
        self.wait_for_topic(name, Some(partitions)).await
    }

    /// Adds partitions to a topic, up to that many, and waits until each has a leader.
    pub async fn add_partitions(&self, name: &str, partitions: i32) -> Result<()> {
        let more = NewPartitions::new(name, usize::try_from(partitions)?);
        let results = self.admin()?.create_partitions([&more], &AdminOptions::new()).await;
        for result in results.context("failed to add partitions")? {
            result.map_err(|(topic, code)| {
                anyhow::anyhow!("failed to add partitions to `{topic}`: {code}")
            })?;
        }
        self.wait_for_topic(name, Some(partitions)).await
    }

    /// Sets settings of a topic, all others to their defaults, and waits until the broker tells
    /// them.
    pub async fn set_topic(&self, name: &str, settings: &[(&str, &str)]) -> Result<()> {
        let (admin, topic) = (self.admin()?, ResourceSpecifier::Topic(name));
        let mut change = AlterConfig::new(topic);
        for (setting, value) in settings {
            change = change.set(setting, value);
        }
        let results = admin.alter_configs([&change], &AdminOptions::new()).await;
        for result in results.context("failed to change a topic")? {
            result.map_err(|(topic, code)| {
                anyhow::anyhow!("failed to change the topic `{topic:?}`: {code}")
            })?;
        }
        wait::until(
            DEADLINE,
            POLL,
            async || {
                let answers = admin.describe_configs([&topic], &AdminOptions::new()).await?;
                let Some(Ok(told)) = answers.into_iter().next() else { return Ok(false) };
                let is_told = |(setting, value): &(&str, &str)| {
                    told.get(setting).is_some_and(|entry| entry.value.as_deref() == Some(*value))
                };
                Ok(settings.iter().all(is_told))
            },
            async || format!("the broker does not tell the new settings of `{name}`"),
        )
        .await
    }

    /// Deletes a topic and waits until it is gone.
    pub async fn delete_topic(&self, name: &str) -> Result<()> {
        let results = self.admin()?.delete_topics(&[name], &AdminOptions::new()).await;
        for result in results.context("failed to delete a topic")? {
            result.map_err(|(topic, code)| {
                anyhow::anyhow!("failed to delete the topic `{topic}`: {code}")
            })?;
        }
        self.wait_for_topic(name, None).await
    }

    fn own(&mut self) -> Result<&mut Broker> {
        self.own
            .as_mut()
            .context("the shared broker is not to be stopped; use `KafkaServer::start_private`")
    }

    fn admin(&self) -> Result<AdminClient<DefaultClientContext>> {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", &self.bootstrap)
            .create()
            .context("failed to make an admin client")
    }

    /// Waits until the topic has that many partitions with a leader, or does not exist.
    async fn wait_for_topic(&self, name: &str, partitions: Option<i32>) -> Result<()> {
        let (bootstrap, name) = (self.bootstrap.clone(), name.to_owned());
        let wait = move || {
            let client = client(&bootstrap)?;
            let done = || led_partitions(&client, &name).is_ok_and(|led| led == partitions);
            wait_until(DEADLINE, done)
                .with_context(|| format!("the topic `{name}` is not as asked for"))
        };
        tokio::task::spawn_blocking(wait).await.context("failed to wait for a topic")?
    }
}

impl Service for KafkaServer {
    const NAME: &'static str = "kafka";

    fn start(dir: &Path) -> Result<Self> {
        Self::start_in(dir, "", &[])
    }

    fn address(&self) -> String {
        self.bootstrap.clone()
    }

    fn is_running(&self) -> bool {
        self.own.as_ref().and_then(|broker| broker.child.as_ref()).is_some_and(Child::is_running)
    }

    fn stop(self) {
        drop(self);
    }
}

/// A broker's files and its process.
#[derive(Debug)]
struct Broker {
    dir: PathBuf,
    port: u16,
    /// Ports of listeners that clients are not told of.
    behind: Vec<u16>,
    child: Option<Child>,
}

impl Broker {
    /// Fetches Kafka if need be, writes the settings and formats the storage.
    fn create(dir: &Path, settings: &str, advertised: &[u16]) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("failed to create `{}`", dir.display()))?;
        let mut ports = BTreeSet::new();
        while ports.len() < advertised.len() + 2 {
            ports.insert(free_port()?);
        }
        let mut ports = ports.into_iter();
        let (port, controller) = (ports.next().context("a port")?, ports.next().context("a port")?);
        let mut broker = Self { dir: dir.to_owned(), port, behind: ports.collect(), child: None };
        let numbered = |name: &str, ports: &[u16]| -> String {
            ports
                .iter()
                .enumerate()
                .map(|(number, port)| format!(",{name}{number}://127.0.0.1:{port}"))
                .collect()
        };
        let protocols: String =
            (0..advertised.len()).map(|number| format!(",BEHIND{number}:PLAINTEXT")).collect();
        let settings = format!(
            "{SETTINGS}listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT{protocols}\n\
             {settings}log.dirs={}\n\
             listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}{}\n\
             advertised.listeners=PLAINTEXT://127.0.0.1:{port}{}\n\
             controller.quorum.voters=1@127.0.0.1:{controller}\n",
            broker.data().display(),
            numbered("BEHIND", &broker.behind),
            numbered("BEHIND", advertised),
        );
        fs::write(broker.settings(), settings).context("failed to write `server.properties`")?;
        broker.format()?;
        Ok(broker)
    }

    fn settings(&self) -> PathBuf {
        self.dir.join("server.properties")
    }

    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// Formats the storage. The files are the same for each broker, so that they are made once: to
    /// make them starts a JVM.
    fn format(&mut self) -> Result<()> {
        let libraries = libraries()?;
        let kept = libraries.join(FORMATTED);
        let lock = File::create(kept.with_added_extension("lock"))
            .and_then(|lock| lock.lock().map(|()| lock))
            .context("failed to wait for another process that formats Kafka's storage")?;
        if !kept.is_dir() {
            self.prepare(&libraries)?;
        }
        drop(lock);
        copy_files(&kept, &self.data())
    }

    /// Formats the storage that all brokers begin with, and archives the classes of a broker that
    /// starts: with them it is up in half the time.
    fn prepare(&mut self, libraries: &Path) -> Result<()> {
        let mut format = java(libraries);
        format
            .args(["kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c"])
            .arg(self.settings());
        let output = format
            .output()
            .context("failed to run `java`; install a runtime of version 17 or newer")?;
        ensure!(
            output.status.success(),
            "failed to format Kafka's storage: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let formatted = libraries.join(FORMATTED).with_added_extension("new");
        let _ = fs::remove_dir_all(&formatted); // of a process that was killed
        copy_files(&self.data(), &formatted)?;
        let classes = libraries.join(CLASSES).with_added_extension("new");
        let mut archiving = java(libraries);
        archiving.arg(with_path("-XX:ArchiveClassesAtExit=", &classes));
        self.run(archiving)?;
        self.end(&[(SIGTERM, DEADLINE)])?;
        let _ = fs::rename(&classes, libraries.join(CLASSES)); // not every JVM can
        fs::remove_dir_all(self.data()).context("failed to clear the storage")?;
        fs::rename(&formatted, libraries.join(FORMATTED)).context("failed to keep the storage")
    }

    fn launch(&mut self) -> Result<()> {
        ensure!(self.child.is_none(), "the broker is running already");
        let libraries = libraries()?;
        let (mut java, classes) = (java(&libraries), libraries.join(CLASSES));
        if classes.exists() {
            java.arg(with_path("-XX:SharedArchiveFile=", &classes));
        }
        self.run(java)
    }

    fn run(&mut self, mut java: Command) -> Result<()> {
        let log = OpenOptions::new()
            .append(true)
            .create(true)
            .open(self.log())
            .context("failed to open the broker's log")?;
        java.arg("kafka.Kafka").arg(self.settings());
        java.stdout(log.try_clone().context("failed to share the log")?).stderr(log);
        self.child = Some(Child::spawn(java, SIGKILL).context("failed to start `java`")?);
        self.wait_until_ready()
    }

    fn log(&self) -> PathBuf {
        self.dir.join("kafka.log")
    }

    /// Ready is when a client's question for metadata is answered with a broker in it.
    fn wait_until_ready(&self) -> Result<()> {
        let client = client(&format!("127.0.0.1:{}", self.port))?;
        let ended = || self.child.as_ref().is_none_or(|child| !child.is_running());
        let ready = || {
            client
                .fetch_metadata(None, Duration::from_millis(500))
                .is_ok_and(|metadata| !metadata.brokers().is_empty())
        };
        let waited = wait_until(DEADLINE, || ended() || ready());
        let log = || fs::read_to_string(self.log()).unwrap_or_default();
        ensure!(waited.is_ok() && !ended(), "the broker does not start; it says:\n{}", log());
        Ok(())
    }

    fn end(&mut self, signals: &[(libc::c_int, Duration)]) -> Result<()> {
        let Some(child) = self.child.take() else {
            return Ok(());
        };
        child.end(signals).context("the broker does not end")?;
        Ok(())
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if let Err(error) = self.end(&[(SIGKILL, Duration::from_secs(10))]) {
            tracing::warn!("{error:#}");
        }
        let _ = fs::remove_dir_all(&self.dir); // what is left is in a folder that others clear
    }
}

/// `java` with Kafka's jars, a small heap and the quick compiler: a broker that lives for
/// minutes does not repay better code.
fn java(libraries: &Path) -> Command {
    let mut class_path = OsString::from(libraries);
    class_path.push("/*");
    let mut java = maven::java();
    java.args(["-Xmx512m", LOGGING, "-cp"]).arg(class_path);
    java
}

/// An option of the JVM with a path.
fn with_path(option: &str, path: &Path) -> OsString {
    let mut option = OsString::from(option);
    option.push(path);
    option
}

/// The folder with Kafka's jars, fetched if need be.
fn libraries() -> Result<PathBuf> {
    let otherwise = format!("install Maven, or set {BROKERS} to a broker that runs");
    maven::fetched("kafka/pom.xml", "dependency:copy-dependencies", "kafka-libs", &otherwise)
}

fn copy_files(from: &Path, to: &Path) -> Result<()> {
    let failed = || format!("failed to copy `{}` to `{}`", from.display(), to.display());
    fs::create_dir_all(to).with_context(failed)?;
    for file in fs::read_dir(from).with_context(failed)? {
        let file = file.with_context(failed)?;
        fs::copy(file.path(), to.join(file.file_name())).with_context(failed)?;
    }
    Ok(())
}

/// A client for questions. It is quiet: that a broker is not up yet is no news here.
fn client(bootstrap: &str) -> Result<BaseConsumer> {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", bootstrap)
        .set("reconnect.backoff.max.ms", "100")
        .set("log_level", "0");
    config.set_log_level(RDKafkaLogLevel::Emerg).create().context("failed to make a client")
}

/// How many partitions of the topic have a leader; `None` if it does not exist.
fn led_partitions(client: &BaseConsumer, topic: &str) -> Result<Option<i32>> {
    let metadata = client
        .fetch_metadata(Some(topic), Duration::from_secs(5))
        .context("failed to ask for a topic")?;
    let Some(found) =
        metadata.topics().iter().find(|found| found.name() == topic && found.error().is_none())
    else {
        return Ok(None);
    };
    let led = found.partitions().iter().filter(|partition| partition.leader() >= 0).count();
    Ok(Some(i32::try_from(led)?))
}

fn wait_until(limit: Duration, mut done: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !done() {
        ensure!(Instant::now() < deadline, "gave up after {limit:?}");
        std::thread::sleep(POLL);
    }
    Ok(())
}
