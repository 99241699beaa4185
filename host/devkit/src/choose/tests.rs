//! Every path of the decision. What could go wrong: a path has no end, an end names a policy that
//! no consumer can have, promises what its policy does not give, or contradicts another end.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use oncebox_control::BaselinePart;
use oncebox_model::{
    PayloadKey,
    identity::decode,
    message::Message,
    policy::{
        BrokerRetention, Collision, Dedup, Horizon, HorizonVerdict, IdSource, MemoryFacts, Order,
        Policy, Redelivery, TopicRetention, TopicSettings,
    },
    record::{Headers, Record},
};

use super::{Answers, Choice, EffectKind, IdPlace, OtherSide, Pattern, Property, Question, YesNo};

/// All paths of answers that end.
fn paths() -> Vec<Answers> {
    let (mut ended, mut open) = (Vec::new(), vec![Answers::default()]);
    while let Some(answers) = open.pop() {
        match answers.next() {
            None => ended.push(answers),
            Some(question) => open.extend((0..question.answers().len()).map(|number| {
                let mut next = answers;
                next.give(question, number);
                next
            })),
        }
    }
    ended
}

fn ends() -> Vec<(Answers, Choice)> {
    let end = |answers: Answers| (answers, Choice::of(&answers).expect("each path has an end"));
    paths().into_iter().map(end).collect()
}

/// What a policy gives or refuses by itself; neither where it is not asked for it.
fn of_policy(policy: &Policy, property: Property) -> Option<bool> {
    let remembers = policy.dedup == Dedup::Inbox;
    match property {
        Property::SecondDelivery => Some(remembers),
        Property::OtherPayload => remembers.then(|| policy.collision() == Collision::Park),
        Property::LookUp => Some(remembers && !policy.is_light()),
        Property::Order => (policy.order == Order::Key).then_some(true),
        Property::Replay => Some(policy.replay.allowed),
        Property::SecondId | Property::Outside => None,
    }
}

/// What an end says of a property.
fn said(choice: &Choice, property: Property) -> Option<bool> {
    match (choice.gives.contains(&property), choice.lacks.contains(&property)) {
        (true, true) => panic!("{property:?} is given and missing: {choice:?}"),
        (false, false) => None,
        (is_given, _) => Some(is_given),
    }
}

