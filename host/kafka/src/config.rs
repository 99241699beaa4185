//! A consumer's configuration, and the properties of librdkafka that no configuration may set.

use std::{collections::BTreeMap, fmt, time::Duration};

use oncebox_model::policy;
use rdkafka::{ClientConfig, config::RDKafkaLogLevel};

use crate::error::ConsumerError;

/// The Kafka settings of one consumer.
#[derive(Clone)]
pub struct ConsumerConfig {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the consumer within the tenant.
    pub consumer: String,
    /// The topics to read; a name that starts with `^` is a regular expression.
    pub topics: Vec<String>,
    /// The consumer's policy: group, prefetch bounds and properties of its own.
    pub kafka: policy::KafkaPolicy,
    /// Properties of the host's configuration, such as `bootstrap.servers`. The policy's properties
    /// override them. Values are secrets.
    pub host_properties: BTreeMap<String, String>,
    /// The consumer's deadlines.
    pub timing: Timing,
}

/// The deadlines of a consumer.
#[derive(Debug, Clone)]
pub struct Timing {
    /// The time for a revoked partition to finish the batch that runs. Must stay well below
    /// `max.poll.interval.ms`.
    pub revoke: Duration,
    /// The longest wait for a synchronous commit.
    pub commit: Duration,
    /// The longest wait for one answer of a broker: watermarks, committed offsets, topic ids.
    pub lookup: Duration,
    /// The interval of the periodic work: lag, pauses and topic ids.
    pub tick: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            revoke: Duration::from_secs(20),
            commit: Duration::from_secs(5),
            lookup: Duration::from_secs(5),
            tick: Duration::from_secs(5),
        }
    }
}

/// Shows only the names of properties, since their values may be passwords.
impl fmt::Debug for ConsumerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsumerConfig")
            .field("tenant", &self.tenant)
            .field("consumer", &self.consumer)
            .field("topics", &self.topics)
            .field("group", &self.group())
            .field("prefetch_messages", &self.kafka.prefetch_messages)
            .field("prefetch_bytes", &self.kafka.prefetch_bytes)
            .field("properties", &self.kafka.properties.keys())
            .field("host_properties", &self.host_properties.keys())
            .field("timing", &self.timing)
            .finish()
    }
}

/// The host's defaults; the configuration and the policy may change them.
pub(crate) const DEFAULTS: &[(&str, &str)] = &[
    ("client.id", "oncebox"),
    ("auto.commit.interval.ms", "500"),
    ("partition.assignment.strategy", "cooperative-sticky"),
    // librdkafka's own prefetch, over all partitions, in addition to the partitions' bounds.
    ("queued.min.messages", "10000"),
    ("queued.max.messages.kbytes", "16384"),
    // Until the library looks again whether its queue is full. It was a second, in which a consumer
    // that empties the queue stands still.
    ("fetch.queue.backoff.ms", "10"),
    // A pause discards the records that librdkafka has prefetched of the partition. Small
    // fetches keep that cheap. A batch larger than this is still fetched whole.
    ("fetch.message.max.bytes", "262144"),
    // A resumed partition waits until the fetch that is under way returns.
    ("fetch.wait.max.ms", "100"),
    // The longest wait of a dead host's partitions for another host.
    ("session.timeout.ms", "10000"),
    // A member learns by it that another one left or came; partitions that move wait so long.
    ("heartbeat.interval.ms", "1000"),
    // The longest wait of an added partition, or of a topic that matches a pattern, to be read.
    ("topic.metadata.refresh.interval.ms", "5000"),
    // Without this, three times the refresh interval: librdkafka would forget its topics while
    // brokers are away.
    ("metadata.max.age.ms", "900000"),
];

/// The host's `session.timeout.ms`, as in [`DEFAULTS`], and librdkafka's `max.poll.interval.ms`.
const SESSION_TIMEOUT_MS: u64 = 10_000;
const MAX_POLL_INTERVAL_MS: u64 = 300_000;

