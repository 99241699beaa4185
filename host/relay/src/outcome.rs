//! The results of sending a message, and what they make of its row.

use std::time::Duration;

use oncebox_kafka::ProduceError;
use oncebox_model::outgoing::OutgoingStatus;

use crate::{answer::KeptAnswer, backoff, reason::OutgoingReason};

/// Attempts after which a topic that the brokers do not know parks the message.
const UNKNOWN_TOPIC_ATTEMPTS: u32 = 10;
/// Delay of a message whose destination is away. Its pair pauses for longer.
const AWAY_DELAY: Duration = Duration::from_secs(1);
/// Longest text of an error that a row keeps, characters.
const ERROR_MAX: usize = 1_000;

/// The result of one attempt to send a message.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Sent {
    /// The destination has confirmed it.
    Confirmed,
    /// The destination has confirmed it, with an answer that is kept.
    Answered(KeptAnswer),
    /// It was delivered, and its row marked, in one transaction: so many seconds past its due time.
    Marked {
        /// Seconds from its due time to the transaction.
        delay_s: f64,
    },
    /// The lease is no longer this relay's. Nothing was sent, and nothing is to be marked.
    Lost,
    /// The send did not begin. The lease is given back.
    Unsent,
    /// The destination did not answer in time. The message may have arrived.
    Unconfirmed {
        /// Text for readers.
        error: String,
    },
    /// The attempt failed and counts; another one follows.
    Failed {
        /// Reason.
        reason: OutgoingReason,
        /// Text for readers.
        error: String,
    },
    /// The attempt failed and counts; another one follows after the time that the destination asks
    /// for.
    Later {
        /// Reason.
        reason: OutgoingReason,
        /// Text for readers.
        error: String,
        /// Time until the next attempt.
        after: Duration,
    },
    /// The destination asks for fewer messages: the attempt does not count, and the pair rests.
    Limited {
        /// Text for readers.
        error: String,
        /// Time until the next attempt.
        after: Duration,
    },
    /// The message is for an operator.
    Parked {
        /// Reason.
        reason: OutgoingReason,
        /// Text for readers.
        error: String,
    },
    /// The whole destination is away: the attempt does not count, and the pair pauses.
    Away {
        /// Reason.
        reason: OutgoingReason,
        /// Text for readers.
        error: String,
    },
}

/// What is written into the row of a message.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mark {
    /// New status.
    pub(crate) status: OutgoingStatus,
    /// Reason of it.
    pub(crate) reason: Option<OutgoingReason>,
    /// Text for readers.
    pub(crate) error: Option<String>,
    /// Time until the next attempt.
    pub(crate) delay: Duration,
    /// Whether the attempt counts.
    pub(crate) counts: bool,
    /// Answer that is kept with it.
    pub(crate) answer: Option<KeptAnswer>,
}

impl Sent {
    /// Translates an error of the brokers for the given attempt, counted from 1.
    pub(crate) fn of_kafka(error: ProduceError, attempt: u32) -> Self {
        use OutgoingReason as Reason;
        let text = error.to_string();
        match error {
            ProduceError::TooLarge => Self::parked(Reason::TooLarge, text),
            ProduceError::Refused(_) => Self::parked(Reason::Refused, text),
            ProduceError::NoRight(_) => Self::parked(Reason::NoRight, text),
            ProduceError::UnknownTopic(_) if attempt >= UNKNOWN_TOPIC_ATTEMPTS => {
                Self::parked(Reason::UnknownTopic, text)
            }
            ProduceError::UnknownTopic(_) => Self::failed(Reason::UnknownTopic, text),
            ProduceError::Away(_) => Self::away(Reason::DestinationAway, text),
            // What was under way when the client failed may have arrived.
            ProduceError::Broken(_) => Self::away(Reason::Unconfirmed, text),
            ProduceError::Unconfirmed(_) => Self::Unconfirmed { error: text },
            ProduceError::Failed(_) => Self::failed(Reason::Failed, text),
        }
    }

    /// Creates the result of an attempt that failed and counts.
    pub(crate) fn failed(reason: OutgoingReason, error: impl Into<String>) -> Self {
        Self::Failed { reason, error: error.into() }
    }

