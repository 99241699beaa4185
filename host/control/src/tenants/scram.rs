//! SCRAM-SHA-256 verifiers (RFC 5803), so that a role's password never stands in a statement.

use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// Rounds of PBKDF2, which each login of a session costs the host. Rounds slow down an attacker
/// that guesses passwords from a stolen verifier. The passwords are 256 random bits, which cannot
/// be guessed, so one round is enough; RFC 7677 asks for 4,096 with passwords that users choose.
const ITERATIONS: u32 = 1;

/// Returns the verifier of a random password, which `CREATE ROLE … PASSWORD` takes in its place.
/// The password is ASCII.
pub(crate) fn verifier(password: &str) -> String {
    let salt: [u8; 16] = rand::random();
    let salted = salted_password(password, &salt, ITERATIONS);
    let stored = Sha256::digest(mac(&salted, b"Client Key"));
    let server = mac(&salted, b"Server Key");
    let encode = |bytes: &[u8]| STANDARD.encode(bytes);
    format!("SCRAM-SHA-256${ITERATIONS}:{}${}:{}", encode(&salt), encode(&stored), encode(&server))
}

/// Derives a key with PBKDF2, one block of it.
fn salted_password(password: &str, salt: &[u8], iterations: u32) -> [u8; 32] {
    let mut block = mac(password.as_bytes(), &[salt, &1_u32.to_be_bytes()].concat());
    let mut result = block;
    for _ in 1..iterations {
        block = mac(password.as_bytes(), &block);
        result.iter_mut().zip(block).for_each(|(r, b)| *r ^= b);
    }
    result
}

fn mac(key: &[u8], data: &[u8]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length");
    mac.update(data);
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    // The exchange of RFC 7677, section 3: password `pencil`.
    #[test]
    fn agrees_with_the_rfc() {
        use base64::{Engine, engine::general_purpose::STANDARD};
        let salt = STANDARD.decode("W22ZaJ0SNY7soEsUEjb6gQ==").expect("base64");
        let salted = super::salted_password("pencil", &salt, 4_096);
        let server = super::mac(&salted, b"Server Key");
        let auth = "n=user,r=rOprNGfwEbeRWgbNEkqO,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
                    s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096,c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0";
        assert_eq!(
            STANDARD.encode(super::mac(&server, auth.as_bytes())),
            "6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
        );
    }
}