/// The properties of every connection of a host to brokers. A silent connection is closed after
/// eight seconds, and another one is tried soon.
pub const CONNECTION: &[(&str, &str)] = &[
    ("socket.timeout.ms", "8000"),
    ("socket.connection.setup.timeout.ms", "5000"),
    ("socket.keepalive.enable", "true"),
    ("reconnect.backoff.max.ms", "2000"),
];

/// The property that makes a member static, and the assignment strategy of static members, which
/// assigns all partitions in one step. The cooperative strategy has two. A static member that dies
/// between them and returns at once keeps the assignment of the first step. No member starts the
/// second step, and the partitions that the member gave up stay without an owner until the group
/// changes again.
const STATIC_MEMBER: (&str, &str) = ("group.instance.id", "roundrobin");

/// The fixed properties, by which an offset means "everything before it is settled".
const FIXED: &[(&str, &str)] = &[
    ("enable.auto.commit", "true"),
    ("enable.auto.offset.store", "false"),
    ("auto.offset.reset", "earliest"),
    ("enable.partition.eof", "false"),
];

/// Properties that concern how a member of a group reads, and not how it reaches brokers. A
/// property that is not listed counts as one that concerns the connection.
const OF_READING: &[&str] = &[
    "group.instance.id",
    "session.timeout.ms",
    "heartbeat.interval.ms",
    "max.poll.interval.ms",
    "partition.assignment.strategy",
    "auto.commit.interval.ms",
    "isolation.level",
    "check.crcs",
    "allow.auto.create.topics",
    "client.id",
    "client.rack",
    "statistics.interval.ms",
    "max.partition.fetch.bytes",
];
/// The beginnings of further such properties.
const OF_READING_BEGINNINGS: &[&str] = &["fetch.", "queued.", "coordinator.", "consume."];

const OFFSETS: &str = "the host alone decides which offsets are stored; remove it";
/// The properties that are refused everywhere, each with the reason.
const REFUSED: &[(&str, &str)] = &[
    ("enable.auto.commit", OFFSETS),
    ("auto.commit.enable", OFFSETS),
    ("enable.auto.offset.store", OFFSETS),
    ("offset.store.method", OFFSETS),
    ("offset.store.path", OFFSETS),
    ("auto.offset.reset", "anything but `earliest` skips messages; remove it"),
    ("group.id", "set `group` in the policy's `kafka` table instead"),
    ("group.protocol", "the host is built for the classic protocol; remove it"),
    ("group.remote.assignor", "the host is built for the classic protocol; remove it"),
    ("enable.partition.eof", "the host does not use it; remove it"),
    ("log.queue", "the host takes the client's log; remove it"),
];

/// The properties that are refused in a policy, since they reach into the host: its files, its
/// commands, its memory.
const HOST_ONLY: &[&str] = &[
    "plugin.library.paths",
    "sasl.kerberos.kinit.cmd",
    "sasl.kerberos.keytab",
    "ssl.engine.location",
    "ssl.engine.id",
    "ssl.providers",
    "debug",
    "log_level",
    "statistics.interval.ms",
    "queued.min.messages",
    "queued.max.messages.kbytes",
    "receive.message.max.bytes",
    "fetch.max.bytes",
    "fetch.message.max.bytes",
    "max.partition.fetch.bytes",
    "test.mock.num.brokers",
    // Patterns, which the client compiles with the C library.
    "topic.blacklist",
];
/// Pauses below which the client's threads would spin, while a queue is full or while brokers
/// refuse. Shorter ones are raised to these, in milliseconds.
const LEAST_MS: &[(&str, u64)] = &[("fetch.queue.backoff.ms", 10), ("fetch.error.backoff.ms", 10)];
/// The endings of further such properties.
const HOST_ONLY_ENDINGS: &[&str] = &[".location", ".file", ".cmd", ".url"];
const HOST_ONLY_REASON: &str = "it reaches into the host; ask for it in the host's configuration";

impl ConsumerConfig {
    /// Returns the name of the Kafka group: the policy's, or `oncebox.<tenant>.<consumer>`.
    pub fn group(&self) -> String {
        match self.kafka.group.as_str() {
            "" => format!("oncebox.{}.{}", self.tenant, self.consumer),
            group => group.to_owned(),
        }
    }