/// A record with a key and a version, and with an id at a place.
fn record(id: IdPlace) -> Record {
    let header = |name: &str, value: &str| (name.to_owned(), value.as_bytes().to_vec());
    let mut headers: Headers = vec![header("version", "1")];
    match id {
        IdPlace::Cloudevents => headers.extend([
            header("ce_specversion", "1.0"),
            header("ce_id", "1"),
            header("ce_source", "/s"),
            header("ce_type", "t"),
        ]),
        IdPlace::Header => headers.push(header("message-id", "1")),
        IdPlace::Payload | IdPlace::Nowhere => {}
    }
    let payload = if id == IdPlace::Payload { r#"{"id":"1"}"# } else { r#"{"n":1}"# };
    Record {
        topic: "events".into(),
        topic_id: None,
        partition: 0,
        offset: 7,
        timestamp_ms: 0,
        key: Some(b"object".to_vec()),
        headers,
        payload: Some(payload.as_bytes().to_vec()),
    }
}

fn decoded(policy: &Policy, record: Record) -> Result<Message, String> {
    let key = PayloadKey::new(&[1; 32]);
    let decoded = decode(record, &policy.identity, policy.sequence.as_ref(), None, None, &key);
    decoded.map_err(|(_, fault)| fault.to_string())
}

/// Topics with the defaults of Kafka.
fn kafka_defaults(policy: &Policy) -> Horizon {
    const WEEK_MS: u64 = 604_800_000;
    let kept = TopicRetention::Known(BrokerRetention {
        retention_ms: Some(WEEK_MS),
        retention_bytes: None,
        segment_ms: WEEK_MS,
        cleanup_policy: "delete".to_owned(),
    });
    let topics = vec![TopicSettings { topic: "events".to_owned(), kept }];
    Horizon::of(policy, &Redelivery { topics, group_ms: 0 }, &MemoryFacts::default())
}

/// The parts of the gate that the answers put out of reach.
fn out_of_reach(answers: &Answers, choice: &Choice) -> Vec<BaselinePart> {
    let is_off = matches!(choice.pattern, Pattern::Idempotent | Pattern::Tolerant);
    let is_light = said(choice, Property::OtherPayload) == Some(false);
    let is_safe_outside = match answers.effect {
        Some(EffectKind::Call) => said(choice, Property::Outside) == Some(true),
        Some(EffectKind::Long | EffectKind::Steps) => false,
        _ => true,
    };
    let unmet = |part: &BaselinePart| match part {
        BaselinePart::StableId => is_off || is_light || answers.id == Some(IdPlace::Nowhere),
        BaselinePart::DurableDedup | BaselinePart::TransactionalEffect => is_off,
        BaselinePart::ExternalIdempotency => !is_safe_outside,
        BaselinePart::ReplayPolicy => is_off && answers.replay != Some(YesNo::No),
        BaselinePart::CrashTests | BaselinePart::Observability => false,
    };
    BaselinePart::ALL.into_iter().filter(unmet).collect()
}

// S1-127: the decision begins with the effect, and each path of it ends.
#[test]
fn every_path_ends_in_a_policy_that_can_work() {
    let ends = ends();
    // S1-127.
    assert!(ends.len() > 300, "{} paths", ends.len());
    let patterns: BTreeSet<_> = ends.iter().map(|(_, choice)| choice.pattern).collect();
    // S1-127.
    assert_eq!(patterns.len(), 7, "a pattern that no path ends in: {patterns:?}");
    for (answers, choice) in &ends {
        let policy = Policy::parse(&choice.policy)
            .unwrap_or_else(|error| panic!("{answers:?}: {error}\n{}", choice.policy));
        assert!(!choice.why.is_empty() && !choice.pages.is_empty(), "{answers:?}");
        let by_position = policy.identity.id == [IdSource::Position];
        assert_eq!(by_position, answers.id == Some(IdPlace::Nowhere), "{answers:?}");
        let may_replay = answers.replay != Some(YesNo::No);
        assert_eq!(policy.replay.allowed, may_replay, "{answers:?}");
        let is_off = matches!(choice.pattern, Pattern::Idempotent | Pattern::Tolerant);
        assert_eq!(policy.dedup == Dedup::Off, is_off, "{answers:?}");
        let is_sequence = choice.pattern == Pattern::Sequence;
        assert!(!is_sequence || policy.sequence.is_some(), "{answers:?}");
        assert!(choice.pattern != Pattern::LightInbox || policy.is_light(), "{answers:?}");
    }
}

// What could go wrong: an end promises what its policy does not give, denies what it gives, or says
// another thing of the same policy.
#[test]
fn no_end_contradicts_itself_or_another() {
    const OF_POLICY: [Property; 4] =
        [Property::SecondDelivery, Property::OtherPayload, Property::LookUp, Property::Order];
    let mut by_policy: BTreeMap<String, Vec<Option<bool>>> = BTreeMap::new();
    for (answers, choice) in ends() {
        let policy = Policy::parse(&choice.policy).expect("a policy of an end");
        let is_idempotent = choice.pattern == Pattern::Idempotent;
        for property in OF_POLICY {
            let is_of_effect = is_idempotent && property == Property::SecondDelivery;
            let given = if is_of_effect { Some(true) } else { of_policy(&policy, property) };
            let is_said = said(&choice, property) == Some(true);
            assert_eq!(is_said, given == Some(true), "{property:?} of {answers:?}: {choice:?}");
            assert!(given != Some(false) || !is_said, "{property:?} of {answers:?}");
        }
        let replay = said(&choice, Property::Replay) == Some(true);
        assert!(!replay || policy.replay.allowed, "{answers:?}");
        if !is_idempotent {
            let promised: Vec<_> = OF_POLICY.map(|property| said(&choice, property)).to_vec();
            let known = by_policy.entry(choice.policy.clone()).or_insert_with(|| promised.clone());
            assert_eq!(*known, promised, "{}", choice.policy);
        }
    }
}

// What could go wrong: the other side is told of one fact twice, under two keys, and the end
// promises that it acts once; or a payload that matters is dropped unseen.
#[test]
fn what_is_lost_or_doubled_is_said() {
    for (answers, choice) in ends() {
        let one_key = answers.effect == Some(EffectKind::Call)
            && answers.other_side == Some(OtherSide::Key)
            && answers.two_ids == Some(YesNo::No)
            && answers.id != Some(IdPlace::Nowhere);
        let is_promised = choice.gives.contains(&Property::Outside);
        assert_eq!(is_promised, one_key, "{answers:?}");
        let matters = matches!(answers.effect, Some(EffectKind::Amount | EffectKind::Call));
        let is_seen = choice.gives.contains(&Property::OtherPayload);
        assert!(!matters || is_seen, "{answers:?}");
        assert!(is_seen || !choice.gives.contains(&Property::LookUp), "{answers:?}");
    }
}

// What could go wrong: the policy that is printed parks every record, skips the first version of an
// object, or forgets before Kafka does.
#[test]
fn each_policy_takes_the_records_that_it_was_asked_for() {
    for (answers, choice) in ends() {
        let policy = Policy::parse(&choice.policy).expect("a policy of an end");
        let id = answers.id.expect("each path asks for the id");
        let message = decoded(&policy, record(id));
        assert!(message.is_ok(), "{answers:?}: {message:?}\n{}", choice.policy);
        let plain = decoded(&policy, record(IdPlace::Nowhere));
        let takes_plain = id == IdPlace::Nowhere || choice.pattern == Pattern::Tolerant;
        assert_eq!(plain.is_ok(), takes_plain, "{answers:?}: {plain:?}\n{}", choice.policy);
        let first = policy.sequence.as_ref().map(|sequence| sequence.first);
        assert!(first.is_none_or(|first| first == Some(1)), "{}", choice.policy);
        let verdict = kafka_defaults(&policy).verdict;
        let remembers = policy.dedup == Dedup::Inbox;
        assert_eq!(verdict == HorizonVerdict::Holds, remembers, "{}", choice.policy);
    }
}

// What could go wrong: the gate refuses for ever what the same program advised.
#[test]
fn an_end_names_the_parts_of_the_gate_that_it_cannot_meet() {
    for (answers, choice) in ends() {
        assert_eq!(choice.unmet, out_of_reach(&answers, &choice), "{answers:?}");
        let mut all: Vec<_> = choice.within_reach().chain(choice.unmet.iter().copied()).collect();
        all.sort();
        assert_eq!(all, BaselinePart::ALL, "{answers:?}");
    }
}

#[test]
fn pages_that_an_end_names_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let pages: BTreeSet<_> = ends().into_iter().flat_map(|(_, choice)| choice.pages).collect();
    for page in pages {
        let (path, section) = page.split_once('#').unwrap_or((page, ""));
        let text = fs::read_to_string(root.join(path)).unwrap_or_else(|_| panic!("{page}"));
        let anchor = |line: &str| {
            let heading = line.strip_prefix("## ").or_else(|| line.strip_prefix("### "))?;
            Some(heading.to_lowercase().replace([',', '\'', '`'], "").replace(' ', "-"))
        };
        let has = text.lines().any(|line| anchor(line).is_some_and(|anchor| anchor == section));
        assert!(section.is_empty() || has, "{page}");
    }
}

// What could go wrong: an answer to a question that was not asked changes the end unseen.
#[test]
fn an_answer_that_does_not_matter_is_named() {
    let mut answers = Answers::default();
    let tolerant = Question::Effect.answers().iter().position(|it| it.name == "tolerant");
    answers.give(Question::Effect, tolerant.expect("an answer"));
    answers.give(Question::Id, 0);
    assert!(Choice::of(&answers).is_some());
    answers.give(Question::Replay, 0);
    assert_eq!((answers.unneeded(), Choice::of(&answers)), (Some(Question::Replay), None));
    let names: BTreeSet<_> = Question::ALL.iter().map(|question| question.name()).collect();
    assert_eq!(names.len(), Question::ALL.len());
}
