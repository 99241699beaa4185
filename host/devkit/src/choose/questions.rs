//! The questions about an effect, their answers, and which question follows from the answers so far.

/// Defines the answers to one question: a name for the command line, and a text for readers.
macro_rules! answers {
    ($(#[$about:meta])* $name:ident: $($(#[$doc:meta])* $variant:ident = $key:literal, $text:literal;)+) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name {
            $($(#[$doc])* $variant,)+
        }

        impl $name {
            /// All answers, in the order in which they are shown.
            const ALL: &'static [Self] = &[$(Self::$variant),+];
            /// Names and texts of the answers.
            const SHOWN: &'static [AnswerText] = &[$(AnswerText { name: $key, text: $text }),+];
        }
    };
}

answers! {
    /// What a message does.
    EffectKind:
    /// An amount is added or taken.
    Amount = "amount", "an amount is added or taken: a balance, stock, points, a quota";
    /// A row is inserted.
    Entry = "entry", "a row is inserted for each message: an order, an entry of a ledger";
    /// A row is set to a value of the message.
    Value = "value", "a row is set to what the message says: a projection, a profile, a status";
    /// Another system acts.
    Call = "call", "another system acts: a payment, a mail, a webhook, a message to a topic";
    /// Another store is updated by key.
    Copy = "copy", "another store is updated by key: a search index, an object store";
    /// Work takes minutes, or waits.
    Long = "long", "work that takes minutes, or waits for something";
    /// Several services change, one after the other.
    Steps = "steps", "several services or databases change, one after the other";
    /// A little too much does no harm.
    Tolerant = "tolerant", "a number of which a little too much does no harm: telemetry, clicks";
}

answers! {
    /// How the other system recognises a repeated call.
    OtherSide:
    /// By an idempotency key.
    Key = "key", "it takes an idempotency key, and refuses or repeats its answer to a second call";
    /// It can be asked.
    Lookup = "lookup", "it takes no key, and can be asked whether it has acted";
    /// Not at all.
    Neither = "neither", "neither: a second call acts a second time";
}

answers! {
    /// The order that messages of one object need.
    OrderNeed:
    /// Any order is right.
    Any = "any", "any order is right";
    /// As they come.
    Arrival = "arrival", "the order in which they come, also when one of them fails";
    /// By version.
    Version = "version", "the order of their versions: an old one must not come after a newer one";
}

answers! {
    /// Where the message carries its id.
    IdPlace:
    /// In CloudEvents attributes.
    Cloudevents = "cloudevents", "in CloudEvents attributes";
    /// In a header.
    Header = "header", "in a header of the record";
    /// In the payload.
    Payload = "payload", "in the payload, which is JSON";
    /// Nowhere.
    Nowhere = "nowhere", "nowhere: the producer sends none";
}

answers! {
    /// A plain answer.
    YesNo:
    /// Yes.
    Yes = "yes", "yes";
    /// No.
    No = "no", "no";
}

/// The name and the text of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerText {
    /// Name on the command line.
    pub name: &'static str,
    /// Text for a reader.
    pub text: &'static str,
}

/// A question. Its name is that of its option.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Question {
    /// What a message does.
    Effect,
    /// How the other system recognises a repeated call.
    OtherSide,
    /// The order that messages of one object need.
    Order,
    /// Where the message carries its id.
    Id,
    /// Whether a producer may send one fact under two ids.
    TwoIds,
    /// Whether single completed messages are looked up.
    LookUp,
    /// Whether operators may read messages again.
    Replay,
}

/// The answers so far; none where a question was not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Answers {
    pub(super) effect: Option<EffectKind>,
    pub(super) other_side: Option<OtherSide>,
    pub(super) order: Option<OrderNeed>,
    pub(super) id: Option<IdPlace>,
    pub(super) two_ids: Option<YesNo>,
    pub(super) look_up: Option<YesNo>,
    pub(super) replay: Option<YesNo>,
}

impl Question {
    /// All questions, in the order in which they are asked.
    pub const ALL: [Self; 7] = [
        Self::Effect,
        Self::OtherSide,
        Self::Order,
        Self::Id,
        Self::TwoIds,
        Self::LookUp,
        Self::Replay,
    ];