    /// Refuses settings that would break the guarantees.
    ///
    /// # Errors
    ///
    /// A [`ConsumerError`] that names the property or setting.
    pub fn check(&self) -> Result<(), ConsumerError> {
        if self.topics.is_empty() {
            return Err(ConsumerError::NoTopics { consumer: self.consumer.clone() });
        }
        // The last check before a native library: a policy's row may be older than the rule that
        // would refuse it.
        let names =
            policy::topics_fault(&self.topics).or_else(|| policy::group_fault(&self.kafka.group));
        let fault = names.or_else(|| {
            policy::properties_fault(self.kafka.properties.iter()).map(|(_, text)| text)
        });
        if let Some(text) = fault {
            return Err(ConsumerError::Unfit { consumer: self.consumer.clone(), text });
        }
        let bounds = [
            ("kafka.prefetch_messages", self.kafka.prefetch_messages),
            ("kafka.prefetch_bytes", self.kafka.prefetch_bytes),
        ];
        if let Some((name, _)) = bounds.into_iter().find(|(_, bound)| *bound == 0) {
            return Err(ConsumerError::ZeroBound { consumer: self.consumer.clone(), name });
        }
        self.host_properties.keys().try_for_each(|name| check_name(name))?;
        self.kafka
            .properties
            .keys()
            .try_for_each(|name| check_name(name).and_then(|()| check_policy_name(name)))?;
        self.check_poll_interval()
    }

    /// Refuses a poll interval that is too short to wait for workers between two polls.
    fn check_poll_interval(&self) -> Result<(), ConsumerError> {
        let name = "max.poll.interval.ms";
        let Some(value) = self.property(name) else { return Ok(()) };
        let interval: u64 =
            value.parse().map_err(|_| ConsumerError::InvalidProperty { name: name.to_owned() })?;
        if u128::from(interval) > (self.timing.revoke + 2 * self.timing.commit).as_millis() {
            return Ok(());
        }
        let reason = "it is shorter than a partition's time to finish what it runs; raise it";
        Err(ConsumerError::RefusedProperty { name: name.to_owned(), reason })
    }

    /// Returns whether a topic's name is a regular expression.
    pub fn has_patterns(&self) -> bool {
        self.topics.iter().any(|topic| policy::is_pattern(topic))
    }

    /// Returns the longest time after which the group redelivers a record that a host completed and
    /// did not ack.
    pub fn redelivery(&self) -> Duration {
        let ms = |name: &str, default: u64| {
            self.property(name).and_then(|value| value.parse().ok()).unwrap_or(default)
        };
        let session_ms = ms("session.timeout.ms", SESSION_TIMEOUT_MS);
        let poll_ms = ms("max.poll.interval.ms", MAX_POLL_INTERVAL_MS);
        Duration::from_millis(session_ms.saturating_add(poll_ms))
            .saturating_add(self.timing.revoke + self.timing.commit)
    }

    /// Returns the properties that a client connects with. Consumers with equal ones see equal
    /// brokers, with equal rights.
    pub fn connection_properties(&self) -> BTreeMap<String, String> {
        let defaults =
            CONNECTION.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let all = self.host_properties.iter().chain(&self.kafka.properties);
        let of_reading = |name: &str| {
            OF_READING.contains(&name)
                || OF_READING_BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
        };
        defaults
            .chain(
                all.filter(|(name, _)| !of_reading(name))
                    .map(|(name, value)| (name.clone(), value.clone())),
            )
            .collect()
    }

    fn property(&self, name: &str) -> Option<&String> {
        self.kafka.properties.get(name).or_else(|| self.host_properties.get(name))
    }

    /// Returns the values that must not appear in an error.
    pub(crate) fn secrets(&self) -> Vec<String> {
        self.host_properties.values().chain(self.kafka.properties.values()).cloned().collect()
    }

