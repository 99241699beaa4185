use axum::http::{HeaderName, HeaderValue};
use openssl::pkey::Private;

use super::*;

const NOW: u64 = 1_614_265_330;
const BODY: &str = r#"{"test": 2432232314}"#;
const STANDARD_SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OTHER_SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const STANDARD_SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
const SLACK_BODY: &str = "token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&\
    channel_id=G8PSS9T3V&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&\
    command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2F\
    T1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.\
    803a0bc887a14d10d2c447fce8b6703c";

/// A request, with what a test changes of it.
#[derive(Clone)]
struct Sent {
    scheme: Verification,
    secrets: Vec<String>,
    headers: Vec<(&'static str, String)>,
    body: String,
    now: u64,
}

impl Sent {
    fn new(
        scheme: Verification,
        secret: &str,
        headers: &[(&'static str, &str)],
        body: &str,
    ) -> Self {
        let headers = headers.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        Self { scheme, secrets: vec![secret.to_owned()], headers, body: body.to_owned(), now: NOW }
    }

    fn is_verified(&self) -> bool {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.headers {
            headers.append(
                HeaderName::from_static(name),
                HeaderValue::try_from(value.as_str()).unwrap(),
            );
        }
        let verifier = Verifier::new(self.scheme, &self.secrets).expect("secrets of the scheme");
        let proof = verifier.proof(&headers, self.now);
        proof.and_then(|proof| verifier.verify(&proof, self.body.as_bytes())).is_ok()
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

fn standard() -> Sent {
    let headers = [
        ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
        ("webhook-timestamp", "1614265330"),
        ("webhook-signature", STANDARD_SIGNATURE),
    ];
    Sent::new(Verification::StandardWebhooks, STANDARD_SECRET, &headers, BODY)
}

/// The requests of every scheme: the vectors of Standard Webhooks, GitHub and Slack are those that
/// they publish; those of Stripe and Shopify were computed by another program.
fn all() -> Vec<Sent> {
    let slack = Sent::new(
        Verification::Slack,
        "8f742231b10e8888abcd99yyyzzz85a5",
        &[
            ("x-slack-request-timestamp", "1531420618"),
            (
                "x-slack-signature",
                "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
            ),
        ],
        SLACK_BODY,
    );
    vec![
        standard(),
        public_key().0,
        Sent::new(
            Verification::Github,
            "It's a Secret to Everybody",
            &[(
                "x-hub-signature-256",
                "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17",
            )],
            "Hello, World!",
        ),
        Sent::new(
            Verification::Shopify,
            "hush-hush-shopify",
            &[("x-shopify-hmac-sha256", "DX6VXZbZ1VzjWfMpO/q+XUUpwWCp92CbxTC5Bf8y/rE=")],
            r#"{"id":1}"#,
        ),
        Sent::new(
            Verification::Stripe,
            "whsec_5WbX5kEWLlfzsGNjH64I8lOOqUB6e8FH",
            &[(
                "stripe-signature",
                "t=1614265330,v1=cb10d5d627f921482730ba39af6e990ed2046f21e2dca1c3f3309cba95e1eb5c,v0=00",
            )],
            r#"{"id":"evt_1"}"#,
        ),
        slack.with(|sent| sent.now = 1_531_420_618),
        Sent::new(
            Verification::Bearer,
            "0123456789abcdef0123456789abcdef",
            &[("authorization", "Bearer 0123456789abcdef0123456789abcdef")],
            "anything",
        ),
    ]
}

/// Returns a request that an Ed25519 key signed, with the key.
fn public_key() -> (Sent, PKey<Private>) {
    let key = PKey::generate_ed25519().unwrap();
    let public = format!("whpk_{}", STANDARD.encode(key.raw_public_key().unwrap()));
    let signed = format!("msg_1.{NOW}.{BODY}");
    let mut signer = sign::Signer::new_without_digest(&key).unwrap();
    let signature = signer.sign_oneshot_to_vec(signed.as_bytes()).unwrap();
    let headers = [
        ("webhook-id", "msg_1"),
        ("webhook-timestamp", "1614265330"),
        ("webhook-signature", &*format!("v1a,{}", STANDARD.encode(signature))),
    ];
    (Sent::new(Verification::StandardWebhooks, &public, &headers, BODY), key)
}

#[test]
fn each_scheme_takes_what_its_senders_sign() {
    for sent in all() {
        assert!(sent.is_verified(), "{}", sent.scheme.name());
    }
}

// What could go wrong: a request of another sender, or one that was changed on its way, passes.
#[test]
fn nothing_passes_that_differs_in_one_place() {
    for sent in all() {
        let scheme = sent.scheme;
        let is_signed = scheme != Verification::Bearer;
        let other_body = sent.clone().with(|sent| sent.body.push(' '));
        assert_eq!(other_body.is_verified(), !is_signed, "{}: another body", scheme.name());
        let other_secret = sent.clone().with(|sent| {
            let is_standard = scheme == Verification::StandardWebhooks;
            let other = if is_standard { OTHER_SECRET } else { "another-secret-of-32-characters-" };
            sent.secrets = vec![other.to_owned()];
        });
        assert!(!other_secret.is_verified(), "{}: another secret", scheme.name());
        for nth in 0..sent.headers.len() {
            let name = sent.headers[nth].0;
            let without = sent.clone().with(|sent| drop(sent.headers.remove(nth)));
            assert!(!without.is_verified(), "{} without {name}", scheme.name());
            let twice = sent.clone().with(|sent| sent.headers.push(sent.headers[nth].clone()));
            assert!(!twice.is_verified(), "{} with {name} twice", scheme.name());
            let empty = sent.clone().with(|sent| sent.headers[nth].1.clear());
            assert!(!empty.is_verified(), "{} with an empty {name}", scheme.name());
            let length = sent.headers[nth].1.len();
            for place in (0..length).filter(|place| *place + 1 < length || nth + 1 < length) {
                let changed = sent.clone().with(|sent| change_at(&mut sent.headers[nth].1, place));
                if changed.headers[nth].1 != sent.headers[nth].1
                    && is_of_signature(&sent, nth, place)
                {
                    assert!(!changed.is_verified(), "{} {name}[{place}]", scheme.name());
                }
            }
        }
    }
}

/// Replaces a character by another one of the same kind.
fn change_at(text: &mut String, place: usize) {
    let old = text.as_bytes()[place];
    let new = match old {
        b'0'..=b'8' | b'a'..=b'e' | b'A'..=b'Y' => old + 1,
        _ => b'0',
    };
    text.replace_range(place..=place, &char::from(new).to_string());
}

/// Returns whether a place of a header is of what is verified: Stripe sends signatures of an older
/// scheme beside it, the name of the scheme of a bearer token ignores case, and the last character
/// of base64 has bits that mean nothing.
fn is_of_signature(sent: &Sent, nth: usize, place: usize) -> bool {
    let value = &sent.headers[nth].1;
    match sent.scheme {
        Verification::Stripe => place < value.find(",v0").unwrap_or(value.len()),
        Verification::Shopify | Verification::StandardWebhooks => {
            place + 3 < value.len() || !value.ends_with('=')
        }
        _ => true,
    }
}

// What could go wrong: a request that someone has kept is sent again after hours.
#[test]
fn a_signed_time_is_near_to_now() {
    let timed = [Verification::StandardWebhooks, Verification::Stripe, Verification::Slack];
    for sent in all().into_iter().filter(|sent| timed.contains(&sent.scheme)) {
        for (seconds, passes) in [(300, true), (301, false)] {
            let later = sent.clone().with(|sent| sent.now += seconds);
            let earlier = sent.clone().with(|sent| sent.now -= seconds);
            assert_eq!(later.is_verified(), passes, "{} after {seconds}", sent.scheme.name());
            assert_eq!(earlier.is_verified(), passes, "{} before {seconds}", sent.scheme.name());
        }
    }
    for text in ["", "+1614265330", "1614265330.0", "16142653300000000000000", "now"] {
        let sent = standard().with(|sent| sent.headers[1].1 = text.to_owned());
        assert!(!sent.is_verified(), "{text}");
    }
}

#[test]
fn both_secrets_of_a_rotation_are_known() {
    for secrets in [[STANDARD_SECRET, OTHER_SECRET], [OTHER_SECRET, STANDARD_SECRET]] {
        let sent = standard().with(|sent| sent.secrets = secrets.map(str::to_owned).to_vec());
        assert!(sent.is_verified());
    }
    let several = format!("v2,AAAA {STANDARD_SIGNATURE} v1,AAAA");
    assert!(standard().with(|sent| sent.headers[2].1 = several).is_verified());
    let many = format!("{}{STANDARD_SIGNATURE}", "v1,AAAA ".repeat(SIGNATURES_MAX));
    assert!(!standard().with(|sent| sent.headers[2].1 = many).is_verified(), "a bounded look");
}

// What could go wrong: a secret of one kind passes for one of another, such as a public key, which
// everybody knows, as the key of an HMAC.
#[test]
fn a_public_key_verifies_no_hmac() {
    let (sent, key) = public_key();
    let mac = Hmac::<Sha256>::new_from_slice(&key.raw_public_key().unwrap()).unwrap();
    let mac = mac.chain_update(format!("msg_1.{NOW}.{BODY}")).finalize().into_bytes();
    let forged = sent.with(|sent| sent.headers[2].1 = format!("v1,{}", STANDARD.encode(mac)));
    assert!(!forged.is_verified());
}

#[test]
fn secrets_of_another_scheme_make_no_verifier() {
    let of = |scheme, secret: &str| Verifier::new(scheme, &[secret.to_owned()]).is_some();
    assert!(!of(Verification::StandardWebhooks, "0123456789abcdef0123456789abcdef"));
    assert!(!of(Verification::Bearer, "too-short-for-a-token"));
    assert!(Verifier::new(Verification::Github, &[]).is_none());
    // One of another scheme, left over from before, keeps the present one from nothing.
    let sent = standard().with(|sent| sent.secrets.push("of another scheme".to_owned()));
    assert!(sent.is_verified());
}