    /// Returns the name of the question, and of its option.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Effect => "effect",
            Self::OtherSide => "other-side",
            Self::Order => "order",
            Self::Id => "id",
            Self::TwoIds => "two-ids",
            Self::LookUp => "look-up",
            Self::Replay => "replay",
        }
    }

    /// Returns the question for a reader.
    pub fn text(self) -> &'static str {
        match self {
            Self::Effect => "What does a message do?",
            Self::OtherSide => "How does the other system recognise a call that is repeated?",
            Self::Order => "Which order do messages about one object need?",
            Self::Id => "Where does a message carry its id?",
            Self::TwoIds => "May the producer send one fact under two ids?",
            Self::LookUp => "Are single messages looked up after they completed?",
            Self::Replay => "May operators set the offsets back, to read messages again?",
        }
    }

    /// Returns the answers that the question takes.
    pub fn answers(self) -> &'static [AnswerText] {
        match self {
            Self::Effect => EffectKind::SHOWN,
            Self::OtherSide => OtherSide::SHOWN,
            Self::Order => OrderNeed::SHOWN,
            Self::Id => IdPlace::SHOWN,
            Self::TwoIds | Self::LookUp | Self::Replay => YesNo::SHOWN,
        }
    }
}

impl Answers {
    /// Returns the next question; none where the answers suffice.
    pub fn next(&self) -> Option<Question> {
        Question::ALL.into_iter().find(|question| self.needs(*question) && !self.has(*question))
    }

    /// Returns a question that was answered, and whose answer does not matter.
    pub fn unneeded(&self) -> Option<Question> {
        Question::ALL.into_iter().find(|question| self.has(*question) && !self.needs(*question))
    }

    /// Returns whether the answers before a question make it one that matters.
    pub fn needs(&self, question: Question) -> bool {
        let is_tolerant = self.effect == Some(EffectKind::Tolerant);
        match question {
            Question::Effect => true,
            Question::OtherSide => self.effect == Some(EffectKind::Call),
            Question::Id => true,
            Question::Order | Question::Replay => !is_tolerant,
            Question::TwoIds => {
                !is_tolerant && !self.is_idempotent() && self.id != Some(IdPlace::Nowhere)
            }
            Question::LookUp => !is_tolerant && !self.is_idempotent() && !self.must_compare(),
        }
    }

    /// Returns whether a second run leaves what the first one left, whatever comes in between.
    pub(super) fn is_idempotent(&self) -> bool {
        self.effect == Some(EffectKind::Value) && self.order == Some(OrderNeed::Any)
    }

    /// Returns whether another payload under a known id must be seen: its amount is lost, or its
    /// action is left out. Only full rows keep a hash to compare with.
    pub(super) fn must_compare(&self) -> bool {
        matches!(self.effect, Some(EffectKind::Amount | EffectKind::Call))
    }

    /// Returns whether one fact may come under two ids.
    pub(super) fn may_have_two_ids(&self) -> bool {
        self.two_ids == Some(YesNo::Yes) || self.id == Some(IdPlace::Nowhere)
    }

    /// Gives an answer by its number among those that the question takes. A number beyond them
    /// leaves the question open.
    pub fn give(&mut self, question: Question, number: usize) {
        match question {
            Question::Effect => self.effect = EffectKind::ALL.get(number).copied(),
            Question::OtherSide => self.other_side = OtherSide::ALL.get(number).copied(),
            Question::Order => self.order = OrderNeed::ALL.get(number).copied(),
            Question::Id => self.id = IdPlace::ALL.get(number).copied(),
            Question::TwoIds => self.two_ids = YesNo::ALL.get(number).copied(),
            Question::LookUp => self.look_up = YesNo::ALL.get(number).copied(),
            Question::Replay => self.replay = YesNo::ALL.get(number).copied(),
        }
    }

    /// Returns the answer to a question.
    pub fn answer(&self, question: Question) -> Option<&'static AnswerText> {
        let number = match question {
            Question::Effect => self.effect.map(|it| it as usize),
            Question::OtherSide => self.other_side.map(|it| it as usize),
            Question::Order => self.order.map(|it| it as usize),
            Question::Id => self.id.map(|it| it as usize),
            Question::TwoIds => self.two_ids.map(|it| it as usize),
            Question::LookUp => self.look_up.map(|it| it as usize),
            Question::Replay => self.replay.map(|it| it as usize),
        };
        question.answers().get(number?)
    }

    fn has(&self, question: Question) -> bool {
        self.answer(question).is_some()
    }
}