    /// Returns librdkafka's configuration: defaults, the host's, the policy's and the fixed
    /// properties, each over the ones before.
    pub(crate) fn client_config(&self) -> Result<ClientConfig, ConsumerError> {
        self.check()?;
        let mut config = ClientConfig::new();
        config.set_log_level(RDKafkaLogLevel::Info);
        for (name, value) in DEFAULTS.iter().chain(CONNECTION) {
            config.set(*name, *value);
        }
        let (member, strategy) = STATIC_MEMBER;
        if self.property(member).is_some() {
            config.set("partition.assignment.strategy", strategy);
        }
        for (name, value) in self.host_properties.iter().chain(&self.kafka.properties) {
            config.set(name, value);
        }
        for (name, least) in LEAST_MS {
            if self
                .property(name)
                .and_then(|ms| ms.parse::<u64>().ok())
                .is_some_and(|ms| ms < *least)
            {
                config.set(*name, least.to_string());
            }
        }
        for (name, value) in FIXED {
            config.set(*name, *value);
        }
        config.set("group.id", self.group());
        Ok(config)
    }
}

fn check_name(name: &str) -> Result<(), ConsumerError> {
    match REFUSED.iter().find(|(refused, _)| *refused == name) {
        Some((_, reason)) => Err(ConsumerError::RefusedProperty { name: name.to_owned(), reason }),
        None => Ok(()),
    }
}