    /// Creates the result for a message that an operator has to decide on.
    pub(crate) fn parked(reason: OutgoingReason, error: impl Into<String>) -> Self {
        Self::Parked { reason, error: error.into() }
    }

    /// Creates the result for a destination that is away.
    pub(crate) fn away(reason: OutgoingReason, error: impl Into<String>) -> Self {
        Self::Away { reason, error: error.into() }
    }

    /// Judges a silence of the destination: where it confirms other messages at this time, the
    /// silence is about this one, and else about the destination as a whole.
    pub(crate) fn judged(self, confirms_others: bool) -> Self {
        match self {
            Self::Unconfirmed { error } if confirms_others => {
                Self::failed(OutgoingReason::Unconfirmed, error)
            }
            Self::Unconfirmed { error } => Self::away(OutgoingReason::Unconfirmed, error),
            other => other,
        }
    }

    /// Returns whether the destination has taken the message.
    pub(crate) fn is_confirmed(&self) -> bool {
        matches!(self, Self::Confirmed | Self::Answered(_) | Self::Marked { .. })
    }

    /// Returns for how long the destination asks to be left alone, and its text; none where it does
    /// not.
    pub(crate) fn is_limited(&self) -> Option<(Duration, &str)> {
        match self {
            Self::Limited { error, after } => Some((*after, error)),
            _ => None,
        }
    }

    /// Returns why the destination as a whole is away; none where it is not.
    pub(crate) fn is_away(&self) -> Option<&str> {
        match self {
            Self::Away { error, .. } => Some(error),
            _ => None,
        }
    }

    /// Returns what is to be written for an attempt, counted from 1; none where the row needs
    /// nothing. `spread` is that of [`backoff::delay`].
    pub(crate) fn mark(self, attempt: u32, spread: f64) -> Option<Mark> {
        let mark = |status, reason, error: Option<String>, delay, counts| {
            let error = error.map(cut);
            Some(Mark { status, reason, error, delay, counts, answer: None })
        };
        let now = Duration::ZERO;
        match self.judged(true) {
            Self::Marked { .. } | Self::Lost => None,
            Self::Confirmed => mark(OutgoingStatus::Completed, None, None, now, true),
            Self::Answered(answer) => mark(OutgoingStatus::Completed, None, None, now, true)
                .map(|mark| Mark { answer: Some(answer), ..mark }),
            Self::Unsent => mark(OutgoingStatus::Received, None, None, now, false),
            Self::Parked { reason, error } => {
                mark(OutgoingStatus::Parked, Some(reason), Some(error), now, true)
            }
            Self::Away { reason, error } => {
                let status = OutgoingStatus::FailedRetryable;
                mark(status, Some(reason), Some(error), AWAY_DELAY, false)
            }
            Self::Failed { reason, error } => {
                let delay = backoff::delay(attempt, spread);
                mark(OutgoingStatus::FailedRetryable, Some(reason), Some(error), delay, true)
            }
            Self::Later { reason, error, after } => {
                mark(OutgoingStatus::FailedRetryable, Some(reason), Some(error), after, true)
            }
            Self::Limited { error, after } => {
                let reason = Some(OutgoingReason::RateLimited);
                mark(OutgoingStatus::FailedRetryable, reason, Some(error), after, false)
            }
            // `judged` leaves none.
            Self::Unconfirmed { .. } => None,
        }
    }
}

