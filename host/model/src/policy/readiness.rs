//! The questions to ask of a consumer before relying on it, answered as far as its policy can.

use super::{
    Ack, Collision, Dedup, IdSource, Order, OutsideEffects, PayloadPolicy, Policy, Retention,
    explain::duration,
};

/// The verdict on one question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadinessVerdict {
    /// The guarantee holds, by the host or by this policy.
    Holds,
    /// The policy cannot know; the answer says where to look, or what to run.
    Look,
    /// The guarantee does not hold with this policy.
    Missing,
}

/// The answer to one question.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ReadinessAnswer {
    /// Text of the question.
    pub question: &'static str,
    /// Verdict.
    pub standing: ReadinessVerdict,
    /// Reason for the verdict, and what to do.
    pub answer: String,
}

use ReadinessVerdict::{Holds, Look, Missing};

impl Policy {
    /// Answers eighteen questions, in the order in which to ask them of any inbox.
    pub fn readiness(&self) -> Vec<ReadinessAnswer> {
        let asked: [(&'static str, (ReadinessVerdict, String)); 18] = [
            ("What is the message id?", self.id()),
            ("Is it the same in every delivery?", self.is_stable()),
            ("Within what is it unique?", self.scope()),
            (
                "Was a duplicate tried?",
                look(
                    "`oncebox verify` delivers your messages twice, in every order, and compares \
                        the tables",
                ),
            ),
            (
                "What is the effect?",
                holds(
                    "SQL of the handler in its tenant's tables, and nothing else: it has no \
                        network and no files",
                ),
            ),
            ("Is the effect idempotent by itself?", self.is_idempotent()),
            ("Are effect and marker one transaction?", self.is_one_transaction()),
            (
                "Are effects outside the database deduplicated?",
                holds(
                    "there are none: a handler writes a row that says what is to be done, and \
                        another program does it",
                ),
            ),
            ("Does the other side get an idempotency key?", self.is_keyed()),
            ("May messages be replayed?", self.replay()),
            ("Does a dead letter keep its id?", self.dead_letters()),
            ("How long is a message remembered?", self.memory()),
            ("Is that longer than it can come again?", self.outlasts()),
            ("What if messages of one thing come out of order?", self.out_of_order()),
            (
                "Does somebody see what is stuck?",
                look(
                    "`oncebox inbox stats` and the metrics on `/metrics` show it, and `[alerts]` \
                        says from where on it is too much; rules \
                     for Prometheus are in docs/alerts.yml",
                ),
            ),
            ("Is work of a dead host taken over?", self.takeover()),
            ("Is a duplicate acked?", self.acks_duplicates()),
            (
                "Was it killed at every step?",
                look(
                    "the host was, in its own tests; `oncebox verify` kills your handler at every \
                        step and compares the tables",
                ),
            ),
        ];
        asked
            .into_iter()
            .map(|(question, (standing, answer))| ReadinessAnswer { question, standing, answer })
            .collect()
    }

    fn is_keyed(&self) -> (ReadinessVerdict, String) {
        match self.effects.outside {
            None => look(
                "give what carries such a row out the message's id, or one derived from it, as its \
                    idempotency key; then `effects.outside = \"keyed\"` declares it",
            ),
            Some(OutsideEffects::None) => {
                holds("no program acts on the rows, as `effects.outside` declares")
            }
            Some(OutsideEffects::Keyed) => {
                holds("what acts on the rows gives a key, as `effects.outside` declares")
            }
        }
    }

    fn dead_letters(&self) -> (ReadinessVerdict, String) {
        match self.payload {
            PayloadPolicy::None => (
                Look,
                "a dead letter is the row of the message, under the same id, but without its \
                    headers and payload (`payload = \"none\"`): \
                 it can be redriven once the same message was delivered again, which brings them \
                 back"
                    .to_owned(),
            ),
            PayloadPolicy::Failed | PayloadPolicy::All => holds(
                "a dead letter is the row of the message, under the same id and with the \
                    same headers",
            ),
        }
    }

    fn out_of_order(&self) -> (ReadinessVerdict, String) {
        match self.order {
            Order::Key if self.sequence.is_some() => holds(
                "an old version is skipped, and one that comes too early waits for those before \
                    it: `sequence`",
            ),
            Order::None => look(
                "nothing holds them back: the handler compares a version or a state, or the policy \
                    says `order = \"key\"`; `oncebox verify` \
                 shows what another order changes",
            ),
            Order::Key | Order::Partition => look(
                "each waits until those that came before it are done; what was produced in another \
                    order runs in another order, so that the \
                 handler still compares a version or a state where producers do not keep theirs",
            ),
        }
    }

    fn by_position(&self) -> Option<bool> {
        let at = self.identity.id.iter().position(|source| *source == IdSource::Position)?;
        Some(at == 0)
    }

    fn id(&self) -> (ReadinessVerdict, String) {
        match self.by_position() {
            Some(true) => (
                Missing,
                "the record's position, which names a delivery and no event: prefer a \
                    header or CloudEvents"
                    .to_owned(),
            ),
            _ => (Holds, "what the sources in `identity.id` find first".to_owned()),
        }
    }

    fn is_stable(&self) -> (ReadinessVerdict, String) {
        match self.by_position() {
            Some(true) => (
                Missing,
                "one event that is produced twice has two positions, and two \
                effects"
                    .to_owned(),
            ),
            Some(false) => (
                Look,
                "records that lack every other source fall back to their \
                position, and collapse no more"
                    .to_owned(),
            ),
            None => look(
                "whoever sends makes it once per event, before the first attempt; a relay carries \
                    it. `oncebox_suspect_ids_total` counts payloads that came under two ids",
            ),
        }
    }

    fn scope(&self) -> (ReadinessVerdict, String) {
        let within = if self.identity.scoped_by_event_type {
            "tenant, consumer and event type"
        } else {
            "tenant and consumer"
        };
        let collision = match self.collision() {
            Collision::Park => "the same id with another payload is parked as `collision`",
            Collision::Ignore => {
                "the same id with another payload is taken for a duplicate, unseen"
            }
        };
        (
            if self.collision() == Collision::Park { Holds } else { Look },
            format!("within {within}; {collision}"),
        )
    }

    fn is_idempotent(&self) -> (ReadinessVerdict, String) {
        match self.dedup {
            Dedup::Inbox => (
                Holds,
                "it need not be: the inbox lets each message have its effect once".to_owned(),
            ),
            Dedup::Off => (
                Look,
                "it has to be: with `dedup = \"off\"` a redelivery has its effect again".to_owned(),
            ),
        }
    }

    fn is_one_transaction(&self) -> (ReadinessVerdict, String) {
        match self.dedup {
            Dedup::Inbox => holds("claim, effect and completion commit together, or not at all"),
            Dedup::Off => (Missing, "there is no marker with `dedup = \"off\"`".to_owned()),
        }
    }

    fn replay(&self) -> (ReadinessVerdict, String) {
        match self.dedup {
            _ if !self.replay.allowed => {
                holds("no: `replay.allowed = false` refuses to set offsets back")
            }
            Dedup::Inbox => {
                holds("offsets can be set back at any time: what is remembered is a duplicate")
            }
            Dedup::Off => {
                (Missing, "every message that is read again has its effect again".to_owned())
            }
        }
    }

    fn memory(&self) -> (ReadinessVerdict, String) {
        match self.dedup {
            Dedup::Inbox if self.retention == Retention::Permanent => {
                holds("for ever, by `retention`")
            }
            Dedup::Inbox => {
                (Holds, format!("{} at least, by `retention`", self.retention.explain()))
            }
            Dedup::Off => (Missing, "not at all".to_owned()),
        }
    }

    fn outlasts(&self) -> (ReadinessVerdict, String) {
        match self.dedup {
            Dedup::Inbox if self.retention == Retention::Permanent => {
                holds("it is never forgotten")
            }
            Dedup::Inbox => (
                Look,
                format!(
                    "`retention` promises {}: `oncebox retention explain` holds that against the \
                        topics' `retention.ms`, and against your longest backfill where \
                        `factors.replay_days` names it",
                    self.retention.explain().trim_start_matches("for ")
                ),
            ),
            Dedup::Off => (Missing, "no".to_owned()),
        }
    }

    fn takeover(&self) -> (ReadinessVerdict, String) {
        let lease = duration(self.lease().as_millis() as u64);
        match self.ack {
            Ack::AfterCommit => (
                Holds,
                format!(
                    "its open transactions vanish, and its records are read again; a retry is \
                        taken over after {lease}"
                ),
            ),
            Ack::AfterInsert => {
                (Holds, format!("another worker takes its messages over after {lease}"))
            }
        }
    }

    fn acks_duplicates(&self) -> (ReadinessVerdict, String) {
        match self.dedup {
            Dedup::Inbox => holds("at once, and its handler does not run"),
            Dedup::Off => {
                (Missing, "none is known as one: each runs, and is then acked".to_owned())
            }
        }
    }
}

fn holds(answer: &str) -> (ReadinessVerdict, String) {
    (Holds, answer.to_owned())
}

fn look(answer: &str) -> (ReadinessVerdict, String) {
    (Look, answer.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standings(text: &str) -> Vec<ReadinessVerdict> {
        let policy = Policy::parse(&format!("topics = ['t']\nack = 'after_commit'\n{text}"))
            .expect("a policy of the test");
        policy.readiness().into_iter().map(|answer| answer.standing).collect()
    }

    // S1-128: all eighteen are answered, and differ with the policy.
    #[test]
    fn every_question_has_an_answer_of_the_policy() {
        let usual = standings("");
        // S1-128.
        assert_eq!(usual.len(), 18);
        assert!(!usual.contains(&Missing), "{usual:?}");
        let missing =
            |text: &str| standings(text).iter().filter(|standing| **standing == Missing).count();
        assert_eq!(missing("identity = { id = ['position'] }"), 2);
        assert_eq!(missing("dedup = 'off'"), 5);
        assert_eq!(missing("dedup = 'off'\nreplay = { allowed = false }"), 4);
        assert_eq!(missing("collision = 'ignore'"), 0);
        assert_eq!(standings("collision = 'ignore'")[2], Look);
        assert_eq!(standings("inbox = 'light'")[2], Look, "light rows keep no hash");
        let outside = |word| standings(&format!("effects = {{ outside = '{word}' }}"))[8];
        assert_eq!((standings("")[8], outside("none"), outside("keyed")), (Look, Holds, Holds));
        assert_eq!(
            (standings("")[10], standings("payload = 'none'")[10]),
            (Holds, Look),
            "what keeps no record cannot run again"
        );
        assert_eq!((standings("")[12], standings("retention = 'permanent'")[12]), (Look, Holds));
        assert_eq!(
            standings("identity = { id = ['cloudevents', 'position'] }")[..2],
            [Holds, Look]
        );
    }
}