fn check_policy_name(name: &str) -> Result<(), ConsumerError> {
    if HOST_ONLY.contains(&name) || HOST_ONLY_ENDINGS.iter().any(|ending| name.ends_with(ending)) {
        return Err(ConsumerError::RefusedProperty {
            name: name.to_owned(),
            reason: HOST_ONLY_REASON,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::support::config;

    fn with(policy: &[(&str, &str)], host: &[(&str, &str)]) -> ConsumerConfig {
        let map = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect()
        };
        let mut config = config("localhost:1", "t", "c", "topic");
        config.kafka.properties = map(policy);
        config.host_properties = map(host);
        config
    }

    fn refused(config: &ConsumerConfig) -> String {
        config.client_config().err().map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    fn properties_that_break_the_guarantees_are_refused_by_name() {
        for (name, _) in REFUSED {
            for config in
                [with(&[(name, "hunter2secret")], &[]), with(&[], &[(name, "hunter2secret")])]
            {
                let text = refused(&config);
                assert!(text.contains(&format!("`{name}`")) && !text.contains("hunter2"), "{text}");
            }
        }
    }

    #[test]
    fn a_policy_cannot_reach_into_the_host() {
        for name in [
            "ssl.ca.location",
            "sasl.oauthbearer.token.endpoint.url",
            "plugin.library.paths",
            "debug",
        ] {
            assert!(refused(&with(&[(name, "x")], &[])).contains(name));
            assert_eq!(refused(&with(&[], &[(name, "x")])), "");
        }
    }

    #[test]
    fn no_pause_is_so_short_that_a_thread_spins() {
        for (name, _) in LEAST_MS {
            for (asked, set) in [("0", "10"), ("9", "10"), ("11", "11")] {
                for config in [with(&[(name, asked)], &[]), with(&[], &[(name, asked)])] {
                    assert_eq!(config.client_config().expect("sound").get(name), Some(set));
                }
            }
        }
    }

    #[test]
    fn the_policy_stands_above_the_host_and_below_what_is_fixed() {
        let config =
            with(&[("client.id", "policy")], &[("client.id", "host"), ("sasl.username", "me")]);
        let client = config.client_config().unwrap();
        assert_eq!(client.get("client.id"), Some("policy"));
        assert_eq!(client.get("sasl.username"), Some("me"));
        assert_eq!(client.get("auto.offset.reset"), Some("earliest"));
        assert_eq!(client.get("enable.auto.offset.store"), Some("false"));
        assert_eq!(client.get("group.id"), Some("oncebox.t.c"));
    }

    /// The defaults could let a dead host's partitions, or a broken connection, wait for long; only
    /// an operator may choose that. S4-002.
    #[test]
    fn losses_are_noticed_within_seconds() {
        let ms =
            |config: &ClientConfig, name: &str| config.get(name).unwrap().parse::<u64>().unwrap();
        let client = with(&[], &[]).client_config().unwrap();
        assert_eq!(
            (ms(&client, "session.timeout.ms"), ms(&client, "heartbeat.interval.ms")),
            (10_000, 1_000)
        );
        assert_eq!(ms(&client, "topic.metadata.refresh.interval.ms"), 5_000);
        // Connections other than a consumer's have these deadlines too.
        let mut other = ClientConfig::new();
        for (name, value) in with(&[], &[]).connection_properties() {
            other.set(name, value);
        }
        for config in [&client, &other] {
            let silent = ms(config, "socket.timeout.ms")
                + ms(config, "reconnect.backoff.max.ms")
                + ms(config, "socket.connection.setup.timeout.ms");
            assert!(silent <= 15_000, "{silent}");
            assert_eq!(config.get("socket.keepalive.enable"), Some("true"));
        }
        let (policy, host) = (
            [("socket.timeout.ms", "20000")],
            [("session.timeout.ms", "45000"), ("reconnect.backoff.max.ms", "9000")],
        );
        let chosen = with(&policy, &host);
        let client = chosen.client_config().unwrap();
        assert_eq!(
            (ms(&client, "socket.timeout.ms"), ms(&client, "session.timeout.ms")),
            (20_000, 45_000)
        );
        let connection = chosen.connection_properties();
        assert_eq!(
            (
                connection["socket.timeout.ms"].as_str(),
                connection["reconnect.backoff.max.ms"].as_str()
            ),
            ("20000", "9000")
        );
        assert!(!connection.contains_key("session.timeout.ms"), "it is of reading");
    }

    #[test]
    fn static_members_rebalance_in_one_step() {
        let strategy = |config: ConsumerConfig| {
            config.client_config().unwrap().get("partition.assignment.strategy").map(str::to_owned)
        };
        assert_eq!(strategy(with(&[], &[])).as_deref(), Some("cooperative-sticky"));
        assert_eq!(
            strategy(with(&[], &[("group.instance.id", "a")])).as_deref(),
            Some("roundrobin")
        );
        let chosen =
            with(&[("partition.assignment.strategy", "range")], &[("group.instance.id", "a")]);
        assert_eq!(strategy(chosen).as_deref(), Some("range"));
    }

    #[test]
    fn values_are_never_shown() {
        let config =
            with(&[("sasl.password", "hunter2secret")], &[("ssl.key.pem", "hunter3secret")]);
        let text = format!("{config:?}");
        assert!(
            text.contains("sasl.password")
                && text.contains("ssl.key.pem")
                && !text.contains("hunter"),
            "{text}"
        );
    }

    #[test]
    fn a_value_that_is_not_accepted_is_not_shown() {
        for (name, value) in
            [("security.protocol", "hunter2secret"), ("no.such.property", "hunter2secret")]
        {
            let config = with(&[(name, value)], &[]);
            let created =
                config.client_config().unwrap().create::<rdkafka::consumer::BaseConsumer>();
            let error = ConsumerError::from_creation(created.err().unwrap(), &config.secrets());
            let text = format!("{error} {error:?}");
            assert!(text.contains(name) && !text.contains("hunter"), "{text}");
        }
    }

    // What could go wrong: the time after which a group redelivers is told without what an operator
    // made longer, or by a default that is no longer one.
    #[test]
    fn redelivery_takes_a_session_a_poll_and_a_drain() {
        let client = with(&[], &[]).client_config().unwrap();
        let default = SESSION_TIMEOUT_MS.to_string();
        assert_eq!(client.get("session.timeout.ms"), Some(default.as_str()));
        assert_eq!(with(&[], &[]).redelivery(), Duration::from_secs(10 + 300 + 20 + 5));
        let longer =
            with(&[("max.poll.interval.ms", "600000")], &[("session.timeout.ms", "45000")]);
        assert_eq!(longer.redelivery(), Duration::from_secs(45 + 600 + 20 + 5));
    }

    #[test]
    fn a_poll_interval_must_leave_time_to_finish() {
        assert!(
            refused(&with(&[("max.poll.interval.ms", "15000")], &[]))
                .contains("max.poll.interval.ms")
        );
        assert_eq!(refused(&with(&[("max.poll.interval.ms", "60000")], &[])), "");
    }
}