/// Cuts a text to what a row keeps. PostgreSQL takes no zero byte.
fn cut(text: String) -> String {
    text.chars().filter(|c| *c != '\0').take(ERROR_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(error: ProduceError, attempt: u32) -> Mark {
        Sent::of_kafka(error, attempt).judged(true).mark(attempt, 0.0).unwrap()
    }

    // What could go wrong: a message that can never be sent is sent for ever, or an outage of the
    // brokers uses up the attempts of all messages.
    #[test]
    fn a_failure_parks_counts_or_waits_by_its_kind() {
        use OutgoingStatus::{FailedRetryable, Parked};
        let text = || "said".to_owned();
        for (error, status, reason, counts) in [
            (ProduceError::TooLarge, Parked, OutgoingReason::TooLarge, true),
            (ProduceError::Refused(text()), Parked, OutgoingReason::Refused, true),
            (ProduceError::NoRight(text()), Parked, OutgoingReason::NoRight, true),
            (
                ProduceError::UnknownTopic(text()),
                FailedRetryable,
                OutgoingReason::UnknownTopic,
                true,
            ),
            (ProduceError::Failed(text()), FailedRetryable, OutgoingReason::Failed, true),
            (ProduceError::Unconfirmed(text()), FailedRetryable, OutgoingReason::Unconfirmed, true),
            (ProduceError::Away(text()), FailedRetryable, OutgoingReason::DestinationAway, false),
            (ProduceError::Broken(text()), FailedRetryable, OutgoingReason::Unconfirmed, false),
        ] {
            let mark = of(error.clone(), 9);
            assert_eq!((mark.status, mark.reason, mark.counts), (status, Some(reason), counts));
            assert!(mark.error.is_some(), "{error:?}");
        }
        let mark = of(ProduceError::UnknownTopic(text()), UNKNOWN_TOPIC_ATTEMPTS);
        assert_eq!((mark.status, mark.reason), (Parked, Some(OutgoingReason::UnknownTopic)));
    }

    #[test]
    fn a_silence_is_of_the_destination_where_it_confirms_nothing() {
        let silence = || Sent::Unconfirmed { error: "silence".to_owned() };
        let alone = silence().judged(false);
        assert_eq!(alone.is_away(), Some("silence"));
        // It may have arrived, so that it cannot be cancelled: `mark_outgoing` reads the reason.
        assert_eq!(alone.mark(1, 0.0).unwrap().reason, Some(OutgoingReason::Unconfirmed));
        let among_others = silence().judged(true);
        assert_eq!(among_others.is_away(), None);
        assert!(among_others.mark(1, 0.0).unwrap().counts);
    }

    #[test]
    fn what_was_sent_completes_and_what_was_not_is_given_back() {
        let completed = Sent::Confirmed.mark(3, 0.0).unwrap();
        assert_eq!((completed.status, completed.counts), (OutgoingStatus::Completed, true));
        let given_back = Sent::Unsent.mark(3, 0.0).unwrap();
        assert_eq!((given_back.status, given_back.counts), (OutgoingStatus::Received, false));
        assert_eq!(Sent::Lost.mark(1, 0.0), None);
        assert_eq!(Sent::Marked { delay_s: 1.0 }.mark(1, 0.0), None);
        assert!(Sent::Marked { delay_s: 1.0 }.is_confirmed() && !Sent::Lost.is_confirmed());
    }

    // What could go wrong: an endpoint that asks for time uses up the attempts of messages, or is
    // asked again at once.
    #[test]
    fn what_a_destination_asks_for_is_given() {
        let (error, after) = ("429".to_owned(), Duration::from_secs(7));
        let limited = Sent::Limited { error: error.clone(), after };
        assert_eq!(limited.is_limited(), Some((after, "429")));
        let mark = limited.mark(1, 0.0).unwrap();
        assert_eq!(
            (mark.delay, mark.counts, mark.reason),
            (after, false, Some(OutgoingReason::RateLimited))
        );
        let later = Sent::Later { reason: OutgoingReason::Failed, error, after };
        assert_eq!(later.is_limited(), None);
        let mark = later.mark(9, 0.0).unwrap();
        assert_eq!(
            (mark.status, mark.delay, mark.counts),
            (OutgoingStatus::FailedRetryable, after, true)
        );
        let kept = KeptAnswer { status: 200, content_type: None, body: Vec::new(), is_whole: true };
        let answered = Sent::Answered(kept.clone());
        assert!(answered.is_confirmed());
        assert_eq!(answered.mark(1, 0.0).unwrap().answer, Some(kept));
        assert_eq!(Sent::Confirmed.mark(1, 0.0).unwrap().answer, None);
    }

    #[test]
    fn a_text_fits_its_row() {
        let sent = Sent::failed(OutgoingReason::Failed, "a\0".repeat(2 * ERROR_MAX));
        assert_eq!(sent.mark(1, 0.0).unwrap().error, Some("a".repeat(ERROR_MAX)));
    }
}
